"""What ends a run by itself: one message, the exit status of an error, and files that say what was done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run, steps
from torchrl_grpo.errors import NoSignalError
from torchrl_grpo.records import read_jsonl


def test_a_scorer_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    """It was a normal end: every optimizer step was skipped, and exit status 0."""
    (tmp_path / "broken.py").write_text("def score(response):\n    raise OSError('no judge')\n")
    with pytest.raises(NoSignalError, match=r"3 optimizer steps in a row changed nothing, .* no reward is valid"):
        run(tmp_path / "run", f"env.reward={tmp_path}/broken.py:score", steps(5), "train.max_nonfinite_steps=3")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("rollout/invalid") for row in rows] == [None, 16, 16]
