"""``train.resume`` and a run's folder: who owns its files, which config applies, and what is
refused at once.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchrl import torchrl_logger

from tests.support.configs import ROOT
from tests.support.runs import at, differences, run, state_of, steps
from torchrl_grpo.config import ConfigError
from torchrl_grpo.host.checkpoint_files import checkpoints_in, read_manifest
from torchrl_grpo.host.files import read_jsonl

TESTED = (
    "evaluation.num_prompts=8",
    "evaluation.k=2",
    "evaluation.frequency=2",
    "logging.sample_frequency=3",
)
SAVED = ("train.checkpoint_frequency=2",)
SYNC = ROOT / "sota" / "grpo" / "grpo.py"
SCRIPT = (
    "--config-name", "grpo_arithmetic", "env.num_envs=16", "env.repeats=4", "evaluation.num_prompts=0",
    "logging.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder, *TESTED, *SAVED, steps(8))
    return folder


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("five")
    run(folder, *TESTED, *SAVED, steps(5))
    return folder


@pytest.fixture
def killed(five_steps: Path, tmp_path: Path) -> Path:
    """Return the folder of a run that was killed after step 5."""
    shutil.copytree(five_steps, tmp_path, dirs_exist_ok=True)
    at(tmp_path, 5).rename(tmp_path / "checkpoints" / "checkpoint_000005.tmp")
    return tmp_path


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file without measured times."""
    timed = ("time/", "throughput/", "memory/", "sync/receipt_s")
    rows = read_jsonl(folder / name)
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


@pytest.mark.slow
def test_a_killed_run_goes_on_in_its_folder_as_if_nothing_had_been(
    whole: Path, killed: Path
) -> None:
    run(killed, *TESTED, *SAVED, steps(8), "train.resume=auto")
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(killed, name) == rows_of(whole, name)
    assert differences(state_of(at(killed, 8)), state_of(at(whole, 8))) == []
    assert {path.name for path in (killed / "checkpoints").iterdir()} == {
        path.name for path in (whole / "checkpoints").iterdir()
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_without_evaluations_goes_on_with_one_row_a_step(tmp_path: Path) -> None:
    untested = ("evaluation.num_prompts=0", "evaluation.frequency=2", *SAVED)
    run(tmp_path, *untested, steps(4))
    run(tmp_path, *untested, steps(6), "train.resume=auto")
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(7))


