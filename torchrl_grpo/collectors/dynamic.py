"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): zero-variance groups teach nothing and are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from tensordict import TensorDictBase

from torchrl_grpo.keys import GROUP_ID, REWARD, REWARD_VALID


@dataclass
class GroupCounts:
    """What dynamic sampling did with the groups of a batch.

    ``played`` of them, ``zero_variance`` dropped because their valid rewards are all equal, ``surplus`` dropped because
    the batch was full, and ``filled`` taken although they have zero variance, because the rounds were used up.
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
    """Plays until it has ``num_groups`` groups whose rewards differ.

    The surplus of the last play is dropped: kept for the next batch, it would be of older weights than the rest. After
    ``max_rounds`` plays the zero-variance groups that were played last fill the batch.

    Args:
        play: gives the sequences of some whole groups, the members of a group adjacent.
        num_groups: groups wanted, at most what ``max_rounds`` plays give.
        max_rounds: most plays.

    Returns:
        the sequences of exactly ``num_groups`` groups in the order in which they were played, and the counts.
    """
    groups: list[list[TensorDictBase]] = []
    varied: list[int] = []
    for _ in range(max_rounds):
        for _, members in groupby(play(), key=lambda row: row.get(GROUP_ID).item()):
            groups.append(list(members))
            varied += [len(groups) - 1] if has_variance(groups[-1]) else []
        if len(varied) >= num_groups:
            break
    spare = [number for number in range(len(groups)) if number not in varied]
    filled = max(num_groups - len(varied), 0)
    chosen = sorted(varied[:num_groups] + spare[len(spare) - filled :])
    counts = GroupCounts(len(groups), len(spare) - filled, len(varied) - num_groups + filled, filled)
    return [row for number in chosen for row in groups[number]], counts
