"""The reference model."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo import checks
from torchrl_grpo.config.devices import DevicesConfig
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule


@dataclass
class RefModelConfig(DevicesConfig):
    """The reference model, which exists only if policy.kl_coef is not 0."""

    dtype: str = choice(checks.Dtype, "float32")
    """Type of the weights."""
    sharded: bool = False
    """Whether it is sharded over the trained model's devices, whose ranks score their shares of a
    batch before they train on it. Otherwise each device has a full copy, and scores while others
    sample."""
    refresh_every: int | None = limited(None, ge=1)
    """Steps between two copies of the trained weights to the reference model; null never copies
    them."""
    decay: float = limited(0.0, ge=0, lt=1)
    """With refresh_every: the share of its own weights that the reference model keeps each time, in
    [0, 1); 0 only copies. Above 0 it is a moving average kept with the trained weights, and the
    training ranks score with it."""


RULES = (
    Rule(
        "ref_model.refresh_every",
        "needs a separate reference model, but policy.kl_coef=0 uses none",
        "leave ref_model.refresh_every out",
        lambda c: c.ref_model.refresh_every is not None and not c.needs_reference,
    ),
    Rule(
        "ref_model.refresh_every",
        "needs a separate reference model, but with LoRA the reference is the trained model with "
        "its adapters off",
        "leave ref_model.refresh_every out, or add ref_model.decay",
        lambda c: (
            c.ref_model.refresh_every is not None
            and c.train_model.lora.enabled
            and not c.ref_model.decay
        ),
    ),
    Rule(
        "ref_model.decay",
        "needs ref_model.refresh_every, the steps between two updates of the average",
        "use ref_model.refresh_every=1",
        lambda c: c.ref_model.decay and c.ref_model.refresh_every is None,
    ),
    *(
        Rule(
            key,
            "must be left out with {ref_model.decay=}, whose average is kept with the trained weights",
            f"leave {key} out",
            "ref_model.decay",
        )
        for key in (
            "ref_model.num_devices",
            "ref_model.devices",
            "ref_model.sharded",
        )
    ),
    *(
        Rule(
            key,
            "must be left out with ref_model.sharded=true, which puts the reference model on the "
            "trained model's devices",
            f"leave {key} out, or use ref_model.sharded=false",
            "ref_model.sharded",
        )
        for key in ("ref_model.num_devices", "ref_model.devices")
    ),
)
