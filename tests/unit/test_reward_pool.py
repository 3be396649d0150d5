"""RewardPool: scorers that hang, crash and raise; sharing of its processes, and their end."""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from torchrl import torchrl_logger
from transformers import PreTrainedTokenizerFast

from tests.support.configs import ROOT
from tests.support.envs import END, ScriptedEngine, column, respond
from tests.support.processes import alive, has_ended
from tests.support.reward_runs import assert_killed_reward_workers_change_no_number
from tests.support.reward_tasks import ObedientTask, UnloadableTask
from tests.support.waiting import until
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.collectors.sampler import RolloutTask, Sampler
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.host import progress
from torchrl_grpo.reward_pool import RESTARTS, TIMED_OUT, Failure, RewardPool, slot
from torchrl_grpo.reward_pool.protocol import decode, encode
from torchrl_grpo.runtime.actors import Actor, make_seeded
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Task, Turn, TurnLimits
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    with RewardPool(ObedientTask(), 2, timeout_s=300) as workers:
        yield workers


def score(pool: RewardPool, *orders: str) -> list[Score | Failure | None]:
    turns = [
        turn.result()
        for turn in [pool.submit(Dialog(Problem("a", "a"), [order])) for order in orders]
    ]
    return [turn if isinstance(turn, Failure) else turn.score for turn in turns]


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_scores_come_in_order_and_what_hangs_crashes_or_raises_has_none() -> None:
    with RewardPool(ObedientTask(), 3, timeout_s=3.0) as pool:
        one, hung, left, raised, killed, two = score(pool, "1", "hang", "exit", "boom", "kill", "2")
        assert (one, two) == (Score(1.0, True), Score(2.0, True))
        assert isinstance(hung, Failure) and "env.reward_timeout_s=3" in hung.text
        assert (
            isinstance(left, Failure)
            and "2 processes ended while they scored it (status 3)" in left.text
        )
        assert isinstance(killed, Failure) and "(status -9, SIGKILL)" in killed.text
        assert (
            isinstance(raised, Failure)
            and raised.kind[0] == "KeyError"
            and 'raise KeyError("boom")' in raised.text
        )
        assert len({failure.kind for failure in (hung, left, raised, killed)}) == 4
        assert pool.take_counts() == {
            RESTARTS: 4,
            TIMED_OUT: 1,
        }  # two deaths are tried twice, the timeout once
        assert score(pool, *"3456789") == [Score(float(number), True) for number in "3456789"]
        assert pool.take_counts() == {RESTARTS: 0, TIMED_OUT: 0}


@pytest.mark.slow
def test_an_error_on_one_line_has_the_place_in_the_file_of_the_scorer(tmp_path: Path) -> None:
    """Neither the line in ``json`` that raised nor the package's own."""
    file = tmp_path / "strict.py"
    file.write_text(
        "import json\n\ndef parsed(response):\n    return json.loads(response)\n\n"
        "def score(response):\n    return parsed(response)\n\nasync def later(response):\n    return parsed(response)\n"
    )
    for function in ("score", "later"):
        task = WithRewards(ArithmeticTask(), make_rewards(f"{file}:{function}"))
        with RewardPool(task, 1, timeout_s=300) as pool:
            (failed,) = score(pool, "no\nJSON")
        assert isinstance(failed, Failure)
        assert (
            failed.line == f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) at {file}:4"
        )


@pytest.mark.slow
def test_a_dialog_whose_worker_dies_once_has_its_score(pool: RewardPool, tmp_path: Path) -> None:
    assert score(pool, f"exit-once {tmp_path / 'file'}") == [Score(1.0, True)]
    assert pool.take_counts() == {RESTARTS: 1, TIMED_OUT: 0}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the scorer looks for its files in /proc")
@pytest.mark.parametrize("what", ["pickle", "text", "answer", "huge"])
def test_what_a_scorer_writes_into_its_pipe_is_never_unpickled_or_taken(
    what: str, tmp_path: Path
) -> None:
    with RewardPool(ObedientTask(), 1, timeout_s=300) as pool:
        got = score(pool, f"send {what} {tmp_path / 'canary'}", "2", "3")
        assert isinstance(got[0], Failure) and got[0].cause == "crash"
        assert (
            "2 processes ended while they scored it (after sending an invalid answer)"
            in got[0].text
        )
        assert got[1:] == [Score(2.0, True), Score(3.0, True)]
        assert pool.take_counts() == {RESTARTS: 2, TIMED_OUT: 0}
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the scorer looks for its files in /proc")
def test_how_a_worker_ended_is_not_how_the_pool_ends_it(pool: RewardPool) -> None:
    interrupted, closed, stays, two = score(pool, "interrupt", "close 0", "close 100", "2")
    assert isinstance(interrupted, Failure) and interrupted.cause == "exception"
    assert "raise KeyboardInterrupt" in interrupted.text and "status" not in interrupted.text
    assert (
        isinstance(closed, Failure)
        and "(status 0, after closing its pipe to the run)" in closed.text
    )
    assert isinstance(stays, Failure) and "(after closing its pipe to the run)" in stays.text
    assert two == Score(2.0, True)
    assert pool.take_counts() == {RESTARTS: 4, TIMED_OUT: 0}


