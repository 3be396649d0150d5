"""In-memory index of a run's ``samples.jsonl``: the position of each row, and its values for
searches.

A hundred thousand responses take some tens of megabytes; their texts and tokens stay in the file.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_grpo.extras.report.records import TOKENS, passes, problem_of, valid_reward
from torchrl_grpo.extras.view.files import Tail
from torchrl_grpo.host.files import SAMPLES_FILE, is_row, read_row

_MAX_SEARCHES = 8


@dataclass(frozen=True)
class Criteria:
    """Search criteria for rows; None matches any."""

    split: str | None = None
    dataset: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = None


class Search:
    """The matching rows of a search, by group. ``upto`` is the number of rows searched so far."""

    def __init__(self) -> None:
        self.upto = 0
        self.matches: dict[int, list[int]] = {}


class Index:
    """The rows of one file, in order. A reader can access the first ``count`` rows while others are
    added.

    Attributes:
        count: number of rows.
        groups: rows of each group, in the order of their first rows.
        splits: names of splits, in order of appearance.
        datasets: names of data sets, in order of appearance.

    Args:
        tail: reads the file.
    """

    def __init__(self, tail: Tail) -> None:
        self._descriptor = tail.file
        self.count = 0
        self.groups: list[list[int]] = []
        self.splits: dict[str, int] = {}
        self.datasets: dict[str, int] = {}
        self._groups: dict[tuple[Any, ...], int] = {}
        self._starts = array("q")
        self._heads = array("l")
        self._lengths = array("l")
        self._steps = array("l")
        self._rewards = array("d")
        self._group = array("l")
        self._split = array("l")
        self._dataset = array("l")
        self._searches: OrderedDict[Criteria, Search] = OrderedDict()

    def add(self, start: int, line: bytes) -> None:
        """Add a line at a position of the file; invalid lines are skipped."""
        before, has_tokens, _ = line.partition(TOKENS.encode())
        row = read_row(before + b"}" if has_tokens else line)
        if not is_row(row):
            return
        split = str(row.get("split"))
        dataset = str(row.get("dataset") or "")
        # Rows of older runs and of evaluations have no group.
        group = row.get("group")
        key = (row["step"], split, dataset, hash(problem_of(row)) if group is None else group)
        group = self._groups.setdefault(key, len(self.groups))
        if group == len(self.groups):
            self.groups.append([])
        reward = valid_reward(row)
        self._starts.append(start)
        self._heads.append(len(before))
        self._lengths.append(len(line))
        self._steps.append(row["step"])
        self._rewards.append(math.nan if reward is None else reward)
        self._split.append(self.splits.setdefault(split, len(self.splits)))
        self._dataset.append(self.datasets.setdefault(dataset, len(self.datasets)))
        self._group.append(group)
        self.groups[group].append(self.count)
        self.count += 1

    def row(self, number: int, *, tokens: bool = False) -> dict[str, Any]:
        """Return a row, without its tokens unless requested."""
        assert self._descriptor is not None
        head, length = self._heads[number], self._lengths[number]
        is_whole = tokens or head == length
        text = os.pread(
            self._descriptor.fileno(), length if is_whole else head, self._starts[number]
        )
        return read_row(text if is_whole else text + b"}")

    def group_of(self, number: int) -> list[int]:
        """Return the rows of a row's group."""
        return self.groups[self._group[number]]

    def spread(self, group: int) -> float:
        """Return the difference between a group's highest and lowest valid reward."""
        rewards = [self._rewards[row] for row in list(self.groups[group])]
        valid = [reward for reward in rewards if not math.isnan(reward)]
        return max(valid) - min(valid) if valid else -1.0

    def step_range(self) -> tuple[int, int] | None:
        """Return the first and the last step that have rows."""
        steps = self._steps[: self.count]
        return (min(steps), max(steps)) if steps else None

    def search(self, criteria: Criteria) -> dict[int, list[int]]:
        """Return the groups with matching rows, oldest first, and these rows."""
        search = self._searches.setdefault(criteria, Search())
        self._searches.move_to_end(criteria)
        if len(self._searches) > _MAX_SEARCHES:
            self._searches.popitem(last=False)
        count = self.count
        for number in range(search.upto, count):
            if self._matches(number, criteria):
                search.matches.setdefault(self._group[number], []).append(number)
        search.upto = count
        return search.matches

    def _matches(self, number: int, criteria: Criteria) -> bool:
        step, reward = self._steps[number], self._rewards[number]
        return (
            (criteria.split is None or self._split[number] == self.splits.get(criteria.split))
            and (
                criteria.dataset is None
                or self._dataset[number] == self.datasets.get(criteria.dataset)
            )
            and (criteria.first_step is None or step >= criteria.first_step)
            and (criteria.last_step is None or step <= criteria.last_step)
            and (
                criteria.min_reward is None or reward >= criteria.min_reward
            )  # no comparison holds for one not valid
            and (criteria.max_reward is None or reward <= criteria.max_reward)
            and (criteria.text is None or self._has_text(number, criteria.text))
        )

    def _has_text(self, number: int, text: str) -> bool:
        if text.isascii():  # so that most rows need not be parsed
            assert self._descriptor is not None
            head = os.pread(self._descriptor.fileno(), self._heads[number], self._starts[number])
            if json.dumps(text)[1:-1].lower().encode() not in head.lower():
                return False
        return passes(self.row(number), text=text)


class Samples:
    """The samples of a run that may still be running.

    Attributes:
        index: index of the rows read so far; replaced when the run rewrites the file.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder, SAMPLES_FILE)
        self.index = Index(self._tail)

    def refresh(self) -> None:
        """Read new rows; in one thread at a time."""
        if self._tail.reopen():
            self.index = Index(self._tail)
        for start, line in self._tail.lines():
            self.index.add(start, line)
