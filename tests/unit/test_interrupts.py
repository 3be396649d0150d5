"""A signal at any moment of a run: it saves, its files agree, and the exit status says why it
ended.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.configs import ROOT, compose_config
from tests.support.runs import SMALL, at, run, save_weight, steps
from torchrl_grpo.assembly.run import Run, build
from torchrl_grpo.config import orderly_exit
from torchrl_grpo.host import interrupts
from torchrl_grpo.host.checkpoint_files import check_whole, checkpoints_in
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.host.interrupts import shielded, watched
from torchrl_grpo.learner.checkpoint import Checkpointer

OPTIONS = (
    "train.checkpoint_frequency=2",
    "evaluation.num_prompts=4",
    "evaluation.k=0",
    "evaluation.frequency=1",
)


def send_at(run_: Run, moment: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal at ``moment`` of the third step."""
    holders: dict[str, tuple[Any, str]] = {
        "wait for a batch": (run_.rollouts, "next_batch"),
        "play": (run_.rollouts.samplers[0].part, "play"),
        "step": (run_.learner.trainer, "optim_step"),
        "end of a step": (run_.learner, "train_groups"),
        "weight sync": (run_.rollouts, "publish"),
        "evaluation": (run_.rollouts, "evaluate"),
        "log": (run_.logger, "log"),
        "samples": (run_.learner, "samples"),
        "save": (os, "fsync"),
        "export": (run_.learner, "export"),
    }
    holder, name = holders[moment]
    real = getattr(holder, name)

    def with_signal(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if run_.learner.version >= {
            "save": 4,
            "export": 4,
            "wait for a batch": 2,
            "play": 2,
            "step": 2,
        }.get(moment, 3):
            monkeypatch.setattr(holder, name, real)
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(holder, name, with_signal)


USER = """
import os, time
from torchrl.envs.transforms import Transform
from torchrl_grpo.tasks.base import Problem, Score, Task

def signaled():
    os.kill(os.getpid(), NUMBER)
    time.sleep(600)

def caught():
    try:
        signaled()
    except:
        pass

def reward(response, answer):
    signaled()

def catching_reward(response, answer):
    caught()
    return 0.0

class MyTask(Task):
    name = "mine"
    def problems(self, split):
        return [Problem(str(i), "") for i in (range(9, 12) if split == "test" else range(9))]
    def score(self, problem, responses):
        signaled()

class CatchingTask(MyTask):
    def advance(self, dialogs, timeout_s=None):
        caught()
        return super().advance(dialogs, timeout_s)
    def score(self, problem, responses):
        return Score(0.0, False)

class CatchingTransform(Transform):
    def _step(self, tensordict, next_tensordict):
        caught()
        return next_tensordict
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "option"),
    [
        (signal.SIGHUP, "env.reward={}:catching_reward"),
        *(
            pytest.param(signal.SIGTERM, option, marks=pytest.mark.nightly)
            for option in (
                "env.reward={}:reward",
                "env.transforms=[{{_target_: '{}:CatchingTransform'}}]",
                "env.task._target_={}:MyTask",
                "env.task._target_={}:CatchingTask",
            )
        ),
    ],
)
def test_a_signal_in_a_users_code_ends_the_run(number: int, option: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER.replace("NUMBER", str(int(number))))
    start = time.monotonic()
    with pytest.raises(SystemExit) as ended, orderly_exit():
        config = compose_config(*SMALL, steps(9), "evaluation.num_prompts=0", option.format(file))
        with closing(build(config, tmp_path / "run")) as training_run:
            training_run.fit()
    assert ended.value.code == 128 + number
    assert time.monotonic() - start < 300
    steps_done = max(row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    # Between a transform and the end of its step nothing looks for a signal that it has caught.
    assert steps_done == ("Transform" in option)


def test_nohup_keeps_its_effect() -> None:
    code = """
import os, signal
from torchrl_grpo.host.interrupts import watched
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with watched():
    os.kill(os.getpid(), signal.SIGHUP)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


MOMENTS = ["wait for a batch", "play", "step", "end of a step", "weight sync"]
MOMENTS += ["evaluation", "log", "samples", "save", "export"]
EVERY_RUN = ("weight sync", "save")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(number, moment, marks=() if moment in EVERY_RUN else pytest.mark.nightly)
        for number, moment in zip(cycle((signal.SIGTERM, signal.SIGINT)), MOMENTS, strict=False)
    ],
)
def test_a_signal_at_any_moment_saves_and_leaves_files_that_agree(
    number: int, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended, orderly_exit():
        training_run = build(compose_config(*SMALL, *OPTIONS, steps(4)), tmp_path)
        with closing(training_run):
            send_at(training_run, moment, number, monkeypatch)
            start = time.monotonic()
            training_run.fit()
    assert ended.value.code == 128 + number
    assert time.monotonic() - start < 300
    [newest, *_] = checkpoints_in(tmp_path / "checkpoints")
    check_whole(newest)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert newest == at(tmp_path, rows[-1]["step"])
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows[-1]["step"] == {
        "wait for a batch": 2,
        "play": 2,
        "samples": 4,
        "save": 4,
        "export": 4,
    }.get(moment, 3)
    assert "train/loss" in rows[-1]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", [pytest.param("weight sync", marks=pytest.mark.nightly), "play"])
def test_the_evaluation_or_batch_that_a_signal_cut_short_is_made_up_for(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_config(*SMALL, *OPTIONS, steps(4))
    with (
        pytest.raises(SystemExit),
        orderly_exit(),
        closing(build(config, tmp_path)) as training_run,
    ):
        send_at(training_run, moment, signal.SIGTERM, monkeypatch)
        training_run.fit()
    rows = run(tmp_path, *OPTIONS, steps(4), "train.resume=auto")
    whole = run(tmp_path / "whole", *OPTIONS, steps(4))
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    names = ("train/loss", "eval/pass@1", "rollout/reward_mean")
    assert [[row.get(name) for name in names] for row in merged.values()] == [
        [row.get(name) for name in names] for row in whole
    ]


def test_a_second_signal_ends_at_once_with_its_own_status() -> None:
    code = """
import os, signal, time
from torchrl_grpo.host.interrupts import shielded, watched
with watched(), shielded():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_a_shield_ends_after_its_time() -> None:
    start = time.monotonic()
    with pytest.raises(SystemExit, match="143"), watched(), shielded(0.2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(300)
    assert 0.1 < time.monotonic() - start < 290
    assert interrupts.status() is None


def test_a_signal_while_the_terminal_is_written_to_is_no_error() -> None:
    """Python's own stream raises a ``RuntimeError`` for a reentrant call."""
    code = """
import sys
from torchrl_grpo.host.interrupts import shielded, watched
with watched(), shielded():
    sys.stdout.write("now")
    sys.stdout.flush()
    sys.stderr.write(1_000_000 * "x")
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout is not None and process.stdout.read(3) == b"now"
        time.sleep(0.5)  # the pipe is full, and has no reader
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 143
    assert stderr.count(b"ending after this step") == 1 and stderr.count(b"x") == 1_000_000
    assert b"reentrant" not in stderr


def test_a_signal_inside_torchs_writer_is_not_taken_for_an_error(tmp_path: Path) -> None:
    """There is no shield here, like during the save of a run that is already ending."""
    with pytest.raises(KeyboardInterrupt), watched():
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        for step in range(10_000):
            save_weight(Checkpointer(tmp_path, {}, "last:1"), step, torch.zeros(2_000_000))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [("hydra.", ["--help"]), ("numpy.", ["--config-name", "grpo_arithmetic"])],
)
def test_ctrl_c_while_the_script_imports_gives_no_traceback(
    module: str, options: list[str], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        str(ROOT / "sota" / "grpo" / "grpo.py"),
        *options,
    ]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(module in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_time_limit_saves_and_ends_well(
    run_here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the loop jumps after a few steps, however slow they are."""
    looks = count()
    clock = SimpleNamespace(
        perf_counter=time.perf_counter,
        monotonic=lambda: time.monotonic() + 10_000 * (next(looks) > 3),
    )
    monkeypatch.setattr("torchrl_grpo.loop.time", clock)
    script = ROOT / "sota" / "grpo" / "grpo.py"
    status = run_here(
        script, "--config-name", "grpo_arithmetic", *SMALL, steps(100_000), "train.time_limit=9000",
        f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert status == 0
    assert (
        "WARNING] - train.time_limit=9000 ended the run after step"
        in (tmp_path / "run" / "grpo.log").read_text()
    )
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert checkpoints_in(tmp_path / "run" / "checkpoints")[0] == at(
        tmp_path / "run", rows[-1]["step"]
    )
    assert (tmp_path / "run" / "checkpoints" / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "into", [subprocess.DEVNULL, subprocess.STDOUT], ids=["stdout", "both streams"]
)
def test_a_pipe_that_nobody_reads_any_more_ends_nothing(into: int, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom torchrl_grpo.config import orderly_exit\n"
        "with orderly_exit():\n"
        "    print('first', flush=True)\n"
        "    sys.stdin.read()\n"
        "    for _ in range(100):\n"
        "        print('x' * 1000, flush=True)\n"
        "        print('y' * 1000, file=sys.stderr)\n"
        "    Path('done').touch()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=into,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(300) == 0
    assert (tmp_path / "done").exists()


STREAMS = """
import sys
from torchrl_grpo.config import orderly_exit
with orderly_exit():
    print('first', flush=True)
    sys.stdin.read()
    for _ in range(10):
        print('x', flush=True)
        sys.stderr.write('y')
sys.exit(7)
"""


def test_streams_that_are_closed_from_the_start_end_nothing(tmp_path: Path) -> None:
    command = 'exec "$0" -c "$1" >&- 2>&-'
    process = subprocess.run(
        ["sh", "-c", command, sys.executable, STREAMS],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert process.returncode == 7


def test_a_terminal_that_is_closed_ends_nothing() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", STREAMS],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        assert os.read(ours, 5) == b"first"
        os.close(ours)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(300) == 7
