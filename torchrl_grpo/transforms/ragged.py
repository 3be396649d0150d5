"""Reading and writing one value per token, in a batch that is ragged, padded or a single sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor


def flatten(batch: TensorDictBase) -> TensorDictBase:
    """The sequences of a batch of any shape as a flat batch [N]; a single sequence is a batch of one."""
    return lazy_stack([batch]) if batch.ndim == 0 else batch.reshape(-1)


def set_rows(batch: TensorDictBase, key: NestedKey, rows: Sequence[Tensor]) -> TensorDictBase:
    """Writes one [T_i] tensor for each sequence.

    Args:
        batch: any batch size.
        key: the entry.
        rows: one for each sequence, in the order of ``flatten``.

    Returns:
        the same batch; where rows differ in length and the batch is no flat lazy stack, a flat lazy stack.
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
