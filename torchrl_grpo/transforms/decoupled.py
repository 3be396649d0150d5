"""GDPO: the advantage of a reward whose parts are normalized separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.functional import group_advantage
from torchrl_grpo.models.entries import entry
from torchrl_grpo.rewards.spec import part_weight

_CANCELLED = 1e-4  # share of the parts' sizes below which their sum is 0


def reward_parts(batch: TensorDictBase) -> list[dict[str, float | None]]:
    """Return the parts of each sequence's reward, by name.

    Raises:
        KeyError: the batch has no reward parts.
    """
    return entry(batch, keys.REWARD_PARTS).reshape(-1).tolist()


def decoupled_advantage(
    parts: Sequence[Mapping[str, float | None]],
    weights: Sequence[Mapping[str, float]],
    group: Tensor,
    valid: Tensor,
    normalize: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return GDPO's advantage (arXiv 2601.05242): the weighted sum of the parts' advantages,
    normalized over the batch.

    ``A_i = (S_i - mean(S)) / (std(S) + eps)`` over the batch, where ``S_i`` is the sum over the
    parts k of ``w_k A_ki``, and ``A_ki`` is part k normalized within its group by ``normalize``. A
    response that a part does not apply to (None, or no entry) is left out of that part's statistics
    and gets 0 from it, as does a group in which all values of the part are equal.

    Args:
        parts: reward parts of each of N responses, by name.
        weights: weights of each response's parts, see ``rewards.spec.part_weight``.
        group: [N] int64.
        valid: [N] bool, False where the reward is unknown.
        normalize: function from a part's values, the groups and the mask of where it applies to the
            part's advantages, all [N].

    Returns:
        [N] float32, exactly 0 where all parts are 0 or they cancel each other.

    Raises:
        ValueError: a valid response has no parts.

    >>> group = torch.tensor([0, 0])
    >>> parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": None}]
    >>> decoupled_advantage(parts, [{}, {}], group, group == 0, group_advantage)
    tensor([ 0.7071, -0.7071])
    """
    empty = sum(bool(good) and not row for good, row in zip(valid.tolist(), parts, strict=True))
    if empty:
        raise ValueError(
            f"reward_combination=gdpo must have the parts of each reward, but {empty} of "
            f"{len(parts)} responses have no parts: name the reward functions in env.reward, or "
            "return parts in the task's Score."
        )
    names = list(dict.fromkeys(name for row in parts for name in row))
    total, size = torch.zeros((2, *group.shape), dtype=torch.float64, device=group.device)
    for name in names:
        weight = [
            part_weight(name, row, row_weights)
            for row, row_weights in zip(parts, weights, strict=True)
        ]
        if any(weight):
            values = [row.get(name) for row in parts]
            applies = torch.tensor([value is not None for value in values], device=group.device)
            reward = torch.tensor(
                [value or 0.0 for value in values], dtype=torch.float64, device=group.device
            )
            part = reward.new_tensor(weight) * normalize(reward, group, valid & applies).double()
            total = total + part
            size = size + part.abs()
    # Where parts cancel, epsilons and rounding errors remain, which division by the batch's
    # deviation could blow up. Apart from them, the mean over the batch is 0, because the advantages
    # of each part add up to 0 in a group.
    signal = total.abs() > _CANCELLED * size
    advantage = group_advantage(
        torch.where(signal, total, 0.0), group, valid, mean="batch", std="batch"
    )
    return torch.where(signal, advantage, 0.0)
