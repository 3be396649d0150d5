"""Whole runs in this process or on Ray, and comparing two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support.configs import compose_config
from torchrl_grpo.assembly.run import build
from torchrl_grpo.host.checkpoint_files import SealedFile
from torchrl_grpo.reporting.metrics import read_jsonl

SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "optimizer.lr=1e-3",
    "evaluation.num_prompts=0",
    "logging.tensorboard=false",
)
LORA = ("train_model.lora.enabled=true", "optimizer.lr=1e-2")
NUMBERS = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/kl_k3_to_ref",
    "rollout/reward_mean",
    "rollout/tokens",
)


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """A whole run in this process or on Ray; returns its metrics, one row a step."""
    made = build(compose_config(*SMALL, *overrides), folder)
    try:
        made.fit()
    finally:
        made.close()
    return read_jsonl(folder / "metrics.jsonl")


def steps(count: int) -> str:
    return f"train.total_dialog_turns={16 * count}"


def at(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"checkpoint_{step:06d}.pt"


def folder_at(folder: Path, step: int) -> Path:
    """The checkpoint of several ranks."""
    return at(folder, step).with_suffix("")


def numbers(rows: list[dict[str, Any]], first: int) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in NUMBERS) for row in rows if row["step"] >= first]


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two nests of dicts, lists and tensors are not equal to the last bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [
            place for key in one for place in differences(one[key], other[key], f"{where}/{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            place
            for i in range(len(one))
            for place in differences(one[i], other[i], f"{where}/{i}")
        ]
    if hasattr(one, "codes") and hasattr(other, "codes"):  # a moment of torchao's AdamW
        return differences([one.codes, one.scale], [other.codes, other.scale], where)
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [where]


def state_of(path: Path) -> dict[str, Any]:
    state = whole_state_of(path)
    del state["config"]  # it names what was resumed
    return state


def whole_state_of(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, put together where it is the folder of several ranks."""
    if not path.is_dir():
        return torch.load(path, weights_only=True)
    state = torch.load(path / "state.pt", weights_only=True)
    reader = dcp.HuggingFaceStorageReader(str(path))
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(of.size, torch.nan, dtype=of.properties.dtype)
        for name, of in found.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    for name, tensor in tensors.items():
        kind, rest = name.split("/", 1)
        if kind == "weights":
            state["trainer"]["model"][rest] = tensor
        else:
            moment, parameter = rest.split("/")
            state["trainer"]["optimizer"]["state"][parameter][moment] = tensor
    return state


def changed(path: Path, into: Path, **entries: Any) -> Path:
    """A copy of a checkpoint with other entries, whole again."""
    into.parent.mkdir(parents=True, exist_ok=True)
    state = torch.load(path, weights_only=True) | entries
    with into.open("wb") as file:
        sealed = SealedFile(file)
        torch.save(state, sealed)
        sealed.seal({"step": state["step"], "config": state["config"], "metrics": {}})
    return into
