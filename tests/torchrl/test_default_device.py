"""With ``torch.set_default_device("cuda:0")``, as in TorchRL's scripts, a batch stays on its own
device.

The default device is ``meta`` here, whose tensors cannot be read, so that each mistake is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.transforms import GroupAdvantage, KLScoring, RewardShaping
from torchrl_grpo.transforms.whitening import AdvantageWhitening

G = 2


def make_batch() -> TensorDictBase:
    """Return two groups of two ragged sequences; the last two rows are one trajectory."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, (prompt, length) in enumerate(((3, 6), (3, 8), (2, 7), (2, 5), (2, 6))):
        tokens = torch.randint(5, 60, (length,), generator=generator)
        tokens[:prompt] = 7
        mask = torch.arange(length) >= prompt
        row = {
            keys.FULL: tokens,
            keys.ASSISTANT_MASK: mask,
            keys.LOG_PROBS: torch.where(mask, -1.0, 0.0),
            keys.GROUP_ID: torch.tensor([number // 2 if number < 4 else 1]),
            keys.QUERY: "first" if number < 2 else "second",
            keys.REWARD: torch.tensor([float(number % 2)]),
            keys.DONE: torch.tensor([number != 3]),
        }
        if number > 2:
            row[keys.TRAJECTORY] = torch.tensor([9])
        rows.append(TensorDict(row))
    return lazy_stack(rows)


@pytest.fixture
def scorer() -> TokenScorer:
    return TokenScorer(make_tiny_model())


def in_buffer(transform: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    def write_and_read(batch: TensorDictBase) -> TensorDictBase:
        buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=transform)
        buffer.extend(batch)
        return buffer[:]

    return write_and_read


@pytest.mark.parametrize(
    "make",
    [
        lambda scorer: GroupAdvantage(G),
        lambda scorer: GroupAdvantage(G, group_key=keys.QUERY),
        lambda scorer: in_buffer(GroupAdvantage(G)),
        lambda scorer: in_buffer(GroupAdvantage(G, candidate_group_size=3)),
        lambda scorer: in_buffer(GroupAdvantage(G, group_key=keys.QUERY)),
        lambda scorer: lambda batch: AdvantageWhitening()(GroupAdvantage(G)(batch)),
        lambda scorer: KLScoring(scorer, max_tokens=9),
        lambda scorer: RewardShaping(overlong_buffer=4, max_response_tokens=8),
        lambda scorer: lambda batch: GRPOLoss(scorer)(GroupAdvantage(G)(batch)),
    ],
)
def test_nothing_is_made_on_the_default_device(
    scorer: TokenScorer, make: Callable[[TokenScorer], Callable[[Any], Any]]
) -> None:
    expected = make(scorer)(make_batch())
    batch = make_batch()
    torch.set_default_device("meta")
    try:
        out = make(scorer)(batch)
    finally:
        torch.set_default_device(None)
    for one, other in zip(
        *(part.unbind(0) if part.ndim else [part] for part in (out, expected)), strict=True
    ):
        for name, value in other.items(True, True):
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(one.get(name), value)


def test_a_scorer_is_made_on_the_device_of_its_model() -> None:
    model = make_tiny_model()
    torch.set_default_device("meta")
    try:
        assert TokenScorer(model).packs(8)
    finally:
        torch.set_default_device(None)
