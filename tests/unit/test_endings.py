"""Runs that end by themselves: one message, an error's exit status, and files that say what was
done.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torchrl import torchrl_logger

from tests.support.configs import compose_config
from tests.support.runs import SMALL, at, run, steps
from torchrl_grpo.assembly.run import Run, build
from torchrl_grpo.config import orderly_exit
from torchrl_grpo.errors import STALLED_STATUS, NoSignalError
from torchrl_grpo.host.checkpoint_files import check_whole
from torchrl_grpo.host.files import read_jsonl


@pytest.mark.slow
def test_a_scorer_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    """It once ended normally, with every optimizer step skipped and exit status 0."""
    (tmp_path / "broken.py").write_text(
        "from itertools import count\ncalls = count()\ndef score(response):\n"
        "    if next(calls) % 2: return None\n    raise OSError('no judge')\n"
    )
    message = r"3 optimizer steps in a row changed nothing, .* all rewards are invalid"
    with pytest.raises(NoSignalError, match=message) as ended:
        run(
            tmp_path / "run",
            f"env.reward={tmp_path}/broken.py:score",
            steps(5),
            "train.max_nonfinite_steps=3",
        )
    failed = (
        "The scorer failed on 16 of 16 responses, first with OSError: no "
        f"judge at {tmp_path}/broken.py:5."
    )
    assert failed in str(ended.value)
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


@pytest.mark.slow
def test_a_run_whose_stacks_cannot_be_written_ends_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(HANG)
    (tmp_path / "run" / "stacks.txt").mkdir(parents=True)
    slow = f"env.reward={tmp_path}/slow.py:score"
    with pytest.raises(SystemExit) as ended, orderly_exit():
        run(tmp_path / "run", slow, steps(5), "train.stall_timeout_s=15")
    assert ended.value.code == STALLED_STATUS
    stderr = capfd.readouterr().err
    assert (
        "error: no progress for 15 s (train.stall_timeout_s); current task: sample and score the batch of step 3"
        in stderr
    )
    assert "Its stacks could not be written (IsADirectoryError" in stderr
    check_whole(at(tmp_path / "run", 2))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_stands_still_shows_where_and_saves(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(HANG)
    timeout = ["env.reward_timeout_s=1000"] if workers else []
    start = time.monotonic()
    with pytest.raises(SystemExit) as ended, orderly_exit():
        run(
            tmp_path / "run", f"env.reward={tmp_path}/slow.py:score", steps(5), "train.stall_timeout_s=15",
            f"env.reward_workers={workers}", *timeout,
        )  # fmt: skip
    assert ended.value.code == STALLED_STATUS == 75
    assert time.monotonic() - start < 300
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert "current task: sample and score the batch of step 3" in stacks.splitlines()[0]
    assert stacks.count('slow.py", line 8 in score') == 1
    assert ("reward_pool" in stacks and "\nprocess " in stacks) or not workers
    assert "error: no progress for 15 s (train.stall_timeout_s)" in capfd.readouterr().err
    check_whole(at(tmp_path / "run", 2))
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2


def fail(*_: Any, **__: Any) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, None])
def test_what_cannot_be_written_at_the_end_costs_no_checkpoint(
    ended_by: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)

    def at_third_sync(run_: Run) -> None:
        """Raise the error there, and refuse writes to the run's files from then on."""
        publish: Callable[..., None] = run_.rollouts.publish

        def with_end(*args: Any) -> None:
            publish(*args)
            if run_.learner.version == 3:
                monkeypatch.setattr(run_.logger, "log", fail)
                if ended_by is not None:
                    os.kill(os.getpid(), ended_by)

        monkeypatch.setattr(run_.rollouts, "publish", with_end)

    (tmp_path / "report.html").mkdir()  # the report cannot be written either
    expected = (
        pytest.raises(OSError, match="Input/output")
        if ended_by is None
        else pytest.raises(SystemExit)
    )
    with (
        expected as ended,
        orderly_exit(),
        closing(build(compose_config(*SMALL, steps(5)), tmp_path)) as training_run,
    ):
        at_third_sync(training_run)
        training_run.fit()
    assert ended_by is None or ended.value.args == (128 + ended_by,)
    check_whole(at(tmp_path, 3))
    assert (
        messages.count("Step 3 is only partly logged (OSError: [Errno 5] Input/output error).") == 1
    )
    assert (
        sum(
            line.startswith(f"No report could be written in {tmp_path} (IsADirectoryError")
            for line in messages
        )
        == 1
    )


@pytest.mark.slow
def test_time_that_is_over_before_the_first_step_names_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)
    run(tmp_path / "a", steps(2), "train.time_limit=0.001")
    assert messages == ["train.time_limit=0.001 ended the run after step 0."]
    run(tmp_path / "b", steps(2))
    run(tmp_path / "c", steps(4), f"train.resume={tmp_path / 'b'}", "train.time_limit=0.001")
    newest = at(tmp_path / "b", 2)
    assert (
        messages[-1]
        == f"train.time_limit=0.001 ended the run after step 2. Resume with:\ntrain.resume={newest}"
    )


def test_a_report_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with closing(build(compose_config(*SMALL, steps(2)), tmp_path)) as training_run:
        assert training_run.fit()["steps"] == 2
    check_whole(at(tmp_path, 2))


@pytest.mark.slow
def test_a_signal_in_the_save_of_a_run_that_failed_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def with_signal(file: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        os.kill(os.getpid(), signal.SIGTERM)
        real(file)

    failed = pytest.raises(SystemExit, match="143")
    with (
        failed,
        orderly_exit(),
        closing(build(compose_config(*SMALL, steps(5)), tmp_path)) as training_run,
    ):
        monkeypatch.setattr(training_run.logger, "log_samples", fail)
        monkeypatch.setattr(os, "fsync", with_signal)
        training_run.fit()
    check_whole(at(tmp_path, 1))
