"""The parts of a ``PolicyLoss``: surrogates, selections of tokens, and further terms.

Each part declares what it reads. Write your own as a subclass of ``Surrogate``, ``Select``, or
``Term``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey
from torch import Tensor, nn

from torchrl_grpo import functional as F
from torchrl_grpo.checks import KLEstimator, check_clip_epsilon
from torchrl_grpo.compat.torchrl import check_choice
from torchrl_grpo.objectives.tokens import Tokens


class Part(nn.Module):
    """A part of a loss.

    Attributes:
        in_keys: names (of ``set_keys``) or keys of the entries that it needs, besides ``advantage``
            and the log-probs.
        active: whether it changes the loss. Otherwise a batch may lack these entries.
        optional_in_keys: entries that it reads if a batch has them.
        prepared: names of the values that ``prepare`` returns.
    """

    in_keys: tuple[NestedKey, ...] = ()
    active: bool = True
    optional_in_keys: tuple[NestedKey, ...] = ()
    prepared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Initialize the module of a part that is a dataclass."""
        super().__init__()

    def prepare(self, t: Tokens) -> dict[str, Tensor]:
        """Return values [S] that depend on the whole optimization batch, for all of its passes. The
        tokens have no scores yet.
        """
        return {}


class Surrogate(Part):
    """The objective of each token, to be maximized; ``clip_epsilon`` of the loss sets its bounds.

    Args:
        low: distance of the lower clip bound below 1; with ``high``, ``clip_epsilon`` of a loss
            replaces it, which the scripts always set.
        high: distance of the upper one above 1.

    Example:
        >>> class Reinforce(Surrogate):
        ...     def forward(self, t):
        ...         return t["advantage"] * t["log_prob"]
    """

    low: Any
    high: Any
    bounds_itself = False
    """Whether it bounds every token, so that ``dual_clip`` is refused."""
    is_supervised = False
    """Whether no policy sampled the tokens; the current one then counts as the sampling policy."""

    def __init__(self, low: float = 0.2, high: float = 0.2) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float(low), device="cpu"))
        self.register_buffer("high", torch.tensor(float(high), device="cpu"))

    def __post_init__(self) -> None:
        """Initialize the module of a surrogate that is a dataclass, which has the default bounds."""
        Surrogate.__init__(self)

    @property
    def clip_epsilon(self) -> tuple[Tensor, Tensor]:
        """Distances of both bounds from 1; they can be set to a number or a pair."""
        return self.low, self.high

    @clip_epsilon.setter
    def clip_epsilon(self, value: float | tuple[Any, Any]) -> None:
        for bound, distance in zip(self.clip_epsilon, check_clip_epsilon(value), strict=True):
            bound.fill_(distance)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest ratio of the clip."""
        return 1 - self.low, 1 + self.high

    def forward(self, t: Tokens) -> Tensor:
        """Return the objective of each token, [S]."""
        raise NotImplementedError

    def clipped(self, t: Tokens) -> tuple[Tensor, Tensor]:
        """Return, [S] bool each, the tokens without gradient because of the lower and the upper
        clip, for the metrics.
        """
        (low, high), ratio, advantage = self.bounds, t["ratio"], t["advantage"]
        return (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)


class Clip(Surrogate):
    """PPO's clipped surrogate."""

    def forward(self, t: Tokens) -> Tensor:
        """Return ``min(ratio A, clip(ratio, 1 - low, 1 + high) A)``. Its gradient is 0 where the
        clipped branch is the smaller one.
        """
        ratio, advantage = t["ratio"], t["advantage"]
        return torch.minimum(ratio * advantage, ratio.clamp(*self.bounds) * advantage)


class CISPO(Surrogate):
    """A clipped ratio without gradient, times advantage and log-prob (arXiv 2506.13585), so that no
    token loses its gradient to the clip.
    """

    bounds_itself = True

    def __init__(self, low: float = 1.0, high: float = 4.0) -> None:
        super().__init__(low, high)

    def forward(self, t: Tokens) -> Tensor:
        """Return ``stop_gradient(clip(ratio)) A log_prob`` (equation 4)."""
        return t["ratio"].clamp(*self.bounds).detach() * t["advantage"] * t["log_prob"]

    def clipped(self, t: Tokens) -> tuple[Tensor, Tensor]:
        """Return, [S] bool each, the tokens with weights at the lower and at the upper bound."""
        low, high = self.bounds
        return t["ratio"] < low, t["ratio"] > high


