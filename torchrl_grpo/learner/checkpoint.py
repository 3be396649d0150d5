"""Checkpoints: the state of a run in one file, and the model as ``from_pretrained`` reads it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchrl._utils import logger as torchrl_logger
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.checkpoint_files import SealedFile, check_whole, checkpoints_in
from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.models.loading import base_model_of
from torchrl_grpo.models.sharding import is_writer
from torchrl_grpo.weights import named_weights

_ENTRIES = {"step", "trainer", "source", "rng", "config"}


class Checkpointer:
    """Writes ``checkpoint_{step}.pt`` and ``model/`` into a folder, each whole or not at all.

    A checkpoint holds ``trainer`` (model, optimizer, scheduler, scaler, counts), ``source`` (data order, the engine's
    random state), ``rng`` (Python, torch, CUDA), ``config`` (the full config as plain types) and ``step``. It loads
    with ``torch.load(path, weights_only=True)``. A manifest and a checksum stand at its end (``checkpoint_files``).

    Attributes:
        metrics: of the latest evaluation, for the manifest.

    Args:
        directory: made when the first checkpoint is written.
        config: the run's config as plain types.
    """

    def __init__(self, directory: str | os.PathLike[str], config: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self.config = config
        self.metrics: dict[str, float] = {}

    def path(self, step: int) -> Path:
        """The file of the checkpoint after ``step`` steps."""
        return self.directory / f"checkpoint_{step:06d}.pt"

    def begin(self, step: int) -> None:
        """Makes the folder that of a run which goes on after ``step``: later checkpoints are set aside (``.old``), and
        what an interrupted save left is removed."""
        for path in checkpoints_in(self.directory):
            if path.name > self.path(step).name:
                path.rename(path.with_suffix(".old"))
                torchrl_logger.warning(f"{path} is of a later step than {step}: it is now {path.stem}.old.")
        for path in self.directory.glob("checkpoint_*.tmp"):
            path.unlink()

    def save(self, step: int, trainer: dict[str, Any], source: dict[str, Any]) -> Path:
        """Writes the state after ``step`` steps; returns the file.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.
        """
        check_finite(trainer["model"])
        state = {"step": step, "trainer": trainer, "source": source, "rng": rng_state(), "config": self.config}
        path = self.path(step)
        self.directory.mkdir(parents=True, exist_ok=True)
        staging = path.with_suffix(".tmp")
        try:
            with staging.open("wb") as file:
                sealed = SealedFile(file)
                torch.save(state, sealed)  # type: ignore[arg-type]  # it needs only write and flush
                sealed.seal({"step": step, "config": self.config, "metrics": self.metrics})
                file.flush()
                os.fsync(file.fileno())
            staging.rename(path)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
        return path

    def latest(self) -> Path | None:
        """The checkpoint with the most steps, None when there is none."""
        return next(iter(checkpoints_in(self.directory)), None)

    def export(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> Path:
        """Writes the model, adapters merged, and its tokenizer into ``model/``, in place of an earlier export.

        ``AutoModelForCausalLM.from_pretrained`` and vLLM load the folder as it is. Of a sharded model all ranks must
        call this: rank 0 writes.
        """
        base, writes = base_model_of(model), is_writer(model)
        target, staging, old = (self.directory / name for name in ("model", "model.tmp", "model.old"))
        state = {name: tensor.cpu().contiguous() for name, tensor in named_weights(model) if writes}
        if not writes:
            return target
        shutil.rmtree(staging, ignore_errors=True)
        base.save_pretrained(staging, state_dict=state, save_original_format=False)  # its names are that already
        tokenizer.save_pretrained(staging)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        staging.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        return target


def read_checkpoint(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """What ``Checkpointer.save`` wrote; the tensors stay in the file until they are used.

    Args:
        path: the file.
        trusted: whether checksum and weights were checked already.

    Raises:
        ValueError: the file is not a whole checkpoint, or has weights that are not finite.
    """
    if not trusted:
        check_whole(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever reading a foreign file may raise
        reason = str(error).splitlines()[0].partition(". ")[0]  # torch goes on with advice to trust the file
        raise ValueError(f"{path.name} cannot be read ({type(error).__name__}: {reason:.200})") from error
    if not isinstance(state, dict) or not state.keys() >= _ENTRIES:
        raise ValueError(f"{path.name} holds something else")
    if not trusted:
        try:
            check_finite(state["trainer"]["model"])
        except NonFiniteError as error:
            raise ValueError(f"{path.name} is of no use: {error}") from error
    return state


def check_finite(weights: Mapping[str, Any]) -> None:
    """Checks that weights are numbers.

    Raises:
        NonFiniteError: one is not finite.
    """
    for name, tensor in weights.items():
        # A sum is cheap, and not finite if a summand is not; it may overflow by itself.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise NonFiniteError(f"the weight {name} has values that are not finite")


def rng_state() -> dict[str, Any]:
    """The state of the global random generators."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what ``rng_state`` gave; that of the accelerators only where there are as many."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
