"""``Compiled``: an elementwise part of a computation, as one kernel on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger

DEVICES = ("cuda",)
"""Devices for whose tensors functions are compiled."""
MIN_ELEMENTS = 2**22
"""Smaller tensors are not worth the seconds that compiling takes."""
_TOLERANCE = 1e-2


class Compiled:
    """A function of tensors that is compiled by its first call with a large tensor on CUDA.

    That call compares the results with those of the plain function. Where they differ, or where it
    cannot be compiled, a warning says so, and the plain function is called from then on.

    Args:
        function: of tensors, the first of which is the largest, and other values; returns tensors.
            It may change its arguments, but not while it is compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, largest: Tensor, *args: Any) -> Any:
        if (
            largest.device.type not in DEVICES
            or largest.numel() < MIN_ELEMENTS
            or torch.compiler.is_compiling()
        ):
            return self.function(largest, *args)
        if self._compiled is None:
            self._compiled = self._checked(largest, *args)
        return self._compiled(largest, *args)

    def _checked(self, largest: Tensor, *args: Any) -> Callable[..., Any]:
        """Return the compiled function, or the plain one if it must be used."""
        compiled = torch.compile(self.function, dynamic=True)
        try:
            results = _flat(compiled(largest, *args))
            expected = _flat(self.function(largest.clone(), *args))
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


def _flat(results: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results
