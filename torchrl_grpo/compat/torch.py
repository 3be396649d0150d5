"""Private names of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def norms(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the 2-norm of each tensor, computed together."""
    return tuple(torch._foreach_norm(list(tensors)))


def mark_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make a loss scaler's next ``update`` lower the scale, as if it had found an infinite gradient itself."""
    for found in scaler._found_inf_per_device(optimizer).values():
        found.fill_(1.0)


def release_shared_memory(*counter: Any) -> None:
    """Give up a reader's share of memory that was sent over CUDA IPC: its reference counter's handle and offset."""
    torch.UntypedStorage._release_ipc_counter_cuda(*counter)
