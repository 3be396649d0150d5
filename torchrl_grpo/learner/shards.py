"""Saving by several ranks: each writes its part, in a thread, while training goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_grpo.host.checkpoint_files import STATE, measured, write_manifest
from torchrl_grpo.learner.checkpoint import Checkpointer, bytes_of, check_finite, set_aside
from torchrl_grpo.learner.export import check_room
from torchrl_grpo.learner.parts import files_of, write_parts
from torchrl_grpo.models.sharding import WEIGHTS, own_parts

if TYPE_CHECKING:
    from torchrl_grpo.learner.step import GRPOTrainer

_T = TypeVar("_T")


class ShardedSaver:
    """Writes the checkpoints of several ranks, each a folder that is complete or absent.

    All ranks have one and call its methods together. ``start`` copies a rank's part to the CPU and
    returns; a thread then writes it under a temporary name, flushes it and takes its SHA-256. Rank
    0 adds the manifest and renames the folder when all ranks are done. One checkpoint is written at
    a time. The threads talk through a process group of their own, so that training may use the
    others.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(
        self, checkpointer: Checkpointer, trainer: GRPOTrainer, source: dict[str, Any]
    ) -> Path:
        """Begins to write the state of a trainer and of a source; returns the folder that there
        will be.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.
            NotSavedError: the checkpoint before this one could not be written; nothing is.
        """
        self.finish()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        parts, rest = own_parts(
            trainer.model, trainer.optimizer if trainer.optimizer.state else None
        )
        weights = (
            (name.removeprefix(WEIGHTS), part)
            for name, part in parts.items()
            if name.startswith(WEIGHTS)
        )
        self._together(lambda: check_finite((name, _local(part)) for name, part in weights))
        tensors = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        state = deepcopy(
            {"model": {}, "optimizer": rest} | trainer.progress()
        )  # training goes on in it
        write = _Write(
            checkpointer,
            trainer.version,
            tensors,
            checkpointer.state(trainer.version, state, source),
        )
        self._writing = self._thread.submit(self._write, write)
        return write.path

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if one is.

        Raises:
            NotSavedError: it could not be written, for lack of room (``DiskFullError``) or because
                the folder cannot be written to; the earlier ones are as they were. It is said once.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, write: _Write) -> None:
        rank = dist.get_rank()
        try:
            self._together(write.prepare if rank == 0 else _nothing)
            write_parts(write.staging, write.tensors, self._group)
            files = self._together(
                lambda: {path.name: measured(path) for path in files_of(write.staging, rank)}
            )
            self._together(
                lambda: write.seal({name: of for each in files for name, of in each.items()}, rank)
            )
        except BaseException as error:
            if rank == 0:
                shutil.rmtree(write.staging, ignore_errors=True)
            raise write.checkpointer.not_saved(write.path, error) from None

    def _together(self, work: Callable[[], _T]) -> list[_T]:
        """Do a rank's work; return the results of all ranks, or raise the first rank's error on all
        of them.
        """
        mine: tuple[_T | None, Exception | None]
        try:
            mine = work(), None
        except Exception as error:
            mine = None, error
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        for _, failed in every:
            if failed is not None:
                raise failed
        return [given for given, _ in every]


class _Write:
    """A checkpoint in progress; rank 0 creates and finishes its folder."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
    ) -> None:
        self.checkpointer = checkpointer
        self.path = checkpointer.path(step).with_suffix("")
        self.staging = self.path.with_suffix(".tmp")
        self.tensors = tensors
        self._state = state
        self._manifest = checkpointer.manifest(step)

    def prepare(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_room(self.path.parent, bytes_of(self.tensors), self.path.name)
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir()

    def seal(self, files: dict[str, tuple[int, str]], rank: int) -> None:
        if rank != 0:
            return
        with (self.staging / STATE).open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        write_manifest(
            self.staging, self._manifest, {STATE: measured(self.staging / STATE), **files}
        )
        if self.path.exists():
            set_aside(self.path)
        self.staging.rename(self.path)
        self.checkpointer.remove_old()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nothing() -> None:
    """Work of the other ranks: none."""