@pytest.mark.slow
def test_a_cause_is_a_known_word_and_each_sample_has_its_own(pool: RewardPool) -> None:
    causes = {
        "cause timeout": "exception",
        "cause secret #### 80": "exception",
        "invalid not_finite": "not_finite",
        "invalid secret #### 80": "exception",
        "unpicklable": "exception",
        "part": "not_finite",
        "memory": "exception",
    }
    *failures, two = score(pool, *causes, "2")
    assert two == Score(2.0, True)
    assert [failure.cause for failure in failures] == [*causes.values()]
    part, memory = (failure.text for failure in failures[-2:])
    assert "must be a finite number" in part and "type lock" in part
    assert memory.endswith("MemoryError")
    assert pool.take_counts() == {RESTARTS: 0, TIMED_OUT: 0}


@pytest.mark.slow
def test_an_error_of_any_length_is_a_few_thousand_characters(pool: RewardPool) -> None:
    [failure] = score(pool, "long")
    assert isinstance(failure, Failure) and len(failure.text) == 4000
    assert "raise ValueError" in failure.text and " ... " in failure.text
    direct = Failure.of(ValueError("x" * 10_000_000))
    assert len(direct.text) < 4100 and direct.text.startswith("ValueError: xxx")


@pytest.mark.slow
def test_a_worker_killed_while_it_waits_costs_only_a_restart(pool: RewardPool) -> None:
    score(pool, "1")
    pid = pool.pids()[0]
    os.kill(pid, signal.SIGKILL)
    os.waitid(
        os.P_PID, pid, os.WEXITED | os.WNOWAIT
    )  # a signal takes a moment to arrive; the pool still has to notice
    assert score(pool, "exit", "2", "3")[1:] == [Score(2.0, True), Score(3.0, True)]
    assert pool.take_counts()[RESTARTS] == 3


@pytest.mark.slow
def test_a_worker_that_stopped_while_it_waits_holds_up_no_dialog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that doesn't fit into the pipe once blocked forever."""
    monkeypatch.setattr(slot, "_MAX_TRANSFER_S", 1)
    with RewardPool(ObedientTask(), 1, timeout_s=600) as pool:
        score(pool, "1")
        [worker] = psutil.Process(pool.pids()[0]).children() or [psutil.Process(pool.pids()[0])]
        worker.suspend()
        assert score(pool, "5 " + 2_000_000 * "x") == [Score(5.0, True)]
        assert pool.take_counts() == {RESTARTS: 1, TIMED_OUT: 0}