@pytest.mark.slow
def test_a_used_folder_is_refused_unless_the_run_goes_on(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"hydra\.run\.dir=.* without a run.* checkpoint_",
    ):
        run(whole, *TESTED, steps(4))
    assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_auto_starts_afresh_in_an_empty_folder_and_after_no_checkpoint(
    whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/pass@1": 0.5}\n{"step": 1}\n')
    run(tmp_path, *TESTED, *SAVED, steps(1), "train.resume=auto")
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    assert rows_of(tmp_path, "metrics.jsonl")[0] == rows_of(whole, "metrics.jsonl")[0]


@pytest.mark.slow
def test_auto_refuses_to_start_afresh_over_damaged_checkpoints(
    whole: Path, tmp_path: Path, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for path in checkpoints_in(folder / "checkpoints"):
        state = path / "state.pt"
        state.write_bytes(state.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert (
        run_here(SYNC, "train.resume=auto", f"hydra.run.dir={folder}", "hydra.output_subdir=null")
        == 2
    )
    stderr = capfd.readouterr().err
    assert (
        f"error: train.resume=auto must find a complete checkpoint, but {folder}/checkpoints has none"
        in stderr
    )
    assert "checkpoint_000008 is damaged: state.pt" in stderr and "Nothing is deleted" in stderr
    assert "to start over, use another hydra.run.dir, or move that folder away." in stderr
    assert {path: path.read_bytes() for path in before} == before
    (folder / "checkpoints").rename(folder / "damaged")
    run(folder, *TESTED, *SAVED, steps(1), "train.resume=auto")
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [0, 1]


@pytest.mark.slow
def test_lines_that_are_no_rows_are_left_out_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once raised a JSONDecodeError or a KeyError each time that the run was resumed."""
    messages: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", messages.append)
    run(tmp_path, *TESTED, *SAVED, steps(3))
    torn = {
        "metrics.jsonl": '{"step": 2, "train/lo',
        "samples.jsonl": "\0" * 9,
        "timeline.jsonl": '{"actor": "learner"}',
    }
    for name, line in torn.items():
        lines = (tmp_path / name).read_text().split("\n")
        (tmp_path / name).write_text("\n".join([lines[0], line, *lines[1:-1], "[3]", ""]))
    run(tmp_path, *TESTED, *SAVED, steps(4), "train.resume=auto")
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    for name in torn:
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert all(isinstance(row["step"], int) for row in rows)
        warnings = [
            line
            for line in messages
            if line.startswith(f"{tmp_path / name} has 2 lines that are not rows of a run")
        ]
        assert len(warnings) == 1 and "the first is line 2" in warnings[0]


@pytest.mark.slow
def test_auto_writes_the_model_that_a_finished_run_lacks(tmp_path: Path) -> None:
    run(tmp_path, steps(2))
    before = rows_of(tmp_path, "metrics.jsonl")
    (tmp_path / "checkpoints" / "model").rename(tmp_path / "gone")
    run(tmp_path, steps(2), "train.resume=auto")
    assert (tmp_path / "checkpoints" / "model" / "config.json").exists()
    assert rows_of(tmp_path, "metrics.jsonl") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "tensorboard",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("wandb", "mlflow")),
    ],
)
def test_a_finished_run_writes_nothing_more_to_other_loggers(name: str, tmp_path: Path) -> None:
    """Each restart once added another offline folder of Weights & Biases, and another file of
    TensorBoard.
    """
    pytest.importorskip(name)
    override = (
        "logging.tensorboard=true" if name == "tensorboard" else f"logging.{name}.mode=offline"
    )
    run(tmp_path, override, steps(1))

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / name).rglob("*")}

    before = written()
    run(tmp_path, override, steps(1), "train.resume=auto")
    assert written().keys() == before.keys()
    before = written()
    run(tmp_path, override, steps(2), "train.resume=auto")
    assert written() != before


@pytest.mark.slow
def test_checkpoints_of_later_steps_are_set_aside(killed: Path) -> None:
    run(killed, *TESTED, *SAVED, steps(3), f"train.resume={at(killed, 2)}", "optimizer.lr=1e-4")
    names = {path.name for path in (killed / "checkpoints").iterdir()}
    assert names == {
        "checkpoint_000002",
        "checkpoint_000003",
        "checkpoint_000004.old",
        "model",
    }


@pytest.mark.slow
def test_the_saved_config_is_the_base_and_differences_are_shown(
    run_here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = (
        "algo=dapo", "optimizer.lr=3e-4", "policy.kl_coef=0.5", "inference_model.temperature=0.5", "env.difficulty=3",
        "policy.dynamic_sampling=false", steps(1), f"hydra.run.dir={tmp_path / 'a'}",
    )  # fmt: skip
    assert run_here(SYNC, *SCRIPT, *old) == 0
    capsys.readouterr()
    again = (f"train.resume={tmp_path / 'a'}", f"hydra.run.dir={tmp_path / 'b'}", steps(2))
    assert (
        run_here(SYNC, *again, "policy.kl_coef=0.25") == 0
    )  # without the --config-name of the first one
    output = capsys.readouterr().out
    assert re.search(
        r"that differ.*policy\.kl_coef +0\.5 +0\.25.*train\.total_dialog_turns +16 +32",
        output,
        re.S,
    )
    before, now = (
        read_manifest(at(tmp_path / folder, step))["config"]
        for folder, step in (("a", 1), ("b", 2))
    )
    for config, kl, turns in ((before, 0.5, 16), (now, 0.25, 32)):
        assert (config["policy"].pop("kl_coef"), config["train"].pop("total_dialog_turns")) == (
            kl,
            turns,
        )
        config["train"].pop("resume")
    assert now == before
    assert now["policy"]["aggregation"] == "token_mean"


@pytest.mark.slow
def test_what_is_refused_on_resume_is_refused_before_anything_loads(
    whole: Path,
    run_here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "torchrl_grpo.assembly.run", None)  # its import would fail
    resumes = ("train.resume=auto", f"hydra.run.dir={whole}", "hydra.output_subdir=null")
    assert run_here(SYNC, *resumes, "env.repeats=8") == 2
    message = r"error: env\.repeats=8 must be 4, .*checkpoint_000008 .*: use env\.repeats=4"
    assert re.search(message, capsys.readouterr().err)
