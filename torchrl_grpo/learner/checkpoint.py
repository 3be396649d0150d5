"""Write and read checkpoints: everything that a run needs to go on."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchrl import torchrl_logger
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.checks import check_keep
from torchrl_grpo.errors import ConfigError, DiskFullError, NonFiniteError, NotSavedError
from torchrl_grpo.host.checkpoint_files import (
    STATE,
    SealedFile,
    check_stored,
    check_whole,
    checkpoints_in,
    is_sharded,
    read_manifest,
    remove,
    step_of,
)
from torchrl_grpo.host.files import is_full
from torchrl_grpo.host.folders import numbered
from torchrl_grpo.host.text import size
from torchrl_grpo.learner.export import ACCURACY, INVALID, check_room, export_model, model_card
from torchrl_grpo.learner.parts import weights_in

_MOST_INVALID = 0.5
"""Share of invalid rewards above which an evaluation does not count for ``best``: too few problems
are left.
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
    def most(self) -> int:
        """Maximum number of checkpoints at a time: a new one is written before an old one is
        removed.
        """
        keep = check_keep(self.keep)
        return self.checkpoints if keep is None else min(self.checkpoints, sum(keep.values()) + 1)

    @property
    def bytes(self) -> int:
        """Maximum number of bytes at a time."""
        return self.most * self.checkpoint_bytes + self.models * self.model_bytes

    def check_room(self, directory: Path, beside: int = 0) -> None:
        """Check that the disk has room for them.

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
                f"hydra.run.dir={directory} must have room for {self.most} checkpoints of "
                f"{size(self.checkpoint_bytes)} and for {self.models} "
                f"model{'s' * (self.models != 1)} of {size(self.model_bytes)}, {size(needed)} in "
                f"total, but {there} has {size(free)} free: use another folder, "
                "train.keep_checkpoints=last:1 or larger frequencies."
            )


def room_at(directory: Path) -> tuple[Path, int]:
    """Return the nearest existing folder of a path, and the bytes free there."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return there, shutil.disk_usage(there).free


class Checkpointer:
    """Writer of ``checkpoint_{step}.pt`` and ``model/``, each complete or absent.

    A checkpoint has ``trainer`` (model, optimizer, scheduler, scaler, counters), ``source`` (data
    order, the engine's random state), ``rng`` (Python, torch, CUDA), ``config`` (the full config as
    plain types) and ``step``. ``torch.load(path, weights_only=True)`` loads it. A manifest and a
    checksum follow (``checkpoint_files``). Several ranks write a folder ``checkpoint_{step}``
    instead (``shards.ShardedSaver``).

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
        """Return the file of the checkpoint after ``step`` steps."""
        return self.directory / f"checkpoint_{step:06d}.pt"

    def begin(self, step: int) -> None:
        """Prepare the folder for a run that resumes after ``step``: rename later checkpoints
        (``.old``, ``.old-2``) and remove the leftovers of an interrupted save.
        """
        for path in checkpoints_in(self.directory):
            if (step_of(path) or 0) > step:
                aside = set_aside(path)
                torchrl_logger.warning(
                    f"{path} is of a later step than {step}: renamed to {aside.name}."
                )
        for path in self.directory.glob("checkpoint_*.tmp"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def save(self, step: int, trainer: dict[str, Any], source: dict[str, Any]) -> Path:
        """Write the state after ``step`` steps; return the file.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.
            NotSavedError: the disk is full (``DiskFullError``) or the folder is not writable;
                earlier checkpoints are unchanged.
        """
        check_finite(trainer["model"].items())
        state = self.state(step, trainer, source)
        path = self.path(step)
        staging = path.with_suffix(".tmp")
        sealed: SealedFile | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            check_room(self.directory, bytes_of(trainer), path.name)
            with staging.open("wb") as file:
                sealed = SealedFile(file)
                torch.save(state, sealed)  # type: ignore[arg-type]  # it needs only write and flush
                sealed.seal(self.manifest(step))
                file.flush()
                os.fsync(file.fileno())
            staging.rename(path)
        except BaseException as error:
            with suppress(OSError):
                staging.unlink(missing_ok=True)
            # After a failed write torch raises an error of its own, about its count of bytes.
            cause = (sealed and sealed.error) or error
            raise self.not_saved(path, cause) from None
        self.remove_old()
        return path

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
        """Return the manifest of a checkpoint: its step, config and evaluation."""
        return {"step": step, "config": self.config, "metrics": self.metrics}

    def not_saved(self, path: Path, error: BaseException) -> BaseException:
        """Return the exception to raise when ``error`` has ended the writing of a checkpoint."""
        if is_full(error):
            return DiskFullError(f"there is no room for {path.name} in {self.directory}")
        if isinstance(error, OSError):
            return NotSavedError(
                f"{path.name} cannot be written in {self.directory} ({error.strerror})"
            )
        return error

    def remove_old(self) -> None:
        """Remove the checkpoints that ``train.keep_checkpoints`` does not keep; the newest one
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
        """Write the model, its tokenizer and its card into ``model/``. Before the run has ended the
        folder is ``model_{step}/`` and has LoRA's adapters alone; see ``export_model``.
        """
        target = self.directory / ("model" if ended else f"model_{step:06d}")
        card = model_card(self.config, step, self.metrics)
        adapters = hasattr(model, "peft_config") and not ended
        return export_model(model, tokenizer, target, card, adapters=adapters)


