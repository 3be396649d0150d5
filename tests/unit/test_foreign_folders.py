"""Run folders from other people: nothing is written or read through a link that leads out of the
folder.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.runs import SMALL, run, steps
from tests.support.scripts import SYNC
from torchrl_grpo.assembly.run import build
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.extras.export.export import export
from torchrl_grpo.extras.report import samples
from torchrl_grpo.extras.report.report import write_report
from torchrl_grpo.extras.report.sweep_report import write_sweep
from torchrl_grpo.extras.trackers.services import recorded_run
from torchrl_grpo.host.folders import check_own_files

FILES = (
    ".lock",
    "environment.json",
    "metrics.jsonl",
    "metrics.tmp",
    "samples.jsonl",
    "report.html",
    "curves.png",
    "grpo.log",
    ".hydra",
    ".hydra/config.yaml",
    "checkpoints",
    "checkpoints/checkpoint_000002.tmp",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder, steps(1), "train.checkpoint_frequency=1")
    (folder / ".hydra").mkdir()
    return folder


def linked(whole: Path, tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Copy a run and move one of its files elsewhere; return the folder and that file."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(whole, folder)
    file = folder / name
    if file.exists():
        file.rename(outside)
    else:
        outside.write_text("precious")
    file.symlink_to(outside)
    return folder, outside


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files}


@pytest.mark.parametrize("name", FILES)
def test_a_run_does_not_write_through_a_link(name: str, whole: Path, tmp_path: Path) -> None:
    folder, outside = linked(whole, tmp_path, name)
    before = contents(outside)
    with pytest.raises(ConfigError, match=f"{name} is a link that leads out"):
        build(compose_config(*SMALL, steps(2), "train.resume=auto"), folder).close()
    with pytest.raises(ConfigError, match=f"{name} is a link that leads out"):
        write_report(folder)
    with pytest.raises(ConfigError, match=f"{name} is a link that leads out"):
        export(str(folder))
    assert contents(outside) == before


@pytest.mark.slow
def test_hydra_does_not_write_through_a_link(whole: Path, tmp_path: Path) -> None:
    folder, outside = linked(whole, tmp_path, ".hydra")
    for more in ([], ["dry_run=true"]):
        ended = subprocess.run(
            [sys.executable, SYNC, f"hydra.run.dir={folder}", "train.resume=auto", *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 2 and ".hydra is a link that leads out" in ended.stderr
    assert contents(outside) == {}


def test_a_sweep_is_not_written_or_read_through_a_link(whole: Path, tmp_path: Path) -> None:
    for name in ("sweep.html", "0/metrics.jsonl"):
        folder = tmp_path / name[0]
        shutil.copytree(whole, folder / "0")
        (folder / "0/.hydra/overrides.yaml").write_text("[]")
        (tmp_path / "outside").write_text("precious")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "outside")
        with pytest.raises(ConfigError, match=f"{name} is a link that leads out"):
            write_sweep(folder)
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_service_is_not_told_the_text_of_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("precious")
    (tmp_path / "run/wandb").mkdir(parents=True)
    file = tmp_path / "run/wandb/run_id"
    file.symlink_to(tmp_path / "secret")
    assert recorded_run([tmp_path / "run"], "wandb") is None
    file.unlink()
    file.write_text("abc\n")
    assert recorded_run([tmp_path / "none", tmp_path / "run"], "wandb") == "abc"


def test_thumbnails_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/images").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="images is a link that leads out"):
        check_own_files(tmp_path / "run")


def test_links_within_a_folder_and_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/latest-run").symlink_to("run-1")
    (tmp_path / "data").symlink_to("/usr")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest.pt").symlink_to("checkpoint_000001")
    check_own_files(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="or not a file"):
        check_own_files(tmp_path)


ROWS = (
    ("metrics.jsonl", "rollout/reward_mean", "x"),
    ("metrics.jsonl", "rollout/reward_mean", [1]),
    ("metrics.jsonl", "rollout/reward_mean", 10**400),
    ("metrics.jsonl", "time/train_s", {"a": 1}),
    ("metrics.jsonl", "rollout/sequences", 0),
    ("metrics.jsonl", "eval/pass@1", "x"),
    ("metrics.jsonl", "step", 10**400),
    ("samples.jsonl", "reward", "x"),
    ("samples.jsonl", "turn_rewards", 1),
    ("samples.jsonl", "parts", [1]),
    ("samples.jsonl", "problem", [1]),
    ("samples.jsonl", "group", {}),
    ("environment.json", "packages", [1]),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key", "value"), ROWS, ids=lambda value: str(value)[:20])
def test_what_no_run_writes_is_left_out(
    name: str, key: str, value: object, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "0"
    shutil.copytree(whole, folder)
    (folder / ".hydra/overrides.yaml").write_text("[]")
    lines = (folder / name).read_text()
    row = json.loads(lines if name == "environment.json" else lines.splitlines()[-1]) | {key: value}
    (folder / name).write_text(
        json.dumps(row) if name == "environment.json" else f"{lines}{json.dumps(row)}\n"
    )
    write_report(folder)
    write_sweep(tmp_path)
    for more in ([], ["--sort", "reward"], ["--compare"]):
        samples.main([str(folder), *more], io.StringIO())


OTHER_TEXTS = (
    *((".hydra/overrides.yaml", text) for text in ("5", "[[a], {b: 1}, 2]", "- [", "- &a [x]\n- *a", 10**5 * "[")),
    *(("environment.json", text) for text in ("[1]", "{", "[" * 10**5, "\udc80")),
)  # fmt: skip


@pytest.mark.slow
def test_files_with_something_else_are_left_out(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "0")
    for name, text in OTHER_TEXTS:
        (tmp_path / "0" / name).write_text(text, errors="surrogateescape")
        write_sweep(tmp_path) if "overrides" in name else write_report(tmp_path / "0")
