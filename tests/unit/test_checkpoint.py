"""Checkpoints on disk: complete or reported as damaged, and never of useless weights."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchrl import torchrl_logger

from tests.support.configs import ROOT, compose_config
from tests.support.disks import mounted
from tests.support.runs import (
    SMALL,
    at,
    changed,
    differences,
    reseal,
    run,
    save_weight,
    steps,
    whole_state_of,
)
from tests.support.waiting import until
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError, plain
from torchrl_grpo.config.resumed import on_saved_config
from torchrl_grpo.errors import DiskFullError, NonFiniteError
from torchrl_grpo.extras.export.card import model_card
from torchrl_grpo.host.checkpoint_files import (
    check_whole,
    checkpoints_in,
    read_manifest,
    saved_config,
    step_of,
    write_manifest,
)
from torchrl_grpo.learner.checkpoint import Checkpointer, Writes, read_checkpoint
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.learner.resume import Resume, find_resume
from torchrl_grpo.reporting.metrics import MetricsLogger, read_jsonl
from torchrl_grpo.weights import named_weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(folder, steps(2), "train.checkpoint_frequency=1", "logging.sample_frequency=1")
    return folder


def resume_in(folder: Path) -> Resume:
    config = compose_config(*SMALL, steps(9), f"train.resume={folder}")
    resume = find_resume(config, plain(config))
    assert resume is not None
    return resume


@pytest.mark.slow
def test_each_of_200_flipped_bits_and_4_kib_of_zeros_is_found(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(at(saved, 2), at(tmp_path, 2)))
    draw = random.Random(0)
    files = sorted(path.iterdir())
    [shard] = path.glob("*.safetensors")
    assert [file.name for file in files] == ["manifest.json", shard.name, "state.pt"]
    accepted = 0
    for number in range(200):
        file = files[number % len(files)]
        place = draw.randrange(file.stat().st_size)
        bit = 1 << draw.randrange(8)
        _flip(file, place, bit)
        accepted += _is_accepted(path)
        _flip(file, place, bit)
    check_whole(path)
    with shard.open("r+b") as opened:
        opened.seek(500_000)
        opened.write(bytes(4096))
    assert accepted + _is_accepted(path) == 0


def _flip(file: Path, place: int, bits: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        [byte] = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ bits]))


@pytest.mark.slow
def test_each_flipped_bit_of_a_manifest_is_found_before_the_rest_is_read(
    saved: Path, tmp_path: Path
) -> None:
    """The config of a resumed run comes from there, and a manifest with one other digit in a
    learning rate still parses.
    """
    path = Path(shutil.copytree(at(saved, 2), at(tmp_path, 2)))
    draw = random.Random(0)
    file = path / "manifest.json"
    manifest = read_manifest(path)
    whole = file.read_bytes()
    accepted = 0
    start, end = whole.rindex(b'{"step"'), whole.rindex(b', "sha256"')
    for place in [whole.rindex(b'"lr": ') + 6, *draw.sample(range(start, end), 100)]:
        _flip(file, place, 1)
        with suppress(ValueError):
            accepted += read_manifest(path) is not None
        _flip(file, place, 1)
    assert accepted == 0
    assert read_manifest(path) == manifest


@pytest.mark.slow
def test_what_is_only_named_like_a_checkpoint_is_passed_over(saved: Path, tmp_path: Path) -> None:
    changed(at(saved, 1), at(tmp_path, 1))
    at(tmp_path, 7).mkdir()
    at(tmp_path, 8).symlink_to("nowhere")
    for step, manifest in enumerate(({}, {"config": 3}), start=9):
        at(tmp_path, step).mkdir()
        write_manifest(at(tmp_path, step), manifest, {})
    assert resume_in(tmp_path).step == 1
    user_config = OmegaConf.structured(compose_config(*SMALL, f"train.resume={tmp_path}"))
    path, config = saved_config(str(tmp_path), tmp_path / "new") or (tmp_path, {})
    assert (
        path == at(tmp_path, 1)
        and on_saved_config(user_config, [], path, config).train.total_dialog_turns == 32
    )


def test_the_checkpoint_with_the_most_steps_is_the_newest(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        save(checkpointer(tmp_path), step)
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [1_000_000, 999_999, 20]
    checkpointer(tmp_path).begin(999_999)
    assert steps_in(tmp_path) == [20, 999_999]


def _is_accepted(path: Path) -> bool:
    try:
        check_whole(path)
    except ValueError:
        return False
    return True


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        changed(at(saved, step), at(tmp_path, step))
    [shard] = at(tmp_path, 2).glob("*.safetensors")
    _flip(shard, 400_000, 1)
    with pytest.raises(ConfigError, match=r"checkpoint_000002 is damaged: shard-.* checksum"):
        resume_in(at(tmp_path, 2))
    for folder in (tmp_path, tmp_path / "checkpoints"):
        resume = resume_in(folder)
        assert (resume.step, resume.path) == (1, at(tmp_path, 1))


class Zeros:
    """Pickled as a call that makes zeros."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**20,)


