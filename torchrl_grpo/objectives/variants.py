"""Losses with other surrogates: CISPO, SAPO, GMPO, VESPO, Clip-Cov and KL-Cov; and that of
demonstrations.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_grpo import functional as F
from torchrl_grpo.models.padding import pad
from torchrl_grpo.objectives.grpo import GRPOLoss, _of_sequence_or_token, _Tokens


class CISPOLoss(GRPOLoss):
    """CISPO (arXiv 2506.13585): the clipped ratio is a weight without gradient, times advantage and
    log-prob.

    The clip bounds are those of the weight. The default has no lower bound and an upper bound of 5;
    with the 0.2 of a clipped surrogate nearly every weight would be at a bound. The clip fractions
    count the tokens with a weight at a bound; these tokens keep their gradient.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments but ``dual_clip``.

    Raises:
        ValueError: ``dual_clip`` is set; the weights are bounded already.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | tuple[float, float] = (1.0, 4.0),
        **kwargs: Any,
    ) -> None:
        _refuse_dual_clip(type(self).__name__, kwargs)
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **kwargs)

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return, [B, T] bool each, the tokens with weights at the lower and at the upper bound."""
        return ratio < 1 - self.clip_epsilon_low, ratio > 1 + self.clip_epsilon_high

    def surrogate(self, ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        return F.cispo_objective(
            ratio, log_prob, advantage, self.clip_epsilon_low, self.clip_epsilon_high
        )


class SAPOLoss(GRPOLoss):
    """SAPO (arXiv 2511.20347): a soft gate in place of the clip.

    Only the metrics read the clip bounds: they count the tokens that a clip would have affected.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments but ``dual_clip``.

    Keyword Args:
        tau_positive: temperature of the gate where the advantage is positive, above 0.
        tau_negative: temperature elsewhere, above 0; a larger one removes more of the gradient that
            makes tokens less likely.

    Raises:
        ValueError: a temperature is not above 0, or ``dual_clip`` is set; the gate is bounded
            already.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        tau_positive: float = 1.0,
        tau_negative: float = 1.05,
        **kwargs: Any,
    ) -> None:
        if tau_positive <= 0 or tau_negative <= 0:
            raise ValueError(
                f"tau_positive={tau_positive} and tau_negative={tau_negative} must be above 0: use "
                "1.0 and 1.05."
            )
        _refuse_dual_clip(type(self).__name__, kwargs)
        super().__init__(actor_network, **kwargs)
        self.tau_positive = tau_positive
        self.tau_negative = tau_negative

    def surrogate(self, ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        return F.sapo_objective(ratio, advantage, self.tau_positive, self.tau_negative)


class GMPOLoss(GRPOLoss):
    """GMPO (arXiv 2507.20673): the geometric mean of a sequence's clipped token ratios.

    The clip range is a distance from 0 in log space. With ``aggregation="sequence_mean"``, each
    sequence counts once. ``clipped`` compares ratios with the exponentials of that range.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments but ``dual_clip``.

    Raises:
        ValueError: ``dual_clip`` is set.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | tuple[float, float] = 0.4,
        **kwargs: Any,
    ) -> None:
        _refuse_dual_clip(type(self).__name__, kwargs)
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **kwargs)

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """See ``GRPOLoss``."""
        low, high = (-self.clip_epsilon_low).exp(), self.clip_epsilon_high.exp()
        return (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)

    def _objective(self, tokens: _Tokens, ratio: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        low, high = self.clip_epsilon_low, self.clip_epsilon_high
        return F.gmpo_objective(ratio, advantage, tokens.mask, low, high)


class VESPOLoss(GRPOLoss):
    """VESPO (arXiv 2602.10693): a soft gate of the whole sequence's ratio, times advantage and
    log-prob.

    Only the metrics read the clip bounds: they count the tokens that a clip would have affected.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments but ``dual_clip``.

    Keyword Args:
        k_positive: exponent of the sequence's ratio where the advantage is at least 0.
        lambda_positive: how fast the gate closes for larger ratios there.
        k_negative: the exponent elsewhere.
        lambda_negative: likewise.

    Raises:
        ValueError: one of these is not above 0, or ``dual_clip`` is set; the gate is bounded.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        k_positive: float = 2.0,
        lambda_positive: float = 3.0,
        k_negative: float = 3.0,
        lambda_negative: float = 2.0,
        **kwargs: Any,
    ) -> None:
        if min(k_positive, k_negative, lambda_positive, lambda_negative) <= 0:
            raise ValueError(
                f"k_positive={k_positive}, k_negative={k_negative}, "
                f"lambda_positive={lambda_positive} and lambda_negative={lambda_negative} must be "
                "above 0: use 2.0, 3.0, 3.0 and 2.0."
            )
        _refuse_dual_clip(type(self).__name__, kwargs)
        super().__init__(actor_network, **kwargs)
        self.k_positive = k_positive
        self.lambda_positive = lambda_positive
        self.k_negative = k_negative
        self.lambda_negative = lambda_negative

    def surrogate(self, ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        k = (self.k_positive, self.k_negative)
        decay = (self.lambda_positive, self.lambda_negative)
        return F.vespo_objective(ratio, log_prob, advantage, k, decay)


class _CovarianceLoss(GRPOLoss):
    """A loss that treats some tokens of a large covariance of log-prob and advantage apart.

    The covariance is that of the optimization batch, with the log-probs of the policy that sampled.
    """

    def __init__(
        self, actor_network: TensorDictModuleBase, *, covariance_share: float, **kwargs: Any
    ) -> None:
        if not 0 < covariance_share <= 1:
            raise ValueError(f"covariance_share={covariance_share} must be in (0, 1]: use 0.0002.")
        super().__init__(actor_network, **kwargs)
        self.covariance_share = covariance_share

    def _of_covariance(self, batch: TensorDictBase, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T] each, the log-probs and the advantages that make the covariance."""
        log_prob = pad(batch, self.tensor_keys.sample_log_prob)
        advantage = _of_sequence_or_token(batch, self.tensor_keys.advantage, mask.shape[1])
        return log_prob, advantage.to(log_prob.dtype)


class ClipCovLoss(_CovarianceLoss):
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate without some tokens of a large
    covariance of log-prob and advantage, which lower the entropy most.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments.

    Keyword Args:
        covariance_share: of the batch's tokens, how many are left out at most, in (0, 1].
        covariance_low: those left out are drawn from tokens with a covariance above it,
        covariance_high: and below this.

    Raises:
        ValueError: the share is out of its range, or the bounds are not in order.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        covariance_share: float = 0.0002,
        covariance_low: float = 1.0,
        covariance_high: float = 5.0,
        **kwargs: Any,
    ) -> None:
        if not covariance_low < covariance_high:
            raise ValueError(
                f"covariance_low={covariance_low} must be below covariance_high={covariance_high}: "
                "use 1.0 and 5.0."
            )
        super().__init__(actor_network, covariance_share=covariance_share, **kwargs)
        self.covariance_low = covariance_low
        self.covariance_high = covariance_high

    def token_roles(self, batch: TensorDictBase, mask: Tensor) -> Tensor:
        """See ``GRPOLoss``."""
        of_batch = self._of_covariance(batch, mask)
        bounds = (self.covariance_low, self.covariance_high)
        out = F.clip_cov_tokens(*of_batch, mask, self.covariance_share, bounds)
        return super().token_roles(batch, mask) & ~out


class KLCovLoss(_CovarianceLoss):
    """KL-Cov (arXiv 2505.22617): the ratio times the advantage, without a clip, and a penalty on
    the change of the tokens with the largest covariance of log-prob and advantage.

    Before the first optimizer step on a batch the penalty is 0 and has no gradient: it acts with
    several steps per batch, and with stale samples. Only the metrics read the clip bounds.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments.

    Keyword Args:
        covariance_share: of the batch's tokens, how many are penalized, in (0, 1].
        penalty: weight of the absolute log-ratio, above 0.

    Raises:
        ValueError: one of these is out of its range.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        covariance_share: float = 0.0002,
        penalty: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if penalty <= 0:
            raise ValueError(f"penalty={penalty} must be above 0: use 1.0.")
        super().__init__(actor_network, covariance_share=covariance_share, **kwargs)
        self.penalty = penalty

    def token_roles(self, batch: TensorDictBase, mask: Tensor) -> Tensor:
        """See ``GRPOLoss``; 2 for tokens that are penalized."""
        penalized = F.kl_cov_tokens(*self._of_covariance(batch, mask), mask, self.covariance_share)
        return super().token_roles(batch, mask).to(torch.uint8) * (1 + penalized)

    def _objective(self, tokens: _Tokens, ratio: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        return F.kl_cov_objective(ratio, advantage, tokens.roles == 2, self.penalty)


class DemonstrationLoss(GRPOLoss):
    """Minus the log-likelihood of demonstrations: supervised training, with each token weighted by
    its advantage.

    It reads tokens, as ``GRPOLoss`` does; TorchRL's ``SFTLoss`` reads histories.

    Since no policy sampled the demonstrations, the current one counts as the sampling policy: every
    ratio is 1, and the metrics that compare with the sampling policy mean nothing.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments.
    """

    def behaviour(self, log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
        return log_prob.detach()

    def surrogate(self, ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        return advantage * log_prob


SFTLoss = DemonstrationLoss
"""The former name."""


def _refuse_dual_clip(name: str, settings: dict[str, Any]) -> None:
    if settings.get("dual_clip") is not None:
        raise ValueError(
            f"dual_clip={settings['dual_clip']} must be None with {name}, which already bounds "
            "every token: leave it out, or use GRPOLoss."
        )
