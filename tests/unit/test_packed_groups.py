"""Groups that are packed to be sent between actors."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from torchrl_grpo.runtime.groups import PackedGroup


def make_row(length: int) -> TensorDict:
    row = TensorDict(
        {
            "tokens": {"full": torch.arange(length), "response": torch.arange(length)[1:]},
            "log_probs": {"full": -torch.rand(length)},
            "mask": torch.arange(length) > 1,
            "reward": torch.tensor([0.5, torch.nan], dtype=torch.bfloat16),
            "group_id": torch.tensor(7),
        }
    )
    return row.set_non_tensor("query", "x" * length).set_non_tensor(
        ("text", "info"), {"words": [length]}
    )


def travelled(group):
    return pickle.loads(pickle.dumps(PackedGroup(group)))


@pytest.mark.parametrize("lengths", [(3, 5, 1), (4,)])
def test_a_group_arrives_as_it_left(lengths):
    group = lazy_stack([make_row(length) for length in lengths])
    arrived = travelled(group)
    assert isinstance(arrived, LazyStackedTensorDict)
    assert arrived.batch_size == group.batch_size
    for before, after in zip(group.unbind(0), arrived.unbind(0), strict=True):
        assert set(after.keys(True)) == set(before.keys(True))
        assert after["query"] == before["query"]
        assert after["text", "info"] == before["text", "info"]
        for key, value in before.items(True, True):
            assert after[key].dtype == value.dtype
            assert torch.equal(after[key].nan_to_num(9), value.nan_to_num(9))


def test_its_sequences_take_new_entries_as_they_did():
    group = lazy_stack([make_row(3), make_row(2)])
    arrived = travelled(group)
    for row in arrived.unbind(0):
        row.set(("next", "advantage"), torch.ones(1))
        row["tokens", "full"].add_(1)
    assert [row["tokens", "full"].tolist() for row in arrived.unbind(0)] == [[1, 2, 3], [1, 2]]
    assert [row["tokens", "response"].tolist() for row in arrived.unbind(0)] == [[1, 2], [1]]
    assert arrived["next", "advantage"].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    "rows",
    [
        [TensorDict({"a": torch.arange(3)}), TensorDict({"b": torch.arange(2)})],
        [
            TensorDict({"a": torch.arange(3)}, batch_size=[3]),
            TensorDict({"a": torch.ones(3)}, batch_size=[3]),
        ],
        [TensorDict({"a": torch.arange(3)}), TensorDict({"a": torch.ones(2)})],
    ],
    ids=["other keys", "batch size", "other dtypes"],
)
def test_sequences_that_do_not_fit_into_flat_tensors_arrive_too(rows):
    for before, after in zip(rows, travelled(lazy_stack(rows)).unbind(0), strict=True):
        assert after.batch_size == before.batch_size
        assert {key: value.tolist() for key, value in after.items()} == {
            k: v.tolist() for k, v in before.items()
        }
