"""Imports of a command before its first step, and its output in the meantime."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.configs import ROOT, compose_config
from tests.support.waiting import until
from torchrl_grpo.config import ConfigError
from torchrl_grpo.config.rules import check_script
from torchrl_grpo.host import startup

# Runs a script and prints its imports at its end or, if it gets there, at its first step.
RUN = """
import os, runpy, sys
from torchrl_grpo.host import startup
def show(*_):
    print("\\nimported", *sorted({name.partition(".")[0] for name, module in sys.modules.items() if module}))
    sys.stdout.flush()
    os._exit(0)
startup.end = show
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    show()
"""
HEAVY = {"torch", "torchrl", "tensordict", "transformers", "numpy", "datasets", "ray", "vllm"}
UNUSED = {
    "vllm",
    "ray",
    "matplotlib",
    "datasets",
    "peft",
    "pyarrow",
    "pandas",
    "sglang",
    "trl",
    "torchao",
}
UNUSED |= {"wandb", "mlflow", "trackio"}


def imported(folder: Path, *arguments: str) -> set[str]:
    code = (
        f"import sys; sys.argv = {[str(ROOT / 'sota' / 'grpo' / 'grpo.py'), *arguments]!r}\n{RUN}"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert lines, done.stdout + done.stderr
    return set(lines[-1].split()[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["env.num_envs=30"],
        *(
            pytest.param([mistake], marks=pytest.mark.nightly)
            for mistake in (
                "env.num_env=3",
                "optimizer.lr=abc",
                "train.max_staleness=1",
                "inference_model.weight_transfer=broadcast",
            )
        ),
    ],
    ids=" ".join,
)
def test_help_and_mistakes_are_answered_without_torch(arguments: list[str], tmp_path: Path) -> None:
    modules = imported(tmp_path, *arguments)
    assert "hydra" in modules
    assert not modules & HEAVY


WITHOUT_TORCH = """
import json, runpy, sys
import torchrl_grpo.extras.view.server
assert not {"torch", "matplotlib", "numpy"} & {*sys.modules}
for module, *words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert not end.code, words
assert not {"torch", "torchrl", "transformers"} & {*sys.modules}
"""


@pytest.mark.slow
def test_the_other_commands_need_no_torch(tmp_path: Path) -> None:
    """They show their help, list samples, write the page of a sweep, and plan."""
    for job in ("0", "1"):
        (tmp_path / job / ".hydra").mkdir(parents=True)
        (tmp_path / job / ".hydra" / "overrides.yaml").write_text(f"[seed={job}]")
        row = {"step": 1, "rollout/reward_mean": 0.5, "rollout/sequences": 8}
        (tmp_path / job / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        sample = {"step": 1, "split": "train", "query": "1+1=", "response": "2", "reward": 1.0}
        (tmp_path / job / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    names = ("export", "samples", "sweep", "view", "migrate", "plan")
    commands = [["torchrl_grpo", name, "--help"] for name in names]
    commands += [[f"torchrl_grpo.{name}", "--help"] for name in names]
    for words in (["samples", f"{tmp_path}/0"], ["sweep", str(tmp_path)], ["plan", "--devices=2"]):
        commands.append(["torchrl_grpo", *words])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TORCHRL_GRPO_QUICK_IMPORTS"},
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 matching samples" in done.stdout and (tmp_path / "sweep.html").exists()
    assert "python sota/grpo/grpo-async.py" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        "env.columns.answer=anser",
        *(
            pytest.param(mistake, marks=pytest.mark.nightly)
            for mistake in ("env.reward=mine.py:scor", "env.max_turns=3")
        ),
    ],
)
def test_mistakes_in_the_data_are_answered_without_torch(mistake: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 4)
    (tmp_path / "mine.py").write_text("def score(response, answer):\n    return 1.0\n")
    keys = ["env.dataset=d.jsonl", "env.columns.answer=answer", "env.reward=mine.py:score"]
    remaining = [key for key in keys if key.partition("=")[0] != mistake.partition("=")[0]]
    modules = imported(tmp_path, "--config-name", "grpo_arithmetic", *remaining, mistake)
    assert "datasets" in modules
    assert not modules & {"torch", "torchrl", "tensordict", "transformers"}


@pytest.mark.slow
def test_the_first_step_needs_no_package_that_the_run_does_not_use(tmp_path: Path) -> None:
    modules = imported(
        tmp_path, "--config-name", "grpo_arithmetic", "env.num_envs=16", "env.repeats=4",
        "train.total_dialog_turns=32", "evaluation.num_prompts=4", "evaluation.k=2",
    )  # fmt: skip
    assert modules > {"torch", "torchrl", "transformers", "tensorboard"}
    assert not modules & UNUSED


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines after all carriage returns."""
        lines = []
        for written in self.getvalue().split("\n"):
            line = ""
            for part in written.split("\r"):
                line = part + line[len(part) :]
            lines.append(line.rstrip())
        return lines


