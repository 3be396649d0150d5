"""``GRPOLossOutput``: what the losses return."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

_OPTIONAL = {"loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference", "loss_teacher", "loss_sft"}


class GRPOLossOutput(TensorDict):
    """A TensorDict whose entries are attributes too, under TorchRL's names as well.

    ``clip_fraction`` is the sum of ``clip_fraction_low`` and ``clip_fraction_high``, ``kl_approx``
    minus ``kl_k1_to_inference``, and ``kl_to_ref`` and ``kl_to_inference`` are their k3 estimates.
    A loss term that was not asked for is None.

    Examples:
        >>> import torch
        >>> out = GRPOLossOutput({"loss_objective": torch.tensor(-1.5), "kl_k1_to_inference": torch.tensor(0.25)})
        >>> out.loss_objective, out.kl_approx, out.loss_entropy
        (tensor(-1.5000), tensor(-0.2500), None)
    """

    def __getattr__(self, name: str) -> Any:
        if name == "clip_fraction":
            return self["clip_fraction_low"] + self["clip_fraction_high"]
        if name == "kl_approx":
            return -self["kl_k1_to_inference"]
        if name in ("kl_to_ref", "kl_to_inference"):
            return self.get(name.replace("kl", "kl_k3", 1), None)
        value = None if name.startswith("_") else self.get(name, None)
        if value is None and name not in _OPTIONAL:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, it has {', '.join(self.keys())}."
            )
        return value
