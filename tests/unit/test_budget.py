"""The core stays as small as CONTRIBUTING.md says."""

from __future__ import annotations

import re

from tests.support.configs import ROOT
from tests.support.cpu import LIMIT_S, START_S, over_limits
from tools.count import core_tokens, count_tokens, tokens_by_folder


def test_tokens_are_counted_without_comments_and_docstrings() -> None:
    source = '"""A module."""\n\n# a comment\ndef f(x):\n    """A function."""\n    return x + 1\n'
    assert count_tokens(source) == len(["def", "f", "(", "x", ")", ":", "return", "x", "+", "1"])


def test_the_core_keeps_to_its_budget() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    budgets = {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"\| (core|package) \| ([\d,]+) \|", text)
    }
    counts = tokens_by_folder()
    assert core_tokens(counts) <= budgets["core"]
    assert counts.total() <= budgets["package"]


def test_a_file_over_its_limit_of_cpu_seconds_and_the_sum_are_named() -> None:
    seconds = {"a.py": LIMIT_S + START_S + 1, "b.py": 30.0, "c.py": LIMIT_S + START_S}
    assert over_limits(seconds, {"b.py": 25, "all": 60}) == [
        "a.py took 16.0 CPU s of 5",
        "all took 61.0 CPU s of 60",
    ]
