"""Pure tensor math of GRPO: group advantages, KL estimators, importance weights. That of an objective
is in its part (``objectives``).

Nothing here reads a TensorDict or a config. Shape suffixes: N sequences, T tokens, G responses in a
group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_grpo.checks import (
    AdvantageMean,
    AdvantageStd,
    KLEstimator,
    WeightBound,
)

Normalize = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rewards, groups, and which rewards are valid -> advantages; all [N]."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude, so that an absurd ratio stays finite (e^20 = 4.9e8)."""


def head_logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Return the product of an LM head in float32 or wider.

    CUDA multiplies 16-bit factors into float32. On a CPU the product is computed in 16 bits and
    then widened, because a product of widened factors takes twice as long (docs/algorithms.md). No
    gradients flow.

    Args:
        hidden_ND: [N, D].
        weight_VD: [V, D], of the same dtype.
        bias_V: [V] or None.

    Returns:
        [N, V].
    """
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    if dtype == hidden_ND.dtype or rounds_logits(hidden_ND):
        return torch.nn.functional.linear(hidden_ND, weight_VD, bias_V).to(dtype)
    logits = torch.mm(hidden_ND, weight_VD.t(), out_dtype=dtype)
    return logits if bias_V is None else logits.add_(bias_V)


def rounds_logits(hidden: Tensor) -> bool:
    """Return whether ``head_logits`` rounds to 16 bits first for such hidden states."""
    return hidden.dtype in (torch.bfloat16, torch.float16) and hidden.device.type not in (
        "cuda",
        "meta",
    )


def group_advantage(
    reward: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    mean: AdvantageMean = "group",
    std: AdvantageStd = "group",
    eps: float = 1e-6,
    length: Tensor | None = None,
) -> Tensor:
    """Advantage of each response: its reward minus a baseline, divided by a scale.

    ``mean`` is the baseline: ``group`` (arXiv 2402.03300, section 4.1.2), ``leave_one_out`` (the
    mean of the *other* members of the group, arXiv 2402.14740), ``length_weighted`` (the group's
    mean over tokens, OPO's approximation of the baseline of least variance, arXiv 2505.23585),
    ``second_best`` (the best member of the group gets its lead over the second one, the others 0:
    an estimate for pass@k, arXiv 2503.19595), ``batch`` (arXiv 2501.03262) or ``none``. ``std`` is
    the scale: ``eps`` plus the unbiased standard deviation, over the ``group`` or the ``batch``, of
    what the baseline left of the rewards (of the rewards, with ``second_best``); ``group_mean``,
    ``eps`` plus the group's mean reward (MaxRL, arXiv 2602.02710, for rewards of at least 0);
    ``nonzero``, the share of rewards in the batch that are not 0 (GPG, arXiv 2504.02546); or
    ``none`` (arXiv 2503.20783).

    Args:
        reward: [N] floating.
        group: [N] int64, any ids; members need not be adjacent.
        valid: [N] bool, False where the reward is unknown.
        mean: the baseline.
        std: the scale.
        eps: added to the standard deviation.
        length: [N], the tokens of each response; read with ``length_weighted``.

    Returns:
        [N] float32. Exactly 0 for an invalid member. With a baseline or scale of the group, exactly
        0 for a group whose valid rewards are all equal or that has fewer than two of them; with
        those of the batch, for such a batch.

    Raises:
        ValueError: a valid reward is not finite, or a choice is unknown; or a reward is below 0
            with ``group_mean``.
    """
    if mean not in get_args(AdvantageMean) or std not in get_args(AdvantageStd):
        raise ValueError(
            f"mean={mean!r} must be one of {get_args(AdvantageMean)} and std={std!r} one of "
            f"{get_args(AdvantageStd)}: use 'group' for both."
        )
    _, index = group.unique(return_inverse=True)
    one_group = torch.zeros_like(index)
    values = torch.where(valid, reward.to(torch.float64), 0.0)
    if not values.isfinite().all():
        raise ValueError(
            f"reward must be finite where it is valid, but {int((~values.isfinite()).sum())} values "
            "are not: mark them as invalid, or fix what made them."
        )
    rewards, signal = values, valid
    if mean != "none":
        average, count, varies = _statistics(
            rewards, one_group if mean == "batch" else index, valid
        )
        if mean == "length_weighted":
            assert length is not None
            weight = torch.where(valid, length.to(torch.float64), 0.0)
            average = _total(weight * rewards, index) / _total(weight, index)
        signal = valid & varies
        values = torch.where(signal, rewards - average, 0.0)
        if mean == "leave_one_out":
            values = values * (count / (count - 1).clamp(min=1))
        elif mean == "second_best":
            values = _lead(rewards, index, valid)
    if std == "group_mean":
        if (rewards < 0).any():
            raise ValueError(
                f"reward={rewards.min().item():g} must be at least 0 with std='group_mean', which "
                "divides by the mean reward: add a bias to the rewards, or use std='group'."
            )
        average, _, _ = _statistics(rewards, index, valid)
        values = values / (average + eps)
    elif std == "nonzero":
        values = values * (valid.sum() / (rewards != 0).sum().clamp(min=1))
    elif std != "none":
        over = index if std == "group" else one_group
        spread = rewards if mean == "second_best" else values
        center, count, varies = _statistics(spread, over, valid)
        squares = torch.where(valid, (spread - center).square(), 0.0)
        deviation = (_total(squares, over) / (count - 1).clamp(min=1)).sqrt()
        values, signal = values / (deviation + eps), signal & varies
    return torch.where(signal, values, 0.0).to(torch.float32)


def _total(values: Tensor, index: Tensor) -> Tensor:
    """Return, [N], the sum over each element's group; groups are numbered from 0."""
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def _group_max(values: Tensor, index: Tensor, among: Tensor) -> Tensor:
    """Return, [N], the largest value in each element's group; -inf if there is none."""
    lowest = torch.full_like(values, -math.inf)
    return lowest.scatter_reduce(0, index, torch.where(among, values, -math.inf), "amax")[index]


def _lead(rewards: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Return, [N], the lead of each group's best member over the second best; 0 for the others."""
    is_best = valid & (rewards == _group_max(rewards, index, valid))
    second = _group_max(rewards, index, valid & ~is_best)
    is_unique = is_best & (_total(is_best.to(rewards.dtype), index) == 1)
    return torch.where(is_unique & second.isfinite(), rewards - second, 0.0)


def _statistics(values: Tensor, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, [N] each, mean and number of the valid members of each element's group, and whether
    two of them differ.
    """
    count = _total(valid.to(values.dtype), index)
    mean = _total(torch.where(valid, values, 0.0), index) / count.clamp(min=1)
    return mean, count, _group_max(values, index, valid) > -_group_max(-values, index, valid)


def sampled_token_gae(
    reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lmbda: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimate along the sampled tokens of each sequence (arXiv 1506.02438),
    by TorchRL's ``generalized_advantage_estimate``.

    Tokens outside the mask are skipped, so that no time passes on them. After the last one the
    value is 0: the sequence is ``terminated``, even if a limit on tokens cut it off.

    Args:
        reward: [N, T] floating.
        value: [N, T] of the same type: the value of the state that each token was sampled in.
        mask: [N, T] bool, the sampled tokens. ``reward`` and ``value`` may be anything outside it.
        gamma: discount from one sampled token to the next.
        lmbda: weight of rewards beyond the next value, relative to that value.

    Returns:
        the estimate, and the target of the value, which is their sum; [N, T] each, 0 outside the
        mask.
    """
    order = mask.sort(dim=1, descending=True, stable=True).indices[:, : int(mask.any(0).sum())]
    reward, value = (
        torch.where(mask, part, 0.0).gather(1, order).unsqueeze(-1) for part in (reward, value)
    )
    following = torch.nn.functional.pad(value, (0, 0, 0, 1))[:, 1:]
    done = torch.zeros_like(value, dtype=torch.bool)  # all is 0 after the last token
    # As tensors, because TorchRL would round numbers to float32.
    rates = value.new_tensor([gamma, lmbda]).unbind()
    parts = generalized_advantage_estimate(*rates, value, following, reward, done)
    zeros = torch.zeros(mask.shape, dtype=value.dtype, device=value.device)
    advantage, target = (zeros.scatter(1, order, part.squeeze(-1)) for part in parts)
    return advantage, target


def token_advantage(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    group: Tensor,
    gamma: float,
    lmbda: float,
    normalize: Normalize,
) -> tuple[Tensor, Tensor]:
    """Advantage of each sampled token: its generalized advantage estimate, compared with all
    estimates of its group.

    Args:
        reward: [M, T] floating, of the tokens of each trajectory.
        value: [M, T], see ``sampled_token_gae``.
        mask: [M, T] bool, the sampled tokens of valid trajectories.
        group: [M], or [M, T] of each token.
        gamma: discount from one sampled token to the next.
        lmbda: as in ``sampled_token_gae``.
        normalize: returns the advantages, given estimates, their groups, and which are valid.

    Returns:
        the advantages, [M, T] float32, and the targets of the values, [M, T]; 0 outside the mask.
    """
    estimate, target = sampled_token_gae(reward, value, mask, gamma, lmbda)
    groups = group.reshape(len(group), -1).expand_as(mask)[mask]
    advantage = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    advantage[mask] = normalize(estimate[mask], groups, torch.ones_like(groups, dtype=torch.bool))
    return advantage, target


def turn_advantage(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    group: Tensor,
    valid: Tensor,
    gamma: float,
    lmbda: float,
    normalize: Normalize,
) -> tuple[Tensor, Tensor]:
    """Advantage of each turn, on all of its tokens: the generalized advantage estimate along turns,
    which without values is the turn's return, compared with those of the group's other
    trajectories.

    First turns are compared with first turns, second with second, as long as all valid trajectories
    of the group have that turn. Later turns are compared together with the last one that all have.

    Args:
        reward: [M, T] floating, of the tokens of each trajectory.
        value: [M, T] of the same type, of the state that each token was sampled in. A turn's is
            that of its first token.
        mask: [M, T] bool, the sampled tokens of valid trajectories; adjacent ones are one turn.
        group: [M] int64.
        valid: [M] bool.
        gamma: discount from one turn to the next.
        lmbda: as in ``sampled_token_gae``.
        normalize: returns the advantages, given estimates, their groups, and which are valid.

    Returns:
        the advantages, [M, T] float32, and the targets of the values, [M, T], which all tokens of
        a turn share; 0 outside the mask.
    """
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turn, num_turns = (starts.cumsum(1) - 1).clamp(min=0), starts.sum(1)
    numbers = torch.arange(max(1, int(num_turns.max())), device=group.device)
    exists = numbers < num_turns.unsqueeze(-1)
    rewards, values = (
        reward.new_zeros(exists.shape).scatter_add(1, turn, torch.where(where, part, 0.0))
        for where, part in ((mask, reward), (starts, value))
    )
    _, index = group.unique(return_inverse=True)
    # the turns that all valid trajectories have
    common = -_group_max(-num_turns.double(), index, valid)
    last_common = (common - 1).clamp(min=0).unsqueeze(-1)
    compared = index.unsqueeze(-1) * len(numbers) + torch.minimum(numbers, last_common)

    # In float32, where returns that differ only in the order of their sums are equal.
    parts = token_advantage(
        rewards,
        values,
        exists,
        compared,
        gamma,
        lmbda,
        lambda returns, *others: normalize(returns.float(), *others),
    )
    advantage, target = (torch.where(mask, part.gather(1, turn), 0.0) for part in parts)
    return advantage, target


def overlong_penalty(length: Tensor, longest: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    Args:
        length: any shape, tokens of a response.
        longest: the length that gets the full penalty.
        buffer: tokens over which the penalty grows, at least 1.

    Returns:
        float64 of the same shape: 0 up to ``longest - buffer``, from there linear down to -1 at
        ``longest``, -1 beyond.
    """
    return ((longest - buffer - length.to(torch.float64)) / buffer).clamp(-1, 0)


def kl_k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimator k1 of KL(p || q) at samples of p: ``log p - log q``. Unbiased, can be negative.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    return log_p - log_q


def kl_k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimator k2 of KL(p || q) at samples of p: ``(log p - log q)^2 / 2``. Biased, never
    negative.
    """
    return (log_p - log_q).square() / 2


def kl_k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimator k3 of KL(p || q) at samples of p: ``q/p - 1 - log(q/p)``, where ``log(q/p)`` is
    clamped to [-20, 20]. Unbiased but for that, never negative.

    This is the KL term of GRPO (arXiv 2402.03300, equation 4).
    """
    log_ratio = (log_q - log_p).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}
"""The estimators by name. As a loss, k2 has the gradient of the KL itself; on-policy, k1's is 0 in
expectation.
"""


def importance_ratio(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Return ``cur / sample`` per token; the log-ratio is clamped to [-20, 20]."""
    return (log_prob - sample_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_weight(log_ratio: Tensor, bound: WeightBound, cap: float, floor: float = 0.0) -> Tensor:
    """Return the exponentials of log-ratios of any shape: ``truncate`` clamps them to ``floor`` and
    ``cap``, ``mask`` sets those outside to 0, ``none`` is weight 1 everywhere.
    """
    if bound == "none":
        return torch.ones_like(log_ratio)
    weight = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = weight.clamp(floor, cap)
    return bounded if bound == "truncate" else torch.where(weight == bounded, weight, 0.0)


def centering_coefficients(
    log_prob: Tensor, sample_log_prob: Tensor, bound: WeightBound, cap: float, floor: float
) -> Tensor:
    """Share of each possible token in the mean score that score centering subtracts: ``q f(p / q)``
    (arXiv 2609.20807, with the whole distribution in place of its head and a tail).

    Of samples from q, the update ``A f(p / q) grad log p`` has the mean ``E[A] sum(q f(p / q) grad
    log p)`` plus a covariance. The first part is a drift, which does not vanish unless f is the
    whole ratio; subtracting ``A sum(q f(p / q) grad log p)`` removes it.

    Args:
        log_prob: [N, K] log p, the trainer's.
        sample_log_prob: [N, K] log q of the policy that sampled, -inf where there is no token.
        bound: f, as in ``bounded_weight``.
        cap: largest weight.
        floor: smallest weight.

    Returns:
        [N, K], without gradient.
    """
    exists = sample_log_prob.isfinite()
    log_ratio = torch.where(exists, log_prob - sample_log_prob, 0.0).detach()
    weight = bounded_weight(log_ratio, bound, cap, floor)
    return torch.where(exists, sample_log_prob.exp() * weight, 0.0)


def effective_sample_size(ratio_mean: Tensor, ratio_square_mean: Tensor) -> Tensor:
    """Effective sample size as a share: ``E[w]^2 / E[w^2]``, in (0, 1]; 1 when all weights are
    equal.
    """
    return ratio_mean.square() / ratio_square_mean.clamp(
        min=torch.finfo(ratio_square_mean.dtype).tiny
    )
