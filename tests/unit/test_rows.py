"""Flat sequences: sums over segments, and batches of any form as rows."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.segments import Segments

SIZES = [2, 0, 3, 1]


def test_sum_and_spread_and_their_gradients_equal_loops() -> None:
    segments = Segments.of(SIZES)
    values = torch.arange(6.0, dtype=torch.float64).requires_grad_()
    parts = values.split(SIZES)
    assert segments.sum(values).tolist() == [part.sum().item() for part in parts]
    assert segments.mean(values).tolist() == [0.5, 0, 3, 5]
    assert segments.any(values > 3).tolist() == [False, False, True, True]
    assert torch.autograd.gradcheck(segments.sum, values)
    of_rows = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    assert segments.spread(of_rows).tolist() == [0, 0, 2, 2, 2, 3]
    assert torch.autograd.gradcheck(segments.spread, of_rows)
    assert segments.places(torch.tensor([2, 0])).tolist() == [2, 3, 4, 0, 1]


def sequences() -> list[TensorDict]:
    """Return three sequences, the second without a scored token, the third of one token."""
    rows = []
    for number, (length, scored) in enumerate(((5, [2, 4]), (3, []), (1, [0]))):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[scored] = True
        sampled = len(scored)
        row = {
            keys.FULL: torch.arange(length) + 10 * number,
            keys.ASSISTANT_MASK: mask,
            keys.ATTENTION_MASK: torch.ones_like(mask),
            keys.LOG_PROBS: torch.arange(length) * -1.0 - number,
            "advantage": torch.tensor([float(number)]),
            keys.KEPT: torch.full((sampled, 1 + number), number),
            keys.KEPT_LOG_PROBS: torch.full((sampled, 1 + number), -1.0),
        }
        rows.append(TensorDict(row))
    return rows


def padded(rows: list[TensorDict], width: int) -> TensorDict:
    out = TensorDict({}, [len(rows)])
    for key in (keys.FULL, keys.ASSISTANT_MASK, keys.ATTENTION_MASK, keys.LOG_PROBS):
        values = [torch.nn.functional.pad(row[key], (0, width - len(row[key]))) for row in rows]
        out[key] = torch.stack(values)
    out["advantage"] = torch.stack([row["advantage"] for row in rows])
    return out


@pytest.mark.parametrize("form", ["ragged", "padded", "wide"])
def test_a_batch_of_any_form_gives_the_same_rows(form: str) -> None:
    names = (keys.LOG_PROBS, "advantage", "absent")
    rows = sequences()
    batch = lazy_stack(rows) if form == "ragged" else padded(rows, 5 if form == "padded" else 7)
    read = Rows.read(batch, names)
    assert read.tokens.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 20]
    assert read.lengths.tolist() == [5, 3, 1] and read.of_scored.sizes.tolist() == [2, 0, 1]
    assert read.scored.tolist() == [2, 4, 8] and read.position.tolist() == [2, 4, 0]
    assert read.values[keys.LOG_PROBS].tolist() == [-2, -4, -2]
    assert read.values["advantage"].tolist() == [0, 0, 2] and "absent" not in read.values
    taken = read.take(torch.tensor([2, 0]))
    assert taken.tokens.tolist() == [20, 0, 1, 2, 3, 4] and taken.scored.tolist() == [0, 3, 5]
    assert taken.values[keys.LOG_PROBS].tolist() == [-2, -2, -4]
    none = read.take(torch.tensor([], dtype=torch.int64))
    assert len(none) == 1 and not len(none.scored) and not len(none.values["advantage"])


def test_values_of_sampled_tokens_are_filled_up_and_of_ragged_rows_cut() -> None:
    rows = sequences()
    rows[2][keys.LOG_PROBS] = torch.arange(9.0)  # as a padded actor writes it
    read = Rows.read(lazy_stack(rows), (keys.KEPT, keys.KEPT_LOG_PROBS, keys.LOG_PROBS))
    assert read.values[keys.KEPT].tolist() == [[0, -1, -1], [0, -1, -1], [2, 2, 2]]
    filled = read.values[keys.KEPT_LOG_PROBS]
    assert filled[0].tolist() == [-1, -math.inf, -math.inf] and filled[2].tolist() == [-1, -1, -1]
    assert read.values[keys.LOG_PROBS].tolist() == [-2, -4, 0]


def test_values_go_back_to_each_token_of_a_sequence() -> None:
    read = Rows.read(lazy_stack(sequences()))
    values = torch.tensor([1.0, 2.0, 3.0])
    assert [row.tolist() for row in read.split(values)] == [[0, 0, 1, 0, 2], [0, 0, 0], [3]]
    assert read.padded(values).tolist() == [[0, 0, 1, 0, 2], [0] * 5, [3, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [(torch.ones(3), r"\[3, 5\], one for each token"), (torch.tensor(1.0), "use unsqueeze")],
)
def test_an_entry_that_does_not_fit_the_tokens_is_refused(value: Tensor, message: str) -> None:
    rows = sequences()
    for row in rows:
        row["mine"] = value
    with pytest.raises(ValueError, match=f"'mine' .*{message}"):
        Rows.read(lazy_stack(rows), ["mine"])
