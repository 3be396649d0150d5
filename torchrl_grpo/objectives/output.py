"""``GRPOLossOutput``: the output of the losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

TORCHRL_METRICS = ("clip_fraction", "kl_approx", "kl_to_inference", "kl_to_ref")
"""Metrics under TorchRL's names, for its trainers: each repeats others of the output."""

LARGEST_RATIO = "mismatch_largest_ratio"
"""The metric that is a maximum; all others are sums over the micro-batches of a step."""

_OPTIONAL = {
    "loss_entropy",
    "loss_kl_to_ref",
    "loss_kl_to_inference",
    "loss_teacher",
    "loss_sft",
    "loss_value",
    "loss_score_centering",
    "kl_to_ref",
}


def accumulate(totals: dict[str, Tensor], out: Mapping[str, Tensor]) -> None:
    """Add the outputs of a micro-batch to ``totals``, in place."""
    for name, value in out.items():
        if name in totals:
            before = totals[name]
            value = torch.maximum(before, value) if name == LARGEST_RATIO else before + value
        totals[name] = value


class GRPOLossOutput(TensorDict):
    """A TensorDict with its entries as attributes too, to read and to set.

    Four metrics also have TorchRL's names: ``clip_fraction`` is the sum of ``clip_fraction_low``
    and ``clip_fraction_high``, ``kl_approx`` is minus ``kl_k1_to_inference``, and ``kl_to_ref`` and
    ``kl_to_inference`` are the k3 estimates. A missing optional entry is None as an attribute.
    ``mean(reduce=True)``, which TorchRL's scripts call, and ``sum(reduce=True)`` return the loss,
    the sum of the entries named ``loss_*``; TorchRL's own would include the metrics.

    Examples:
        >>> import torch
        >>> out = GRPOLossOutput({"loss_objective": torch.tensor(-1.5), "ESS": torch.tensor(0.5)})
        >>> out.loss_objective = out.loss_objective / 2
        >>> out["loss_objective"], out.mean(reduce=True), out.loss_entropy
        (tensor(-0.7500), tensor(-0.7500), None)
    """

    def __getattr__(self, name: str) -> Any:
        value = None if name.startswith("_") else self.get(name, None)
        if value is None and name not in _OPTIONAL:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, but it has {', '.join(self.keys())}."
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            self.set(name, value)

    def mean(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """Return the loss with ``reduce=True``, else TensorDict's mean."""
        return self._loss() if reduce else super().mean(*args, **kwargs)

    def sum(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """Return the loss with ``reduce=True``, else TensorDict's sum."""
        return self._loss() if reduce else super().sum(*args, **kwargs)

    def _loss(self) -> Any:
        return sum(value for name, value in self.items() if name.startswith("loss_"))
