"""Pure tensor maths of GRPO: masked reductions, group advantages, KL estimators, the clipped surrogate.

Nothing here reads a TensorDict or a config. Shape suffixes: N sequences, T tokens, G responses in a group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude, so that an absurd ratio stays finite (e^20 = 4.9e8)."""


def masked_mean(values: Tensor, mask: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Mean of ``values`` where ``mask`` is True; 0 when the mask is empty.

    Args:
        values: any shape, floating.
        mask: bool, the same shape. Values outside it may be anything, NaN included.
        count: what to divide by instead of the number of True elements. A micro-batch passes the count of the whole
            batch, so that the results of its parts add up to the mean over the batch.

    Returns:
        scalar tensor.
    """
    total = torch.where(mask, values, 0).sum()
    if count is None:
        count = mask.sum().clamp(min=1)
    return total / count


def group_advantage(
    reward: Tensor, group: Tensor, valid: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Advantage of each response relative to its group (arXiv 2402.03300, section 4.1.2).

    ``A_i = (r_i - mean(r)) / (std(r) + eps)`` over the valid members of the group of i, with the unbiased standard
    deviation; without ``normalize_std`` only the mean is taken off (arXiv 2503.20783).

    Args:
        reward: [N] floating.
        group: [N] int64, any ids; members need not be adjacent.
        valid: [N] bool, False where the reward is unknown.
        normalize_std: whether to divide by the standard deviation.
        eps: added to the standard deviation.

    Returns:
        [N] float32. Exactly 0 for an invalid member, for a group whose valid rewards are all equal, and for a group
        with fewer than two valid members.
    """
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0
    weight = valid.to(torch.float64)
    reward64 = torch.where(valid, reward.to(torch.float64), 0.0)

    def total(values: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=torch.float64, device=reward.device).index_add_(0, index, values)

    count = total(weight)
    mean = total(reward64) / count.clamp(min=1)
    deviation = torch.where(valid, reward64 - mean[index], 0.0)
    low = torch.full((groups,), math.inf, dtype=torch.float64, device=reward.device)
    high = -low
    low = low.scatter_reduce(0, index, torch.where(valid, reward64, math.inf), "amin")
    high = high.scatter_reduce(0, index, torch.where(valid, reward64, -math.inf), "amax")
    has_signal = (count >= 2) & (high > low)
    advantage = deviation
    if normalize_std:
        std = (total(deviation.square()) / (count - 1).clamp(min=1)).sqrt()
        advantage = deviation / (std[index] + eps)
    return torch.where(valid & has_signal[index], advantage, 0.0).to(torch.float32)


def kl_k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimator k1 of KL(p || q) at samples of p: ``log p - log q``. Unbiased, can be negative.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    return log_p - log_q


def kl_k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimator k2 of KL(p || q) at samples of p: ``(log p - log q)^2 / 2``. Biased, never negative."""
    return (log_p - log_q).square() / 2


def kl_k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimator k3 of KL(p || q) at samples of p: ``q/p - 1 - log(q/p)``. Unbiased, never negative.

    This is the KL term of GRPO (arXiv 2402.03300, equation 4). The log-ratio is clamped to ``MAX_LOG_RATIO``.
    """
    log_ratio = (log_q - log_p).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


def importance_ratio(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """``cur / sample`` per token, from log-probs; the log-ratio is clamped to ``MAX_LOG_RATIO``."""
    return (log_prob - sample_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's pessimistic objective per token: ``min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)``.

    Args:
        ratio: [N, T], current over behaviour probability.
        advantage: [N, 1] or [N, T].
        clip_low: distance below 1, in [0, 1).
        clip_high: distance above 1, at least 0 (arXiv 2503.14476 takes it larger than ``clip_low``).

    Returns:
        [N, T], to be maximised. Its gradient is 0 where the clipped branch is the smaller one.
    """
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def sequence_mean_weights(mask: Tensor, num_sequences: Tensor | float | None = None) -> Tensor:
    """Token weights that make a weighted sum the mean over sequences of the mean over their tokens (arXiv 2402.03300).

    Args:
        mask: [N, T] bool, the tokens that count.
        num_sequences: sequences with at least one such token in the whole batch; by default those of ``mask``.

    Returns:
        [N, T] float32; 0 outside the mask. A sequence without tokens has no effect.
    """
    length = mask.sum(-1, keepdim=True)
    if num_sequences is None:
        num_sequences = (length > 0).sum().clamp(min=1)
    return torch.where(mask, 1.0 / (length.clamp(min=1) * num_sequences), 0.0).to(torch.float32)


def effective_sample_size(ratio_mean: Tensor, ratio_square_mean: Tensor) -> Tensor:
    """Share of samples that carry the weight: ``E[w]^2 / E[w^2]``, in (0, 1]; 1 when all weights are equal."""
    return ratio_mean.square() / ratio_square_mean.clamp(min=torch.finfo(ratio_square_mean.dtype).tiny)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right (arXiv 2107.03374).

    Args:
        num_samples: samples drawn, at least k.
        num_correct: how many of them were right.
        k: at least 1.

    Raises:
        ValueError: ``k > num_samples``.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must be between 1 and the {num_samples} samples drawn: draw more, or lower k.")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