@pytest.mark.slow
def test_dialogs_are_scored_at_once_without_torch_in_the_workers(
    pool: RewardPool, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert score(pool, f"meet {a} {b}", f"meet {b} {a}") == [Score(1.0, True)] * 2
    assert score(pool, "modules") == [Score(0.0, True)]
    assert len(pool.pids()) == 2


def test_a_task_that_no_worker_can_load_ends_the_run_with_the_reason() -> None:
    with (
        RewardPool(UnloadableTask(), 1, timeout_s=300) as pool,
        pytest.raises(RuntimeError, match="no such library"),
    ):
        score(pool, "1")


@pytest.mark.slow
def test_close_ends_busy_workers_and_what_they_started(pool: RewardPool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(score, pool, f"hang-child {file}", "1")
        until(lambda: file.exists() and file.read_text())
        pids = [*pool.pids(), int(file.read_text())]
        pool.close()
        pool.close()
        with pytest.raises(RuntimeError, match="the reward pool is closed"):
            scoring.result(timeout=120)
    assert alive(pids) == []
    with pytest.raises(RuntimeError):
        score(pool, "1")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
@pytest.mark.parametrize("end", ["close", "hang", "exit"])
def test_a_daemon_that_a_scorer_started_ends_with_its_worker(end: str, tmp_path: Path) -> None:
    with RewardPool(ObedientTask(), 1, timeout_s=3.0) as pool:
        [result] = score(pool, f"daemon {tmp_path / 'pid'} {end}")
        assert isinstance(result, Score) == (end == "close")
        daemon = int((tmp_path / "pid").read_text())
        assert (not has_ended(daemon)) == (end == "close")  # the guard ends last
    assert alive([daemon]) == []


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="the scorer becomes another user"
)
def test_a_fork_bomb_under_a_limit_ends_with_its_worker() -> None:
    with TemporaryDirectory() as folder, RewardPool(ObedientTask(), 1, timeout_s=2.0) as pool:
        Path(folder).chmod(0o777)
        assert score(pool, "1") == [Score(1.0, True)]
        start = time.monotonic()
        [bomb] = score(pool, f"forks {folder}/began")
        assert time.monotonic() - start < 290
        assert (
            isinstance(bomb, Failure)
            and bomb.cause == "timeout"
            and score(pool, "2") == [Score(2.0, True)]
        )
        with open(f"{folder}/began") as held_by_each:
            fcntl.flock(held_by_each, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert pool.take_counts() == {RESTARTS: 0, TIMED_OUT: 1}


SCRIPT = """
import sys, threading
from tests.support.reward_tasks import ObedientTask
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.base import Dialog, Problem
pool = RewardPool(ObedientTask(), 2, timeout_s=1000)
for turn in [pool.submit(Dialog(Problem("a", "a"), ["1"])) for _ in range(8)]:
    turn.result()
pool.submit(Dialog(Problem("a", "a"), [f"daemon {sys.argv[2]}"])).result()
print(*pool.pids(), open(sys.argv[2]).read(), flush=True)
if sys.argv[1] == "hang":
    pool.submit(Dialog(Problem("a", "a"), ["hang"]))
    pool.submit(Dialog(Problem("a", "a"), ["hang"])).result()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
@pytest.mark.parametrize("end", ["hang", "return"])
def test_no_worker_outlives_a_parent_that_is_killed_or_never_closes(
    end: str, tmp_path: Path
) -> None:
    """A second signal in the terminal doesn't matter either: the workers are in process groups of
    their own.
    """
    command = [sys.executable, "-c", SCRIPT, end, str(tmp_path / "pid")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and not has_ended(
            pids[2]
        )  # two workers, and a process that a scorer started
        if end == "hang":
            assert all(os.getpgid(pid) == pid for pid in pids[:2])
            parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=300)
    assert alive(pids) == []


@pytest.fixture
def make_env(tokenizer: PreTrainedTokenizerFast) -> Callable[..., LLMEnv]:
    def make(pool: RewardPool | None, num_envs: int = 4) -> LLMEnv:
        return LLMEnv(ObedientTask(), tokenizer, num_envs=num_envs, repeats=2, reward_pool=pool)

    return make


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_an_env_marks_what_has_no_score_and_logs_each_kind_once(
    make_env: Callable[..., LLMEnv],
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(torchrl_logger, "error", logged.append)
    with RewardPool(ObedientTask(), 4, timeout_s=3.0) as pool:
        env = make_env(pool, 8)
        for first in (0, 4):
            data = env.reset()
            texts = ["4", "boom", "2", "hang", "boom", "exit", "5", "hang"]
            after = respond(env, data, [[*tokenizer(text)["input_ids"], END] for text in texts])
            assert column(after, "reward_valid") == [
                True,
                False,
                True,
                False,
                False,
                False,
                True,
                False,
            ]
            assert column(after, "reward") == [4.0, 0.0, 2.0, 0.0, 0.0, 0.0, 5.0, 0.0]
            assert column(after, "done") == [True] * 8
            assert data["group_id"].reshape(-1).tolist() == [first + row // 2 for row in range(8)]
        assert pool.take_counts() == {RESTARTS: 4, TIMED_OUT: 4}
    assert len(logged) == 3
    assert (
        "KeyError: 'boom'" in logged[0]
        and "reward_timeout_s=3" in logged[1]
        and "status 3" in logged[2]
    )


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ["own", "function", "pool"])
def test_scoring_that_takes_long_logs_how_far_it_is(
    scorer: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(logging.getLogger("torchrl"), "info", lines.append)
    task: Task = ObedientTask()
    if scorer == "function":
        task = WithRewards(task, make_rewards(lambda response: float(response)))
    pool = RewardPool(task, 1, timeout_s=300) if scorer == "pool" else None
    env = LLMEnv(task, tokenizer, num_envs=4, repeats=2, reward_pool=pool)
    with pool or nullcontext():
        responses = [[*tokenizer(text)["input_ids"], END] for text in "4255"]
        after = respond(env, env.reset(), responses)
    assert column(after, "reward") == [4.0, 2.0, 5.0, 5.0]
    assert [line.partition(",")[0] for line in lines] == [
        f"scored {done} of 4 responses" for done in (1, 2, 3)
    ]
    assert all("env.reward_workers" in line for line in lines)


def test_environments_of_one_task_log_a_failure_once_between_them(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(torchrl_logger, "error", logged.append)
    task = ObedientTask()
    for _ in range(3):  # for training, the greedy and the sampled evaluation
        env = LLMEnv(task, tokenizer, num_envs=2, repeats=2)
        respond(env, env.reset(), [[*tokenizer("boom")["input_ids"], END]] * 2)
        assert env.take_counts() == {"rewards/invalid_exception": 2}
    assert len(logged) == 1


@pytest.mark.slow
def test_an_env_of_other_rows_shares_workers_a_pickled_one_has_its_own(
    make_env: Callable[..., LLMEnv], pool: RewardPool
) -> None:
    env = make_env(pool)
    score(pool, "1")
    assert env.with_rows(2).reward_pool is pool
    other, twin = pickle.loads(pickle.dumps((env, make_env(pool))))
    assert (
        other.reward_pool is twin.reward_pool is not pool
    )  # one for all environments of a process
    with other.reward_pool as own:
        assert own.pids() == []
        assert score(own, "2") == [Score(2.0, True)]
        assert set(own.pids()).isdisjoint(pool.pids())


@pytest.mark.slow
def test_a_replica_plays_on_while_a_unit_is_scored(
    make_env: Callable[..., LLMEnv], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The first unit's scorer ends when the second unit is through."""
    pool = RewardPool(ObedientTask(), 3, timeout_s=300)  # the first task needs two
    begun, through = tmp_path / "begun", tmp_path / "through"
    slow = f"meet {begun} {through}"
    fast = "3"

    def rule(prompt: Any, copy_number: int) -> tuple[list[int], str]:
        return [*tokenizer(fast if begun.exists() else slow)["input_ids"], END], "stop"

    def parts() -> Sampler:
        engine = ScriptedEngine(rule)
        params = SamplingParams(64)
        env = make_env(pool, 2)
        policy = GenerationPolicy(engine, params)
        return Sampler(
            engine,
            lambda groups: RolloutCollector(env.with_rows(2 * groups), policy),
            None,
            groups_at_a_time=1,
            overlapping=True,
            reward_pool=pool,
        )

    actor = Actor(partial(make_seeded, parts))
    actor.setup(0, None)
    drawing = make_env(None, 2).drawing
    slow_task, fast_task = (RolloutTask((drawing.draw(),)) for _ in range(2))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(actor.call_for_groups, "play", slow_task)
        until(begun.exists)
        assert not first.done()
        through_report, group = actor.call_for_groups("play", fast_task)
        assert pickle.loads(pickle.dumps(group))["next", "reward"].reshape(-1).tolist() == [
            3.0,
            3.0,
        ]
        assert not first.done()
        through.touch()
        report, group = first.result(timeout=300)
    assert pickle.loads(pickle.dumps(group))["next", "reward"].reshape(-1).tolist() == [1.0, 1.0]
    assert [group.group for group in (*report.groups, *through_report.groups)] == [0, 1]
    assert report.engine is None  # an engine's state is undefined while other calls sample
    assert report.rewards == {RESTARTS: 0, TIMED_OUT: 0}
    actor.call("close")
    with pytest.raises(RuntimeError):
        score(pool, "1")


@pytest.mark.slow
def test_reward_workers_change_no_number_even_when_killed(tmp_path: Path) -> None:
    assert_killed_reward_workers_change_no_number(tmp_path, asynchronous=False)


def test_a_turn_is_the_same_after_its_way_through_a_pipe() -> None:
    turn = Turn(
        [{"role": "user", "content": "\U0001f600"}],
        Score(0.5, True, {"a": 0.5, "b": None}),
        {"tools/calls": 2.0},
        0.25,
        [{"type": "function"}],
        3,
        TurnLimits(7, ("END",), True),
        undelivered=True,
    )
    assert all(
        getattr(turn, field.name) != field.default for field in fields(Turn)
    )  # none is lost here
    assert decode(encode([turn], 5), 5, 1) == [turn]
