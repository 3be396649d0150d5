"""``PackedGroup``: a group of sequences on its way from actor to actor.

A group travels as one flat tensor per key, instead of one per sequence. The cost of pickling grows
with the number of objects, and a lazy stack of 64 short sequences has more than a thousand tensors
and TensorDicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack
from torch import Tensor

_Column = tuple[tuple[str, ...], Any, list[torch.Size] | None]
"""A key and its values: a flat tensor and the shapes of its parts, or a list of other values and
None.
"""


class PackedGroup:
    """Group that unpickles as a lazy stack again, of views of the flat tensors.

    Args:
        group: lazy stack of sequences, each without a batch size. A group whose sequences have
            different keys is pickled without packing.

    Example:
        >>> import pickle
        >>> group = lazy_stack([TensorDict({"a": {"b": torch.arange(n)}, "text": "x" * n}) for n in (2, 3)])
        >>> [(row["a", "b"].tolist(), row["text"]) for row in pickle.loads(pickle.dumps(PackedGroup(group))).unbind(0)]
        [([0, 1], 'xx'), ([0, 1, 2], 'xxx')]
    """

    def __init__(self, group: TensorDictBase) -> None:
        self._group = group

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sequences = self._group.unbind(0)
        rows = [
            dict(row.items(True, leaves_only=True, is_leaf=is_leaf_nontensor)) for row in sequences
        ]
        columns = [_column(key, [row.get(key) for row in rows]) for key in rows[0]]
        is_ragged = any(row.keys() != rows[0].keys() for row in rows) or any(
            row.batch_size for row in sequences
        )
        return (
            (_as_it_is, (self._group,))
            if is_ragged or None in columns
            else (_rows, (len(rows), columns))
        )


def _column(key: str | tuple[str, ...], values: list[Any]) -> _Column | None:
    path = (key,) if isinstance(key, str) else key
    if all(type(value) is Tensor and value.dtype == values[0].dtype for value in values):
        return (
            path,
            torch.cat([value.reshape(-1) for value in values]),
            [value.shape for value in values],
        )
    if all(type(value) is NonTensorData for value in values):
        return path, [value.data for value in values], None
    return None


def _as_it_is(group: TensorDictBase) -> TensorDictBase:
    return group


def _rows(count: int, columns: list[_Column]) -> TensorDictBase:
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for path, values, shapes in columns:
        if shapes is None:
            entries: list[Any] = [NonTensorData(value) for value in values]
        else:
            parts = values.split([shape.numel() for shape in shapes])
            entries = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for row, entry in zip(rows, entries, strict=True):
            for name in path[:-1]:
                row = row.setdefault(name, {})
            row[path[-1]] = entry
    return lazy_stack([TensorDict(row) for row in rows])