def test_a_terminal_counts_the_seconds_of_a_silence_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(startup, "_SILENCE_S", 0.4)
    startup.say("nothing, before begin()")
    startup.begin()
    try:
        startup.say("importing")
        until(lambda: terminal.getvalue().count("still importing") > 3)
        with startup._current._lock:  # type: ignore[union-attr]
            during = terminal.screen()
        startup.say("loading")
    finally:
        startup.end()
        startup.end()
    startup.say("nothing, after end()")
    assert [line.partition("] ")[2] for line in during] == ["importing", "still importing"]
    assert [line.partition("] ")[2] for line in terminal.screen()] == ["importing", "loading", ""]


def test_without_a_terminal_a_silence_has_few_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of its own."""
    stream, now = io.StringIO(), [100.0]
    looks = 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return now[0]

    def messages() -> list[str]:
        return [line.partition("] ")[2] for line in stream.getvalue().splitlines()]

    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(startup, "_SILENCE_S", 0.01)
    startup.begin()
    try:
        startup.say("importing")
        for later, count in ((29, 0), (2, 1), (28, 1), (3, 2)):
            now[0] += later
            before = looks
            until(lambda before=before: looks > before + 3)  # type: ignore[misc]
            assert messages() == ["importing", *count * ["still importing"]]
        startup.say("loading")
    finally:
        startup.end()
    assert messages() == ["importing", "still importing", "still importing", "loading"]


def test_quick_imports_put_everything_back() -> None:
    modules = {name: sys.modules.get(name) for name in ("vllm", "ray", "torchao")}
    with startup.quick_imports():
        assert not gc.isenabled()
        assert "torchrl.collectors" in sys.modules
    assert gc.isenabled()
    assert {name: sys.modules.get(name) for name in modules} == modules


@pytest.mark.nightly
@pytest.mark.slow
def test_actors_import_as_their_driver_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_skips_imports", False)
    assert startup.actor_environment() == {}
    monkeypatch.setattr(startup, "_skips_imports", True)
    [(name, value)] = startup.actor_environment().items()
    code = "import sys, torchrl_grpo.runtime as d; print('torchrl' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize(
    ("overrides", "asynchronous", "message"),
    [
        (["train.max_staleness=1"], False, "train.max_staleness=1 must be 0 in grpo.py"),
        (["train.max_staleness=1"], True, None),
        (
            ["inference_model.weight_transfer=broadcast"],
            False,
            "weight_transfer=broadcast must be auto",
        ),
        (["inference_model.weight_transfer=broadcast"], True, None),
        (["inference_model.weight_transfer=broadcast", "train_model.num_devices=2"], False, None),
        (["inference_model.weight_transfer=broadcast", "ref_model.devices=[0,1]"], False, None),
        (["inference_model.weight_transfer=broadcast", "ray.address=auto"], False, None),
    ],
)
def test_a_script_refuses_what_it_cannot_do(
    overrides: list[str], asynchronous: bool, message: str | None
) -> None:
    config = compose_config(*overrides)
    if message is None:
        check_script(config, asynchronous)
        return
    with pytest.raises(ConfigError) as caught:
        check_script(config, asynchronous)
    assert message in str(caught.value)
