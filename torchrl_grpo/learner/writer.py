"""Write checkpoints. With several ranks, each writes its part while training continues."""

from __future__ import annotations

import os
import shutil
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_grpo.host.checkpoint_files import STATE, sizes_and_sha256, write_manifest
from torchrl_grpo.learner.checkpoint import Checkpointer, bytes_of, check_finite, set_aside
from torchrl_grpo.learner.export import check_room, not_saved
from torchrl_grpo.learner.shards import files_of, write_parts
from torchrl_grpo.models.sharding import WEIGHTS, is_shared, local_part, own_parts

if TYPE_CHECKING:
    from torchrl_grpo.learner.step import PolicyTrainer

_T = TypeVar("_T")


class CheckpointWriter:
    """Writer of checkpoints, each a folder that is complete or absent.

    A single process writes synchronously. With several ranks, each has a writer, and all ranks call
    its methods together: ``start`` copies a rank's part to the CPU and returns. A thread then
    writes the part under a temporary name, flushes it and computes its SHA-256. When all ranks are
    done, rank 0 adds the manifest and renames the folder. Only one checkpoint is written at a time.
    The threads have their own process group, which leaves the others to training.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(
        self, checkpointer: Checkpointer, trainer: PolicyTrainer, source: dict[str, Any]
    ) -> Path:
        """Write the state of a trainer and of a source, or begin to. Return the folder's path.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.
            NotSavedError: with one process, this checkpoint could not be written; with several
                ranks, the previous one could not, and this one is not written either.
        """
        self.finish()
        shared = is_shared(trainer.model)
        if shared and self._group is None:
            self._group = dist.new_group(backend="gloo")
        parts, rest = own_parts(
            trainer.model, trainer.optimizer if trainer.optimizer.state else None
        )
        parts |= trainer.averages_by_name()
        weights = [
            (name, local_part(part)) for name, part in parts.items() if name.startswith(WEIGHTS)
        ]
        self._together(lambda: check_finite(weights))
        if shared:  # copies, because training changes them
            parts = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        state = deepcopy({"optimizer": rest} | trainer.progress())
        write = _Write(
            checkpointer=checkpointer,
            path=checkpointer.path(trainer.version),
            tensors={name: part.contiguous() for name, part in parts.items()},
            state=checkpointer.state(trainer.version, state, source),
            manifest=checkpointer.manifest(trainer.version),
        )
        if shared:
            self._writing = self._thread.submit(self._write, write)
        else:
            self._write(write)
        return write.path

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete.

        Raises:
            NotSavedError: the disk is full (``DiskFullError``) or the folder is not writable.
                Earlier checkpoints are unchanged. Raised once.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, write: _Write) -> None:
        rank = 0 if self._group is None else dist.get_rank()
        try:
            self._together(write.prepare if rank == 0 else _do_nothing)
            write_parts(write.staging, write.tensors, self._group)
            measured = self._together(lambda: sizes_and_sha256(files_of(write.staging, rank)))
            files = dict(ChainMap(*measured))
            self._together(partial(write.seal, files) if rank == 0 else _do_nothing)
        except BaseException as error:
            if rank == 0:
                shutil.rmtree(write.staging, ignore_errors=True)
            raise not_saved(error, write.path.name, write.checkpointer.directory) from None

    def _together(self, work: Callable[[], _T]) -> list[_T]:
        """Do a rank's work. Return the results of all ranks, or raise the error of the first rank
        that failed on all of them.
        """
        if self._group is None:
            return [work()]
        outcome: tuple[_T | None, Exception | None]
        try:
            outcome = work(), None
        except Exception as error:
            outcome = None, error
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, outcome, group=self._group)
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        return [result for result, _ in outcomes]


@dataclass(frozen=True)
class _Write:
    """A checkpoint in progress. Rank 0 creates and finishes its folder."""

    checkpointer: Checkpointer
    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def staging(self) -> Path:
        return self.path.with_suffix(".tmp")

    def prepare(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_room(self.path.parent, bytes_of(self.tensors), self.path.name)
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir()

    def seal(self, files: dict[str, tuple[int, str]]) -> None:
        state = self.staging / STATE
        with state.open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        write_manifest(self.staging, self.manifest, sizes_and_sha256([state]) | files)
        if self.path.exists():
            set_aside(self.path)
        self.staging.rename(self.path)
        self.checkpointer.remove_old()


def _do_nothing() -> None:
    """Do nothing, as the work of the other ranks."""