def rewritten(file: Path, kind: str) -> None:
    """Rewrite a state so that torch makes more of it than the file has."""
    state = torch.load(file, weights_only=True)
    if kind == "unknown key":
        torch.save(state | {"bomb": torch.zeros(3)}, file)
    elif kind == "zeros":
        torch.save(state | {"step": Zeros()}, file)
    elif kind == "legacy format":
        torch.save(state, file, _use_new_zipfile_serialization=False)
    else:
        packed = io.BytesIO()
        method = zipfile.ZIP_STORED if kind == "overlapping" else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(file) as members, zipfile.ZipFile(packed, "w", method) as other:
            for name in members.namelist():
                other.writestr(name, members.read(name))
            first, second, *_ = (entry for entry in other.infolist() if "/data/" in entry.filename)
            if kind == "overlapping":
                second.header_offset = first.header_offset
        data = packed.getvalue()
        if kind == "shifted":  # zipfile reads the second directory, which says "not compressed"
            directory = data[other.start_dir : -22]
            method_8 = rb"(PK\x01\x02.{6})\x08"
            stored = re.sub(method_8, lambda match: match[1] + b"\0", directory, flags=re.S)
            data = data[:-22] + stored + data[-22:]
        file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["compressed", "shifted", "overlapping", "zeros", "legacy format", "unknown key"]
)
def test_a_state_that_is_more_than_its_file_is_refused(
    kind: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed(at(saved, 2), at(tmp_path, 2))
    rewritten(path / "state.pt", kind)
    reseal(path)
    if kind != "unknown key":  # refused unread
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match=rf"train\.resume={path}.* checkpoint_000002 "):
        resume_in(path)


@pytest.mark.slow
def test_a_manifest_of_any_length_is_refused_unread(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_000003"
    folder.mkdir()
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(ConfigError, match=r"manifest\.json of \d+ bytes"):
        resume_in(folder)


def test_a_pickle_is_refused_unread_and_without_advice_to_trust_it(
    saved: Path, tmp_path: Path
) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "canary",)

    path = changed(at(saved, 1), at(tmp_path, 1))
    torch.save({"step": Canary()}, path / "state.pt")
    reseal(path)
    with pytest.raises(
        ConfigError, match=r"cannot be read \(UnpicklingError: Weights only load failed\)"
    ):
        resume_in(path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("resume", ["checkpoints/checkpoint_000002.pt", "", "auto"])
def test_a_file_of_an_older_version_is_refused_with_its_conversion(
    resume: str, tmp_path: Path
) -> None:
    """A run must not restart from scratch next to it."""
    old = tmp_path / "checkpoints" / "checkpoint_000002.pt"
    old.parent.mkdir()
    torch.save({"step": 2}, old)
    value = resume if resume == "auto" else str(tmp_path / resume)
    with pytest.raises(ConfigError, match=rf"train\.resume=.*convert_checkpoint\.py {old}"):
        saved_config(value, tmp_path)


def test_a_file_of_an_older_version_is_converted(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = tmp_path / "checkpoint_000002.pt"
    state = whole_state_of(at(saved, 2))
    manifest = read_manifest(at(saved, 2))
    del manifest["files"]
    text = json.dumps(manifest | {"sha256": ""}).encode()

    def write(state: dict[str, Any]) -> None:
        with old.open("wb") as file:
            torch.save(state, file)
            file.write(text + struct.pack("<Q", len(text)))
        digest = hashlib.sha256(old.read_bytes()).digest()
        with old.open("ab") as file:
            file.write(digest + b"grpo-ck1")

    write(state)
    tool = str(ROOT / "tools" / "convert_checkpoint.py")
    monkeypatch.setattr(sys, "argv", [tool, str(old)])
    runpy.run_path(tool, run_name="__main__")
    folder = Path(capsys.readouterr().out.strip())
    assert differences(whole_state_of(folder), state) == []
    assert resume_in(folder).step == 2
    with old.open("r+b") as file:
        file.seek(100_000)
        file.write(b"x")
    with pytest.raises(SystemExit, match="damaged"):
        runpy.run_path(tool, run_name="__main__")
    write(state | {"step": Zeros()})
    with pytest.raises(SystemExit, match="bytearray"):
        runpy.run_path(tool, run_name="__main__")


@pytest.mark.slow
def test_weights_that_a_step_made_useless_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 1.* lower optimizer\.lr than 1e\+10"):
        run(tmp_path, steps(3), "optimizer.lr=1e10", "train.checkpoint_frequency=1")
    with pytest.raises(NonFiniteError, match=r"step 1, .* lower optimizer\.lr\."):
        run(tmp_path / "b", steps(3), "optimizer.lr=1e10")
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_weights_that_overflow_only_in_mixed_precision_are_never_saved(tmp_path: Path) -> None:
    """In float32 these weights gave finite log-probs, while every training step was skipped because
    of NaN.
    """
    with pytest.raises(
        NonFiniteError,
        match=r"step 3.* lower optimizer\.lr than 1\.",
    ):
        run(tmp_path, steps(3), "optimizer.lr=1", "train.mixed_precision=fp16")
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.safetensors"))


def checkpointer(folder: Path, keep: str | None = None) -> Checkpointer:
    return Checkpointer(folder, {}, keep)


def save(saver: Checkpointer, step: int, accuracy: float | None = None, floats: int = 1000) -> None:
    saver.metrics = {} if accuracy is None else {"eval/pass@1": accuracy}
    save_weight(saver, step, torch.full((floats,), float(step)))


def steps_in(folder: Path) -> list[int]:
    return sorted(read_checkpoint(path)["step"] for path in checkpoints_in(folder))


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("last:2", [4, 5]),
        ("last:1,best:1", [2, 5]),
        ("last:2,best:2", [2, 3, 4, 5]),
        (None, [1, 2, 3, 4, 5]),
        (compose_config().train.keep_checkpoints, [3, 4, 5]),
    ],
)
def test_the_newest_and_the_best_checkpoints_are_kept(
    keep: str | None, expected: list[int], tmp_path: Path
) -> None:
    saver = checkpointer(tmp_path, keep)
    for step, accuracy in enumerate([0.5, 0.9, 0.7, None, 0.1], start=1):
        save(saver, step, accuracy)
    assert steps_in(tmp_path) == expected


