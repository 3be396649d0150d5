"""Linear layers for decoding: many products with few rows, and weights that change only between them.

On a CPU a product with so few rows spends up to half of its time on bringing the weight into the order that the kernel
wants. That is done here once for each version of the weights, through oneDNN, at the price of a second copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrl_grpo.compat.torch import pack_linear, packed_linear, packs_linear, version_of

_LEAST = 2**17
"""Elements from which on a weight is packed: below, the call costs more than it saves."""
_ROWS = 64
"""Rows that the order is chosen for; it suits other numbers as well."""


class PackedLinear:
    """``x @ weight.T + bias``, and a residual that is added in the same pass.

    Args:
        weight: [out, in], of which ``sources`` are views.
        bias: [out] or None.
        sources: the parameters whose changes ``refresh`` looks for.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sources: Sequence[Tensor]) -> None:
        self._weight, self._bias, self._sources = weight, bias, sources
        self._packed: Tensor | None = None
        self._versions: list[int] | None = None
        self._packs = weight.numel() >= _LEAST and packs_linear(weight)

    def refresh(self) -> None:
        """Packs the weight, if it has changed."""
        versions = [version_of(source) for source in self._sources]
        if self._packs and versions != self._versions:
            self._packed = pack_linear(self._weight, _ROWS)
            self._versions = versions

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[N, in] to [N, out]; ``residual`` is [N, out]."""
        if self._packed is not None:
            return packed_linear(x, self._packed, self._bias, residual)
        if residual is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._weight.t())
