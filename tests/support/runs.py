"""Whole runs in this process or on Ray, and comparisons of two of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.configs import compose_config
from torchrl_grpo.assembly.run import build
from torchrl_grpo.host.checkpoint_files import (
    MANIFEST,
    STATE,
    read_manifest,
    sizes_and_sha256,
    write_manifest,
)
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.writer import CheckpointWriter
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
    """Run a config in this process or on Ray; return its metrics, one row per step."""
    with closing(build(compose_config(*SMALL, *overrides), folder)) as training_run:
        training_run.fit()
    return read_jsonl(folder / "metrics.jsonl")


def steps(count: int) -> str:
    return f"train.total_dialog_turns={16 * count}"


def at(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"checkpoint_{step:06d}"


def numbers(rows: list[dict[str, Any]], first: int) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in NUMBERS) for row in rows if row["step"] >= first]


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Yield the differences between two nested structures of dicts, lists and tensors, to the last
    bit.
    """
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
    del state["config"]  # names the checkpoint that was resumed
    return state


def state_in(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, without its tensors."""
    return torch.load(path / STATE, weights_only=True)


def whole_state_of(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint with the tensors of all ranks."""
    state = state_in(path)
    trainer = state["trainer"]
    trainer["model"] = {}
    reader = dcp.HuggingFaceStorageReader(str(path))
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(tensor.size, torch.nan, dtype=tensor.properties.dtype)
        for name, tensor in metadata.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    for name, tensor in tensors.items():
        kind, rest = name.split("/", 1)
        if kind == "weights":
            trainer["model"][rest] = tensor
        else:
            moment, parameter = rest.split("/")
            trainer["optimizer"]["state"][parameter][moment] = tensor
    return state


def changed(
    path: Path, into: Path, tensors: Mapping[str, Tensor] | None = None, **entries: Any
) -> Path:
    """Copy a checkpoint with other tensors or state entries and a valid manifest."""
    shutil.copytree(path, into, dirs_exist_ok=True)
    state = state_in(path) | entries
    torch.save(state, into / STATE)
    for file in into.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            own = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        changes = {name: tensor for name, tensor in (tensors or {}).items() if name in own}
        if changes:
            save_file(own | changes, file, metadata)
    return reseal(into, config=state["config"])


def save_weight(checkpointer: Checkpointer, step: int, weight: Tensor) -> Path:
    """Write a checkpoint of a model with a single weight."""
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer: Any = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        version=step,
        averages_by_name=dict,
        progress=lambda: {"version": step},
    )
    return CheckpointWriter().start(checkpointer, trainer, {})


def reseal(path: Path, **entries: Any) -> Path:
    """Rewrite the manifest of a checkpoint for its current files."""
    manifest = {name: value for name, value in read_manifest(path).items() if name != "files"}
    files = sizes_and_sha256([file for file in path.iterdir() if file.name != MANIFEST])
    write_manifest(path, manifest | entries, files)
    return path
