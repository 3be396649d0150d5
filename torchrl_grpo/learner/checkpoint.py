"""Write and read checkpoints: everything that a run needs to continue."""

from __future__ import annotations

import math
import os
import pickletools
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchrl import torchrl_logger
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.checks import check_keep
from torchrl_grpo.compat.torch import FileReader
from torchrl_grpo.errors import ConfigError, NonFiniteError
from torchrl_grpo.host.checkpoint_files import (
    STATE,
    check_whole,
    checkpoints_in,
    read_manifest,
    remove,
    step_of,
)
from torchrl_grpo.host.clock import run_date
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.folders import numbered
from torchrl_grpo.host.text import size
from torchrl_grpo.images.families import family_of
from torchrl_grpo.learner.export import ACCURACY, INVALID, export_model
from torchrl_grpo.learner.shards import tensors_in
from torchrl_grpo.models.loading import base_model_of
from torchrl_grpo.weights.named import NamedTensors

_MOST_INVALID = 0.5
"""Fraction of invalid rewards above which an evaluation does not count for ``best``, because too
few problems are left.
"""
_ENTRIES = {"step", "trainer", "source", "rng", "config"}


@dataclass(frozen=True)
class Writes:
    """Number and size of the checkpoints and models that a run writes.

    Attributes:
        checkpoints: number of checkpoints.
        checkpoint_bytes: size of each checkpoint.
        models: number of exported models.
        model_bytes: size of each model.
        keep: which checkpoints to keep, as in ``train.keep_checkpoints``.
    """

    checkpoints: int
    checkpoint_bytes: int
    models: int
    model_bytes: int
    keep: str | None

    @property
    def max_checkpoints(self) -> int:
        """Maximum number of checkpoints at a time: a new one is written before an old one is
        removed.
        """
        keep = check_keep(self.keep)
        return self.checkpoints if keep is None else min(self.checkpoints, sum(keep.values()) + 1)

    @property
    def bytes(self) -> int:
        """Maximum number of bytes at a time."""
        return self.max_checkpoints * self.checkpoint_bytes + self.models * self.model_bytes

    def check_room(self, directory: Path, beside: int = 0) -> None:
        """Check that the disk has room for the checkpoints and models.

        Args:
            directory: folder of the run; it need not exist.
            beside: bytes that the run writes there in addition.

        Raises:
            ConfigError: the disk has too little room.
        """
        needed = self.bytes + beside
        there, free = room_at(directory)
        if free < needed:
            raise ConfigError(
                f"hydra.run.dir={directory} must have room for {self.max_checkpoints} checkpoints of "
                f"{size(self.checkpoint_bytes)} and for {self.models} "
                f"model{'s' * (self.models != 1)} of {size(self.model_bytes)}, {size(needed)} in "
                f"total, but {there} has {size(free)} free: use another folder, "
                "train.keep_checkpoints=last:1 or larger frequencies."
            )


