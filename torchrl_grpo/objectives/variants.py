"""Losses with other surrogates: CISPO, SAPO, GMPO and VESPO; and the loss of demonstrations."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_grpo import functional as F
from torchrl_grpo.objectives.grpo import GRPOLoss, _Tokens


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
        k, decay = (k_positive, k_negative), (lambda_positive, lambda_negative)
        if min(*k, *decay) <= 0:
            raise ValueError(
                f"k_positive={k_positive}, k_negative={k_negative}, "
                f"lambda_positive={lambda_positive} and lambda_negative={lambda_negative} must be "
                "above 0: use 2.0, 3.0, 3.0 and 2.0."
            )
        _refuse_dual_clip(type(self).__name__, kwargs)
        super().__init__(actor_network, **kwargs)
        self.k = k
        self.decay = decay

    def surrogate(self, ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """See the class."""
        return F.vespo_objective(ratio, log_prob, advantage, self.k, self.decay)


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
