"""Run folders: each start gets its own, and only one process at a time writes into it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from torchrl import torchrl_logger

from tests.support.configs import ROOT, compose_config
from tests.support.disks import mounted
from tests.support.runs import SMALL, run, steps
from tests.support.waiting import until
from torchrl_grpo.assembly.run import Run, build
from torchrl_grpo.config import ConfigError
from torchrl_grpo.errors import NotSavedError
from torchrl_grpo.extras.export.command import main as export
from torchrl_grpo.extras.view.runs import RunView
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.host.folders import LOCK_FILE, FolderLock
from torchrl_grpo.scripts import job

SYNC = ROOT / "sota" / "grpo" / "grpo.py"
SHORT = ("--config-name", "grpo_arithmetic", *SMALL, steps(1))


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the time that Hydra uses in folder names."""
    from omegaconf import OmegaConf

    real = OmegaConf.register_new_resolver

    def register(name: str, resolver: Callable[..., object], **options: object) -> None:
        real(name, (lambda _: "12-00-00") if name == "now" else resolver, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(OmegaConf, "register_new_resolver", register)


@pytest.mark.slow
@pytest.mark.usefixtures("stopped_clock")
def test_starts_in_the_same_second_have_folders_of_their_own(
    run_here: Callable[..., int], tmp_path: Path
) -> None:
    assert [run_here(SYNC, *SHORT) for _ in range(3)] == [0, 0, 0]
    day = tmp_path / "outputs" / "12-00-00"
    assert sorted(path.name for path in day.iterdir()) == ["12-00-00", "12-00-00-2", "12-00-00-3"]
    assert [
        [row["step"] for row in read_jsonl(path / "metrics.jsonl")] for path in day.iterdir()
    ] == 3 * [[0, 1]]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("stopped_clock")
def test_sweeps_in_the_same_second_have_folders_of_their_own(
    run_here: Callable[..., int], tmp_path: Path
) -> None:
    assert [run_here(SYNC, "--multirun", *SHORT) for _ in range(2)] == [0, 0]
    sweeps = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("metrics.jsonl")
    )
    day = "multirun/12-00-00"
    assert sweeps == [f"{day}/12-00-00-2/0/metrics.jsonl", f"{day}/12-00-00/0/metrics.jsonl"]
    assert (tmp_path / day / "12-00-00-2" / "sweep.html").exists()


HELD = r"hydra\.run\.dir=.* must be a folder that no other run writes to, but process {} on host {} does: wait until"


def held_by(pid: int) -> str:
    return HELD.format(pid, os.uname().nodename)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_another_start_does_not_continue_a_live_run(tmp_path: Path) -> None:
    """The second run once renamed the first one's checkpoints and truncated its metrics."""
    config = compose_config(*SMALL, steps(3), "train.checkpoint_frequency=1")
    with closing(build(config, tmp_path)) as live:
        live.fit()
        before = contents(tmp_path)
        for resume in ("auto", str(tmp_path / "checkpoints" / "checkpoint_000001"), "null"):
            with pytest.raises(ConfigError, match=held_by(os.getpid())):
                run(tmp_path, steps(4), f"train.resume={resume}")
        assert contents(tmp_path) == before
        export([str(tmp_path), "--output", str(tmp_path / "model")])  # reading needs no lock
        assert (tmp_path / "model" / "config.json").exists()
        view = RunView(tmp_path, "live")
        view.refresh()
        assert view.status()["step"] == 3
    rows = run(tmp_path, steps(4), "train.resume=auto")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["train.max_staleness=1", "env.dataset=nowhere.jsonl"])
@pytest.mark.parametrize("options", [(), ("hydra.run.dir=some/where",)])
def test_a_refused_start_leaves_no_folder(
    refused: str, options: tuple[str, ...], run_here: Callable[..., int], tmp_path: Path
) -> None:
    assert run_here(SYNC, *SHORT, refused, *options) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_log_file_begins_with_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, used = (logging.FileHandler(tmp_path / name) for name in ("empty.log", "used.log"))
    later = logging.FileHandler(tmp_path / "later.log", delay=True)
    nowhere = logging.FileHandler(os.devnull)
    monkeypatch.setattr(logging.root, "handlers", [empty, used, later, nowhere])
    used.emit(logging.makeLogRecord({"msg": "before"}))
    job._remove_empty_log()
    assert [path.name for path in tmp_path.iterdir()] == ["used.log"]
    for number in (1, 2):
        logging.root.error("line %d", number)
    for handler in (empty, used, later, nowhere):
        handler.close()
    assert Path(os.devnull).exists()
    assert (tmp_path / "empty.log").read_text() == "line 1\nline 2\n"
    assert (tmp_path / "used.log").read_text() == "before\nline 1\nline 2\n"


