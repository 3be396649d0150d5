"""A package of a third party, installed by pip, adds an engine, rewards, a task and a tracker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.configs import ROOT, SMALL, compose_config, composed
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import GRPOConfig, from_hydra, plain
from torchrl_grpo.engines import ENGINES
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import engine_class
from torchrl_grpo.host import plugins
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.host.objects import load_function
from torchrl_grpo.rewards import BUILTINS

SYNC = ROOT / "sota" / "grpo" / "grpo.py"
PACKAGE = ROOT / "tests" / "support" / "plugin"
OPTIONS = (
    "env.reward=nines",
    "inference_model.backend=counting",
    "env.task._target_=nines",
    "logging.trackers=[{_target_: lines, file: tracked.txt}]",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package from a copy, as pip writes into its folder."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        folder / "site-packages",
    ]
    subprocess.run([*command, folder / "source"], check=True, timeout=600)
    return folder / "site-packages"


@pytest.fixture
def plugin(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the package in this process."""
    monkeypatch.syspath_prepend(installed)
    plugins.plugins.cache_clear()
    yield
    plugins.plugins.cache_clear()
    for name in [name for name in sys.modules if name.startswith("grpo_sample")]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_command_line_uses_an_installed_package(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, SYNC, "--config-name", "grpo_arithmetic", *SMALL, *OPTIONS]
    with forks.Popen(
        [*command, "hydra.run.dir=run", "env.dataset=null", "env.difficulty=2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= row["reward/nines/mean"] <= 1 for row in rows[1:])
    counts = [int(line.split()[1]) for line in stdout.splitlines() if "counted" in line]
    assert sum(counts) == 32 and len(rows) == 3
    steps = (tmp_path / "run" / "tracked.txt").read_text().splitlines()[1:]
    assert [line.split()[0] for line in steps] == ["0", "1", "2"]
    assert "reward/nines/mean" in steps[1]


@pytest.mark.usefixtures("plugin")
def test_an_unknown_name_lists_what_is_built_in_and_installed() -> None:
    with pytest.raises(ValueError, match=r"^env\.reward=nine must .*gsm8k.*nines.*mean nines\?"):
        load_function("nine", "env.reward", BUILTINS)
    message = r"^inference_model\.backend=count must .*transformers, vllm, server, counting"
    with pytest.raises(ConfigError, match=message):
        compose_config("inference_model.backend=count")


@pytest.mark.usefixtures("plugin")
def test_what_is_built_in_keeps_its_name_and_choices_list_nothing_else() -> None:
    assert load_function("gsm8k", "env.reward", BUILTINS)("#### 72", "72") is True
    assert list(ENGINES) == ["transformers", "vllm", "server"]
    assert not ENGINES["counting"].concurrent
    assert list(ENGINES) == ["transformers", "vllm", "server"]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("env.reward=broken", r"env\.reward=broken must .*no licence at .*grpo_sample/broken.py:3: fix it"),
        ("env.reward=removed", r"env\.reward=removed must .*install its package again"),
        ("env.reward=no_function", r"env\.reward=no_function must name a function .*use one of \['nines'\]"),
        ("env.task._target_=no_task", r"env\.task\._target_=no_task must be a subclass of Task"),
        ("env.task._target_=unknown", r"env\.task\._target_=unknown must be .*nines.* file\.py:class"),
    ],
)  # fmt: skip
def test_a_package_that_does_not_fit_is_refused(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^{message}"):
        make_task(compose_config(option, *(["env.dataset=null"] if "task" in option else [])).env)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "inference_model.backend=no_kind",
            "error: inference_model.backend=no_kind must name a value of type EngineKind",
        ),
        (
            "inference_model.backend=no_engine",
            "error: inference_model.backend=no_engine must name a subclass of Engine",
        ),
        (
            "logging.trackers=[{_target_: no_tracker}]",
            "error: logging.trackers[0]._target_=no_tracker must be a subclass of Tracker",
        ),
        (
            "logging.trackers=[{_target_: lines, colour: red}]",
            "error: logging.trackers[0]={'_target_': 'lines', 'colour': 'red'} must be",
        ),
        (
            "logging.trackers=[{file: lines.txt}]",
            "error: logging.trackers[0]._target_=None must be a built-in or installed name",
        ),
    ],
)
def test_a_command_line_refuses_it_in_one_line(
    option: str, message: str, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(SYNC, "--config-name", "grpo_arithmetic", *SMALL, option) == 2
    stderr = capfd.readouterr().err
    assert message in stderr and "Traceback" not in stderr


def resumed(saved: Any, *overrides: str) -> GRPOConfig:
    cfg = composed("grpo_arithmetic", ("train.resume=folder", *overrides))
    return from_hydra(cfg, overrides, lambda _: (Path("folder/checkpoint_000001"), saved))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("option", OPTIONS)
def test_a_foreign_checkpoint_chooses_no_installed_package(option: str) -> None:
    more = ("env.dataset=null",) if "task" in option else ()
    saved = plain(compose_config(option, *more))
    key = option.partition("=")[0].removesuffix("._target_")
    with pytest.raises(ConfigError, match=rf"^{key}=.* must be on the command line too"):
        resumed(saved)
    assert plain(resumed(saved, option)) == saved | {"train": saved["train"] | {"resume": "folder"}}
    assert "grpo_sample.tasks" not in sys.modules


@pytest.mark.parametrize("reward", ["gsm8k", "mine.py:reward"])
def test_a_name_that_is_known_reads_no_entry_points(
    reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: str) -> None:
        raise AssertionError("read")

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def reward(response): return 1.0\n")
    plugins.plugins.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", refuse)
    config = compose_config(f"env.reward={reward}")
    assert make_task(config.env).name == "arithmetic"
    assert engine_class(config.inference_model.backend).__name__ == "TransformersEngine"