def read_checkpoint(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """Return the state in a checkpoint. That of several ranks comes without its tensors, which
    ``parts.read_parts`` reads.

    A file's tensors are memory-mapped.

    Args:
        path: the file or folder.
        trusted: skip checksums and weights, which were checked before.

    Raises:
        ValueError: it is not a whole checkpoint, or has weights that are not finite.
    """
    sharded = is_sharded(path)
    if not trusted:
        check_whole(path)
    try:
        if not trusted:
            check_stored(path)
        config = read_manifest(path)["config"]
        if config.get("optimizer", {}).get("name") == "adamw_8bit":
            import torchao.optim  # noqa: F401  allows torch.load to read its types
        state = torch.load(
            path / STATE if sharded else path, map_location="cpu", weights_only=True, mmap=True
        )
    except Exception as error:  # a foreign file may raise anything
        # The rest of torch's message advises to trust the file.
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(
            f"{path.name} cannot be read ({type(error).__name__}: {reason:.200})"
        ) from error
    if not isinstance(state, dict) or not state.keys() >= _ENTRIES:
        raise ValueError(f"{path.name} holds something else")
    if not trusted:
        try:
            weights = state["trainer"]["model"]
            if not all(map(is_whole, weights.values())):
                raise ValueError(f"{path.name} has weights that are no tensors of their own")
            check_finite(weights_in(path) if sharded else weights.items())
        except NonFiniteError as error:
            raise ValueError(f"{path.name} cannot be used: {error}") from error
        except Exception as error:  # a foreign state may raise anything
            raise ValueError(
                f"{path.name} holds something else ({type(error).__name__}: {error!s:.200})"
            ) from error
    return state | {"config": config}  # the config that was checked when this run's was made


def is_whole(weight: Any) -> bool:
    """Whether a weight is a dense tensor whose memory holds all of its elements."""
    if not isinstance(weight, torch.Tensor) or weight.layout != torch.strided:
        return False
    return weight.nbytes <= weight.untyped_storage().nbytes()


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, or whatever has its name, to ``.old``, ``.old-2`` and so on; return the
    new path.
    """
    return path.rename(
        next(name for name in numbered(path.with_suffix(".old")) if not name.exists())
    )


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the tensors in nested dictionaries and lists; for sharded ones, those of
    all ranks.
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


def check_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that weights, (name, tensor), are finite.

    Raises:
        NonFiniteError: a weight is not finite.
    """
    for name, tensor in weights:
        # The sum is cheap, and not finite if an element is not. It may also overflow.
        if (
            tensor.is_floating_point()
            and not tensor.sum().isfinite()
            and not tensor.isfinite().all()
        ):
            raise NonFiniteError(f"the weight {name} has values that are not finite")


def rng_state() -> dict[str, Any]:
    """Return the state of the global random generators."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state from ``rng_state``; accelerators' only if there are as many of them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
