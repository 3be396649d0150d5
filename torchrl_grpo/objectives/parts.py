"""The parts of a ``PolicyLoss``: surrogates, selections of tokens, and further terms.

Each says what it reads. Write your own from ``Surrogate``, ``Select``, or ``Term``.
"""

from __future__ import annotations

import math
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
        optional_in_keys: those that it reads if a batch has them.
        prepared: names of the values that ``prepare`` returns.
        out_keys: names of the metrics that it returns.
    """

    in_keys: tuple[NestedKey, ...] = ()
    optional_in_keys: tuple[NestedKey, ...] = ()
    prepared: tuple[str, ...] = ()
    out_keys: tuple[str, ...] = ()

    def prepare(self, t: Tokens) -> dict[str, Tensor]:
        """Return values [S] that depend on the whole optimization batch, which its passes then have
        too. The tokens have no scores yet.
        """
        return {}


class Surrogate(Part):
    """The objective of each token, to be maximized.

    Args:
        low: distance of the lower clip bound below 1; with ``high``, this is set by ``clip_epsilon``
            of a loss.
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
        for name, bound in (("low", low), ("high", high)):
            self.register_buffer(name, torch.tensor(float(bound), device="cpu"))

    @property
    def clip_epsilon(self) -> tuple[Tensor, Tensor]:
        """Both bounds; they can be set to a number or a pair."""
        return self.low, self.high

    @clip_epsilon.setter
    def clip_epsilon(self, value: float | tuple[Any, Any]) -> None:
        self.low, self.high = check_clip_epsilon(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep the bounds buffers, whatever number they are set to."""
        if name in ("low", "high") and not isinstance(value, Tensor):
            value = torch.full_like(getattr(self, name), float(value))
        super().__setattr__(name, value)

    def forward(self, t: Tokens) -> Tensor:
        """Return the objective of each token, [S]."""
        raise NotImplementedError

    def clipped(self, t: Tokens) -> tuple[Tensor, Tensor]:
        """Return, [S] bool each, the tokens without gradient because of the lower and the upper
        clip, for the metrics.
        """
        ratio, advantage = t["ratio"], t["advantage"]
        return (ratio < 1 - self.low) & (advantage < 0), (ratio > 1 + self.high) & (advantage > 0)


class Clip(Surrogate):
    """PPO's clipped surrogate."""

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.clipped_surrogate``."""
        return F.clipped_surrogate(t["ratio"], t["advantage"], self.low, self.high)


class CISPO(Surrogate):
    """A clipped ratio without gradient, times advantage and log-prob (arXiv 2506.13585)."""

    bounds_itself = True

    def __init__(self, low: float = 1.0, high: float = 4.0) -> None:
        super().__init__(low, high)

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.cispo_objective``."""
        return F.cispo_objective(t["ratio"], t["log_prob"], t["advantage"], self.low, self.high)

    def clipped(self, t: Tokens) -> tuple[Tensor, Tensor]:
        """Return, [S] bool each, the tokens with weights at the lower and at the upper bound."""
        return t["ratio"] < 1 - self.low, t["ratio"] > 1 + self.high


class SAPO(Surrogate):
    """A soft gate in place of the clip (arXiv 2511.20347); ``SAPOLoss`` has the arguments."""

    bounds_itself = True

    def __init__(self, tau_positive: float = 1.0, tau_negative: float = 1.05) -> None:
        super().__init__()
        if tau_positive <= 0 or tau_negative <= 0:
            raise ValueError(
                f"tau_positive={tau_positive} and tau_negative={tau_negative} must be above 0: use "
                "1.0 and 1.05."
            )
        self.tau_positive = tau_positive
        self.tau_negative = tau_negative

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.sapo_objective``."""
        return F.sapo_objective(t["ratio"], t["advantage"], self.tau_positive, self.tau_negative)


class GMPO(Surrogate):
    """The geometric mean of a sequence's clipped ratios (arXiv 2507.20673). The clip range is a
    distance from 0 in log space.
    """

    bounds_itself = True

    def __init__(self, low: float = 0.4, high: float = 0.4) -> None:
        super().__init__(low, high)

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.gmpo_objective``."""
        return F.gmpo_objective(t["ratio"], t["advantage"], t.rows, self.low, self.high)

    def clipped(self, t: Tokens) -> tuple[Tensor, Tensor]:
        """Compare ratios with the exponentials of the range."""
        ratio, advantage = t["ratio"], t["advantage"]
        low, high = (-self.low).exp(), self.high.exp()
        return (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)


class VESPO(Surrogate):
    """A soft gate of the whole sequence's ratio (arXiv 2602.10693); ``VESPOLoss`` has the
    arguments.
    """

    bounds_itself = True

    def __init__(
        self,
        k_positive: float = 2.0,
        lambda_positive: float = 3.0,
        k_negative: float = 3.0,
        lambda_negative: float = 2.0,
    ) -> None:
        super().__init__()
        if min(k_positive, k_negative, lambda_positive, lambda_negative) <= 0:
            raise ValueError(
                f"k_positive={k_positive}, k_negative={k_negative}, "
                f"lambda_positive={lambda_positive} and lambda_negative={lambda_negative} must be "
                "above 0: use 2.0, 3.0, 3.0 and 2.0."
            )
        self.k_positive = k_positive
        self.lambda_positive = lambda_positive
        self.k_negative = k_negative
        self.lambda_negative = lambda_negative

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.vespo_objective``."""
        k = (self.k_positive, self.k_negative)
        decay = (self.lambda_positive, self.lambda_negative)
        return F.vespo_objective(t["ratio"], t["log_prob"], t["advantage"], t.rows, k, decay)


class KLCov(Surrogate):
    """The ratio times the advantage, and a penalty on the tokens with the largest covariance of
    log-prob and advantage (arXiv 2505.22617); ``KLCovLoss`` has the arguments.
    """

    in_keys = ("advantage",)
    prepared = ("penalized",)

    def __init__(self, covariance_share: float = 0.0002, penalty: float = 1.0) -> None:
        super().__init__()
        _check_share(covariance_share)
        if penalty <= 0:
            raise ValueError(f"penalty={penalty} must be above 0: use 1.0.")
        self.covariance_share = covariance_share
        self.penalty = penalty

    def prepare(self, t: Tokens) -> dict[str, Tensor]:
        """Mark the tokens that are penalized."""
        share = self.covariance_share
        return {"penalized": F.kl_cov_tokens(t["sample_log_prob"], t["advantage"], share)}

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.kl_cov_objective``."""
        return F.kl_cov_objective(t["ratio"], t["advantage"], t["penalized"], self.penalty)


class LogLikelihood(Surrogate):
    """The log-prob times the advantage, for demonstrations, which no policy sampled."""

    is_supervised = True

    def forward(self, t: Tokens) -> Tensor:
        """Return the log-prob times the advantage."""
        return t["advantage"] * t["log_prob"]


class Select(Part):
    """A selection of tokens, made once for an optimization batch."""

    is_of_loss = False
    """Whether other tokens leave the whole loss, with all its means; else the objective alone."""

    def forward(self, t: Tokens) -> Tensor:
        """Return the tokens to train, [S] bool. They have no scores yet."""
        raise NotImplementedError


class Valid(Select):
    """The tokens of sequences with a valid reward."""

    is_of_loss = True
    optional_in_keys = ("reward_valid",)

    def forward(self, t: Tokens) -> Tensor:
        """Return the tokens with a valid reward; all if the batch does not say."""
        if "reward_valid" not in t:
            return torch.ones_like(t["sample_log_prob"], dtype=torch.bool)
        return t["reward_valid"].bool()


class NotTruncated(Select):
    """The tokens of responses that no limit cut off."""

    is_of_loss = True

    def __init__(self, *, on: bool = True) -> None:
        super().__init__()
        self.on = on

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """Whether a response was cut off."""
        return ("truncated",) if self.on else ()

    def forward(self, t: Tokens) -> Tensor:
        """Return the tokens of whole responses."""
        if not self.on:
            return torch.ones_like(t["sample_log_prob"], dtype=torch.bool)
        return ~t["truncated"].bool()


class TopEntropy(Select):
    """The share of tokens with the largest entropy under the proximal policy (arXiv 2506.01939)."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """The entropies, if tokens are left out."""
        return ("prox_entropy",) if self.share < 1 else ()

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.top_entropy_tokens``."""
        if self.share == 1:
            return torch.ones_like(t["sample_log_prob"], dtype=torch.bool)
        return F.top_entropy_tokens(t["prox_entropy"], self.share)


class ClipCov(Select):
    """All tokens but some of a large covariance of log-prob and advantage (arXiv 2505.22617);
    ``ClipCovLoss`` has the arguments.
    """

    in_keys = ("advantage",)

    def __init__(
        self,
        covariance_share: float = 0.0002,
        covariance_low: float = 1.0,
        covariance_high: float = 5.0,
    ) -> None:
        super().__init__()
        _check_share(covariance_share)
        if not covariance_low < covariance_high:
            raise ValueError(
                f"covariance_low={covariance_low} must be below covariance_high={covariance_high}: "
                "use 1.0 and 5.0."
            )
        self.covariance_share = covariance_share
        self.covariance_low = covariance_low
        self.covariance_high = covariance_high

    def forward(self, t: Tokens) -> Tensor:
        """See ``functional.clip_cov_tokens``."""
        bounds = (self.covariance_low, self.covariance_high)
        share = self.covariance_share
        return ~F.clip_cov_tokens(t["sample_log_prob"], t["advantage"], share, bounds)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"covariance_share={share} must be in (0, 1]: use 0.0002.")