class _Positive(Surrogate):
    """A surrogate that is a dataclass of numbers above 0."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        for number in fields(self):  # type: ignore[arg-type]
            value = getattr(self, number.name)
            if value <= 0:
                raise ValueError(f"{number.name}={value} must be above 0: use {number.default}.")


@dataclass(eq=False)
class SAPO(_Positive):
    """A soft gate in place of the clip (arXiv 2511.20347); ``SAPOLoss`` has the arguments."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    bounds_itself = True

    def forward(self, t: Tokens) -> Tensor:
        """Return ``4 / tau * sigmoid(tau (ratio - 1)) A``.

        At ratio 1 its slope is A, as in the clipped surrogate; away from 1 it falls off smoothly,
        faster for a larger tau.
        """
        tau = _by_sign(t["advantage"] > 0, t["ratio"], self.tau_positive, self.tau_negative)
        return 4 / tau * torch.sigmoid(tau * (t["ratio"] - 1)) * t["advantage"]


class GMPO(Surrogate):
    """The geometric mean of a sequence's clipped ratios, times its advantage (arXiv 2507.20673).
    The clip range is a distance from 0 in log space.
    """

    bounds_itself = True

    def __init__(self, low: float = 0.4, high: float = 0.4) -> None:
        super().__init__(low, high)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest ratio of the clip."""
        return (-self.low).exp(), self.high.exp()

    def forward(self, t: Tokens) -> Tensor:
        """Return equation 4. Log-ratios are clipped, to ``high`` where the advantage is positive
        and to ``-low`` where it is negative.
        """
        log_ratio, segments = t["ratio"].log(), t.segments
        down, up = log_ratio.clamp(min=-self.low), log_ratio.clamp(max=self.high)
        mean = segments.mean(torch.where(t["advantage"] < 0, down, up))
        return segments.spread(mean).exp() * t["advantage"]


@dataclass(eq=False)
class VESPO(_Positive):
    """A soft gate of the whole sequence's ratio (arXiv 2602.10693); ``VESPOLoss`` has the
    arguments.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    bounds_itself = True

    def forward(self, t: Tokens) -> Tensor:
        """Return ``stop_gradient(W^k exp(lambda (1 - W))) A log_prob``, W the product of the
        sequence's ratios.
        """
        ratio, is_positive = t["ratio"].detach(), t["advantage"] >= 0
        log_weight = t.segments.spread(t.segments.sum(ratio.log()))
        log_weight = log_weight.clamp(math.log(1e-8), F.MAX_LOG_RATIO)
        power = _by_sign(is_positive, ratio, self.k_positive, self.k_negative)
        rate = _by_sign(is_positive, ratio, self.lambda_positive, self.lambda_negative)
        gate = (rate + power * log_weight - rate * log_weight.exp()).exp()
        return gate * t["advantage"] * t["log_prob"]


def _by_sign(is_positive: Tensor, like: Tensor, positive: float, negative: float) -> Tensor:
    """Return one of two numbers for each token, in the type of ``like``; plain ``torch.where``
    would make them float32.
    """
    return torch.where(is_positive, like.new_tensor(positive), like.new_tensor(negative))


@dataclass(eq=False)
class KLCov(_Positive):
    """The ratio times the advantage, and a penalty on the tokens with the largest covariance of
    log-prob and advantage (arXiv 2505.22617); ``KLCovLoss`` has the arguments.
    """

    covariance_share: float = 0.0002
    penalty: float = 1.0
    in_keys = ("advantage",)
    prepared = ("penalized",)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        _check_share(self.covariance_share)

    def prepare(self, t: Tokens) -> dict[str, Tensor]:
        """Mark the tokens that are penalized: the share of them, at least one, with the largest
        covariance (equation 12).
        """
        covariance = _covariance(t)
        count = min(len(covariance), max(1, int(self.covariance_share * len(covariance))))
        penalized = torch.zeros_like(covariance, dtype=torch.bool)
        return {"penalized": penalized.index_fill(0, covariance.topk(count).indices, True)}

    def forward(self, t: Tokens) -> Tensor:
        """Return ``ratio A``, minus ``penalty |log ratio|`` for penalized tokens (equation 13)."""
        penalty = torch.where(t["penalized"], self.penalty * t["ratio"].log().abs(), 0.0)
        return t["ratio"] * t["advantage"] - penalty


