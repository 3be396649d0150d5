"""What ends a run by itself: one message, the exit status of an error, and files that say what was done."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.runs import at, run, steps
from torchrl_grpo.checkpoint_files import check_whole
from torchrl_grpo.config import orderly_exit
from torchrl_grpo.errors import STALLED_STATUS, NoSignalError
from torchrl_grpo.records import read_jsonl


def test_a_scorer_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    """It was a normal end: every optimizer step was skipped, and exit status 0."""
    (tmp_path / "broken.py").write_text("def score(response):\n    raise OSError('no judge')\n")
    with pytest.raises(NoSignalError, match=r"3 optimizer steps in a row changed nothing, .* no reward is valid"):
        run(tmp_path / "run", f"env.reward={tmp_path}/broken.py:score", steps(5), "train.max_nonfinite_steps=3")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("rollout/invalid") for row in rows] == [None, 16, 16]


HANG = """
import time
calls = 0
def score(response):
    global calls
    calls += 1
    if calls > 40:  # in the third step
        time.sleep(1000)
    return 1.0
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_stands_still_shows_where_and_saves(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(HANG)
    timeout = ["env.reward_timeout_s=1000"] if workers else []
    start = time.monotonic()
    with pytest.raises(SystemExit) as ended, orderly_exit():
        run(
            tmp_path / "run", f"env.reward={tmp_path}/slow.py:score", steps(5), "train.stall_timeout_s=6",
            f"env.reward_workers={workers}", *timeout,
        )  # fmt: skip
    assert ended.value.code == STALLED_STATUS == 75
    assert time.monotonic() - start < 120
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert "it was to sample and score the batch of step 3" in stacks.splitlines()[0]
    assert stacks.count('slow.py", line 8 in score') == 1
    assert ("reward_pool" in stacks and "\nprocess " in stacks) or not workers
    assert "error: no progress for 6 s (train.stall_timeout_s)" in capfd.readouterr().err
    check_whole(at(tmp_path / "run", 2))
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
