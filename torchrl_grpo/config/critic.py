"""The critic."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config.fields import limited
from torchrl_grpo.config.rule import Rule, read_with


@dataclass
class CriticConfig:
    """The critic, which exists only if policy.value_coef is not 0 (algo=ppo): a linear head on the
    policy's last hidden states, each divided by its root mean square. Its output is the value of
    the state before a token."""

    lr: float | None = limited(None, gt=0)
    """Learning rate of the head, above 0; null is 0.4 divided by the hidden size (for a matrix with
    one output, arXiv 2203.03466), so that Adam's first step moves a value by at most 0.4. Its
    schedule and other settings are the policy's."""


RULES = (
    Rule(
        "policy.value_coef",
        "needs an advantage for each token or turn, for which a value is the baseline",
        "use policy.advantage_level=token, or policy.turn_credit=per_turn",
        lambda c: c.policy.value_coef and c.advantage_level == "sequence",
    ),
    Rule(
        "policy.value_coef",
        "must be left out with {policy.reward_coef=}, which trains only on the teacher",
        "leave it out, or use policy.reward_coef=1",
        lambda c: c.policy.value_coef and not c.policy.reward_coef,
    ),
)
UNREAD = read_with(
    "policy.value_coef",
    (),
    "0.5",
    "policy.value_clip",
    "critic.lr",
    unless=lambda c: c.policy.value_coef,
)