class LogLikelihood(Surrogate):
    """The log-prob times the advantage, for demonstrations, which no policy sampled."""

    is_supervised = True

    def forward(self, t: Tokens) -> Tensor:
        """Return the log-prob times the advantage."""
        return t["advantage"] * t["log_prob"]


class Select(Part):
    """A selection of the tokens that the objective trains or, with ``is_of_loss = True``, that the
    whole loss counts, made once for an optimization batch.
    """

    is_of_loss = False
    """Whether other tokens leave the whole loss, with all its means; else they leave the objective,
    but not the KL and entropy terms and the numbers that means divide by.
    """

    def forward(self, t: Tokens) -> Tensor | bool:
        """Return the tokens to train, [S] bool, or True for all. They have no scores yet."""
        raise NotImplementedError


class Valid(Select):
    """The tokens of sequences with a valid reward; all tokens if the batch lacks ``reward_valid``."""

    is_of_loss = True
    optional_in_keys = ("reward_valid",)

    def forward(self, t: Tokens) -> Tensor | bool:
        """Return the tokens with a valid reward."""
        return "reward_valid" not in t or t["reward_valid"].bool()


@dataclass(eq=False)
class NotTruncated(Select):
    """The tokens of responses that no limit cut off; all tokens if it is not ``active``."""

    active: bool = True
    is_of_loss = True
    in_keys = ("truncated",)

    def forward(self, t: Tokens) -> Tensor:
        """Return the tokens of whole responses."""
        return ~t["truncated"].bool()