class Term(Part):
    """A term of the loss besides the objective, ``loss_`` and its name.

    Args:
        coeff: its weight, at least 0; at 0 it has only metrics.
    """

    name: str

    def __init__(self, coeff: float | None) -> None:
        super().__init__()
        self.coeff = coeff

    @property
    def coeff(self) -> float:
        """Weight of the term."""
        return self._coeff

    @coeff.setter
    def coeff(self, value: float | None) -> None:
        if (value or 0.0) < 0:
            raise ValueError(
                f"{self.name}_coeff={value} must not be negative: use 0 to switch the term off."
            )
        self._coeff = value or 0.0

    def forward(self, t: Tokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the values to average, [S], which are not read with a coefficient of 0, and
        metrics.
        """
        raise NotImplementedError


class KLTo(Term):
    """The KL to the reference (``"ref"``) or the sampling policy (``"inference"``).

    Args:
        policy: the other policy.
        coeff: weight.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        unbiased: whether it is multiplied by the ratio (DeepSeek-V3.2, arXiv 2512.02556).
    """

    def __init__(
        self,
        policy: Literal["ref", "inference"],
        coeff: float | None = 0.0,
        estimator: KLEstimator = "k3",
        *,
        unbiased: bool = False,
    ) -> None:
        check_choice("kl_estimator", estimator, get_args(KLEstimator))
        self.name = f"kl_to_{policy}"
        super().__init__(coeff)
        self.policy = policy
        self.estimator = estimator
        self.unbiased = unbiased
        self.other = "sample_log_prob" if policy == "inference" else f"{policy}_log_probs"

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """The other policy's log-probs, with a coefficient."""
        return (self.other,) if self.coeff else ()

    @property
    def optional_in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """The same, for the metrics."""
        return (self.other,)

    @property
    def out_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """Two estimates."""
        always = bool(self.coeff) or self.policy == "inference"
        return (f"kl_k1_to_{self.policy}", f"kl_k3_to_{self.policy}") if always else ()

    def kl(self, t: Tokens) -> Tensor:
        """Return the KL of each token, [S]."""
        return F.KL_ESTIMATORS[self.estimator](t["log_prob"], t[self.other])

    def forward(self, t: Tokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the KL of each token, and two estimates as metrics."""
        if self.other not in t:
            return None, {}
        kl = self.kl(t) if self.coeff else None
        if kl is not None and self.unbiased:
            kl = kl * t["ratio"]
        return kl, t.kl_means(self.policy, t[self.other])


class Entropy(Term):
    """The entropy bonus."""

    name = "entropy"
    out_keys = ("entropy",)

    def forward(self, t: Tokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return minus the entropy."""
        return -t["entropy"], t.means(entropy=t["entropy"])


class Distill(Term):
    """The divergence from a teacher.

    Args:
        coeff: weight.
        clip: largest divergence of a token that counts, in nats; None is unbounded.
    """

    name = "teacher"
    optional_in_keys = ("teacher_valid", "teacher_log_probs")

    def __init__(self, coeff: float = 0.0, clip: float | None = None) -> None:
        super().__init__(coeff)
        self.clip = clip

    @property
    def in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """The divergence, with a coefficient."""
        return ("divergence",) if self.coeff else ()

    @property
    def out_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """The mean divergence, with a coefficient."""
        return ("divergence_to_teacher",) if self.coeff else ()

    def forward(self, t: Tokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the divergence, 0 without a teacher, and metrics that the batch has data for."""
        divergence = None
        out: dict[str, Tensor] = {}
        valid = t["teacher_valid"] > 0 if "teacher_valid" in t else None
        if self.coeff:
            divergence = t["divergence"]
            if valid is not None:
                divergence = torch.where(valid, divergence, 0.0)
            divergence = divergence.clamp(max=math.inf if self.clip is None else self.clip)
            out = t.means(divergence_to_teacher=divergence)
        if "teacher_log_probs" in t:
            log_prob = t["teacher_log_probs"]
            if valid is not None:
                log_prob = torch.where(valid, log_prob, t["log_prob"].detach())
            out |= t.kl_means("teacher", log_prob)
        return divergence, out
