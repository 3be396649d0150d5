"""``OffPolicy``: the ratio of a loss, and its corrections for the mismatch of sampling and training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_grpo import functional as F
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

_REJECTED = ("tokens", "sequences")


class OffPolicy(Part):
    """The proximal policy, the ratio to it, and the weight of each token. It runs before all other
    parts; ``GRPOLoss`` explains the arguments under their names there.

    Args:
        proximal: the policy that the ratio is clipped around.
        ratio_level: of the ratio.
        weight: bound of the factor proximal / sampling probability.
        level: of the weight.
        cap: largest weight.
        floor: smallest weight.
        reject: bounds by rule.
        centering: whether the mean score under the sampling policy is subtracted.
    """

    def __init__(
        self,
        proximal: Proximal | Literal["current"] = "behaviour",
        ratio_level: RatioLevel = "token",
        weight: WeightBound = "none",
        level: WeightLevel = "token",
        cap: float = 5.0,
        floor: float = 0.0,
        reject: Mapping[str, Any] | None = None,
        *,
        centering: bool = False,
    ) -> None:
        super().__init__()
        check_choice("ratio_level", ratio_level, get_args(RatioLevel))
        check_choice("proximal", proximal, (*get_args(Proximal), "current"))
        check_choice("behaviour_weight", weight, get_args(WeightBound))
        check_choice("behaviour_level", level, get_args(WeightLevel))
        check_behaviour_weight(weight, proximal)
        if cap <= 0:
            raise ValueError(f"behaviour_cap={cap} must be above 0: use 5.0.")
        check_floor(floor, cap)
        self.proximal = proximal
        self.ratio_level = ratio_level
        self.weight = weight
        self.level = level
        self.cap = cap
        self.floor = floor
        self.reject = check_rejection(reject)
        self.centering = centering
        if centering:
            check_score_centering(proximal == "current", level, self.reject)

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """What the proximal policy is made of."""
        needs = {"recomputed": ("prox_log_prob",), "interpolated": ("staleness",)}
        return needs.get(self.proximal, ())

    @property
    def out_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """Metrics of the corrections."""
        weight = ("behaviour_weight", "behaviour_capped") if self.weight != "none" else ()
        if not self._corrects:
            return ()
        kinds = ("k1", "k3", "chi2", "ppl_gap")
        rules = ["", *(f"_{rule}" for rule in self.reject)]
        rejected = (f"rejected_{unit}{rule}" for rule in rules for unit in _REJECTED)
        return (*weight, *(f"mismatch_{kind}" for kind in kinds), LARGEST_RATIO, *rejected)

    @property
    def _corrects(self) -> bool:
        return self.weight != "none" or bool(self.reject)

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
        t["prox_log_prob"] = prox = self._proximal(t)
        t["ratio"] = self._ratio(t["log_prob"], prox, t)
        return self._correct(t, prox)

    def _proximal(self, t: Tokens) -> Tensor:
        """Return the log-probs that the ratio is clipped around, [S]."""
        if self.proximal == "recomputed":
            return t["prox_log_prob"]
        if self.proximal == "interpolated":
            return F.interpolated_log_prob(t["log_prob"], t["sample_log_prob"], t["staleness"])
        return t["log_prob"].detach() if self.proximal == "current" else t["sample_log_prob"]

    def _ratio(self, log_prob: Tensor, prox: Tensor, t: Tokens) -> Tensor:
        """Return current over proximal probability, [S]."""
        if self.ratio_level == "token":
            return F.importance_ratio(log_prob, prox)
        mean = t.rows.spread(t.rows.mean(log_prob - prox))
        if self.ratio_level == "sequence_token":
            mean = mean.detach() + log_prob - log_prob.detach()
        return F.importance_ratio(mean, torch.zeros_like(mean))

    def _correct(self, t: Tokens, prox: Tensor) -> dict[str, Tensor]:
        """Set the weight of each token; return metrics."""
        log_weight, bounds = prox - t["sample_log_prob"], (self.cap, self.floor)
        weight = F.behaviour_weight(log_weight, t.rows, self.weight, self.level, *bounds)
        t["behaviour_weight"], t["is_rejected"] = weight, torch.zeros_like(weight, dtype=torch.bool)
        if not self._corrects:
            return {}
        out: dict[str, Tensor] = {}
        if self.weight != "none":
            free = F.behaviour_weight(log_weight, t.rows, "truncate", self.level, math.inf)
            out = t.means(behaviour_weight=weight, behaviour_capped=weight != free)
        current = t["log_prob"].detach()
        trainer = prox if self.proximal == "recomputed" else current
        gap = F.Mismatch(trainer, current, t["sample_log_prob"], t["advantage"], t.rows)
        out |= _mismatch(t, gap)
        for rule, (low, high) in self.reject.items():
            rejected = F.REJECTIONS[rule](gap, low, high)
            out |= _rejected(t, rejected, f"_{rule}")
            weight = torch.where(rejected, 0.0, weight)
            t["is_rejected"] = t["is_rejected"] | rejected
        t["behaviour_weight"] = weight
        return out | _rejected(t, weight == 0)


def _mismatch(t: Tokens, gap: F.Mismatch) -> dict[str, Tensor]:
    """Return the divergences of the trainer's from the sampling policy as metrics."""
    ratio = gap.log_ratio.exp()
    k3 = F.kl_k3(torch.zeros_like(ratio), gap.log_ratio)
    out = t.means(mismatch_k1=-gap.log_ratio, mismatch_k3=k3, mismatch_chi2=ratio**2 - 1)
    out |= t.row_means(mismatch_ppl_gap=t.rows.mean(-gap.log_ratio))
    largest = torch.nn.functional.pad(ratio, (0, 1)).amax()  # 0 without tokens
    return out | {LARGEST_RATIO: largest}


def _rejected(t: Tokens, rejected: Tensor, rule: str = "") -> dict[str, Tensor]:
    """Return the shares of tokens, and of sequences with all of their tokens, as metrics."""
    tokens = t.means(**{f"rejected_tokens{rule}": rejected})
    return tokens | t.row_means(**{f"rejected_sequences{rule}": ~t.rows.any(~rejected)})
