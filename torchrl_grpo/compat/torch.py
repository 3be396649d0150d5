"""Private names of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters as counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Flash attention on a CPU: takes query, key and value, [B, H, T, D], the dropout's probability,
whether it is causal and ``scale``; returns the output and the normalizers, [B, H, T]."""
flash_attention_backward: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
"""Its backward pass: takes the gradient of the output, query, key, value, output, normalizers, the
dropout's probability, whether it is causal and ``scale``; returns the gradients of query, key and
value."""

ProfilerConfig: Any = _ExperimentalConfig
"""Options of ``torch.profiler``, such as ``profile_all_threads``."""
CompilerError: Any = TorchDynamoException
"""Base class of the errors of ``torch.compile`` itself."""

_mkldnn: Any = torch.ops.mkldnn

FileReader: Any = torch._C.PyTorchFileReader
"""The reader of ``torch.load``: its view of a zip file's records is the only one that counts."""


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of each tensor, computed together in float32 or wider, [number of tensors]."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(list(torch._foreach_norm(list(tensors), order, dtype=dtype)))


def copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a copy of each tensor, made together."""
    return tuple(torch._foreach_mul(list(tensors), 1.0))


def differences(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return each tensor minus its counterpart, computed together."""
    return tuple(torch._foreach_sub(list(tensors), list(others)))


def first_place(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the position of this rank's part in a tensor that may be sharded; None on a rank whose
    part is a copy of another's, in the same mesh or in one of a lower rank.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate() or ()
    if mesh.mesh.min() > 0 or any(
        number and placement.is_replicate()
        for number, placement in zip(coordinate, placements, strict=True)
    ):
        return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(offset)


def version_of(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place."""
    return tensor._version


def packs_linear(weight: Tensor) -> bool:
    """Return whether oneDNN can pack a weight on this machine. Its functions are internal to the
    compiler, and a build may lack them.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(_mkldnn, "_reorder_linear_weight") and hasattr(_mkldnn, "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(_mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linear(weight: Tensor, rows: int) -> Tensor:
    """Return a weight, [out, in], in oneDNN's layout for inputs of about this many rows."""
    return _mkldnn._reorder_linear_weight(weight, rows)


def packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias``, plus the residual if there is one, for a packed weight: [N,
    in] to [N, out].
    """
    out: Tensor
    if residual is None:
        out = _mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    else:
        out = _mkldnn._linear_pointwise(x, residual, packed, bias, "add")
    return out


def mark_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make a loss scaler's next ``update`` lower the scale, as if it had found an infinite gradient
    itself.
    """
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        found_inf.fill_(1.0)


def pin_exact_sizes() -> None:
    """Make pinned memory as large as the tensor in it, which PyTorch otherwise rounds up to a power
    of two.

    Only from torch 2.14 on: 2.11 has no such setting, and in between a freed block is taken for a
    larger tensor too (pytorch/pytorch#192722).
    """
    if Version(torch.__version__) >= Version("2.14"):
        configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get(
            "PYTORCH_CUDA_ALLOC_CONF", ""
        )
        settings = f"pinned_max_round_threshold_mb:1,{configured}".rstrip(",")
        torch._C._accelerator_setAllocatorSettings(settings)


def release_shared_memory(*counter: Any) -> None:
    """Release a reader's reference to memory that was sent over CUDA IPC."""
    torch.UntypedStorage._release_ipc_counter_cuda(*counter)


def open_event_file(writer: Any) -> None:
    """Make a closed ``SummaryWriter`` of TensorBoard open its next event file at once."""
    writer._get_file_writer()
