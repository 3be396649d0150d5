"""Command lines as users type them: Hydra's options before, between and after the overrides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from tests.support.configs import ROOT
from tests.support.documentation import PAGES, blocks, commands, script_lines
from torchrl_grpo.config import CONFIG_FILES, compose, split_command_line
from torchrl_grpo.config.help import HELP
from torchrl_grpo.config.schema import FIELDS
from torchrl_grpo.scripts.grpo import job
from torchrl_grpo.scripts.job import Sweep, command

main = job(asynchronous=False)
SHOWN = script_lines()
LINES = {" ".join(words): words for _, _, words in SHOWN}
IN_BLOCKS = {
    " ".join(words[2:])
    for page in ("../README", *PAGES)
    for block in blocks(page)
    if block.language == "bash"
    for _, words in commands(block)
    if words[1:] and words[1].startswith("sota/")
}
"""Lines that test_pages.py composes too, without the script."""
OPTIONS = [
    ("--cfg", "job"), ("--cfg=all",), ("--multirun",), ("-i", "defaults"), ("--config-name", "grpo_math"),
    *(pytest.param(option, marks=pytest.mark.nightly) for option in (("-m",), ("--help",), ("--info",))),
]  # fmt: skip


def split(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that Hydra parses, and the overrides."""
    options, overrides = split_command_line(words)
    parsed = vars(get_args_parser().parse_args([*overrides, *options]))
    assert parsed.pop("overrides") == overrides
    return parsed, overrides