@dataclass(eq=False)
class TopEntropy(Select):
    """The share of tokens, in (0, 1], with the largest entropy under the proximal policy, where the
    policy decides (arXiv 2506.01939).
    """

    share: float
    in_keys = ("prox_entropy",)

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Return whether it leaves out tokens."""
        return self.share < 1

    def forward(self, t: Tokens) -> Tensor | bool:
        """Return the tokens from the quantile ``1 - share`` on, which is linearly interpolated."""
        values = t["prox_entropy"].double().sort().values
        position = (1 - self.share) * (len(values) - 1)
        if position < 0:  # no tokens
            return True
        low, high = values[math.floor(position)], values[math.ceil(position)]
        return t["prox_entropy"] >= low + (high - low) * (position - math.floor(position))


@dataclass(eq=False)
class ClipCov(Select):
    """All tokens but some of a large covariance of log-prob and advantage (arXiv 2505.22617,
    equation 11); ``ClipCovLoss`` has the arguments.
    """

    covariance_share: float = 0.0002
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    in_keys = ("advantage",)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        _check_share(self.covariance_share)
        if not self.covariance_low < self.covariance_high:
            raise ValueError(
                f"covariance_low={self.covariance_low} must be below covariance_high="
                f"{self.covariance_high}: use 1.0 and 5.0."
            )

    def forward(self, t: Tokens) -> Tensor:
        """Return all tokens except a random share, at least one, of the tokens between the bounds.
        The seed is fixed, so that all ranks and a resumed run draw the same tokens.
        """
        covariance = _covariance(t)
        inside = (covariance > self.covariance_low) & (covariance < self.covariance_high)
        candidates = inside.nonzero().flatten()
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(0))
        count = max(1, int(self.covariance_share * len(covariance)))
        rejected = candidates[order[:count].to(candidates.device)]
        return torch.ones_like(inside).index_fill(0, rejected, False)


def _covariance(t: Tokens) -> Tensor:
    """Return the contribution of each token to the covariance of the log-prob at the start of the
    batch's training and the advantage, [S].
    """
    log_prob = t["sample_log_prob"]
    advantage = t["advantage"].to(log_prob.dtype)
    return (advantage - advantage.mean()) * (log_prob - log_prob.mean())


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"covariance_share={share} must be in (0, 1]: use 0.0002.")


class Term(Part):
    """A term of the loss besides the objective: the output ``loss_{name}``, with a unique ``name``.

    Args:
        coeff: its weight, at least 0; at 0 (or None) it has only metrics, if the batch has what it
            reads.
    """

    name: str
    coeff: float

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Return whether its coefficient is above 0."""
        return self.coeff > 0

    def __init__(self, coeff: float) -> None:
        super().__init__()
        self.coeff = coeff

    def __setattr__(self, name: str, value: Any) -> None:
        """Check the coefficient, whenever it is set."""
        if name == "coeff":
            value = value or 0.0
            if value < 0:
                raise ValueError(
                    f"{self.name}_coeff={value} must not be negative: use 0 to switch the term off."
                )
        super().__setattr__(name, value)

    def forward(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values to average, [S], and metrics."""
        raise NotImplementedError


@dataclass(eq=False)
class KLTo(Term):
    """The KL to the reference (``"ref"``), the sampling policy (``"inference"``) or a teacher, if
    there is one.

    Args:
        policy: the other policy.
        coeff: weight.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        unbiased: whether it is multiplied by the ratio (DeepSeek-V3.2, arXiv 2512.02556).
    """

    policy: Literal["ref", "inference", "teacher"]
    coeff: float = 0.0
    estimator: KLEstimator = "k3"
    unbiased: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_choice("kl_estimator", self.estimator, get_args(KLEstimator))
        self.log_probs_key = (
            "sample_log_prob" if self.policy == "inference" else f"{self.policy}_log_probs"
        )
        self.in_keys = (self.log_probs_key,)
        self.optional_in_keys = (self.log_probs_key, "teacher_valid")

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the term."""
        return f"kl_to_{self.policy}"

    def kl(self, t: Tokens) -> Tensor:
        """Return the KL of each token, [S]."""
        return F.KL_ESTIMATORS[self.estimator](t["log_prob"], t[self.log_probs_key])

    def forward(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the KL of each token, and two estimates as metrics."""
        current, other = t["log_prob"].detach(), t[self.log_probs_key]
        if self.policy == "teacher" and "teacher_valid" in t:
            t[self.log_probs_key] = other = torch.where(t["teacher_valid"] > 0, other, current)
        kl = self.kl(t) * t["ratio"] if self.unbiased else self.kl(t)
        k1, k3 = F.kl_k1(current, other), F.kl_k3(current, other)
        return kl, t.means(**{f"kl_k1_to_{self.policy}": k1, f"kl_k3_to_{self.policy}": k3})


class Entropy(Term):
    """The entropy bonus."""

    name = "entropy"

    def forward(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return minus the entropy."""
        return -t["entropy"], t.means(entropy=t["entropy"])


@dataclass(eq=False)
class Distill(Term):
    """The divergence from a teacher, 0 in sequences without one.

    Args:
        coeff: weight.
        clip: largest divergence of a token that counts, in nats; None is unbounded.
    """

    coeff: float = 0.0
    clip: float | None = None
    name = "teacher"
    in_keys = ("divergence",)
    optional_in_keys = ("teacher_valid",)

    def forward(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the divergence, also as a metric if it has a coefficient."""
        divergence = t["divergence"]
        if "teacher_valid" in t:
            divergence = torch.where(t["teacher_valid"] > 0, divergence, 0.0)
        divergence = divergence.clamp(max=math.inf if self.clip is None else self.clip)
        return divergence, t.means(divergence_to_teacher=divergence) if self.active else {}


@dataclass(eq=False)
class Value(Term):
    """The loss of the critic's values, as in PPO (arXiv 1707.06347, equation 9, with the clip of its
    authors' code).

    Args:
        coeff: weight.
        clip: how far a value may move from the one before the batch's first step, above 0; None is
            unbounded.
    """

    coeff: float = 0.0
    clip: float | None = None
    name = "value"
    in_keys = ("value", "state_value", "value_target")

    @property
    def prepared(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of the values that ``prepare`` returns."""
        return ("explained_variance",) if self.active else ()

    def prepare(self, t: Tokens) -> dict[str, Tensor]:
        """Return the share of the targets' variance that the values before the first step explain, at
        least -1, as RLlib does; NaN without variance.
        """
        if not self.active:
            return {}
        target = t["value_target"].double()
        error, whole = (part.var(correction=0) for part in (target - t["state_value"], target))
        share = torch.where(whole > 1e-12, (1 - error / whole).clamp(min=-1), math.nan)
        return {"explained_variance": share.to(t["sample_log_prob"]).expand(len(target))}

    def forward(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return half of the larger square: of the value's distance from its target, or of the
        clipped value's.
        """
        value, before, target = (t[name] for name in self.in_keys)
        distance = math.inf if self.clip is None else self.clip
        clipped = value.clamp(before - distance, before + distance)
        square, of_clipped = (value - target).square(), (clipped - target).square()
        metrics = t.means(
            value_clip_fraction=of_clipped > square,
            explained_variance=t["explained_variance"],
        )
        return torch.maximum(square, of_clipped) / 2, metrics
