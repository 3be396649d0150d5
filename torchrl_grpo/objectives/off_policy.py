"""``OffPolicy``: the ratio of a loss, and its corrections for the mismatch of sampling and training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_grpo import functional as F
from torchrl_grpo import keys
from torchrl_grpo.checks import (
    Proximal,
    RatioLevel,
    WeightBound,
    WeightLevel,
    check_behaviour_weight,
    check_floor,
    check_rejection,
    check_score_centering,
)
from torchrl_grpo.compat.torchrl import check_choice
from torchrl_grpo.objectives.output import LARGEST_RATIO
from torchrl_grpo.objectives.parts import Part
from torchrl_grpo.objectives.tokens import Tokens


@dataclass(eq=False)
class OffPolicy(Part):
    """The proximal policy, the ratio to it, and the weight of each token. It runs before all other
    parts; ``GRPOLoss`` explains the arguments under their names there.

    Args:
        proximal: the policy that the ratio is clipped around.
        ratio_level: level of the ratio, as in ``GRPOLoss``.
        weight: bound of the factor proximal / sampling probability (decoupled PPO, arXiv
            2505.24298), which also corrects for an engine whose log-probs differ from the
            trainer's; see ``functional.bounded_weight``. ``"mask"`` with a ``floor`` is IcePop
            (arXiv 2510.18855).
        level: level of the weight: ``"token"``, or ``"sequence"`` for the product over a sequence's
            tokens, as the weight of each of them.
        cap: largest weight.
        floor: smallest weight.
        reject: bounds by rule, each a method of ``Mismatch``.
        centering: whether the mean score under the sampling policy is subtracted.
    """

    proximal: Proximal | Literal["current"] = "behaviour"
    ratio_level: RatioLevel = "token"
    weight: WeightBound = "none"
    level: WeightLevel = "token"
    cap: float = 5.0
    floor: float = 0.0
    reject: Mapping[str, Any] | None = None
    centering: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        check_choice("proximal", self.proximal, (*get_args(Proximal), "current"))
        check_choice("behaviour_weight", self.weight, get_args(WeightBound))
        check_choice("behaviour_level", self.level, get_args(WeightLevel))
        check_behaviour_weight(self.weight, self.proximal)
        if self.cap <= 0:
            raise ValueError(f"behaviour_cap={self.cap} must be above 0: use 5.0.")
        check_floor(self.floor, self.cap)
        self.reject = check_rejection(self.reject)
        if self.centering:
            check_score_centering(self.proximal == "current", self.level, self.reject)

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """Entries from which the proximal policy is computed."""
        needs = {"recomputed": ("prox_log_prob",), "interpolated": ("staleness",)}
        return needs.get(self.proximal, ())

    def center(self, log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
        """Return the share of each kept token in the mean score, see
        ``functional.centering_coefficients``.
        """
        bounds = (self.weight, self.cap, self.floor)
        return F.centering_coefficients(log_prob, sample_log_prob, *bounds)

    def forward(self, t: Tokens) -> dict[str, Tensor]:
        """Add ``"prox_log_prob"``, ``"ratio"``, ``"behaviour_weight"`` and ``"is_rejected"`` to the tokens,
        and return metrics.
        """
        t["prox_log_prob"] = self._proximal(t)
        t["ratio"] = self._ratio(t)
        log_weight = (t["prox_log_prob"] - t["sample_log_prob"]).detach()
        if self.level == "sequence":
            log_weight = t.segments.spread(t.segments.sum(log_weight))
        t["behaviour_weight"] = F.bounded_weight(log_weight, self.weight, self.cap, self.floor)
        t["is_rejected"] = torch.zeros_like(log_weight, dtype=torch.bool)
        out: dict[str, Tensor] = {}
        if self.weight != "none":
            weight, free = t["behaviour_weight"], F.bounded_weight(log_weight, "truncate", math.inf)
            out = t.means(behaviour_weight=weight, behaviour_capped=weight != free)
        return out | self._reject(t) if out or self.reject else out

    def _proximal(self, t: Tokens) -> Tensor:
        """Return the log-probs that the ratio is clipped around, [S].

        Interpolated ones need no forward pass. The proximal policy is the one that the current step
        started from. It is ``staleness`` versions after the sampling policy, and one version before
        the policy that the step makes, so its log-probs are taken ``staleness / (staleness + 1)``
        of the way between theirs. (AReaL's approximation, also log-linear, counts one version less:
        ``(staleness - 1) / staleness``.) On-policy it is the sampling policy itself.
        """
        if self.proximal == "recomputed":
            return t["prox_log_prob"]
        current, sample = t["log_prob"].detach(), t["sample_log_prob"]
        if self.proximal == "interpolated":
            steps = t["staleness"].to(current.dtype)
            return sample + steps / (steps + 1) * (current - sample)
        return current if self.proximal == "current" else sample

    def _ratio(self, t: Tokens) -> Tensor:
        """Return current over proximal probability, [S]."""
        log_ratio = t["log_prob"] - t["prox_log_prob"]
        if self.ratio_level != "token":
            mean = t.segments.spread(t.segments.mean(log_ratio))
            token_gradient = log_ratio - log_ratio.detach()  # 0, with the gradient of each token
            log_ratio = (
                mean.detach() + token_gradient if self.ratio_level == "sequence_token" else mean
            )
        return F.importance_ratio(log_ratio, torch.zeros_like(log_ratio))

    def _reject(self, t: Tokens) -> dict[str, Tensor]:
        """Remove the weights of rejected tokens. Return divergences of the trainer's from the
        sampling policy, and the shares of what is rejected, as metrics.
        """
        trainer = t["prox_log_prob"] if self.proximal == "recomputed" else t["log_prob"].detach()
        gap = Mismatch(t, trainer)
        ratio = gap.log_ratio.exp()
        out = t.means(mismatch_k1=-gap.log_ratio, mismatch_k3=gap.k3, mismatch_chi2=ratio**2 - 1)
        per_token = t.segments.mean(-gap.log_ratio)
        out |= t.means(of=keys.SEQUENCE_COUNT, mismatch_ppl_gap=per_token)
        out[LARGEST_RATIO] = torch.nn.functional.pad(ratio, (0, 1)).amax()  # 0 without tokens
        for rule, bounds in (self.reject or {}).items():
            rejected = getattr(gap, rule)(*bounds)
            out |= _rejected(t, rejected, f"_{rule}")
            t["is_rejected"] = t["is_rejected"] | rejected
        t["behaviour_weight"] = torch.where(t["is_rejected"], 0.0, t["behaviour_weight"])
        return out | _rejected(t, t["behaviour_weight"] == 0)


def _rejected(t: Tokens, rejected: Tensor, rule: str = "") -> dict[str, Tensor]:
    """Return the shares of tokens, and of sequences with all of their tokens, as metrics."""
    tokens, rows = f"rejected_tokens{rule}", f"rejected_sequences{rule}"
    all_rejected = t.segments.mean(rejected.float()) == 1
    return t.means(**{tokens: rejected}) | t.means(of=keys.SEQUENCE_COUNT, **{rows: all_rejected})


class Mismatch:
    """Log-probs of sampled tokens, which the rules of rejection compare, without gradient.

    A rule takes a lower and an upper bound, inclusive, and returns which tokens are rejected, [S]
    bool.

    Args:
        t: the tokens.
        trainer: log-probs [S], from before the batch's first step if the loss has them.

    Attributes:
        log_ratio: trainer less sampling log-probs, clamped to ``MAX_LOG_RATIO``, [S].
        k3: estimate k3 of KL(sampling || trainer), [S].
    """

    def __init__(self, t: Tokens, trainer: Tensor) -> None:
        self.current, self.sample = t["log_prob"].detach(), t["sample_log_prob"]
        self.advantage, self._segments = t["advantage"], t.segments
        self.log_ratio = (trainer - self.sample).clamp(-F.MAX_LOG_RATIO, F.MAX_LOG_RATIO)
        self.k3 = F.kl_k3(torch.zeros_like(trainer), self.log_ratio)

    def token_ratio(self, low: float, high: float) -> Tensor:
        """Reject tokens whose ratio ``trainer / sampling`` is out of bounds (IcePop without its
        weight, arXiv 2510.18855; verl's ``token_k1``).
        """
        return _outside(self.log_ratio.exp(), low, high)

    def token_k3(self, low: float, high: float) -> Tensor:
        """Reject tokens whose k3 is out of bounds (verl's ``token_k3``)."""
        return _outside(self.k3, low, high)

    def sequence_ratio(self, low: float, high: float) -> Tensor:
        """Reject sequences whose product of ratios is out of bounds (verl's ``seq_sum_k1``)."""
        product = self._segments.sum(self.log_ratio).exp()
        return self._segments.spread(_outside(product, low, high))

    def geometric(self, low: float, high: float) -> Tensor:
        """Reject sequences whose geometric mean of ratios is out of bounds (verl's
        ``seq_mean_k1``, SkyRL's ``geometric``).
        """
        return _outside(self._mean(self.log_ratio).exp(), low, high)

    def sequence_k3(self, low: float, high: float) -> Tensor:
        """Reject sequences whose mean of k3 is out of bounds (verl's ``seq_mean_k3``)."""
        return _outside(self._mean(self.k3), low, high)

    def outlier(self, low: float, high: float) -> Tensor:
        """Reject sequences with a token whose ratio is out of bounds (SkyRL's outlier masking)."""
        return self._segments.spread(self._segments.any(self.token_ratio(low, high)))

    def off_policy(self, low: float, high: float) -> Tensor:
        """Reject sequences of negative advantage whose mean of ``log sampling - log current`` is
        above ``high`` (DeepSeek-V3.2, arXiv 2512.02556, equation 9).
        """
        return (self.advantage < 0) & (self._mean(self.sample - self.current) > high)

    def dppo_tv(self, low: float, high: float) -> Tensor:
        """Reject tokens whose probability has moved too far in the direction of their advantage:
        down by more than ``low``, or up by more than ``high`` (DPPO with binary total variation,
        arXiv 2602.04879).
        """
        return self._moved((self.current.exp() - self.sample.exp()).abs(), low, high)

    def dppo_kl(self, low: float, high: float) -> Tensor:
        """As ``dppo_tv``, by the KL from the sampling to the current policy between their
        distributions over "this token" and "any other" (DPPO with binary KL, arXiv 2602.04879).
        """
        p, q = (value.exp().clamp(1e-7, 1 - 1e-7) for value in (self.sample, self.current))
        return self._moved(p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(), low, high)

    def _moved(self, distance: Tensor, low: float, high: float) -> Tensor:
        """Return the tokens that are too far away in the direction of their advantage."""
        down = (self.advantage < 0) & (self.current < self.sample) & (distance > low)
        return down | ((self.advantage > 0) & (self.current > self.sample) & (distance > high))

    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean over the tokens of each sequence, for each of its tokens, [S]."""
        return self._segments.spread(self._segments.mean(values))


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    return (values < low) | (values > high)
