"""``Compiled``: an elementwise part of a computation, as one kernel on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger

DEVICES = ("cuda",)
"""Devices for whose tensors functions are compiled."""
MIN_ELEMENTS = 2**22
"""Smaller tensors are not worth the seconds that compiling takes."""
_TOLERANCE = 1e-2


@dataclass(eq=False)
class Compiled:
    """A function of tensors that is compiled by its first call with a large tensor on CUDA.

    That call compares the results with those of the plain function. If they differ, or if it
    cannot be compiled, a warning says so, and the plain function is called from then on.

    Args:
        function: of tensors, the first of which is the largest, and other values; returns a tuple of
            tensors. It may change its arguments, but not while it is compiled.
    """

    function: Callable[..., tuple[Tensor, ...]]
    _compiled: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, largest: Tensor, *args: Any) -> tuple[Tensor, ...]:
        if (
            largest.device.type not in DEVICES
            or largest.numel() < MIN_ELEMENTS
            or torch.compiler.is_compiling()
        ):
            return self.function(largest, *args)
        if self._compiled is None:
            self._compiled = self._checked(largest, *args)
        return self._compiled(largest, *args)

    def _checked(self, largest: Tensor, *args: Any) -> Callable[..., tuple[Tensor, ...]]:
        """Return the compiled function, or the plain one if it must be used."""
        compiled = torch.compile(self.function, dynamic=True)
        try:
            results = compiled(largest, *args)
            expected = self.function(largest.clone(), *args)
            if all(
                torch.dist(result.float(), value.float()) <= _TOLERANCE * value.float().norm()
                for result, value in zip(results, expected, strict=True)
            ):
                return compiled
            problem = "its results differ from the plain ones"
        except Exception as error:  # the compiler's are of many kinds
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        torchrl_logger.warning(
            f"{self.function.__qualname__} is not compiled, and steps are slower: {problem}."
        )
        return self.function
