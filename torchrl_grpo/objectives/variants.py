"""Losses with other objectives: CISPO, SAPO, GMPO, VESPO, Clip-Cov, KL-Cov and demonstrations."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_grpo.objectives.grpo import GRPOLoss, Setting
from torchrl_grpo.objectives.parts import (
    CISPO,
    GMPO,
    SAPO,
    VESPO,
    ClipCov,
    KLCov,
    LogLikelihood,
)


class CISPOLoss(GRPOLoss):
    """CISPO (arXiv 2506.13585): the clipped ratio is a weight without gradient, times advantage and
    log-prob.

    The clip bounds are bounds on the weight. The default has no lower bound and an upper bound of 5;
    with the 0.2 of a clipped surrogate nearly every weight would be at a bound. The clip fractions
    count the tokens with a weight at a bound; these tokens keep their gradient.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments but ``dual_clip``.

    Raises:
        ValueError: ``dual_clip`` is set; the weights are bounded already.
    """

    objective_type = CISPO


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

    tau_positive = Setting("objective.tau_positive")
    tau_negative = Setting("objective.tau_negative")

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        tau_positive: float = 1.0,
        tau_negative: float = 1.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, objective=SAPO(tau_positive, tau_negative), **kwargs)


class GMPOLoss(GRPOLoss):
    """GMPO (arXiv 2507.20673): the geometric mean of a sequence's clipped token ratios.

    The clip range is a distance from 0 in log space. With ``aggregation="sequence_mean"``, each
    sequence counts once.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments but ``dual_clip``.

    Raises:
        ValueError: ``dual_clip`` is set.
    """

    objective_type = GMPO


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

    k_positive = Setting("objective.k_positive")
    lambda_positive = Setting("objective.lambda_positive")
    k_negative = Setting("objective.k_negative")
    lambda_negative = Setting("objective.lambda_negative")

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
        gate = VESPO(k_positive, lambda_positive, k_negative, lambda_negative)
        super().__init__(actor_network, objective=gate, **kwargs)


class ClipCovLoss(GRPOLoss):
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

    covariance_share = Setting("select.3.covariance_share")
    covariance_low = Setting("select.3.covariance_low")
    covariance_high = Setting("select.3.covariance_high")

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        covariance_share: float = 0.0002,
        covariance_low: float = 1.0,
        covariance_high: float = 5.0,
        **kwargs: Any,
    ) -> None:
        others = ClipCov(covariance_share, covariance_low, covariance_high)
        super().__init__(actor_network, select=[others], **kwargs)


class KLCovLoss(GRPOLoss):
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

    covariance_share = Setting("objective.covariance_share")
    penalty = Setting("objective.penalty")

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        covariance_share: float = 0.0002,
        penalty: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, objective=KLCov(covariance_share, penalty), **kwargs)


class DemonstrationLoss(GRPOLoss):
    """Minus the log-likelihood of demonstrations: supervised training, with each token weighted by
    its advantage.

    It reads tokens, as ``GRPOLoss`` does; TorchRL's ``SFTLoss`` reads histories.

    Since no policy sampled the demonstrations, the current one counts as the sampling policy: every
    ratio is 1, and the metrics that compare with the sampling policy mean nothing.

    Args:
        actor_network: as in ``GRPOLoss``, like all other arguments.
    """

    objective_type = LogLikelihood


SFTLoss = DemonstrationLoss
"""The former name."""