def room_at(directory: Path) -> tuple[Path, int]:
    """Return the nearest existing folder of a path, and the number of free bytes there."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return there, shutil.disk_usage(there).free


class Checkpointer:
    """Manages the names, contents and number of checkpoints in a folder, and writes ``model/``.

    A checkpoint has ``trainer`` (model, optimizer, scheduler, scaler, counters), ``source`` (data
    order, the engine's random state), ``rng`` (Python, torch, CUDA), ``config`` (the full config as
    plain types) and ``step``. ``writer.CheckpointWriter`` writes it.

    Attributes:
        metrics: results of the evaluation at the step that is saved next, for the manifest.

    Args:
        directory: created with the first checkpoint.
        config: the run's config as plain types.
        keep: which checkpoints to keep, as in ``train.keep_checkpoints``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], config: dict[str, Any], keep: str | None = None
    ) -> None:
        self.directory = Path(directory)
        self.config = config
        self.metrics: dict[str, float] = {}
        self._keep = check_keep(keep)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.directory / f"checkpoint_{step:06d}"

    def begin(self, step: int) -> None:
        """Prepare the folder for a run that resumes after ``step``: rename later checkpoints
        (``.old``, ``.old-2``) and remove the leftovers of an interrupted save.
        """
        for path in checkpoints_in(self.directory):
            if (step_of(path) or 0) > step:
                aside = set_aside(path)
                torchrl_logger.warning(
                    f"{path} is from a later step than {step}: renamed to {aside.name}."
                )
        for path in self.directory.glob("checkpoint_*.tmp"):
            shutil.rmtree(path)

    def state(self, step: int, trainer: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a run after ``step`` steps, in the form of a checkpoint."""
        return {
            "step": step,
            "trainer": trainer,
            "source": source,
            "rng": rng_state(),
            "config": self.config,
        }

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a checkpoint: its step, config, evaluation, and the run's date."""
        date = run_date().isoformat()
        return {"step": step, "config": self.config, "metrics": self.metrics, "date": date}

    def remove_old(self) -> None:
        """Remove the checkpoints that ``train.keep_checkpoints`` does not keep. The newest one
        always stays.
        """
        keep = self._keep
        if keep is None:
            return
        checkpoints = checkpoints_in(self.directory)
        stay = checkpoints[: keep["last"]]
        if "best" in keep:
            scores = {path: score for path in checkpoints if (score := _score(path)) is not None}
            stay += sorted(scores, key=scores.__getitem__, reverse=True)[: keep["best"]]
        for path in checkpoints:
            if path not in stay:
                remove(path)

    def latest(self) -> Path | None:
        """Return the checkpoint with the most steps; None if there is none."""
        return next(iter(checkpoints_in(self.directory)), None)

    def export(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, step: int, *, ended: bool = True
    ) -> Path:
        """Write the model, its tokenizer and its card into ``model/``. During the run the folder is
        ``model_{step}/`` and, with LoRA, has only the adapters; see ``export_model``.
        """
        target = self.directory / ("model" if ended else f"model_{step:06d}")
        adapters = hasattr(model, "peft_config") and not ended
        reads_images = family_of(base_model_of(model).config) is not None
        card: str = load_extra("model_card")(
            self.config, step, self.metrics, adapters=adapters, reads_images=reads_images
        )
        return export_model(model, tokenizer, target, card, adapters=adapters)


def read_checkpoint(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """Return the state in a checkpoint without its tensors, which ``parts.read_parts`` reads.

    Args:
        path: the folder.
        trusted: skip checksums and tensors, which were checked before.

    Raises:
        ValueError: the checkpoint is not complete, or has tensors that are not finite.
    """
    if not trusted:
        check_whole(path)
    manifest = read_manifest(path)
    try:
        if not trusted:
            check_stored(path / STATE)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file may raise anything
        # The rest of torch's message advises trusting the file.
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"{path.name} cannot be read ({type(error).__name__}: {reason:.200})"
        ) from error
    if not isinstance(state, dict) or state.keys() != _ENTRIES:
        raise ValueError(f"{path.name} does not contain a checkpoint")
    if not trusted:
        try:
            check_finite(tensors_in(path))
        except NonFiniteError as error:
            raise ValueError(f"{path.name} cannot be used: {error}") from error
        except Exception as error:  # a foreign file may raise anything
            raise ValueError(
                f"{path.name} does not contain a checkpoint "
                f"({type(error).__name__}: {error!s:.200})"
            ) from error
    # The config is the one that was checked with this run's config.
    date = manifest.get("date", run_date().isoformat())
    return state | {"config": manifest["config"], "date": date}


def check_stored(path: Path) -> None:
    """Check that a file of ``torch.save`` takes no more memory than its size when it is read.

    Raises:
        ValueError: its records are compressed or overlap, or its pickle makes zeros of any length.
        RuntimeError: it is not a file of ``torch.save``.
    """
    reader = FileReader(str(path))
    records = [
        (reader.get_record_offset(name), reader.get_record_size(name))
        for name in reader.get_all_records()
    ]
    end = 4  # torch.load takes a file for a zip file by these bytes
    with path.open("rb") as file:
        is_whole = file.read(end) == b"PK\3\4"
    for start, length in [*sorted(records), (path.stat().st_size, 0)]:
        is_whole = is_whole and end <= start
        end = start + length
    pickled = reader.get_record("data.pkl") if is_whole else b""
    operations = pickletools.genops(pickled)
    if not is_whole or any(str(name).endswith("bytearray") for _, name, _ in operations):
        raise ValueError("its state has compressed or overlapping parts, or a bytearray")


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, or anything else at its path, to ``.old``, ``.old-2`` and so on. Return
    the new path.
    """
    return path.rename(
        next(name for name in numbered(path.with_suffix(".old")) if not name.exists())
    )


def bytes_of(tensors: Any) -> int:
    """Return the number of bytes of the tensors in nested dictionaries and lists. Sharded tensors
    count with the parts of all ranks.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if isinstance(tensors, Mapping):
        tensors = list(tensors.values())
    return sum(map(bytes_of, tensors)) if isinstance(tensors, list) else 0


def _score(path: Path) -> float | None:
    """Return a checkpoint's accuracy; None if it cannot be the best one."""
    try:
        metrics = read_manifest(path)["metrics"]
    except ValueError:
        return None
    score: float = metrics.get(ACCURACY, math.nan)
    return score if math.isfinite(score) and metrics.get(INVALID, 0.0) <= _MOST_INVALID else None


def check_finite(tensors: NamedTensors) -> None:
    """Check that tensors, as (name, tensor), are finite, and that second moments are not negative.

    Raises:
        NonFiniteError: a tensor fails the check.
    """
    for name, tensor in tensors:
        # The sum is cheap, and is not finite if an element is not. It may also overflow.
        if (
            tensor.is_floating_point()
            and not tensor.sum().isfinite()
            and not tensor.isfinite().all()
        ):
            raise NonFiniteError(f"{name} has values that are not finite")
        if name.startswith("moments/exp_avg_sq/") and (tensor < 0).any():
            raise NonFiniteError(f"{name} has negative values")


def rng_state() -> dict[str, Any]:
    """Return the state of the global random generators."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state from ``rng_state``, for accelerators only if their number is the same."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