def places(overrides: list[str], option: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the option before, between and after the overrides."""
    for place in sorted({0, (len(overrides) + 1) // 2, len(overrides)}):
        yield [*overrides[:place], *option, *overrides[place:]]


def test_the_project_shows_lines_of_both_scripts_in_all_its_folders() -> None:
    folders = {file.partition("/")[0] for file, _, _ in SHOWN}
    assert folders == {"README.md", "Makefile", "Dockerfile", "docs", "examples", "sota"}
    assert {script for _, script, _ in SHOWN} == {"grpo", "grpo-async"}
    assert len(LINES) > 50


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: " ".join(option))
def test_an_option_means_the_same_wherever_it_stands_on_a_shown_line(
    option: tuple[str, ...],
) -> None:
    alone, _ = split(list(option))
    assert alone != split([])[0]
    for words in LINES.values():
        _, overrides = split(words)
        for typed in places(overrides, option):
            assert split(typed) == (alone, overrides)


def test_newlines_and_tabs_in_texts_are_characters() -> None:
    judge = r'{fn: judge, model: m, url: "http://h/v1", template: "{response}\n\tScore"}'
    overrides = [
        r'env.prompt_template="{question}\n\nAnswer \nabla \theta \neq \text{x} in \boxed{}\\n"',
        r"env.system_prompt=Be brief: yes.\nAdd.",
        r"inference_model.stop=['\n\n',\n,\t]",
        rf"env.reward={judge}",
    ]
    config = compose("grpo_gsm8k", overrides)
    text = "{question}\n\nAnswer \\nabla \\theta \\neq \\text{x} in \\boxed{}\\\\n"
    assert config.env.prompt_template == text
    assert config.env.system_prompt == "Be brief: yes.\nAdd."
    assert config.inference_model.stop == ["\n\n", "\n", "\t"]
    assert config.env.reward["template"] == "{response}\n\tScore"
    assert split_command_line(overrides)[1][1] == 'env.system_prompt="Be brief: yes.\nAdd."'


def test_arguments_of_a_component_need_no_plus() -> None:
    words = ["policy.loss._target_=a.B", "policy.loss.width=0.5", "+env.task.level=3", "seed=1"]
    _, overrides = split_command_line(words)
    assert overrides == [words[0], "++policy.loss.width=0.5", *words[2:]]
    config = compose("grpo_arithmetic", ["policy.loss.width=0.5", "+policy.advantage.low=2"])
    assert (config.policy.loss["width"], config.policy.advantage["low"]) == (0.5, 2)


def test_a_key_is_deleted_and_added_again() -> None:
    words = ["~policy.loss", "+policy.loss={_target_: a.B}"]
    assert split_command_line(words)[1] == words


def test_help_names_keys_that_exist() -> None:
    keys = re.findall(r"(?<![\w./])[a-z_]+\.[a-z_.]*[a-z_]\b(?!\.md|\.py)", HELP)
    keys = [key for key in keys if not key.startswith(("hydra.", "docs", "my_"))]
    assert set(keys) <= set(FIELDS)
    assert len(set(keys)) >= 30


def test_help_names_all_configs_and_algorithms() -> None:
    words = set(re.findall(r"\w+", HELP))
    paths = [*ROOT.glob("config/*.yaml"), *ROOT.glob("config/algo/*.yaml")]
    assert len(paths) > 30 and {path.stem for path in paths} <= words


def in_this_process(
    monkeypatch: pytest.MonkeyPatch, task: Callable[[], object], *words: str
) -> int:
    """Return the exit status of a command line, as the scripts report it."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words])
    try:
        command(task)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.nightly if line in IN_BLOCKS else ())
        for line, words in LINES.items()
        if "--multirun" not in words
        # Its engine is in a package of somebody else, which test_plugins.py installs.
        and "inference_model.backend=counting" not in words
    ],
)
def test_a_printed_command_line_composes(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    status = in_this_process(monkeypatch, main, *LINES[line], "--cfg", "job")
    assert status == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [["--multirun"], ["-m", "--config-name", "grpo_arithmetic"]], ids=" ".join
)
@pytest.mark.parametrize("place", range(3))
def test_a_sweep_runs_each_job_wherever_multirun_stands(
    option: list[str], place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, jobs = ["optimizer.lr=1e-4,1e-5", "hydra.sweep.dir=sweep"], []

    @hydra.main(version_base="1.3", config_path=CONFIG_FILES, config_name="grpo_gsm8k")
    def record(cfg: DictConfig) -> None:
        jobs.append((cfg.env.dataset, cfg.optimizer.lr, Sweep.folder))

    assert (
        in_this_process(monkeypatch, record, *overrides[:place], *option, *overrides[place:]) == 0
    )
    dataset = "arithmetic" if "--config-name" in option else "gsm8k"
    assert jobs == [(dataset, lr, Path("sweep")) for lr in (1e-4, 1e-5)]


@pytest.mark.slow
def test_a_run_records_only_overrides_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    @hydra.main(version_base="1.3", config_path=CONFIG_FILES, config_name="grpo_gsm8k")
    def record(cfg: DictConfig) -> None:
        """An empty function, because Hydra writes the files."""

    assert in_this_process(monkeypatch, record, "seed=3", "hydra.run.dir=run") == 0
    recorded = yaml.safe_load((tmp_path / "run" / ".hydra" / "hydra.yaml").read_text())["hydra"][
        "overrides"
    ]
    assert recorded == {"hydra": ["hydra.run.dir=run", "hydra.mode=RUN"], "task": ["seed=3"]}
    assert Sweep.folder is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("grpo.py", "optimizer.lr=1e-4 --cfg job", "lr: 0.0001"),
        ("grpo.py", "optimizer.lr=1e-4 --help", "train.total_steps"),
        *(
            pytest.param("grpo.py", words, expected, marks=pytest.mark.nightly)
            for words, expected in (
                (
                    "seed=7 --config-name grpo_arithmetic --cfg job train.total_dialog_turns=64",
                    "seed: 7",
                ),
                ("optimizer.lr=1e-4 --hydra-help", "Hydra's help"),
                ("--info optimizer.lr=1e-4", "Config search path"),
                ("dry_run=true --config-name grpo_arithmetic --cfg job", "dry_run: true"),
            )
        ),
        (
            "grpo-async.py",
            "train_model.num_devices=2 --config-name grpo_arithmetic --cfg job",
            "num_devices: 2",
        ),
    ],
)
def test_the_scripts_answer_options_after_overrides(
    script: str, words: str, expected: str, tmp_path: Path
) -> None:
    """The processes run in the folder of the scripts, as in other projects' READMEs."""
    done = subprocess.run(
        [sys.executable, script, *words.split(), f"hydra.run.dir={tmp_path}"],
        cwd=ROOT / "sota" / "grpo", env=os.environ | {"VLLM_USE_V1": "0"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("seed=1,2 --multirun --cfg job", "--multirun and --cfg exclude each other: set only one of them."),
        ("seed=1 --resolve", "--resolve needs --cfg or --help: use --cfg job --resolve."),
        ("grpo_arithmetic", "grpo_arithmetic must be an override, KEY=VALUE: use --config-name=grpo_arithmetic."),
        ("optimizer.lr 1e-4", "optimizer.lr must be an override, KEY=VALUE: use optimizer.lr=1e-4."),
        ("seed=1 logging", "logging must be an override, KEY=VALUE: use logging=VALUE."),
        ("logging seed=1", "logging must be an override, KEY=VALUE: use KEY=VALUE."),
        ("=3", "=3 must be an override, KEY=VALUE: use KEY=VALUE."),
        ("train.total_dialog_turns=null train.total_epochs=1", "train.total_dialog_turns=null must be a number: "
         "leave it out, because train.total_steps or train.total_epochs replaces it."),
    ],
)  # fmt: skip
def test_what_is_no_command_is_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(monkeypatch, main, *words.split()) == 2
    assert capsys.readouterr().err == f"\nerror: {message}\n"


