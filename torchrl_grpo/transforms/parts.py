"""The advantage of a reward in parts, each normalized on its own: GDPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.functional import group_advantage
from torchrl_grpo.models.packing import entry
from torchrl_grpo.rewards.spec import part_weight

_CANCELLED = 1e-4  # share of the parts' sizes below which their sum is 0


def reward_parts(
    batch: TensorDictBase, key: NestedKey = keys.REWARD_PARTS
) -> list[dict[str, float | None]]:
    """The parts of each sequence's reward, by name.

    Raises:
        KeyError: the batch has none.
    """
    parts: list[dict[str, float | None]] = entry(batch, key).reshape(-1).tolist()
    return parts


def decoupled_advantage(
    parts: Sequence[Mapping[str, float | None]],
    weights: Sequence[Mapping[str, float]],
    group: Tensor,
    valid: Tensor,
    normalize: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """GDPO's advantage (arXiv 2601.05242): the weighted sum of each part's own, normalized over the
    batch.

    ``A_i = (S_i - mean(S)) / (std(S) + eps)`` over the batch, where ``S_i`` is the sum over the
    parts k of ``w_k A_ki`` and ``A_ki`` is what ``normalize`` makes of part k in its group. A
    response that a part does not apply to (None, or no entry) is left out of that part's statistics
    and gets nothing from it; so does a group in which all have the same value.

    Args:
        parts: of each of N responses, by name.
        weights: of each of them, see ``rewards.spec.part_weight``.
        group: [N] int64.
        valid: [N] bool, False where the reward is unknown.
        normalize: from a part's values, the groups and where it applies to the part's advantages,
            all [N].

    Returns:
        [N] float32, exactly 0 where no part gives anything or they cancel each other.

    Raises:
        ValueError: a response that is valid has no parts.

    >>> group = torch.tensor([0, 0])
    >>> parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": None}]
    >>> decoupled_advantage(parts, [{}, {}], group, group == 0, group_advantage)
    tensor([ 0.7071, -0.7071])
    """
    empty = sum(bool(good) and not row for good, row in zip(valid.tolist(), parts, strict=True))
    if empty:
        raise ValueError(
            f"reward_combination=gdpo must have the parts of each reward, {empty} of {len(parts)} "
            "responses have none: name the reward functions in env.reward, or return parts in the "
            "task's Score."
        )
    names = list(dict.fromkeys(name for row in parts for name in row))
    total, size = torch.zeros((2, *group.shape), dtype=torch.float64, device=group.device)
    for name in names:
        weight = [part_weight(name, row, own) for row, own in zip(parts, weights, strict=True)]
        if any(weight):
            values = [row.get(name) for row in parts]
            applies = torch.tensor([value is not None for value in values], device=group.device)
            reward = torch.tensor(
                [value or 0.0 for value in values], dtype=torch.float64, device=group.device
            )
            part = reward.new_tensor(weight) * normalize(reward, group, valid & applies).double()
            total = total + part
            size = size + part.abs()
    # Where parts cancel, their epsilons and rounding are left, which the batch's deviation could
    # blow up. The mean over the batch is 0 but for the same, as each part's advantages add up to 0
    # in a group.
    signal = total.abs() > _CANCELLED * size
    whole = group_advantage(
        torch.where(signal, total, 0.0), group, valid, mean="batch", std="batch"
    )
    return torch.where(signal, whole, 0.0)