def test_an_evaluation_with_mostly_invalid_rewards_is_not_the_best(tmp_path: Path) -> None:
    """One of 400 problems had a valid reward, for a correct response, so pass@1 was 100%."""
    saver = checkpointer(tmp_path, "last:1,best:1")
    for step, (accuracy, invalid) in enumerate(
        [(0.7, 0.5), (1.0, 399 / 400), (math.nan, 1.0), (0.9, 0.51)], start=1
    ):
        saver.metrics = {"eval/pass@1": accuracy, "eval/invalid_fraction": invalid}
        save_weight(saver, step, torch.zeros(3))
    assert steps_in(tmp_path) == [1, 4]


def test_a_model_card_has_no_accuracy_that_no_valid_reward_stands_behind() -> None:
    config = {"env": {"dataset": "gsm8k", "task": {}}, "model": {"name": "base"}}
    assert "| pass@1 | no valid reward |" in model_card(config, 3, {"eval/pass@1": math.nan})


def test_checkpoints_that_were_set_aside_stay_when_others_are(tmp_path: Path) -> None:
    """The second move once overwrote the checkpoints of the first."""
    saver = checkpointer(tmp_path)
    for content in (1, 2, 3):
        saver.begin(1)
        save_weight(saver, 2, torch.full((3,), float(content)))
    saver.begin(1)
    aside = ["checkpoint_000002.old", "checkpoint_000002.old-2", "checkpoint_000002.old-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == aside
    assert [whole_state_of(tmp_path / name)["trainer"]["model"]["weight"][0] for name in aside] == [
        1,
        2,
        3,
    ]
    assert saver.latest() is None


def test_a_save_that_fails_leaves_the_one_before_and_no_staging_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpointer(tmp_path, "last:1")
    save(saver, 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match=r"no room for checkpoint_000002 in"):
        save(saver, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_000001"]
    assert steps_in(tmp_path) == [1]


def test_the_room_that_a_run_needs_is_known_before_it_starts(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ConfigError, match=r"3 checkpoints .* train\.keep_checkpoints=last:1"):
        Writes(9, free // 2, 1, 0, "last:2").check_room(tmp_path)
    Writes(9, free // 4, 1, 0, "last:2").check_room(tmp_path)


@pytest.mark.parametrize("value", ["3", "last:0", "best:1", "last:1,last:2", "last:x", "first:1"])
def test_what_keep_checkpoints_cannot_be_is_refused(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.keep_checkpoints=.* must be last:N or last:N,best:M"
    ):
        compose_config(f"train.keep_checkpoints='{value}'")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 14 MB, where root may."""
    with mounted(tmp_path / "disk", "size=14m") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_disk_leaves_the_run_alive_and_the_one_before_valid(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after the second step and has room again before the fourth; 4 checkpoints
    take 5 MB each.
    """
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)
    filler = small_disk / "filler"
    training_run = build(
        compose_config(
            *SMALL, steps(4), "train.checkpoint_frequency=1", "train.keep_checkpoints=last:1"
        ),
        small_disk / "run",
    )
    real = training_run.learner.train_groups

    def train_groups(*groups: Any) -> dict[str, float]:
        if training_run.learner.version == 1:
            free = shutil.disk_usage(small_disk).free
            filler.write_bytes(bytes(free))
        if training_run.learner.version == 3:
            filler.unlink()
        return real(*groups)

    training_run.learner.train_groups = train_groups  # type: ignore[method-assign, assignment]
    try:
        training_run.fit()
    finally:
        training_run.close()
    run_folder = small_disk / "run"
    assert [row["step"] for row in read_jsonl(run_folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    unsaved = [line for line in messages if "was not saved" in line]
    assert len(unsaved) == 2
    assert re.match(
        r"Step 2 was not saved, the latest checkpoint is checkpoint_000001: there is no room",
        unsaved[0],
    )
    assert sum("metrics.jsonl: its lines wait" in line for line in messages) == 1
    assert steps_in(run_folder / "checkpoints") == [4]
    assert not list(run_folder.rglob("*.tmp"))


@pytest.mark.slow
def test_a_run_on_a_full_disk_is_one_line(
    small_disk: Path, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert (
        run_here(
            ROOT / "sota/grpo/grpo.py",
            "--config-name",
            "grpo_arithmetic",
            f"hydra.run.dir={small_disk}",
        )
        == 1
    )
    stderr = capfd.readouterr().err
    assert (
        "error: the disk is full, so a file of the run cannot be written: free some space, or use"
        in stderr
    )
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_lines_that_are_dropped_from_a_full_disk_stay_whole(small_disk: Path) -> None:
    rows = [{"step": step, "text": 200 * "a"} for step in range(40_000)]
    path = small_disk / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with (
        pytest.raises(OSError, match="No space left"),
        MetricsLogger(small_disk, tensorboard=False, config={}) as logger,
    ):
        logger.truncate(39_999)
    assert not list(small_disk.glob("*.tmp"))
    assert read_jsonl(path) == rows


@pytest.mark.parametrize("beside_weights", [4096, 3 * 4096])
def test_a_model_that_finds_no_room_is_one_line(
    beside_weights: int, small_disk: Path, tiny_model: Any, tokenizer: Any
) -> None:
    """There is room for the weights, but not for the files that go with them."""
    weights = sum(weight.nbytes for _, weight in named_weights(tiny_model))
    (small_disk / "filler").write_bytes(
        bytes(shutil.disk_usage(small_disk).free - weights - beside_weights)
    )
    with pytest.raises(DiskFullError, match=f"^there is no room for the model in {small_disk}$"):
        export_model(tiny_model, tokenizer, small_disk / "model", "card")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def newest_step(folder: Path) -> int:
    return max((step_of(path) or 0 for path in checkpoints_in(folder)), default=0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_20_kills_in_a_save_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    """Each child saves until it is killed, and the next one reads its checkpoints at startup."""
    draw = random.Random(0)
    newest = [0]
    parts = 0
    for number in range(20):
        checkpointer = Checkpointer(tmp_path, {}, "last:2")
        checkpointer.begin(newest[-1])
        assert not list(tmp_path.glob("*.tmp"))
        pid = os.fork()
        if pid == 0:
            for step in range(newest[-1] + 1, 10_000):
                save_weight(checkpointer, step, torch.zeros(200_000))
        # Every second child finishes a checkpoint before it is killed in another one.
        first = newest[-1] + number % 2
        until(
            lambda first=first: list(tmp_path.glob("*.tmp")) and newest_step(tmp_path) >= first,
            every_s=0.0005,
        )
        time.sleep(draw.random() / 100)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for path in checkpoints_in(tmp_path):
            check_whole(path)
        newest.append(newest_step(tmp_path))
        parts += len(list(tmp_path.glob("*.tmp")))
    assert newest == sorted(newest) and newest[-1] > 0
    assert parts > 0  # some were killed in the middle of a save