@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("--train.total_steps 3", "use train.total_steps=3."),
        ("--learning_rate=-1", "use optimizer.lr=-1."),
        ("seed=1 --dry-run", "use dry_run=true."),
        ("--bf16 seed=1", "use train.mixed_precision=VALUE."),
        ("--total_step 3", "did you mean train.total_steps=3?"),
        ("--multi-run seed=1,2", "did you mean --multirun?"),
        ("train.total_steps = 3", "use train.total_steps=3."),
        ("train.total_steps= 3", "use train.total_steps=3."),
        ("train.total_steps =3", "use train.total_steps=3."),
        ("train.total_steps: 3", "use train.total_steps=3."),
        ("num_generations 8", "use env.repeats=8."),
        ("--config grpo_arithmetic", "use --config-name=grpo_arithmetic."),
        ("--config=conf/my.yaml", "use --config-dir=conf --config-name=my."),
        ("grpo_arithmetic.yaml", "use --config-name=grpo_arithmetic."),
        ("policy.clip_epsilon=0.2,0.28", "use 'policy.clip_epsilon=[0.2,0.28]', or --multirun"),
        ("env.system_prompt=Yes,no", "use 'env.system_prompt=\"Yes,no\"', or --multirun"),
        ("optimizer.lr=1e-4,1e-5", "--multirun for a run with each."),
        ("algo=grpo,dapo", "algo=grpo,dapo must be one value: use one, or --multirun"),
        ("hydra/launcher=basic,joblib", "must be one value: use one, or --multirun"),
        ("--config-name", "--config-name"),
        ("--no-such-option", "--hydra-help"),
    ],
)
def test_a_slip_is_one_line_with_what_to_write(
    words: str, use: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(monkeypatch, main, *words.split()) == 2
    message = capsys.readouterr().err.removeprefix("\nerror: ")
    assert use in message
    assert message.count("\n") == 1


def test_version_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(monkeypatch, main, "--version") == 0
    assert capsys.readouterr().out.startswith(f"torchrl_grpo {version('torchrl_grpo')} (Hydra ")


@pytest.mark.parametrize(
    ("size", "rank", "refused"),
    [
        ("WORLD_SIZE", "LOCAL_RANK", True),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", True),
        ("WORLD_SIZE", "OTHER", False),
    ],
)
def test_a_launcher_of_several_processes_is_refused(
    size: str,
    rank: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "0")
    assert in_this_process(monkeypatch, lambda: None) == 2 * refused
    assert ("use python with train_model.num_devices=4." in capsys.readouterr().err) == refused


def test_a_working_directory_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert in_this_process(monkeypatch, main, "--cfg", "job") == 2
    monkeypatch.chdir(tmp_path)
    message = "the working directory must exist, but it was removed: change to another one (cd)."
    assert capsys.readouterr().err == f"\nerror: {message}\n"


@pytest.mark.slow
def test_a_script_as_a_module_does_what_the_script_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchrl_grpo.scripts.grpo"]
    refused = subprocess.run(
        [*command, "--bogus=1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 2 and "error: --bogus=1 must be" in refused.stderr
    shown = subprocess.run(
        [*command, "seed=5", "--cfg", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0 and "seed: 5" in shown.stdout
