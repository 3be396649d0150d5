"""Whether two runs or two checkpoints differ on the test problems: a test paired over problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchrl_grpo.extras.report.records import problem_of
from torchrl_grpo.host.text import points
from torchrl_grpo.intervals import mean_interval

LEVEL = 0.05
"""Greatest p-value of a difference that counts."""
_DRAWS = 10_000

Row = Mapping[str, Any]
Problem = tuple[Any, ...]


@dataclass(frozen=True)
class Comparison:
    """Two mean scores over the same problems.

    Attributes:
        problems: number of problems that both have.
        before: mean score of the first.
        after: mean score of the second.
        low: lower end of the 95% interval of the difference.
        high: upper end of it.
        p: probability of a difference at least as large if both were equally good, from flipping
            the signs of the problems' differences; for greedy scores McNemar's exact test.
    """

    problems: int
    before: float
    after: float
    low: float
    high: float
    p: float

    @property
    def text(self) -> str:
        verdict = "no difference shown"
        if self.p <= LEVEL:
            verdict = "better" if self.after > self.before else "worse"
        chance = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.2g}"
        return (
            f"{points(self.before, self.after)} (95%: {points(0, self.low)[:-7]} to "
            f"{points(0, self.high)[:-7]}, {chance}, {self.problems:,} problems): {verdict}"
        )


def tests_of(rows: Iterable[Row], step: int | None = None) -> dict[Problem, Row]:
    """Return the row of each test problem at a step, or at the last one, by data set, text and, if
    several problems have one text, a number, so that problems of two runs can be paired.
    """
    last, ends = step or 0, dict[int | str, Row]()
    for row in rows:
        if row.get("split") != "test":
            continue
        if step is None and row["step"] > last:
            last, ends = row["step"], {}
        if row["step"] == last:
            ends[problem_of(row)] = row
    seen = Counter[Problem]()
    problems = {}
    for row in ends.values():
        name = (row.get("dataset"), row.get("query"))
        problems[*name, seen[name]] = row
        seen[name] += 1
    return problems


def compare_tests(
    before: Mapping[Any, Row], after: Mapping[Any, Row], *, sampled: bool = False
) -> Comparison | None:
    """Compare rows of test problems, from ``tests_of``, over those that both have; None without any.

    A greedy response scores 1 if it is correct, else 0; with ``sampled`` the score is the share of
    correct samples. Problems without a valid score are left out.

    >>> wrong, right = ({n: {"valid": True, "correct": x} for n in range(12)} for x in (False, True))
    >>> compare_tests(wrong, right).text.partition(" (")[0], compare_tests(wrong, right).p < 0.001
    ('+100.0 points', True)
    """
    scores = [
        (_score(row, sampled), _score(after[problem], sampled))
        for problem, row in before.items()
        if problem in after
    ]
    valid = [pair for pair in scores if None not in pair]
    if not valid:
        return None
    old, new = np.array(valid, dtype=float).T
    change = new - old
    low, high = (2 * end - 1 for end in mean_interval((change + 1) / 2))
    sizes, counts = np.unique(np.abs(change[change != 0]), return_counts=True)
    flipped = 2 * np.random.default_rng(0).binomial(counts, 0.5, (_DRAWS, len(counts))) - counts
    extreme = np.abs(flipped @ sizes) >= abs(change.sum()) - 1e-9
    p = (1 + int(extreme.sum())) / (1 + _DRAWS)
    return Comparison(len(valid), float(old.mean()), float(new.mean()), low, high, p)


def adjust(comparisons: Sequence[Comparison | None]) -> list[Comparison | None]:
    """Return the comparisons with p-values for several tests at once (Holm 1979)."""
    adjusted = list(comparisons)
    order = sorted((c.p, at) for at, c in enumerate(comparisons) if c is not None)
    least = 0.0
    for rank, (p, at) in enumerate(order):
        least = max(least, min(1.0, p * (len(order) - rank)))
        adjusted[at] = replace(comparisons[at], p=least)  # type: ignore[type-var]
    return adjusted


def _score(row: Row, sampled: bool) -> float | None:
    if not sampled:
        return float(bool(row.get("correct"))) if row.get("valid") else None
    correct, valid = row.get("correct_of") or (0, 0)
    return correct / valid if valid else None
