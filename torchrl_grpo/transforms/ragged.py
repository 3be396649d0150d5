"""Helpers to read and write one value per token in a batch that is ragged, padded or a single
sequence, and to read its groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.models.entries import entry


def flatten(batch: TensorDictBase) -> TensorDictBase:
    """Return the sequences of a batch of any shape as a flat batch [N]. A single sequence becomes a
    batch of size 1.
    """
    return lazy_stack([batch]) if batch.ndim == 0 else batch.reshape(-1)


def join_groups(groups: Iterable[TensorDictBase]) -> TensorDictBase:
    """Return the sequences of several groups as one batch, a flat lazy stack."""
    return lazy_stack([row for group in groups for row in group.unbind(0)])


def set_rows(batch: TensorDictBase, key: NestedKey, rows: Sequence[Tensor]) -> TensorDictBase:
    """Write one [T_i] tensor for each sequence.

    Args:
        batch: a batch of any shape.
        key: key of the entry.
        rows: a tensor for each sequence, in the order of ``flatten``.

    Returns:
        the same batch, or a flat lazy stack if the rows differ in length and the batch is not a
        flat lazy stack.
    """
    if batch.ndim == 0:
        return batch.set(key, rows[0])
    if not (isinstance(batch, LazyStackedTensorDict) and batch.ndim == 1):
        if len({len(row) for row in rows}) == 1:
            return batch.set(key, torch.stack(list(rows)).unflatten(0, batch.shape))
        batch = lazy_stack(list(batch.reshape(-1).unbind(0)))
    for part, row in zip(batch.unbind(0), rows, strict=True):
        part.set(key, row)
    return batch


def set_tokens(
    batch: TensorDictBase,
    key: NestedKey,
    values: Tensor,
    mask_key: NestedKey = keys.ASSISTANT_MASK,
) -> TensorDictBase:
    """Write padded values, [N, T], each row cut to the tokens of its sequence; see ``set_rows``."""
    sequences = flatten(batch).unbind(0)
    widths = [sequence.get(mask_key).shape[-1] for sequence in sequences]
    return set_rows(batch, key, [row[:width] for row, width in zip(values, widths, strict=True)])


def join_rows(rows: Tensor, trajectory: Tensor) -> Tensor:
    """Join the adjacent rows of each trajectory.

    Args:
        rows: [N, T].
        trajectory: [N] int64, trajectory of each row, numbered from 0.

    Returns:
        [M, L], the rows of each trajectory one after the other, padded with 0.
    """
    position = _positions(trajectory)
    joined = rows.new_zeros(int(trajectory[-1]) + 1, int(position.max()) + 1, rows.shape[1])
    joined[trajectory, position] = rows
    return joined.flatten(1)


def split_rows(joined: Tensor, trajectory: Tensor, width: int) -> Tensor:
    """Undo ``join_rows`` for rows of this width."""
    return joined.unflatten(1, (-1, width))[trajectory, _positions(trajectory)]


def _positions(trajectory: Tensor) -> Tensor:
    """Return the number of each row within its trajectory."""
    rows = torch.arange(len(trajectory), device=trajectory.device)
    return rows - torch.searchsorted(trajectory, trajectory)


def group_keys(tensordict: TensorDictBase, key: NestedKey) -> Sequence[int | str]:
    """Return the group of each sequence as a hashable value."""
    value = entry(tensordict, key)
    if isinstance(value, Tensor):
        return value.reshape(-1).tolist()
    return [str(text) for text in value.reshape(-1).tolist()]


def group_ids(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """Return group ids, [N] int64, equal if and only if the groups are."""
    value = entry(tensordict, key)
    if isinstance(value, Tensor):
        return value.reshape(-1)
    ids: dict[int | str, int] = {}
    numbers = [ids.setdefault(name, len(ids)) for name in group_keys(tensordict, key)]
    return torch.tensor(numbers, device="cpu")


def all_of_group(group: Tensor, flag: Tensor) -> Tensor:
    """Return whether ``flag`` is True for all members of each row's group, [N] bool."""
    return ~torch.isin(group, group[~flag])
