"""Groups that arrive in pieces, and the expected contents of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import Compose, Transform

from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.transforms import GroupAdvantage, KLScoring

# Group 2 has no signal; members of a group come in different pieces. Their lengths identify the
# sequences.
REWARDS, GROUPS = [1.0, 7.0, 3.0, 9.0, 5.0, 5.0, 8.0, 2.0], [0, 1, 0, 3, 2, 2, 1, 3]
PIECES = (slice(0, 2), slice(2, 6), slice(6, 8))
ADVANTAGES = [-1.0, -0.5, 1.0, 3.5, 0.0, 0.0, 0.5, -3.5]


def make_rows() -> list[TensorDictBase]:
    """Return ragged sequences with two prompt tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        tokens = torch.randint(5, 261, (4 + index,), generator=generator)
        mask = torch.arange(len(tokens)) >= 2
        entries = {
            keys.FULL: tokens,
            keys.ASSISTANT_MASK: mask,
            keys.REWARD: torch.tensor([reward]),
        }
        rows.append(TensorDict(entries | {keys.GROUP_ID: torch.tensor([group])}))
    return rows


def make_transform(kind: str) -> Transform:
    """Return the transform that the buffer's process builds."""
    advantage = GroupAdvantage(2, std="none")
    scoring = KLScoring(TokenScorer(make_tiny_model()))
    # On writing, a Compose applies its transforms from last to first.
    orders = {"advantage": advantage, "scored first": Compose(advantage, scoring)}
    return (orders | {"scored last": Compose(scoring, advantage)})[kind]


def make_buffer(
    kind: str, make: Callable[..., ReplayBuffer] = ReplayBuffer, **options: Any
) -> ReplayBuffer:
    return make(
        storage=partial(LazyStackStorage, 16),
        sampler=SamplerWithoutReplacement,
        transform_factory=partial(make_transform, kind),
        batch_size=4,
        **options,
    )


def by_length(batch: TensorDictBase) -> dict[int, TensorDictBase]:
    return {row[keys.FULL].numel(): row for row in batch.unbind(0)}


def assert_equal(row: TensorDictBase, expected: TensorDictBase) -> None:
    assert set(row.keys(True, True)) == set(expected.keys(True, True))
    for name in expected.keys(True, True):
        torch.testing.assert_close(row[name], expected[name])


def expected_rows(scored: bool) -> dict[int, TensorDictBase]:
    """Return the rows that a buffer must contain, except for one group."""
    batch = lazy_stack(make_rows())
    if scored:
        batch = KLScoring(TokenScorer(make_tiny_model()))(batch)
    for row, advantage in zip(batch.unbind(0), ADVANTAGES, strict=True):
        row["advantage"] = torch.tensor([advantage])
    return by_length(batch)


def fill_and_sample(buffer: ReplayBuffer, scored: bool) -> None:
    """Extend a buffer piece by piece: a group is written when its last member arrives, and not
    before.
    """
    rows = make_rows()
    sizes = []
    for piece in PIECES:
        buffer.extend(lazy_stack(rows[piece]))
        sizes.append(len(buffer))
    assert sizes == [0, 4, 8]
    expected = expected_rows(scored)
    stored = by_length(buffer[:])
    assert [row[keys.GROUP_ID].item() for row in stored.values()] == [0, 0, 2, 2, 1, 1, 3, 3]
    samples = [buffer.sample() for _ in range(2)]
    assert sorted(length for sample in samples for length in by_length(sample)) == sorted(expected)
    for held in (stored, *map(by_length, samples)):
        for length, row in held.items():
            assert_equal(row, expected[length])
