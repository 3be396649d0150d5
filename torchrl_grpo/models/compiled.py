"""``Compiled``, a function that is compiled on CUDA and checked against the original, and
``compile_layers``, which compiles decoder layers in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchrl import torchrl_logger
from transformers.modeling_layers import GradientCheckpointingLayer

from torchrl_grpo.compat.torch import CompilerError
from torchrl_grpo.images.families import language_model_of

DEVICES = ("cuda",)
"""Devices for whose tensors functions are compiled."""
MIN_ELEMENTS = 2**22
"""Smaller tensors are not worth the seconds that compiling takes."""
_TOLERANCE = 1e-2


@dataclass(eq=False)
class Compiled:
    """A function of tensors that is compiled by its first call with a large tensor on CUDA.

    That call compares the results with those of the plain function. A layer's first call, and its
    first one with gradients, compare the gradients too. If they differ, or if it cannot be
    compiled, a warning says so, and the plain function is called from then on.

    Args:
        function: of tensors, the first of which is the largest, and other values; returns a tuple of
            tensors or, if it is of a layer, a tensor. It may change its arguments, but not while it
            is compiled.
        is_layer: whether it is a module's forward, for which any tensor is large enough, on any
            device.
        problems: list shared by functions that are compiled together; if it has any entry, none of
            them is compiled.
    """

    function: Callable[..., Any]
    is_layer: bool = False
    problems: list[str] = field(default_factory=list)
    _compiled: Callable[..., Any] | None = None
    _for_grad: bool = False

    def __call__(self, largest: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_large = largest.device.type in DEVICES and largest.numel() >= MIN_ELEMENTS
        if (self.is_layer or is_large) and not (self.problems or torch.compiler.is_compiling()):
            try:
                # A first call without gradients may be one with the adapters off.
                for_grad = self.is_layer and torch.is_grad_enabled()
                if self._compiled is None or for_grad > self._for_grad:
                    self._compiled = self._checked(largest, *args, **kwargs)
                    self._for_grad = for_grad
                return self._compiled(largest, *args, **kwargs)
            except CompilerError as error:  # later too, at other shapes or settings
                name, problem = self.function.__qualname__, " ".join(str(error).split())[:300]
                self.problems.append(f"{name} is not compiled, and steps are slower: {problem}.")
                torchrl_logger.warning(self.problems[0])
        return self.function(largest, *args, **kwargs)

    def _checked(self, largest: Tensor, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return the compiled function."""

        def results(function: Callable[..., Any]) -> list[Tensor]:
            first = largest.detach().clone()
            if not self.is_layer:
                return [value.float() for value in function(first, *args, **kwargs)]
            weights = self.function.__self__.parameters()  # type: ignore[attr-defined]
            inputs = [first.requires_grad_(), *(w for w in weights if w.requires_grad)]
            # Checkpointing of the layer must not see what is saved here.
            with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
                out = function(first, *args, **kwargs)
            grads = torch.autograd.grad(out, inputs, out.detach(), materialize_grads=True)
            return [value.float() for value in (out.detach(), *grads)]

        compiled = torch.compile(self.function, dynamic=True)
        try:
            ours, plain = results(compiled), results(self.function)
            # A gradient that is much smaller may be nothing but rounding.
            least = max(value.norm() for value in plain) / 100
            if not all(
                torch.dist(result, value) <= _TOLERANCE * max(value.norm(), least)
                for result, value in zip(ours, plain, strict=True)
            ):
                raise ValueError("its results differ from the original's")
        except Exception as error:  # the compiler's are of many kinds
            raise CompilerError(repr(error)) from error
        return compiled


def compile_layers(base: nn.Module) -> None:
    """Compile the decoder layers of a Hugging Face model, each on its first call.

    All layers of the same class share the compiled code. Attention over packed sequences is not
    compiled, so the compiled code does not depend on their lengths. If one layer cannot be compiled,
    none is.
    """
    problems: list[str] = []
    for module in language_model_of(base).modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = Compiled(module.forward, is_layer=True, problems=problems)
