"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a batch is made of groups that have something to teach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from tensordict import TensorDictBase

from torchrl_grpo.keys import GROUP_ID, REWARD, REWARD_VALID


@dataclass
class GroupCounts:
    """What dynamic sampling did with the groups of a batch.

    ``played`` of them, ``zero_variance`` dropped because their rewards are equal, ``surplus`` dropped because the batch
    was full, and ``filled``: zero-variance groups that were taken because the rounds were used up.
    """

    played: int = 0
    zero_variance: int = 0
    surplus: int = 0
    filled: int = 0


def has_variance(rows: Iterable[TensorDictBase]) -> bool:
    """Whether the valid rewards of one group differ, so that its advantages are not all 0.

    Args:
        rows: the sequences of the group (a list or a batch), with ``("next", "reward")``, and ``"reward_valid"`` where
            not all of them are valid. It is the task's reward that counts, not the shaped one.
    """
    rewards = [row.get(REWARD).item() for row in rows if row.get(REWARD_VALID, torch.tensor(True)).item()]
    return len(set(rewards)) > 1


def collect_dynamically(
    play: Callable[[], Iterable[TensorDictBase]], num_groups: int, max_rounds: int
) -> tuple[list[TensorDictBase], GroupCounts]:
    """Plays until ``num_groups`` groups have rewards that differ.

    The surplus of the last play is dropped: kept for the next batch, it would be of older weights than the rest. After
    ``max_rounds`` plays the zero-variance groups that were played last fill the batch.

    Args:
        play: gives the sequences of some whole groups, the members of a group adjacent.
        num_groups: groups wanted, at most what ``max_rounds`` plays give.
        max_rounds: most plays.

    Returns:
        the sequences of exactly ``num_groups`` groups in the order in which they were played, and the counts.
    """
    counts = GroupCounts()
    wanted: list[tuple[int, list[TensorDictBase]]] = []
    spare: deque[tuple[int, list[TensorDictBase]]] = deque(maxlen=num_groups)
    for _ in range(max_rounds):
        for group in _groups(play()):
            counts.played += 1
            if not has_variance(group):
                counts.zero_variance += 1
                spare.append((counts.played, group))
            elif len(wanted) == num_groups:
                counts.surplus += 1
            else:
                wanted.append((counts.played, group))
        if len(wanted) == num_groups:
            break
    counts.filled = num_groups - len(wanted)
    counts.zero_variance -= counts.filled
    chosen = sorted([*wanted, *list(spare)[len(spare) - counts.filled :]], key=lambda entry: entry[0])
    return [row for _, group in chosen for row in group], counts


def _groups(rows: Iterable[TensorDictBase]) -> Sequence[list[TensorDictBase]]:
    return [list(members) for _, members in groupby(rows, key=lambda row: row.get(GROUP_ID).item())]
