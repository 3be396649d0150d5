"""``Segments``: values of several rows, one row after another, with sums over each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the values of B rows are in a flat tensor [S].

    It is made on the CPU, because its size depends on values, and then copied to a device.

    Args:
        sizes: [B] int64, number of values of each row.
        row: [S] int64, row of each value.
        offsets: [B + 1] int64, position of each row's first value, and S.

    >>> segments = Segments.of([2, 0, 1])
    >>> segments.sum(torch.tensor([1.0, 2.0, 5.0])), segments.spread(torch.tensor([1.0, 2.0, 3.0]))
    (tensor([3., 0., 5.]), tensor([1., 1., 3.]))
    """

    sizes: Tensor
    row: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int] | Tensor) -> Segments:
        """Return the segments of rows with these numbers of values."""
        sizes = torch.as_tensor(sizes, dtype=torch.int64, device="cpu")
        row = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
        return cls(sizes, row, torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sizes)

    @cached_property
    def number(self) -> Tensor:
        """[S] int64, number of each value within its row, from 0."""
        return torch.arange(len(self.row), device=self.row.device) - self.offsets[self.row]

    def to(self, device: torch.device) -> Segments:
        """Return the segments on a device, copied without waiting."""
        return Segments(*(send(part, device) for part in (self.sizes, self.row, self.offsets)))

    def spread(self, values: Tensor) -> Tensor:
        """Repeat a value of each row, [B], for each of the row's values, [S]."""
        return _Spread.apply(values, self.row, self.offsets)

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values of each row, [S] floating, in their order, to [B]."""
        return _segment_sum(values, self.offsets)

    def mean(self, values: Tensor) -> Tensor:
        """Average the values of each row, [S] to [B]; 0 for a row without values."""
        return self.sum(values) / self.sizes.clamp(min=1)

    def any(self, flags: Tensor) -> Tensor:
        """Return whether a flag of each row is True, [S] to [B] bool."""
        return self.sum(flags.to(torch.float32)) > 0

    def places(self, index: Tensor) -> Tensor:
        """Return the positions of the values of some rows, [n] int64, one row after another."""
        parts = Segments.of(self.sizes[index])
        return self.offsets[index][parts.row] + parts.number


class _Spread(torch.autograd.Function):
    """A value of each row for each of its values. Its gradient has no ``index_add``, whose order
    varies on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, row: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return values.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        return _segment_sum(grads[0], offsets), None, None


def _segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.segment_reduce(values.contiguous(), "sum", offsets=offsets, unsafe=True)
