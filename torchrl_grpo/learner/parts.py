"""The tensors of a checkpoint of several ranks: safetensors files with the position of their parts
in each tensor.

``torch.distributed.checkpoint`` writes and reads them. Reading unpickles nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchrl_grpo.models.sharding import WEIGHTS, load_parts, own_parts

_FILE_BYTES = 1 << 29
"""Approximate size of a rank's file, which is copied once more while it is written."""


def files_of(folder: Path, rank: int) -> list[Path]:
    """The files that a rank wrote; ranks count from 0."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Writes each rank's part of tensors into a folder, flushed to the disk. Collective.

    Args:
        folder: there already.
        tensors: on the CPU, under the same names on all ranks.
        group: of all ranks, over gloo, which nothing else uses meanwhile.

    Raises:
        Exception: the first error of a rank, on all of them.
    """
    files, used = dict[str, int](), 0
    for name, tensor in tensors.items():
        used += tensor.numel() * tensor.element_size() // dist.get_world_size(group)
        files[name] = 1 + used // _FILE_BYTES
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=files, save_distributed=True
    )
    try:
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _first_of(error) from None


def read_parts(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, rest: Mapping[str, Any]
) -> None:
    """Read weights and optimizer state; each rank reads its share, directly into place. Collective.

    Args:
        folder: of any number of ranks.
        model: sharded or not.
        optimizer: of the model; None leaves its state unread.
        rest: what ``own_parts`` gave beside the tensors; empty if the optimizer had made no step.

    Raises:
        RuntimeError: the model has other parameters.
    """
    tensors, _ = own_parts(model, optimizer if rest else None)
    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata.items()
    saved = {
        name: tuple(tensor.size)
        for name, tensor in found
        if isinstance(tensor, TensorStorageMetadata)
    }
    if optimizer is None:
        saved = {name: shape for name, shape in saved.items() if name.startswith(WEIGHTS)}
    partial = [
        name
        for name, tensor in found
        if isinstance(tensor, TensorStorageMetadata)
        and sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel()
    ]
    if partial:
        raise RuntimeError(f"the checkpoint lacks parts of {len(partial)} tensors {partial[:3]}.")
    needed = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if saved != needed:
        unknown, missing = (
            [name for name in one if one[name] != other.get(name)]
            for one, other in ((saved, needed), (needed, saved))
        )
        raise RuntimeError(
            f"the checkpoint does not fit the model: {len(unknown)} unknown entries {unknown[:3]}, "
            f"{len(missing)} missing ones {missing[:3]}."
        )
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            if alone:  # torch says that it takes this for intended
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise _first_of(error) from None
    if optimizer is not None and rest:
        load_parts(model, optimizer, tensors, rest)


def weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The parts of the weights in all files of a folder, (name, tensor), one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                if name.startswith(WEIGHTS):
                    yield name.removeprefix(WEIGHTS), file.get_tensor(name)


def _first_of(error: CheckpointException) -> BaseException:
    """Return the error of the first rank that had one."""
    return error.failures[min(error.failures)][0]
