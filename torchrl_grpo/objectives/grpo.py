"""``GRPOLoss``: the loss of GRPO and its relatives, with TorchRL's keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_grpo.checks import (
    Aggregation,
    KLEstimator,
    Proximal,
    RatioLevel,
    WeightBound,
    WeightLevel,
    check_top_entropy,
)
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.objectives.off_policy import OffPolicy
from torchrl_grpo.objectives.parts import (
    Clip,
    Distill,
    Entropy,
    KLTo,
    NotTruncated,
    Select,
    Surrogate,
    TopEntropy,
    Valid,
    Value,
)
from torchrl_grpo.objectives.policy_loss import PolicyLoss


class Setting:
    """An attribute of a loss that is an attribute of one of its parts.

    Args:
        path: path of the part in the loss, a dot, and the attribute of the part.
    """

    def __init__(self, path: str) -> None:
        self.part, _, self.name = path.rpartition(".")

    def __get__(self, loss: Any, owner: type) -> Any:
        """Return the attribute of the part."""
        return self if loss is None else getattr(loss.get_submodule(self.part), self.name)

    def __set__(self, loss: Any, value: Any) -> None:
        """Set the attribute of the part; a buffer remains one."""
        part = loss.get_submodule(self.part)
        before = getattr(part, self.name)
        if isinstance(before, Tensor):
            value = torch.full_like(before, value)
        setattr(part, self.name, value)


class GRPOLoss(PolicyLoss):
    """Clipped policy-gradient loss of GRPO (arXiv 2402.03300, equation 3).

    ``loss_objective`` is minus the clipped surrogate, averaged over the tokens of a sequence and
    then over sequences. The arguments turn it into its relatives: Dr. GRPO
    (``aggregation="constant"`` with ``constant_length``), DAPO (``aggregation="token_mean"``,
    ``clip_epsilon=(0.2, 0.28)``), GSPO (``ratio_level="sequence"``). Another ``objective`` makes
    another algorithm. ``loss_kl_to_ref``, ``loss_kl_to_inference``, ``loss_entropy``, ``loss_teacher``,
    ``loss_value`` and ``loss_sft`` exist when their coefficient is not 0. Only entries named ``loss_*`` belong to
    the loss: add those up, and never average over the whole output. Everything else is a detached
    metric.

    ``normalize`` computes the weights of tokens over a whole optimization batch; then the outputs
    and gradients of its micro-batches add up to the whole batch's. Without it, ``forward`` computes
    the weights from the batch that it gets.

    Args:
        actor_network: a TensorDict module that writes the current log-probs ``("cur_log_probs",
            "full")`` and ``("entropy", "full")``, [B, T] padded on the right, such as
            ``TokenScorer``. TorchRL's ``TransformersWrapper`` becomes a ``WrapperScorer`` of its
            model.

    Keyword Args:
        objective: the objective of each token; by default, an ``objective_type``.
        select: further selections of tokens.
        clip_epsilon: clip range of the ratio, ``e`` for ``[1 - e, 1 + e]`` or a pair ``(low,
            high)``. Low is in [0, 1] (1 disables the lower bound), high is at least 0. None keeps the
            objective's, 0.2 for ``Clip``.
        ratio_level: ``"token"``; ``"sequence"``, the exponential of the mean log-ratio of a
            sequence for all of its tokens (GSPO, arXiv 2507.18071); or ``"sequence_token"``, the
            same value with each token's own gradient (GSPO-token).
        aggregation: average over tokens, see ``objectives.tokens.token_weights``.
        constant_length: divisor of ``aggregation="constant"``, in tokens, at least 1; required
            there, and not read by other aggregations. The longest response allowed gives Dr. GRPO
            (arXiv 2503.20783), 1 a plain sum.
        dual_clip: bound of the surrogate where the advantage is negative, above 1 (arXiv
            1912.09729); None disables it.
        proximal: the policy in the denominator of the ratio, around which it is clipped.
            ``"behaviour"``: the policy that sampled (plain PPO). The others separate the two
            (decoupled PPO, arXiv 2505.24298): ``"recomputed"`` reads ``prox_log_prob``, the
            trainer's log-probs from before the batch's first step; ``"current"`` is the same with
            one optimizer step per batch, the current policy without gradient; ``"interpolated"``
            estimates them from ``staleness``.
        behaviour_weight: bound of the factor proximal / sampling probability of the objective:
            ``"truncate"`` and ``"mask"`` are truncated and masked importance sampling; ``"none"``
            is weight 1. See ``OffPolicy``.
        behaviour_level: one weight per ``"token"``, or one per ``"sequence"``.
        behaviour_cap: largest weight, above 0.
        behaviour_floor: smallest weight, at most the cap; above 0 it bounds weights on both sides.
        rejection: rules that remove tokens and sequences from the objective, but not from the KL
            and entropy terms or the divisors of means: bounds by rule, ``{"geometric": (0.99,
            1.01)}``. A token must pass all given rules, methods of ``objectives.off_policy.Mismatch``;
            ``checks.check_rejection`` explains one number in place of a pair. The rules compare the
            sampling policy with the trainer's from before the batch's first step if ``proximal`` is
            ``"recomputed"``, else with the current one; ``off_policy`` and ``dppo_*`` always with
            the current one.
        top_entropy_quantile: share of the batch's tokens to train, those with the largest entropy
            by ``prox_entropy`` (arXiv 2506.01939); the others are removed from the objective, as
            rejected ones are. Less than 1 needs ``proximal="recomputed"``.
        score_centering: whether the mean score under the sampling policy is subtracted, see
            ``functional.centering_coefficients``. The ``TokenScorer`` then reads the kept tokens
            and their log-probs. It needs ``proximal="current"``, a weight (if any) of each token,
            and no ``rejection`` of single tokens.
        mask_truncated: whether truncated responses are removed from the loss (they stay in their
            group's statistics).
        kl_mask_threshold: tokens with a larger k2 estimate of the KL to the sampling policy are
            removed from loss and metrics, as in TorchRL; None keeps all.
        kl_to_ref_coeff: weight of the KL to the reference policy; 0 (or None) needs no reference
            log-probs.
        kl_bias_correction: whether that KL is multiplied by the ratio, which makes estimate and
            gradient unbiased for stale samples (DeepSeek-V3.2, arXiv 2512.02556).
        kl_to_inference_coeff: weight of the KL to the sampling policy, likewise.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``, for both.
        entropy_coeff: weight of the entropy bonus.
        teacher_coeff: weight of the divergence from a teacher that ``actor_network`` writes
            (``TokenScorer.distill_from``); 0 needs none.
        teacher_clip: largest divergence of a token that counts, in nats; a token above it has no
            gradient. None is unbounded.
        sft_coeff: weight of minus the log-likelihood of the demonstrations in the batch, the mean
            over their masked tokens (``DemonstrationLoss`` with ``aggregation="token_mean"``); 0
            needs none.
        value_coeff: weight of the critic's value loss (``TokenScorer.add_critic``); 0 needs none.
        value_clip: how far a value may move from the one before the batch's first step; None is
            unbounded.
        device: device of the loss's buffers; by default, the device on which the model computes.

    Input keys (``set_keys`` renames them; ``in_keys`` has all that ``forward`` may read, and
    ``required_in_keys`` those without which it raises): ``action`` [B, T] int64, the tokens (a ``TokenScorer``
    reads them), ``advantage`` [B, 1] (or TorchRL's [B, 1, 1]) or [B, T],
    ``sample_log_prob`` [B, T], ``ref_log_probs`` [B, T], ``mask`` [B, T] bool (the tokens that the
    policy sampled), ``cur_log_prob`` and ``entropy`` as above; ``prox_log_prob`` [B, T],
    ``prox_entropy`` [B, T], ``staleness`` [B, 1] or [B, T] and ``truncated`` [B, 1] bool if an
    argument requires them,
    ``divergence`` [B, T] with a ``teacher_coeff``, ``value``, ``state_value`` and ``value_target``
    [B, T] with a ``value_coeff``, and ``is_demonstration`` [B, 1] bool with an ``sft_coeff``: its
    rows count only in ``loss_sft``. Rows with the same ``"trajectory"`` [B, 1]
    int64 are samples of one trajectory, which counts as one sequence. If the batch has
    ``reward_valid`` [B, 1] bool, sequences marked False are ignored; with ``teacher_valid`` [B, 1]
    bool, the divergence from the teacher is 0 in sequences marked False.

    Output (``GRPOLossOutput``), all scalars: the ``loss_*`` entries; ``objective``,
    ``clip_fraction_low`` and ``clip_fraction_high`` (tokens whose gradient the lower or upper clip
    took away), ``ESS``, ``ratio_mean``, ``ratio_square_mean``, ``kl_k1_to_inference``,
    ``kl_k3_to_inference``, ``entropy``; ``kl_k1_to_ref`` and ``kl_k3_to_ref`` with reference
    log-probs, ``kl_k1_to_teacher`` and ``kl_k3_to_teacher`` with a teacher's,
    ``divergence_to_teacher`` with a ``teacher_coeff``; ``value_clip_fraction`` (tokens whose value the
    clip keeps) and ``explained_variance`` (of the targets, by the values before the first step; the
    mean over micro-batches' tokens is that of the whole batch) with a ``value_coeff``; ``behaviour_weight`` and
    ``behaviour_capped`` (tokens with a weight that a bound changed) with such a weight; with it or
    a ``rejection``, ``mismatch_*`` (sampling against trainer's log-probs, before the correction),
    ``rejected_tokens`` and ``rejected_sequences`` (those without any weight), and both for each
    rule, such as ``rejected_tokens_geometric``; and ``TORCHRL_METRICS``. Metrics are means over the
    masked tokens, except for those of sequences and ``mismatch_ppl_gap``, which are means over
    sequences, and ``mismatch_largest_ratio``.

    Raises:
        ValueError: ``actor_network`` is not a TensorDict module, a coefficient or a bound is out of
            its range, or two arguments exclude each other; the batch has more than one dimension,
            or its ``advantage``, ``staleness`` or ``truncated`` has a wrong shape.
        TypeError: an argument is TorchRL's and has another name here.
        KeyError: the batch lacks an entry that the loss reads.

    Example:
        >>> loss = GRPOLoss(TokenScorer(model), clip_epsilon=(0.2, 0.28))  # doctest: +SKIP
        >>> out = loss(batch)  # doctest: +SKIP
        >>> sum(value for name, value in out.items() if name.startswith("loss_")).backward()  # doctest: +SKIP
    """

    objective_type: type[Surrogate] = Clip
    ratio_level = Setting("off_policy.ratio_level")
    proximal = Setting("off_policy.proximal")
    behaviour_weight = Setting("off_policy.weight")
    behaviour_level = Setting("off_policy.level")
    behaviour_cap = Setting("off_policy.cap")
    behaviour_floor = Setting("off_policy.floor")
    rejection = Setting("off_policy.reject")
    score_centering = Setting("off_policy.centering")
    clip_epsilon_low = Setting("objective.low")
    clip_epsilon_high = Setting("objective.high")
    clip_epsilon = Setting("objective.clip_epsilon")
    kl_to_ref_coeff = Setting("terms.0.coeff")
    kl_estimator = Setting("terms.0.estimator")
    kl_bias_correction = Setting("terms.0.unbiased")
    kl_to_inference_coeff = Setting("terms.1.coeff")
    entropy_coeff = Setting("terms.2.coeff")
    teacher_coeff = Setting("terms.3.coeff")
    teacher_clip = Setting("terms.3.clip")
    value_coeff = Setting("terms.5.coeff")
    value_clip = Setting("terms.5.clip")
    mask_truncated = Setting("select.1.active")
    top_entropy_quantile = Setting("select.2.share")

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        objective: Surrogate | None = None,
        select: Sequence[Select] = (),
        clip_epsilon: float | tuple[float, float] | None = None,
        ratio_level: RatioLevel = "token",
        aggregation: Aggregation = "sequence_mean",
        constant_length: int | None = None,
        dual_clip: float | None = None,
        proximal: Proximal | Literal["current"] = "behaviour",
        behaviour_weight: WeightBound = "none",
        behaviour_level: WeightLevel = "token",
        behaviour_cap: float = 5.0,
        behaviour_floor: float = 0.0,
        rejection: Mapping[str, Any] | None = None,
        top_entropy_quantile: float = 1.0,
        score_centering: bool = False,
        mask_truncated: bool = False,
        kl_mask_threshold: float | None = None,
        kl_estimator: KLEstimator = "k3",
        kl_to_ref_coeff: float | None = 0.0,
        kl_bias_correction: bool = False,
        kl_to_inference_coeff: float | None = 0.0,
        entropy_coeff: float = 0.0,
        teacher_coeff: float = 0.0,
        teacher_clip: float | None = None,
        sft_coeff: float = 0.0,
        value_coeff: float = 0.0,
        value_clip: float | None = None,
        device: torch.device | str | int | None = None,
        **others: Any,
    ) -> None:
        load_extra("refuse_arguments")(type(self), others)
        objective = self.objective_type() if objective is None else objective
        if clip_epsilon is not None:
            objective.clip_epsilon = clip_epsilon
        check_top_entropy(top_entropy_quantile, proximal)
        super().__init__(
            actor_network,
            objective,
            OffPolicy(
                proximal,
                ratio_level,
                behaviour_weight,
                behaviour_level,
                behaviour_cap,
                behaviour_floor,
                rejection,
                score_centering,
            ),
            select=[
                Valid(),
                NotTruncated(mask_truncated),
                TopEntropy(top_entropy_quantile),
                *select,
            ],
            terms=[
                KLTo("ref", kl_to_ref_coeff or 0.0, kl_estimator, kl_bias_correction),
                KLTo("inference", kl_to_inference_coeff or 0.0, kl_estimator),
                Entropy(entropy_coeff),
                Distill(teacher_coeff, teacher_clip),
                KLTo("teacher"),
                Value(value_coeff, value_clip),
            ],
            aggregation=aggregation,
            constant_length=constant_length,
            dual_clip=dual_clip,
            kl_mask_threshold=kl_mask_threshold,
            sft_coeff=sft_coeff,
            device=device,
        )
        load_extra("adapt_former_methods")(self)
