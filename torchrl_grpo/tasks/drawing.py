"""``Drawing``: draws the problems of a split in order."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchrl import torchrl_logger

from torchrl_grpo.tasks.base import Problem, Task
from torchrl_grpo.tasks.curriculum import Curriculum

Outcomes = Iterable[tuple[int, bool]]
"""For each response with a valid reward: the problem's index, and whether the response is correct.
"""


@dataclass(frozen=True)
class Drawn:
    """A problem that was drawn for a group.

    Attributes:
        group: id of the group, unique in the run.
        index: index of the problem in its split.
        problem: the problem itself, so that a worker can play it without the data.
    """

    group: int
    index: int
    problem: Problem


class Drawing:
    """Draws the problems of a split, one for each group. Each epoch goes through the split in the
    task's order.

    With a ``difficulty_filter``, an epoch skips problems whose share of correct responses, over all
    epochs so far, is too high or too low. They remain skipped, because they get no further
    responses. If all problems would be skipped, all are drawn. With a ``curriculum``, an epoch has
    the problems of the current levels, and each new level begins a new epoch. With a ``pass_rate``,
    an epoch skips a problem with a probability that grows with the distance of its share of correct
    responses from a target.

    Args:
        task: the task, which decides the order of an epoch.
        problems: problems of the split.
        usable: indices of the problems that may be drawn.

    Attributes:
        epoch: number of the current pass over the problems, from 0.
        usable: indices of the problems that may be drawn.
        skipped: indices of the problems that the current epoch skips.
        difficulty_filter: (low, high), the range of the share of correct responses in which a
            problem is drawn again; None draws all. Responses count once it is set.
        curriculum: decides which levels are drawn; None draws all. ``follow`` sets it.
        pass_rate: (target, floor): a problem with a share p of correct responses so far is drawn
            with the probability ``max(floor, 1 - |p - target| / max(target, 1 - target))``, and one
            without responses always; None always draws.
    """

    def __init__(self, task: Task, problems: Sequence[Problem], usable: Sequence[int]) -> None:
        self.task = task
        self.problems = problems
        self.usable = list(usable)
        self.difficulty_filter: Sequence[float] | None = None
        self.curriculum: Curriculum | None = None
        self.pass_rate: tuple[float, float] | None = None
        self.skipped: frozenset[int] = frozenset()
        self._outcomes: Counter[tuple[int, bool]] = Counter()
        self._next_group = 0
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Restart with the order of a new ``seed``; group ids continue."""
        self._seed = seed
        self.skipped = frozenset()
        self._outcomes = Counter()
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._position = 0
        usable = self.usable if self.curriculum is None else self.curriculum.usable
        if self.skipped:
            usable = [index for index in usable if index not in self.skipped]
        self._order = self.task.epoch(self.problems, usable, random.Random(f"{self._seed}/{epoch}"))

    def follow(self, target: float) -> None:
        """Start over, with the problems of the lowest level; see ``Curriculum``.

        Args:
            target: share of correct responses, in (0, 1], at which the next level begins.

        Raises:
            ValueError: no problem has a level.
        """
        self.curriculum = Curriculum(self.problems, self.usable, target)
        self.seed(self._seed)

    def draw(self) -> Drawn:
        """Draw the problem of the next group."""
        index = self._next_index()
        while not self._keeps(index):
            index = self._next_index()
        drawn = self.again(self._next_group, index)
        self._next_group += 1
        return drawn

    def _next_index(self) -> int:
        if self._position == len(self._order):
            self.skipped = self._out_of_range()
            self._start_epoch(self.epoch + 1)
        self._position += 1
        return self._order[self._position - 1]

    def _keeps(self, index: int) -> bool:
        """Return whether to draw the problem at the current position of the epoch; see
        ``pass_rate``.
        """
        share = self._share(index)
        if self.pass_rate is None or share is None:
            return True
        target, floor = self.pass_rate
        probability = max(floor, 1 - abs(share - target) / max(target, 1 - target))
        return random.Random(f"{self._seed}/{self.epoch}/{self._position}").random() < probability

    def _share(self, index: int) -> float | None:
        """Return the share of correct responses to a problem so far; None without responses."""
        num_correct = self._outcomes[index, True]
        total = num_correct + self._outcomes[index, False]
        return num_correct / total if total else None

    def again(self, group: int, index: int) -> Drawn:
        """Rebuild the result of ``draw`` for a group, from its id and the problem's index."""
        return Drawn(group, index, self.problems[index])

    def record(self, outcomes: Outcomes) -> None:
        """Count responses, if there is a ``difficulty_filter``, a ``pass_rate`` or a
        ``curriculum``.
        """
        outcomes = list(outcomes)
        if self.difficulty_filter is not None or self.pass_rate is not None:
            self._outcomes.update(outcomes)
        if self.curriculum is not None and self.curriculum.record(outcomes):
            self._start_epoch(self.epoch + 1)

    def metrics(self) -> dict[str, float]:
        """Return the number of problems skipped by a ``difficulty_filter``, or the level of a
        ``curriculum``.
        """
        if self.curriculum is not None:
            return {"rollout/level": self.curriculum.level}
        if self.difficulty_filter is not None:
            return {"rollout/problems_skipped": float(len(self.skipped))}
        return {}

    def _out_of_range(self) -> frozenset[int]:
        """Return the problems whose share of correct responses is outside the
        ``difficulty_filter``.
        """
        if self.difficulty_filter is None:
            return self.skipped
        low, high = self.difficulty_filter
        out = set()
        for index in {index for index, _ in self._outcomes}:
            share = self._share(index)
            if share is not None and not low <= share <= high:
                out.add(index)
        if len(out) == len(self.usable):
            torchrl_logger.warning(
                f"difficulty_filter=[{low}, {high}] would skip all {len(out)} problems of "
                f"{self.task.name!r}, so none is skipped."
            )
            return frozenset()
        return frozenset(out)

    @cached_property
    def digest(self) -> str:
        """Hash of the problems and their order."""
        digest = hashlib.sha256()
        for index in self.usable:
            problem = self.problems[index]
            digest.update(repr((problem.query, problem.answer)).encode(errors="replace"))
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the state of a ``difficulty_filter``, a ``pass_rate`` or a
        ``curriculum``.
        """
        state: dict[str, Any] = {}
        if self._outcomes:
            state["outcomes"] = [[*key, count] for key, count in sorted(self._outcomes.items())]
        if self.skipped:
            state["skipped"] = sorted(self.skipped)
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.state_dict()
        return state | {
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self._position,
            "next_group": self._next_group,
            "num_problems": len(self.usable),
            "problems": self.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; drawing continues where it was saved. An empty state, which
        TorchRL's collectors may save, restores nothing.

        Raises:
            ValueError: the problems differ.
        """
        if not state:
            return
        if state["num_problems"] != len(self.usable):
            raise ValueError(
                f"the saved environment has num_problems={state['num_problems']}, but this one has "
                f"{len(self.usable)}: use the dataset, split and max_prompt_tokens of the saved "
                "run."
            )
        if state["problems"] != self.digest:
            raise ValueError(
                "the saved environment has different problems, although both have "
                f"num_problems={len(self.usable)}: use the dataset and the seed of the saved run."
            )
        self.seed(state["seed"])
        for index, correct, count in state.get("outcomes", ()):
            self._outcomes[index, bool(correct)] += count
        self.skipped = frozenset(state.get("skipped", ()))
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])
        self._start_epoch(state["epoch"])
        self._position = state["position"]
        self._next_group = state["next_group"]
