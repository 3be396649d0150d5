"""The GRPO loss as a TorchRL ``LossModule``, which reads keys and calls ``functional``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives.common import LossModule

from torchrl_grpo import functional as F
from torchrl_grpo import keys
from torchrl_grpo.checks import (
    Aggregation,
    KLEstimator,
    Proximal,
    RatioLevel,
    WeightBound,
    WeightLevel,
    check_behaviour_weight,
    check_clip_epsilon,
    check_floor,
    check_rejection,
    check_score_centering,
    check_top_entropy,
)
from torchrl_grpo.compat.torchrl import CHOICES, check_choice
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.models.padding import (
    copy_entry,
    entry,
    has,
    pad,
    set_padded,
    trajectories_of,
)
from torchrl_grpo.models.scoring import TokenScorer, WrapperScorer
from torchrl_grpo.models.sharding import compute_device
from torchrl_grpo.objectives.output import LARGEST_RATIO, TORCHRL_METRICS, GRPOLossOutput

_METRICS = (
    "objective",
    "clip_fraction_low",
    "clip_fraction_high",
    "ESS",
    "ratio_mean",
    "ratio_square_mean",
    "kl_k1_to_inference",
    "kl_k3_to_inference",
    "entropy",
)
"""Metrics of every batch."""

NORMALIZED = (
    keys.LOSS_WEIGHTS,
    keys.TOKEN_COUNT,
    keys.SEQUENCE_COUNT,
    keys.TOKEN_ROLES,
    keys.DEMONSTRATION_WEIGHTS,
)
"""Entries that ``GRPOLoss.normalize`` writes."""

_REJECTED = ("tokens", "sequences")
_CORRECTION_METRICS = (
    "mismatch_k1",
    "mismatch_k3",
    "mismatch_chi2",
    "mismatch_ppl_gap",
    LARGEST_RATIO,
    *(f"rejected_{unit}" for unit in _REJECTED),
)
"""Metrics of a batch whose objective is corrected for the mismatch of sampling and training."""


class GRPOLoss(LossModule):
    """Clipped policy-gradient loss of GRPO (arXiv 2402.03300, equation 3).

    ``loss_objective`` is minus the clipped surrogate, averaged over the tokens of a sequence and
    then over sequences. The arguments turn it into its relatives: Dr. GRPO
    (``aggregation="constant"`` with ``constant_length``), DAPO (``aggregation="token_mean"``,
    ``clip_epsilon=(0.2, 0.28)``), GSPO (``ratio_level="sequence"``). A subclass overrides
    ``surrogate``. ``loss_kl_to_ref``, ``loss_kl_to_inference``, ``loss_entropy``, ``loss_teacher``
    and ``loss_sft`` exist when their coefficient is not 0. Only entries named ``loss_*`` belong to
    the loss: add those up, and never average over the whole output. Everything else is a detached
    metric.

    ``normalize`` fixes the weights of tokens over a whole optimization batch; then the outputs of
    its micro-batches add up to those of the batch, and so do the gradients. For a batch without
    those weights, ``forward`` computes them from the batch itself.

    Args:
        actor_network: a TensorDict module that writes the current log-probs ``("cur_log_probs",
            "full")`` and ``("entropy", "full")``, [B, T] padded on the right, such as
            ``TokenScorer``. TorchRL's ``TransformersWrapper`` becomes a ``WrapperScorer`` of its
            model.

    Keyword Args:
        clip_epsilon: clip range of the ratio, ``e`` for ``[1 - e, 1 + e]`` or a pair ``(low,
            high)``. Low is in [0, 1] (1 disables the lower bound), high is at least 0.
        ratio_level: ``"token"``; ``"sequence"``, the exponential of the mean log-ratio of a
            sequence for all of its tokens (GSPO, arXiv 2507.18071); or ``"sequence_token"``, the
            same value with each token's own gradient (GSPO-token).
        aggregation: average over tokens, see ``functional.token_weights``.
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
            estimates them from ``staleness`` (``functional.interpolated_log_prob``).
        behaviour_weight: bound of the factor proximal / sampling probability of the objective:
            ``"truncate"`` and ``"mask"`` are truncated and masked importance sampling; ``"none"``
            is weight 1. See ``functional.behaviour_weight``.
        behaviour_level: whether a weight is that of a ``"token"`` or of its ``"sequence"``.
        behaviour_cap: largest weight, above 0.
        behaviour_floor: smallest weight, at most the cap; above 0 it bounds weights on both sides.
        rejection: rules that remove tokens and sequences from the objective, but not from the KL
            and entropy terms or the divisors of means: bounds by rule, ``{"geometric": (0.99,
            1.01)}``. A token must pass all given rules of ``functional.REJECTIONS``;
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
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``, for both; override ``kl`` for another one.
        entropy_coeff: weight of the entropy bonus.
        teacher_coeff: weight of the divergence from a teacher that ``actor_network`` writes
            (``TokenScorer.distill_from``); 0 needs none.
        teacher_clip: largest divergence of a token that counts, in nats; a token above it has no
            gradient. None is unbounded.
        sft_coeff: weight of minus the log-likelihood of the demonstrations in the batch, the mean
            over their masked tokens (``DemonstrationLoss`` with ``aggregation="token_mean"``); 0
            needs none.
        device: of the loss's own buffers; by default, the device on which the model computes.

    Input keys (``set_keys`` renames them; ``in_keys`` has all that ``forward`` may read, and
    ``required_in_keys`` those without which it raises): ``action`` [B, T] int64, the tokens (a ``TokenScorer``
    reads them), ``advantage`` [B, 1] (or TorchRL's [B, 1, 1]) or [B, T],
    ``sample_log_prob`` [B, T], ``ref_log_probs`` [B, T], ``mask`` [B, T] bool (the tokens that the
    policy sampled), ``cur_log_prob`` and ``entropy`` as above; ``prox_log_prob`` [B, T],
    ``prox_entropy`` [B, T], ``staleness`` [B, 1] or [B, T] and ``truncated`` [B, 1] bool if an
    argument requires them,
    ``divergence`` [B, T] with a ``teacher_coeff``, and ``is_demonstration`` [B, 1] bool with an
    ``sft_coeff``: its rows count only in ``loss_sft``. Rows with the same ``"trajectory"`` [B, 1]
    int64 are samples of one trajectory, which counts as one sequence. If the batch has
    ``reward_valid`` [B, 1] bool, sequences marked False are ignored; with ``teacher_valid`` [B, 1]
    bool, the divergence from the teacher is 0 in sequences marked False.

    Output (``GRPOLossOutput``), all scalars: the ``loss_*`` entries; ``objective``,
    ``clip_fraction_low`` and ``clip_fraction_high`` (tokens whose gradient the lower or upper clip
    took away), ``ESS``, ``ratio_mean``, ``ratio_square_mean``, ``kl_k1_to_inference``,
    ``kl_k3_to_inference``, ``entropy``; ``kl_k1_to_ref`` and ``kl_k3_to_ref`` with reference
    log-probs, ``kl_k1_to_teacher`` and ``kl_k3_to_teacher`` with a teacher's,
    ``divergence_to_teacher`` with a ``teacher_coeff``; ``behaviour_weight`` and
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

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        advantage: NestedKey = keys.ADVANTAGE
        action: NestedKey = keys.FULL
        sample_log_prob: NestedKey = keys.LOG_PROBS
        ref_log_probs: NestedKey = keys.REF_LOG_PROBS
        mask: NestedKey = keys.ASSISTANT_MASK
        cur_log_prob: NestedKey = keys.CUR_LOG_PROBS
        entropy: NestedKey = keys.ENTROPY
        prox_log_prob: NestedKey = keys.PROX_LOG_PROBS
        prox_entropy: NestedKey = keys.PROX_ENTROPY
        staleness: NestedKey = keys.STALENESS
        truncated: NestedKey = keys.TRUNCATED
        reward_valid: NestedKey = keys.REWARD_VALID
        teacher_valid: NestedKey = keys.TEACHER_VALID
        teacher_log_probs: NestedKey = keys.TEACHER_LOG_PROBS
        divergence: NestedKey = keys.DIVERGENCE
        is_demonstration: NestedKey = keys.IS_DEMONSTRATION

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    _schedulable_buffers = frozenset({"clip_epsilon_low", "clip_epsilon_high"})

    actor_network: TensorDictModuleBase
    clip_epsilon_low: Any
    clip_epsilon_high: Any
    _in_keys: list[NestedKey] | None = None
    _out_keys_apparent: list[NestedKey] | None = None

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
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
        device: torch.device | str | int | None = None,
        **others: Any,
    ) -> None:
        load_extra("refuse_arguments")(type(self), others)
        super().__init__()
        self.actor_network = _scorer(actor_network)
        device = _device(self.actor_network) if device is None else torch.device(device)
        for bound in ("clip_epsilon_low", "clip_epsilon_high"):
            self.register_buffer(bound, torch.zeros((), device="cpu").to(device))
        self.clip_epsilon = clip_epsilon
        self.ratio_level = ratio_level
        self.aggregation = CHOICES.get(aggregation, aggregation)
        self.constant_length = constant_length
        self.dual_clip = dual_clip
        self.proximal = proximal
        self.behaviour_weight = behaviour_weight
        self.behaviour_level = behaviour_level
        self.behaviour_cap = behaviour_cap
        self.behaviour_floor = behaviour_floor
        self.rejection = check_rejection(rejection)
        self.top_entropy_quantile = top_entropy_quantile
        self.score_centering = score_centering
        self.mask_truncated = mask_truncated
        self.kl_mask_threshold = kl_mask_threshold or 0.0
        self.kl_estimator = kl_estimator
        self.kl_to_ref_coeff = kl_to_ref_coeff or 0.0
        self.kl_bias_correction = kl_bias_correction
        self.kl_to_inference_coeff = kl_to_inference_coeff or 0.0
        self.entropy_coeff = entropy_coeff
        self.teacher_coeff = teacher_coeff
        self.teacher_clip = teacher_clip
        self.sft_coeff = sft_coeff
        self._check_arguments()

    @property
    def clip_epsilon(self) -> tuple[Tensor, Tensor]:
        """Clip range (low, high); it can be set to a number or a pair, as in the constructor."""
        return self.clip_epsilon_low, self.clip_epsilon_high

    @clip_epsilon.setter
    def clip_epsilon(self, value: float | tuple[float, float]) -> None:
        self.clip_epsilon_low, self.clip_epsilon_high = check_clip_epsilon(value)

    def _check_arguments(self) -> None:
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_choice("proximal", self.proximal, (*get_args(Proximal), "current"))
        check_choice("behaviour_weight", self.behaviour_weight, get_args(WeightBound))
        check_choice("behaviour_level", self.behaviour_level, get_args(WeightLevel))
        check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        check_behaviour_weight(self.behaviour_weight, self.proximal)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip={self.dual_clip} must be above 1: use 3.0, or None to disable it."
            )
        if self.behaviour_cap <= 0:
            raise ValueError(f"behaviour_cap={self.behaviour_cap} must be above 0: use 5.0.")
        check_floor(self.behaviour_floor, self.behaviour_cap)
        check_top_entropy(self.top_entropy_quantile, self.proximal)
        if self.score_centering:
            is_current = self.proximal == "current"
            check_score_centering(is_current, self.behaviour_level, self.rejection)
        length = self.constant_length
        if (length or 0) < 1 and (length is not None or self.aggregation == "constant"):
            raise ValueError(
                f"constant_length={length} must be at least 1, because it divides the sums of "
                "aggregation='constant': use the longest response allowed, in tokens."
            )
        for term, coefficient in self._coefficients().items():
            if coefficient < 0:
                raise ValueError(
                    f"{term}_coeff={coefficient} must not be negative: use 0 to switch the term "
                    "off."
                )

    def _coefficients(self) -> dict[str, float]:
        """Return the coefficient of each optional term, whose output is ``loss_`` and its name."""
        return {
            "kl_to_ref": self.kl_to_ref_coeff,
            "kl_to_inference": self.kl_to_inference_coeff,
            "entropy": self.entropy_coeff,
            "teacher": self.teacher_coeff,
            "sft": self.sft_coeff,
        }

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of all entries that ``forward`` may read, or those that were set, until keys are
        renamed: ``batch.select(*loss.in_keys, strict=False)`` changes no output.
        """
        if self._in_keys is not None:
            return self._in_keys
        names = self.tensor_keys
        optional = [
            *getattr(self.actor_network, "optional_in_keys", ()),
            names.ref_log_probs,
            names.reward_valid,
            names.teacher_valid,
            names.teacher_log_probs,
            keys.TRAJECTORY,
            *NORMALIZED,
        ]
        return list(dict.fromkeys([*self.required_in_keys, *optional]))

    @in_keys.setter
    def in_keys(self, names: list[NestedKey] | None) -> None:
        self._in_keys = names

    @property
    def required_in_keys(self) -> list[NestedKey]:
        """Keys of the entries that a batch must have."""
        names = self.tensor_keys
        scorer = self.actor_network
        centers = self._centers
        optional = {
            keys.KEPT: centers,
            keys.KEPT_LOG_PROBS: centers,
            names.prox_log_prob: self.proximal == "recomputed",
            names.prox_entropy: self.top_entropy_quantile < 1,
            names.staleness: self.proximal == "interpolated",
            names.truncated: self.mask_truncated,
            names.ref_log_probs: self.kl_to_ref_coeff,
            names.divergence: self.teacher_coeff,
            names.is_demonstration: self.sft_coeff,
        }
        required = [names.mask, names.sample_log_prob, names.advantage]
        required += [key for key, needed in optional.items() if needed]
        own = [key for key in required if key not in scorer.out_keys]
        renamed = dict(self._renamed())
        return list(dict.fromkeys([*(renamed.get(key, key) for key in scorer.in_keys), *own]))

    def _renamed(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return the keys of the scorer's entries that have another name in the batch, and that."""
        names = self.tensor_keys
        pairs = [(keys.FULL, names.action), (keys.ASSISTANT_MASK, names.mask)]
        own = self.actor_network.in_keys
        return [(key, name) for key, name in pairs if key != name and key in own]

    @property
    def _centers(self) -> bool:
        """Whether the scorer is asked for the mean scores."""
        return self.score_centering and isinstance(self.actor_network, TokenScorer)

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` returns for a batch with exactly the ``in_keys``, or those that
        ``select_out_keys`` leaves.
        """
        if self._out_keys_apparent is not None:
            return self._out_keys_apparent
        terms = [f"loss_{term}" for term, value in self._coefficients().items() if value]
        optional = {
            ("behaviour_weight", "behaviour_capped"): self.behaviour_weight != "none",
            (*_CORRECTION_METRICS, *self._rejection_metrics()): self._corrects,
            ("loss_score_centering",): self.score_centering,
            ("divergence_to_teacher",): self.teacher_coeff,
            ("kl_k1_to_ref", "kl_k3_to_ref", "kl_to_ref"): self.kl_to_ref_coeff,
        }
        metrics = [name for names, written in optional.items() if written for name in names]
        return ["loss_objective", *terms, *_METRICS, *metrics, *TORCHRL_METRICS[:3]]

    @out_keys.setter
    def out_keys(self, names: list[NestedKey]) -> None:
        self._out_keys_apparent = names

    @property
    def _corrects(self) -> bool:
        """Whether the loss corrects for the mismatch of sampling and training."""
        return self.behaviour_weight != "none" or bool(self.rejection)

    def _rejection_metrics(self) -> list[str]:
        return [f"rejected_{unit}_{rule}" for rule in self.rejection for unit in _REJECTED]

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """Nothing to forward without a value estimator, and the scorer stays as it is."""
        self.in_keys = None

    def normalize(self, batch: TensorDictBase) -> TensorDictBase:
        """Fix the weight of each token and the token count over a whole optimization batch, in
        place.

        Call it before splitting the batch, so that micro-batches add up to the batch.

        Args:
            batch: [N], ragged or padded, with ``mask`` and ``sample_log_prob`` [N, T], and the other entries that
                decide which tokens count (``truncated``, ``reward_valid``).
        """
        mask = self._mask(batch)
        dtype = pad(batch, self.tensor_keys.sample_log_prob).dtype
        set_padded(batch, keys.LOSS_WEIGHTS, self._weights(mask, dtype, trajectories_of(batch)))
        for key, counted in ((keys.TOKEN_COUNT, mask), (keys.SEQUENCE_COUNT, mask.any(1))):
            count = counted.sum().clamp(min=1)
            batch.set(key, count.expand(mask.shape[0], 1).contiguous())
        set_padded(batch, keys.TOKEN_ROLES, self.token_roles(batch, mask))
        if self.sft_coeff:
            weights = self._demonstration_weights(batch, dtype)
            set_padded(batch, keys.DEMONSTRATION_WEIGHTS, weights)
        return batch

    def _mask(self, batch: TensorDictBase) -> Tensor:
        """Return [N, T] bool, the sampled tokens of the loss."""
        mask = pad(batch, self.tensor_keys.mask)
        width = mask.shape[1]
        if has(batch, self.tensor_keys.reward_valid):
            mask = mask & _of_sequence_or_token(batch, self.tensor_keys.reward_valid, width)
        if self.mask_truncated:
            mask = mask & ~_of_sequence_or_token(batch, self.tensor_keys.truncated, width)
        if self.sft_coeff:
            mask = mask & ~_of_sequence_or_token(batch, self.tensor_keys.is_demonstration, width)
        return mask

    def token_roles(self, batch: TensorDictBase, mask: Tensor) -> Tensor:
        """[N, T] uint8 or bool, 0 for tokens that leave the objective by a rule over the whole
        batch. Subclasses may add rules.

        Args:
            batch: [N], the whole optimization batch.
            mask: [N, T] bool, the tokens that count.
        """
        if self.top_entropy_quantile == 1:
            return mask
        entropy = pad(batch, self.tensor_keys.prox_entropy)
        return F.top_entropy_tokens(entropy, mask, self.top_entropy_quantile)

    def _demonstration_weights(self, batch: TensorDictBase, dtype: torch.dtype) -> Tensor:
        mask = pad(batch, self.tensor_keys.mask)
        mask = mask & _of_sequence_or_token(batch, self.tensor_keys.is_demonstration, mask.shape[1])
        return F.token_weights(mask, "token_mean", dtype=dtype)

    def _weights(self, mask: Tensor, dtype: torch.dtype, trajectory: Tensor | None) -> Tensor:
        trajectory = None if trajectory is None else trajectory.to(mask.device)
        length = self.constant_length or 1
        return F.token_weights(
            mask, self.aggregation, constant_length=length, dtype=dtype, trajectory=trajectory
        )

    def ratio(self, log_prob: Tensor, prox_log_prob: Tensor, mask: Tensor) -> Tensor:
        """Return current over proximal probability, [B, T], at the level ``ratio_level``."""
        if self.ratio_level == "token":
            return F.importance_ratio(log_prob, prox_log_prob)
        mean = F.sequence_log_ratio(log_prob - prox_log_prob, mask)
        if self.ratio_level == "sequence_token":
            mean = mean.detach() + log_prob - log_prob.detach()
        return F.importance_ratio(mean, torch.zeros_like(mean)).expand_as(log_prob)

    def behaviour(self, log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
        """Return the sampling policy's log-probs, [B, T]. Losses for other data override it."""
        return sample_log_prob

    def surrogate(self, ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """Return the per-token objective to maximize: PPO's clipped surrogate. Subclasses override
        it.

        Args:
            ratio: [B, T], from the method ``ratio``.
            log_prob: [B, T], current log-probs.
            advantage: [B, T], the same for all tokens of a sequence unless the batch has one per
                token.
        """
        return F.clipped_surrogate(ratio, advantage, self.clip_epsilon_low, self.clip_epsilon_high)

    def _objective(self, tokens: _Tokens, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the surrogate; override it if a token's value depends on other tokens."""
        return self.surrogate(ratio, tokens.log_prob, advantage)

    def kl(self, log_prob: Tensor, other_log_prob: Tensor) -> Tensor:
        """Return the KL of each token to the reference or the sampling policy, [B, T], for the
        loss. Subclasses override it.
        """
        return F.KL_ESTIMATORS[self.kl_estimator](log_prob, other_log_prob)

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return, [B, T] bool each, the tokens without gradient because of the lower and the upper
        clip, for the metrics.
        """
        below = ratio < 1 - self.clip_epsilon_low
        above = ratio > 1 + self.clip_epsilon_high
        return below & (advantage < 0), above & (advantage > 0)

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        """Return the loss terms and the metrics of a batch [B], ragged or padded on the right; see
        the class.
        """
        if tensordict.ndim != 1 or not len(tensordict):
            raise ValueError(
                f"batch_size={list(tensordict.batch_size)} must be [N], at least one sequence: use "
                "batch[:1] for one of them, batch.reshape(-1) for more dimensions, and leave out "
                "empty batches."
            )
        data = tensordict.copy()
        for key, name in self._renamed():
            copy_entry(data, name, key)
        options = {"centering": self._centering} if self._centers else {}
        tokens = self._read_tokens(self.actor_network(data, **options))
        out = self._policy_gradient(tokens)
        out |= self._kl_to_ref(tokens)
        out |= self._kl_to_inference(tokens)
        out |= self._entropy(tokens)
        out |= self._divergence_from_teacher(tokens)
        out |= self._demonstrations(tokens)
        out["clip_fraction"] = out["clip_fraction_low"] + out["clip_fraction_high"]
        out["kl_approx"] = -out["kl_k1_to_inference"]
        out["kl_to_inference"] = out["kl_k3_to_inference"]
        if "kl_k3_to_ref" in out:
            out["kl_to_ref"] = out["kl_k3_to_ref"]
        selected = self._out_keys_apparent
        return GRPOLossOutput(out if selected is None else {name: out[name] for name in selected})

    def select_out_keys(self, *out_keys: str) -> GRPOLoss:
        """Return only these outputs from here on. TorchRL's own needs a batch with all in_keys."""
        self.out_keys = list(out_keys)
        return self

    def reset_out_keys(self) -> GRPOLoss:
        """Return all outputs again."""
        self._out_keys_apparent = None
        return self

    def _read_tokens(self, data: TensorDictBase) -> _Tokens:
        """Return the common inputs of the terms from a batch that the actor network has scored."""
        log_prob = entry(data, self.tensor_keys.cur_log_prob)
        mask = self._mask(data).to(log_prob.device)
        if self.kl_mask_threshold > 0:
            key = self.tensor_keys.sample_log_prob
            sampled = _of_sequence_or_token(data, key, mask.shape[1]).to(mask.device)
            mask = mask & (F.kl_k2(log_prob, sampled) <= self.kl_mask_threshold)
        if has(data, keys.LOSS_WEIGHTS):
            weights = pad(data, keys.LOSS_WEIGHTS)
        else:
            weights = self._weights(mask, log_prob.dtype, trajectories_of(data))
        count = data.get(keys.TOKEN_COUNT, None)
        count = mask.sum().clamp(min=1) if count is None else count[0, 0]
        log_prob = torch.where(mask, log_prob, 0.0)
        tokens = _Tokens(data, mask, weights.to(mask.device), count.to(mask.device), log_prob)
        of_batch = has(data, keys.TOKEN_ROLES)
        roles = pad(data, keys.TOKEN_ROLES) if of_batch else self.token_roles(data, mask)
        tokens.roles = roles.to(mask.device)
        sample_log_prob = tokens.read(self.tensor_keys.sample_log_prob).detach()
        tokens.sample_log_prob = self.behaviour(log_prob, sample_log_prob)
        return tokens

    def _policy_gradient(self, tokens: _Tokens) -> dict[str, Tensor]:
        """Return minus the surrogate and its metrics."""
        advantage = tokens.read(self.tensor_keys.advantage)
        prox = self._proximal_log_prob(tokens)
        ratio = self.ratio(tokens.log_prob, prox, tokens.mask)
        tokens.ratio = ratio
        surrogate = self._objective(tokens, ratio, advantage)
        if self.dual_clip is not None:
            surrogate = F.dual_clip(surrogate, advantage, self.dual_clip)
        weight, correction = self._correction(tokens, prox, advantage)
        surrogate = torch.where(tokens.roles > 0, weight * surrogate, 0.0)
        out = {"loss_objective": -tokens.weighted_sum(surrogate)}
        out |= self._score_centering(tokens, advantage)

        clipped_low, clipped_high = self.clipped(ratio, advantage)
        out |= tokens.means(
            objective=surrogate,
            clip_fraction_low=clipped_low,
            clip_fraction_high=clipped_high,
            ratio_mean=ratio,
            ratio_square_mean=ratio.square(),
        )
        own_mean = F.masked_mean(ratio.detach(), tokens.mask)
        own_square_mean = F.masked_mean(ratio.detach().square(), tokens.mask)
        out["ESS"] = F.effective_sample_size(own_mean, own_square_mean)
        return out | correction

    def _correction(
        self, tokens: _Tokens, prox: Tensor, advantage: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the factor of each token's objective that corrects for the mismatch of sampling
        and training, and its metrics.
        """
        log_weight, mask = prox - tokens.sample_log_prob, tokens.mask
        bound, level = self.behaviour_weight, self.behaviour_level
        cap, floor = self.behaviour_cap, self.behaviour_floor
        weight = F.behaviour_weight(log_weight, mask, bound, level, cap, floor)
        if not self._corrects:
            return weight, {}
        out: dict[str, Tensor] = {}
        if bound != "none":
            unbounded = F.behaviour_weight(log_weight, mask, "truncate", level, math.inf)
            out |= tokens.means(behaviour_weight=weight, behaviour_capped=weight != unbounded)
        current = tokens.log_prob.detach()
        trainer = prox if self.proximal == "recomputed" else current
        gap = F.Mismatch(trainer, current, tokens.sample_log_prob, advantage, mask)
        out |= tokens.mismatch(gap)
        for rule, (low, high) in self.rejection.items():
            rejected = F.REJECTIONS[rule](gap, low, high).expand_as(mask)
            out |= tokens.rejected(rejected, f"_{rule}")
            weight = torch.where(rejected, 0.0, weight)
            tokens.rejections |= rejected
        return weight, out | tokens.rejected(weight == 0)

    def _centering(self, log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
        bound, cap, floor = self.behaviour_weight, self.behaviour_cap, self.behaviour_floor
        return F.centering_coefficients(log_prob, sample_log_prob, bound, cap, floor)

    def _score_centering(self, tokens: _Tokens, advantage: Tensor) -> dict[str, Tensor]:
        """Return the term whose gradient is each token's advantage times the mean score."""
        if not self.score_centering:
            return {}
        trained = (tokens.roles > 0) & ~tokens.rejections
        centering = torch.where(trained, tokens.read(keys.CENTERING), 0.0)
        return {"loss_score_centering": tokens.weighted_sum(advantage * centering)}

    def _proximal_log_prob(self, tokens: _Tokens) -> Tensor:
        """Return the log-probs that the ratio is clipped around."""
        if self.proximal == "recomputed":
            return tokens.read(self.tensor_keys.prox_log_prob)
        if self.proximal == "interpolated":
            staleness = tokens.read(self.tensor_keys.staleness)
            return F.interpolated_log_prob(tokens.log_prob, tokens.sample_log_prob, staleness)
        if self.proximal == "current":
            return tokens.log_prob.detach()
        return tokens.sample_log_prob

    def _kl_to_ref(self, tokens: _Tokens) -> dict[str, Tensor]:
        """Return the KL to the reference policy and its metrics, if the batch has its log-probs."""
        key = self.tensor_keys.ref_log_probs
        if not self.kl_to_ref_coeff and not has(tokens.data, key):
            return {}
        out = {}
        reference = tokens.read(key)
        if self.kl_to_ref_coeff:
            kl = self.kl(tokens.log_prob, reference)
            if self.kl_bias_correction:
                kl = kl * tokens.ratio
            out["loss_kl_to_ref"] = self.kl_to_ref_coeff * tokens.weighted_sum(kl)
        return out | tokens.kl_means("ref", reference)

    def _kl_to_inference(self, tokens: _Tokens) -> dict[str, Tensor]:
        """Return the KL to the sampling policy and its metrics."""
        out = {}
        if self.kl_to_inference_coeff:
            kl = self.kl(tokens.log_prob, tokens.sample_log_prob)
            out["loss_kl_to_inference"] = self.kl_to_inference_coeff * tokens.weighted_sum(kl)
        return out | tokens.kl_means("inference", tokens.sample_log_prob)

    def _entropy(self, tokens: _Tokens) -> dict[str, Tensor]:
        """Return the entropy bonus and the mean entropy."""
        entropy = tokens.read(self.tensor_keys.entropy)
        out = {}
        if self.entropy_coeff:
            out["loss_entropy"] = -self.entropy_coeff * tokens.weighted_sum(entropy)
        return out | tokens.means(entropy=entropy)

    def _divergence_from_teacher(self, tokens: _Tokens) -> dict[str, Tensor]:
        """Return the divergence from a teacher, and the metrics that the batch has data for."""
        out, key, valid = {}, self.tensor_keys.teacher_valid, None
        if has(tokens.data, key):
            valid = tokens.read(key) > 0
        if self.teacher_coeff:
            divergence = tokens.read(self.tensor_keys.divergence)
            if valid is not None:
                divergence = torch.where(valid, divergence, 0.0)
            if self.teacher_clip is not None:
                divergence = divergence.clamp(max=self.teacher_clip)
            out["loss_teacher"] = self.teacher_coeff * tokens.weighted_sum(divergence)
            out |= tokens.means(divergence_to_teacher=divergence)
        if has(tokens.data, self.tensor_keys.teacher_log_probs):
            log_prob = tokens.read(self.tensor_keys.teacher_log_probs)
            if valid is not None:
                log_prob = torch.where(valid, log_prob, tokens.log_prob.detach())
            out |= tokens.kl_means("teacher", log_prob)
        return out

    def _demonstrations(self, tokens: _Tokens) -> dict[str, Tensor]:
        """Return minus the log-likelihood of the demonstrations."""
        if not self.sft_coeff:
            return {}
        log_prob = entry(tokens.data, self.tensor_keys.cur_log_prob)
        if has(tokens.data, keys.DEMONSTRATION_WEIGHTS):
            weights = pad(tokens.data, keys.DEMONSTRATION_WEIGHTS)
        else:
            weights = self._demonstration_weights(tokens.data, log_prob.dtype)
        weights = weights.to(log_prob.device)
        log_likelihood = (weights * torch.where(weights > 0, log_prob, 0.0)).sum()
        return {"loss_sft": -self.sft_coeff * log_likelihood}


@dataclass
class _Tokens:
    """Tokens of a scored batch, [B, T], and the sums and means over them that the loss returns.

    Args:
        data: the batch, with the outputs of the actor network.
        mask: bool, the tokens that count.
        weights: of each token in the loss, 0 outside the mask.
        count: divisor of means, the number of tokens of the whole optimization batch.
        log_prob: of the current policy, 0 outside the mask.
    """

    data: TensorDictBase
    mask: Tensor
    weights: Tensor
    count: Tensor
    log_prob: Tensor
    roles: Tensor = field(init=False)
    sample_log_prob: Tensor = field(init=False)
    ratio: Tensor = field(init=False)
    rejections: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rejections = torch.zeros_like(self.mask)

    def read(self, key: NestedKey) -> Tensor:
        """Return an entry with one value per sequence or token as [B, T], 0 outside the mask."""
        value = _of_sequence_or_token(self.data, key, self.mask.shape[1])
        return torch.where(self.mask, value.to(self.mask.device), 0.0)

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Return the sum that is part of the loss."""
        return (self.weights * values).sum()

    def means(self, **values: Tensor) -> dict[str, Tensor]:
        """Return metrics: the detached mean of each argument under its name."""
        dtype = self.log_prob.dtype
        return {
            name: F.masked_mean(value.detach().to(dtype), self.mask, self.count)
            for name, value in values.items()
        }

    def sequence_means(self, **values: Tensor) -> dict[str, Tensor]:
        """Return metrics: the mean of each argument [B, 1] over the sequences with tokens."""
        count = self.data.get(keys.SEQUENCE_COUNT, None)
        count = None if count is None else count[0, 0].to(self.mask.device)
        ends = self.mask.any(1, keepdim=True)
        return {
            name: F.masked_mean(value.to(self.log_prob.dtype), ends, count)
            for name, value in values.items()
        }

    def mismatch(self, gap: F.Mismatch) -> dict[str, Tensor]:
        """Return the divergences of the trainer's from the sampling policy as metrics."""
        ratio = gap.log_ratio.exp()
        k3 = F.kl_k3(torch.zeros_like(ratio), gap.log_ratio)
        out = self.means(mismatch_k1=-gap.log_ratio, mismatch_k3=k3, mismatch_chi2=ratio**2 - 1)
        out |= self.sequence_means(mismatch_ppl_gap=gap.mean(-gap.log_ratio))
        return out | {LARGEST_RATIO: torch.where(self.mask, ratio, 0.0).amax()}

    def rejected(self, rejected: Tensor, rule: str = "") -> dict[str, Tensor]:
        """Return the shares of tokens, and of sequences with all of their tokens, as metrics."""
        whole = (rejected | ~self.mask).all(1, keepdim=True)
        tokens = self.means(**{f"rejected_tokens{rule}": rejected})
        return tokens | self.sequence_means(**{f"rejected_sequences{rule}": whole})

    def kl_means(self, policy: str, log_prob: Tensor) -> dict[str, Tensor]:
        """Return two estimates of the KL to another policy as metrics."""
        k1 = F.kl_k1(self.log_prob.detach(), log_prob)
        k3 = F.kl_k3(self.log_prob.detach(), log_prob)
        return self.means(**{f"kl_k1_to_{policy}": k1, f"kl_k3_to_{policy}": k3})


def _device(scorer: TensorDictModuleBase) -> torch.device:
    return compute_device(scorer.model if isinstance(scorer, TokenScorer) else scorer)


def _scorer(actor_network: nn.Module) -> TensorDictModuleBase:
    """Return the module that writes current log-probs and entropy, made from a TorchRL wrapper's
    model if necessary.

    Raises:
        ValueError: ``actor_network`` is not a TensorDict module, or the wrapper has no Hugging Face
            model.
    """
    # A caller with a wrapper has imported this module; importing it here would import vLLM if it
    # is installed.
    wrappers = sys.modules.get("torchrl.modules.llm")
    if wrappers is not None and isinstance(actor_network, wrappers.LLMWrapperBase):
        return WrapperScorer(actor_network)
    if not hasattr(actor_network, "out_keys"):
        raise ValueError(
            f"actor_network={type(actor_network).__name__} must be a TensorDict module that writes "
            "log-probs and entropy of the sampled tokens: use TokenScorer(model)."
        )
    return actor_network


def _of_sequence_or_token(batch: TensorDictBase, key: NestedKey, width: int) -> Tensor:
    """Return an entry with one value for each sequence or each of ``width`` tokens, [N, 1] or [N,
    T].

    Raises:
        KeyError: the batch has no such entry.
        ValueError: the entry has another shape.
    """
    value = pad(batch, key)
    if value.flatten(1).shape[1] not in (1, width):
        raise ValueError(
            f"entry {key!r} of shape {list(value.shape)} must be [{len(batch)}, 1], one value for "
            f"each sequence, or [{len(batch)}, {width}], one for each token: compute it for the "
            "tokens of this batch."
        )
    return value.flatten(1)
