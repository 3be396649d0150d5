"""Tensors of a checkpoint: safetensors files that record the position of each part in its tensor.

``torch.distributed.checkpoint`` writes and reads them. Reading unpickles nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchrl_grpo.models.sharding import WEIGHTS, load_parts, own_parts
from torchrl_grpo.weights.named import TensorStream, is_critic

_NONE: Mapping[str, Tensor] = MappingProxyType({})
_FILE_BYTES = 1 << 29
"""Approximate size of a rank's file, which takes memory once more while it is written."""


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank (from 0) wrote."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def write_parts(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Write each rank's part of tensors into a folder, and flush it to the disk. Collective.

    Args:
        folder: an existing folder.
        tensors: tensors with the same names on all ranks; with several ranks, on the CPU.
        group: gloo group of all ranks, reserved for this call; None for one process.

    Raises:
        Exception: the first rank's error, on all ranks.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    files: dict[str, int] = {}
    used = 0
    for name, tensor in tensors.items():
        used += tensor.nbytes // ranks
        files[name] = 1 + used // _FILE_BYTES
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=files, save_distributed=True
    )
    is_single = group is None
    with _first_error(is_single=is_single):
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=is_single)


def read_parts(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rest: Mapping[str, Any],
    further: Mapping[str, Tensor] = _NONE,
) -> None:
    """Read weights and optimizer state; each rank reads its share, directly into place. Collective.

    Args:
        folder: checkpoint of any number of ranks.
        model: a model, sharded or not.
        optimizer: the model's optimizer; None skips its state, and a critic.
        rest: the optimizer's state without tensors, from ``own_parts``; empty if the optimizer had
            made no step.
        further: tensors to read in addition, by their names in the checkpoint.

    Raises:
        RuntimeError: the model has different parameters.
    """
    tensors, _ = own_parts(model, optimizer if rest else None)
    tensors |= further
    reader = HuggingFaceStorageReader(str(folder))
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    partial = [
        name
        for name, tensor in metadata.items()
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel()
    ]
    if partial:
        raise RuntimeError(f"the checkpoint lacks parts of {len(partial)} tensors {partial[:3]}.")
    saved = {
        name: tuple(tensor.size)
        for name, tensor in metadata.items()
        if optimizer is not None
        or (name.startswith(WEIGHTS) and not is_critic(name.removeprefix(WEIGHTS)))
    }
    needed = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if saved != needed:
        unknown = [name for name in saved if saved[name] != needed.get(name)]
        missing = [name for name in needed if needed[name] != saved.get(name)]
        raise RuntimeError(
            f"the checkpoint does not fit the model: {len(unknown)} unknown entries {unknown[:3]}, "
            f"{len(missing)} missing ones {missing[:3]}."
        )
    is_single = not dist.is_initialized()
    with _first_error(is_single=is_single):
        load(tensors, storage_reader=reader, no_dist=is_single)
    if optimizer is not None and rest:
        load_parts(model, optimizer, tensors, rest)


def tensors_in(folder: Path) -> TensorStream:
    """Yield the parts of the tensors in all files of a folder as (name, tensor)."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is not a dictionary
                yield name, file.get_tensor(name)


@contextmanager
def _first_error(*, is_single: bool) -> Iterator[None]:
    """Context for reading or writing that raises the error of the first rank that failed."""
    try:
        with warnings.catch_warnings() if is_single else nullcontext():
            if is_single:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None
