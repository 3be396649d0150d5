"""Checkpoints of several ranks on disk: complete or absent. Real processes over gloo, which a test
starts once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torchrl import torchrl_logger

from tests.support.ranks import start_ranks
from tests.support.runs import changed, reseal, whole_state_of
from torchrl_grpo.assembly.observers import Saver
from torchrl_grpo.errors import ConfigError, DiskFullError, NonFiniteError, NotSavedError
from torchrl_grpo.host.checkpoint_files import (
    check_whole,
    checkpoints_in,
    newest,
    read_manifest,
    step_of,
)
from torchrl_grpo.learner.checkpoint import Checkpointer, read_checkpoint
from torchrl_grpo.learner.resume import refusing
from torchrl_grpo.learner.shards import read_parts
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.loop import Schedule
from torchrl_grpo.models.sharding import init_mesh, shard_model

RANKS = 2
ROWS = 3
"""Of the weight: rank 0 has two, rank 1 has one."""

pytestmark = pytest.mark.slow


class Parts:
    """A trainer as a saver sees it: a single weight, which is its version."""

    def __init__(self, rank: int, folder: Path, meet: str, columns: int = 4) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / meet), RANKS)
        mesh = init_mesh(rank, RANKS, store, device=torch.device("cpu"), timeout_s=300)
        self.model: Any = nn.Sequential(nn.Linear(columns, ROWS, bias=False))
        self.model.get_input_embeddings = self.model.get_output_embeddings = lambda: None
        shard_model(self.model, mesh)
        self.weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.0)
        self.version = 0
        self.saver = CheckpointWriter()

    def progress(self) -> dict[str, Any]:
        return {"version": self.version}

    def averages_by_name(self) -> dict[str, torch.Tensor]:
        return {}

    def save(self, checkpointer: Checkpointer, version: int, source: Any = None) -> None:
        self.version = version
        with torch.no_grad():
            self.weight.fill_(float(version))
        self.saver.start(checkpointer, self, source or {})  # type: ignore[arg-type]


def refused(work: Callable[[], None]) -> str:
    """Return name and text of the error that a rank raises."""
    try:
        work()
    except (NonFiniteError, DiskFullError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def save_much(rank: int, folder: str) -> None:
    """Run the saves of one rank, and write its errors into a file."""
    path = Path(folder)
    parts = Parts(rank, path, "meet")
    errors = dict[str, Any]()
    rotating = Checkpointer(path / "kept", {"a": 1}, "last:2,best:1")
    for version, accuracy in enumerate((0.5, 0.9, 0.1, 0.2, 0.3), start=1):
        rotating.metrics = {"eval/pass@1": accuracy}
        parts.save(rotating, version, {"drawn": version})
        parts.saver.finish()
    full = Checkpointer(path / "full", {}, "last:1")
    real = os.fsync

    def no_room(file: int) -> None:
        raise OSError(28, "No space left on device")

    parts.save(full, 1)
    parts.saver.finish()
    if rank == 1:
        os.fsync = no_room
    parts.save(full, 2)
    errors["full"] = refused(parts.saver.finish)
    errors["left"] = sorted(path.name for path in full.directory.iterdir())
    errors["again"] = refused(parts.saver.finish)
    os.fsync = real
    parts.save(full, 3)
    parts.saver.finish()
    with torch.no_grad():
        if rank == 1:
            parts.weight.to_local()[0, 0] = torch.nan
    errors["nan"] = refused(lambda: parts.saver.start(full, parts, {}))  # type: ignore[arg-type]
    torch.save(errors, path / f"told_{rank}.pt")
    dist.destroy_process_group()


def save_on(rank: int, folder: str, first: int) -> None:
    """Save until the process is killed."""
    parts = Parts(rank, Path(folder), f"meet_{first}", columns=100_000)
    for version in range(first + 1, 10_000):
        parts.save(Checkpointer(Path(folder) / "killed", {}, "last:2"), version)
        parts.saver.finish()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(save_much, RANKS, str(folder))
    return SimpleNamespace(
        folder=folder, told=[torch.load(folder / f"told_{rank}.pt") for rank in range(RANKS)]
    )


@pytest.fixture
def whole(saved: SimpleNamespace, tmp_path: Path) -> Path:
    """Return a copy of the retained checkpoints."""
    return Path(shutil.copytree(saved.folder / "kept", tmp_path / "checkpoints"))


def test_the_newest_and_the_best_folders_are_kept_and_whole(saved: SimpleNamespace) -> None:
    checkpoints = checkpoints_in(saved.folder / "kept")
    assert [path.name for path in checkpoints] == [
        "checkpoint_000005",
        "checkpoint_000004",
        "checkpoint_000002",
    ]
    assert len(list((saved.folder / "kept").iterdir())) == 3
    for path in checkpoints:
        step = step_of(path)
        manifest = read_manifest(path)
        state = read_checkpoint(path)
        assert (manifest["step"], manifest["config"], state["step"]) == (step, {"a": 1}, step)
        assert state["source"] == {"drawn": step} and state["trainer"]["version"] == step
        [weight] = whole_state_of(path)["trainer"]["model"].values()
        assert weight.shape == (ROWS, 4) and (weight == step).all()


def test_a_rank_without_room_fails_the_save_on_all_ranks(saved: SimpleNamespace) -> None:
    for errors in saved.told:
        assert (
            errors["full"]
            == f"DiskFullError: there is no room for checkpoint_000002 in {saved.folder / 'full'}"
        )
        assert errors["again"] == "nothing"
    assert saved.told[0]["left"] == ["checkpoint_000001"]
    [path] = checkpoints_in(saved.folder / "full")
    check_whole(path)
    assert path.name == "checkpoint_000003"


def test_a_weight_that_one_rank_has_as_nan_is_saved_by_none(saved: SimpleNamespace) -> None:
    for errors in saved.told:
        assert errors["nan"] == "NonFiniteError: weights/0.weight has values that are not finite"
    assert len(list((saved.folder / "full").iterdir())) == 1


def test_of_a_folder_with_a_file_more_or_less_the_one_before_is_taken(whole: Path) -> None:
    shutil.copy(
        next((whole / "checkpoint_000004").glob("shard-*")),
        whole / "checkpoint_000005" / "more.safetensors",
    )
    with pytest.raises(ConfigError, match="checkpoint_000005 is damaged"):
        newest(str(whole / "checkpoint_000005"), whole, read_checkpoint)
    assert newest(str(whole), whole, read_checkpoint)[0] == whole / "checkpoint_000004"  # type: ignore[index]
    (whole / "checkpoint_000004" / "manifest.json").unlink()
    assert newest(str(whole), whole, read_checkpoint)[0] == whole / "checkpoint_000002"  # type: ignore[index]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_resealed_folder_that_lacks_a_part_is_refused(whole: Path, rank: int) -> None:
    path = whole / "checkpoint_000005"
    [shard] = path.glob(f"shard-{rank:05d}-*.safetensors")
    shard.unlink()
    reseal(path)
    check_whole(path)
    model: Any = nn.Sequential(nn.Linear(4, ROWS, bias=False))
    with (
        pytest.raises(ConfigError, match=r"train\.resume=.* whose state fits"),
        refusing(path),
    ):
        read_parts(path, model, None, {})


def test_a_folder_with_a_link_or_a_pipe_is_refused(whole: Path) -> None:
    path = whole / "checkpoint_000005"
    [shard] = path.glob("shard-00001-*.safetensors")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ValueError, match="has a link"):
        check_whole(path)
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="has a link"):
        check_whole(path)


def test_weights_that_are_nan_in_a_folder_are_named_when_it_is_read(whole: Path) -> None:
    """The checksums are right, so only the weights reveal it."""
    path = changed(
        whole / "checkpoint_000005",
        whole / "checkpoint_000006",
        {"weights/0.weight": torch.full((1, 4), torch.nan)},
    )
    with pytest.raises(ValueError, match=r"weights/0\.weight has values that are not finite"):
        read_checkpoint(path)


def test_ranks_that_are_killed_in_a_save_leave_only_whole_folders(tmp_path: Path) -> None:
    draw = random.Random(0)
    reached = [0]
    parts = 0
    folder = tmp_path / "killed"
    for rounds in range(12):
        if rounds >= 3 and parts:
            break
        Checkpointer(folder, {}).begin(reached[-1])
        context = start_ranks(save_on, RANKS, str(tmp_path), reached[-1], join=False)
        while (
            max((step_of(path) or 0 for path in checkpoints_in(folder)), default=0) == reached[-1]
        ):
            assert all(process.is_alive() for process in context.processes)
            time.sleep(0.01)
        time.sleep(draw.random() / 5)
        for pid in context.pids():
            with suppress(ProcessLookupError):  # it ended together with the other one
                os.kill(pid, signal.SIGKILL)
        with pytest.raises((ProcessExitedException, ProcessRaisedException)):
            while not context.join():
                """Until both have ended."""
        for path in checkpoints_in(folder):
            read_checkpoint(path)
            assert (
                next(iter(whole_state_of(path)["trainer"]["model"].values())) == step_of(path)
            ).all()
        reached.append(max(step_of(path) or 0 for path in checkpoints_in(folder)))
        parts += len(list(folder.glob("*.tmp")))
    assert reached == sorted(set(reached))
    assert parts > 0  # some were killed in the middle of a save


class LateLearner:
    """A learner whose checkpoints are written after ``save`` has returned; it reports the steps
    that failed.
    """

    resumable = True

    def __init__(self, failing: Sequence[int]) -> None:
        self.version, self.failing = 0, [*failing]
        self.writing: int | None = None
        self.written: list[int] = []

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path:
        assert self.writing is None
        self.writing = self.version
        return checkpointer.path(self.version)

    def finish_save(self) -> None:
        writing, self.writing = self.writing, None
        if writing in self.failing:
            self.failing.remove(writing)
            raise NotSavedError("its folder is gone")
        if writing is not None:
            self.written.append(writing)


@pytest.mark.parametrize(
    ("failing", "written", "unsaved"),
    [
        ((), [2, 4], []),
        ((2,), [4], [2]),
        ((4,), [2, 4], [4]),
        ((2, 4), [4], [2, 4]),
        ((4, 4), [2], [4]),
    ],
)
def test_a_write_that_fails_later_is_said_and_the_last_one_is_tried_again(
    failing: tuple[int, ...],
    written: list[int],
    unsaved: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)
    learner: Any = LateLearner(failing)
    rollouts: Any = SimpleNamespace(state_dict=dict)
    saver = Saver(
        learner,
        rollouts,
        Checkpointer(tmp_path, {}),
        lambda: None,
        Schedule(4, checkpoint_frequency=2),
    )
    for step in range(1, 5):
        saver.taken()
        learner.version = step
        saver.stepped(step, {})
    with pytest.raises(NotSavedError) if failing == (4, 4) else nullcontext():
        saver.ended(4)
    assert learner.written == written
    assert messages == [
        f"Step {step} was not saved, there is no earlier checkpoint: its folder is gone."
        for step in unsaved
    ]


def test_what_is_being_written_is_waited_for_when_a_run_is_interrupted(tmp_path: Path) -> None:
    """It is also awaited inside a step, whose state cannot be saved."""
    learner: Any = LateLearner(())
    rollouts: Any = SimpleNamespace(state_dict=dict)
    saver = Saver(
        learner,
        rollouts,
        Checkpointer(tmp_path, {}),
        lambda: None,
        Schedule(4, checkpoint_frequency=1),
    )
    saver.taken()
    learner.version = 1
    saver.stepped(1, {})
    assert learner.written == []
    learner.resumable = False
    saver.interrupted()
    assert learner.written == [1]