@pytest.mark.slow
@pytest.mark.usefixtures("stopped_clock")
def test_a_refused_start_leaves_the_folders_that_were_there(
    run_here: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "12-00-00" / "12-00-00"
    folder.mkdir(parents=True)
    for options in ((), (f"hydra.run.dir={folder}",)):
        assert run_here(SYNC, *SHORT, "train.max_staleness=1", *options) == 2
        assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.slow
def test_a_refused_start_changes_no_file_of_a_run(
    run_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run_here(SYNC, *SHORT, f"hydra.run.dir={folder}") == 0
    with FolderLock(folder):
        before = contents(folder)
        assert (
            run_here(
                SYNC, *SHORT, f"hydra.run.dir={folder}", "train.resume=auto", "optimizer.lr=1e-5"
            )
            == 2
        )
        assert (
            run_here(
                SYNC,
                *SHORT,
                f"hydra.run.dir={folder}",
                "train.resume=auto",
                steps(2),
                "dry_run=true",
            )
            == 0
        )
        assert contents(folder) == before
    before = contents(folder)
    assert run_here(SYNC, *SHORT, f"hydra.run.dir={folder}", "optimizer.lr=1e-5") == 2
    assert contents(folder) == before
    stderr = capfd.readouterr().err
    assert "use train.resume=auto" in stderr
    assert re.search(f"error: {held_by(os.getpid())}", stderr) and "Traceback" not in stderr


@pytest.mark.slow
def test_a_job_of_a_sweep_is_refused_where_a_run_is_live(
    run_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with FolderLock(tmp_path / "sweep" / "1"):
        assert run_here(SYNC, "--multirun", *SHORT, "hydra.sweep.dir=sweep", "seed=0,1") == 2
    assert re.search(held_by(os.getpid()), capfd.readouterr().err)
    assert [path.parent.name for path in (tmp_path / "sweep").glob("*/metrics.jsonl")] == ["0"]


HOLDER = "import sys, time; from torchrl_grpo.host.folders import FolderLock; lock = FolderLock(sys.argv[1]); "


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that holds the lock on ``tmp_path`` and has reported it."""
    started = []

    def start(then: str = "") -> subprocess.Popen[str]:
        code = f"{HOLDER}{then}print('held', flush=True); time.sleep(600)"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_lock_ends_with_a_process_that_is_killed(
    tmp_path: Path, holder: Callable[..., subprocess.Popen[str]]
) -> None:
    process = holder()
    with pytest.raises(ConfigError, match=held_by(process.pid)):
        FolderLock(tmp_path)
    process.kill()
    process.wait()
    with FolderLock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().split()[1] == str(os.getpid())


def has_open(pid: int, name: str) -> bool:
    """Return whether a process has a file of this name open."""
    files = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            files.append(os.readlink(file))
    return any(file.endswith(name) for file in files)


CHILDREN = {
    "forked": "import os; child = os.fork(); child or time.sleep(600); ",
    "forked by multiprocessing": (
        "import multiprocessing; fork = multiprocessing.get_context('fork'); "
        "child = fork.Process(target=time.sleep, args=(600,)); child.start(); child = child.pid; "
    ),
    "executed": "import subprocess; child = subprocess.Popen(['sleep', '600'], close_fds=False).pid; ",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_no_child_process_keeps_the_lock(
    kind: str, tmp_path: Path, holder: Callable[..., subprocess.Popen[str]]
) -> None:
    """Reward workers, Ray's processes and vLLM's may outlive a run that is killed."""
    process = holder(f"{CHILDREN[kind]}open({str(tmp_path / 'child')!r}, 'w').write(str(child)); ")
    child = int((tmp_path / "child").read_text())
    try:
        until(lambda: not has_open(child, LOCK_FILE))  # a child just forked has not run yet
        process.kill()
        process.wait()
        os.kill(child, 0)
        FolderLock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_ends_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        pid = os.fork()
        if pid == 0:
            lock.close()
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(ConfigError, match=held_by(os.getpid())):
            FolderLock(tmp_path)


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without ``flock``."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_flock")
def test_without_flock_the_file_is_the_lock(
    tmp_path: Path, holder: Callable[..., subprocess.Popen[str]]
) -> None:
    process = holder()
    with pytest.raises(
        ConfigError, match=held_by(process.pid) + f".* remove {tmp_path / LOCK_FILE}"
    ):
        FolderLock(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie until we wait for it
    with FolderLock(tmp_path), pytest.raises(ConfigError, match=held_by(os.getpid())):
        FolderLock(tmp_path)
    process.wait()
    assert not list(tmp_path.iterdir())
    for holder_text in (
        "elsewhere 7 77\n",
        "",
    ):  # a host that cannot be queried, and one that died while writing
        (tmp_path / LOCK_FILE).write_text(holder_text)
        with pytest.raises(
            ConfigError, match=f"If that process has ended, remove {tmp_path / LOCK_FILE}"
        ):
            FolderLock(tmp_path)
    (tmp_path / LOCK_FILE).write_text(
        f"{os.uname().nodename} {os.getpid()} 1\n"
    )  # the process number is used again
    FolderLock(tmp_path).close()


@pytest.mark.slow
def test_of_20_starts_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from torchrl_grpo.errors import ConfigError\n"
        "from torchrl_grpo.host.folders import FolderLock\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "try: FolderLock(sys.argv[1]); print('held', flush=True); time.sleep(600)\n"
        "except ConfigError: print('refused', flush=True)"
    )
    begin = str(time.time() + 2)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), begin],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(20)
    ]
    try:
        lines = [process.stdout.readline() for process in started if process.stdout is not None]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert sorted(lines) == ["held\n", *(19 * ["refused\n"])]


def at_step(
    training_run: Run, step: int, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change a run's folder in the middle of a step."""
    publish: Callable[..., None] = training_run.rollouts.publish

    def publish_then(*args: Any) -> None:
        publish(*args)
        if training_run.learner.version == step:
            then()

    monkeypatch.setattr(training_run.rollouts, "publish", publish_then)


def test_a_file_in_the_place_of_the_checkpoints_drops_no_rows(tmp_path: Path) -> None:
    """The run once restarted: it dropped the rows of its steps, and then came a traceback."""
    (tmp_path / "checkpoints").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(
        ConfigError,
        match=rf"hydra\.run\.dir={tmp_path} .*checkpoints",
    ):
        run(tmp_path, steps(1), "train.resume=auto")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 7}\n'


@pytest.mark.slow
def test_checkpoints_that_cannot_be_written_cost_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)
    checkpoints = tmp_path / "checkpoints"

    def block() -> None:
        checkpoints.rename(tmp_path / "aside")
        checkpoints.write_text("mine")

    config = compose_config(
        *SMALL, steps(4), "train.checkpoint_frequency=1", "train.export_frequency=1"
    )
    with closing(build(config, tmp_path)) as training_run:
        at_step(training_run, 2, block, monkeypatch)
        at_step(training_run, 4, checkpoints.unlink, monkeypatch)
        training_run.fit()
    unsaved = [line for line in messages if "was not" in line]
    why = f"cannot be written in {checkpoints} ("
    assert [line.partition(":")[0] for line in unsaved] == [
        f"{kind} {step} was not {what}"
        for step in (2, 3)
        for kind, what in (
            ("Step", "saved, there is no earlier checkpoint"),
            ("The model of step", "written"),
        )
    ]
    assert all(why in line for line in unsaved)
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint_000004", "model"}


@pytest.mark.slow
def test_a_last_checkpoint_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def block() -> None:
        (tmp_path / "checkpoints").rmdir()
        (tmp_path / "checkpoints").write_text("mine")

    with (
        pytest.raises(
            NotSavedError, match=r"checkpoint_000002 cannot be written in .* \(File exists\)"
        ),
        closing(build(compose_config(*SMALL, steps(2)), tmp_path)) as training_run,
    ):
        at_step(training_run, 2, block, monkeypatch)
        training_run.fit()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A read-only file system, where root may mount one."""
    with mounted(tmp_path / "outputs", "ro") as folder:
        yield folder


@pytest.mark.slow
def test_a_read_only_folder_is_one_line(
    read_only: Path, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(SYNC, *SHORT) == 2
    assert re.search(
        r"error: hydra\.run\.dir=outputs/.* must be a folder that can be created, but it cannot \(Read-only file",
        capfd.readouterr().err,
    )
    with pytest.raises(ConfigError, match=rf"hydra\.run\.dir={read_only} .*\(Read-only"):
        FolderLock(read_only)
