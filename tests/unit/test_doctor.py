"""A dry run: the problems that it finds, the files that it leaves alone, and its forecast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.configs import ROOT, compose_config
from tests.support.runs import SMALL, steps
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.extras.doctor.doctor import examine
from torchrl_grpo.extras.doctor.forecast import Measured, forecast, memory_now
from torchrl_grpo.models import loading

NAMES = ["versions", "devices", "logging", "model", "data", "scoring", "parts"]
PLAYED = ["sync", "rollout", "train", "reward", "mismatch", "steps"]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "600")


def tried(
    capsys: pytest.CaptureFixture[str], folder: Path, *overrides: str
) -> tuple[bool, dict[str, list[str]]]:
    """Return whether a dry run passes, and its table: result and finding of each check."""
    passed = examine(compose_config(*SMALL, *overrides), folder)
    table = (
        capsys.readouterr().out.partition("Checks")[2].partition("Forecast for the whole run")[0]
    )
    rows = [line.split(maxsplit=5) for line in table.splitlines()[3:] if line.strip()]
    return passed, {
        row[0]: [row[1], row[5].strip() if len(row) > 5 else ""] for row in rows if len(row) > 3
    }


@pytest.mark.slow
def test_a_sound_run_passes_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: None
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "before").mkdir()
    passed, table = tried(
        capsys, tmp_path / "out", steps(4), "evaluation.num_prompts=8", "evaluation.k=2"
    )
    assert passed and list(table) == [*NAMES, *PLAYED, "evaluation", "report", "disk"]
    assert {result for result, _ in table.values()} == {"ok"}
    assert abs(float(table["mismatch"][1].split()[-4])) < 1e-6
    assert (
        "427,776 parameters" in table["model"][1] and "4,096 training problems" in table["data"][1]
    )
    assert (
        "prompts: 17 tokens (limit 2,016 with 32 new tokens)" in table["parts"][1]
        and "then 3 at " in table["steps"][1]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.slow
def test_what_follows_a_failure_is_skipped_and_the_rest_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: None
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"q": "1+1", "a": "2"}) + "\n")
    data = ("env.columns.prompt=question", "env.columns.answer=a", "env.reward=math")
    passed, table = tried(capsys, tmp_path / "out", f"env.dataset={tmp_path}/data.jsonl", *data)
    assert (
        not passed
        and table["data"][0] == "FAILED"
        and "env.columns.prompt=question" in table["data"][1]
    )
    assert [table[name][0] for name in ("devices", "model", "disk")] == ["ok"] * 3
    assert table["parts"] == ["skipped", "needs scoring"] and "rollout" not in table


@pytest.mark.slow
def test_a_dry_run_tries_the_revision_that_a_run_would_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, **_: object) -> None:
        raise ValueError(f"{name} was asked for")

    monkeypatch.setattr(loading, "load_config", refuse)
    passed, table = tried(capsys, tmp_path / "out", "model.name=org/model", "model.revision=abc")
    assert not passed and table["model"] == ["FAILED", "org/model@abc was asked for"]
    assert table["parts"] == ["skipped", "see model"]


@pytest.mark.slow
def test_a_scorer_that_fails_and_one_that_gives_nothing_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: None
) -> None:
    (tmp_path / "rewards.py").write_text(
        "def broken(response): raise OSError('no judge')\n"
        "def never(response): return None\n"
        "def right(response, answer): return 1.0 if response == answer else None\n"
        "def long(response): return float(len(response)) if response != 'I do not know.' else 1 / 0\n"
        "def nothing(response, tokens): return 0.0 / len(tokens)\n"
    )
    for name, problem in {"broken": "no judge", "never": "return 0.0", "long": "division"}.items():
        passed, table = tried(capsys, tmp_path, f"env.reward={tmp_path}/rewards.py:{name}")
        assert not passed and table["scoring"][0] == "FAILED" and problem in table["scoring"][1]
        assert table["parts"] == ["skipped", "needs scoring"]
    passed, table = tried(capsys, tmp_path, f"env.reward={tmp_path}/rewards.py:right", steps(4))
    assert table["scoring"][0] == "warning" and "return 0.0" in table["scoring"][1]
    passed, table = tried(capsys, tmp_path, f"env.reward={tmp_path}/rewards.py:nothing", steps(4))
    assert passed and table["reward"][0] == "warning" and "all rewards were 0" in table["reward"][1]


@pytest.mark.slow
def test_problems_in_both_splits_and_prompts_that_are_too_long_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_sums.py").write_text(
        "from torchrl_grpo.tasks import Problem, Score, Task\n"
        "class Sums(Task):\n"
        "    name = 'sums'\n"
        "    def problems(self, split):\n"
        "        few = range(10, 40) if split == 'train' else range(35, 45)\n"
        "        return [Problem(f'{n}+{n}=? #### n' + ' ' * (40 * (n == 12)), 2 * n) for n in few]\n"
        "    def score(self, problem, responses):\n"
        "        return Score(len(responses[0]) % 2, True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = ("env.dataset=null", "env.task._target_=my_sums.Sums", "env.max_prompt_tokens=30")
    passed, table = tried(
        capsys, tmp_path / "out", *task, "evaluation.num_prompts=4", "evaluation.k=0", steps(2)
    )
    assert passed and "30 training problems" in table["data"][1]
    assert (
        table["data"][0] == "warning"
        and "5 of the test problems are also training problems" in table["data"][1]
    )
    assert (
        table["parts"][0] == "warning"
        and "1 of 30 prompts are longer and are left out" in table["parts"][1]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("train_model.lora.enabled=true",),
        ("env.reward_workers=1", "algo=dapo"),
        ("train.total_dialog_turns=0",),
    ],
)
def test_it_works_with_adapters_reward_workers_and_nothing_to_train(
    overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: None
) -> None:
    trains = overrides[-1] != "train.total_dialog_turns=0"
    passed, table = tried(
        capsys, tmp_path, *([steps(2)] * trains), "evaluation.num_prompts=4", *overrides
    )
    assert passed and ("steps" in table) == trains and table["evaluation"][0] == "ok"


@pytest.mark.slow
def test_its_steps_change_no_weight(tmp_path: Path) -> None:
    run = build(
        compose_config(*SMALL, steps(2), "optimizer.lr=1e-30", "optimizer.weight_decay=0.1"),
        tmp_path,
    )
    before = [parameter.clone() for parameter in run.learner.trainer.parameters]
    run.rollouts.publish(run.learner.weights(), 0)
    assert run.learner.train_groups(*run.rollouts.next_batch())["train/grad_norm"] > 0
    assert all(map(torch.equal, before, run.learner.trainer.parameters))
    run.close()


@pytest.mark.slow
def test_the_script_has_the_exit_status_of_the_checks(
    tmp_path: Path, run_here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "sota" / "grpo" / "grpo.py"
    small = ("--config-name", "grpo_arithmetic", *SMALL, "dry_run=true")
    assert run_here(script, *small, steps(2)) == 0
    assert run_here(script, *small, "model.name=/nowhere") == 1
    assert "FAILED  model: model.name=/nowhere must be a folder" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_forecast_equals_the_sums_by_hand() -> None:
    config: GRPOConfig = compose_config(
        "env.num_envs=16", "env.repeats=4", steps(100), "evaluation.frequency=10", "evaluation.num_prompts=50",
        "train.checkpoint_frequency=20", "train.keep_checkpoints=last:2", "logging.tensorboard=false",
    )  # fmt: skip
    measured = Measured(start_s=5, steps_s=[9, 0.5, 0.7, 0.6], greedy_s=2, sampled_s=7, report_s=3)
    measured.checkpoint_bytes, measured.model_bytes, measured.memory = 10**8, 10**7, {"cpu": 10**9}
    measured.prompt_tokens, measured.response_tokens = 8, 12
    figures = forecast(config, measured)
    assert figures.seconds == pytest.approx(
        {
            "start": 5,
            "steps": 60,
            "evaluations": 2 * 7 + 9 * 2,
            "checkpoints": 2.55,
            "report": 3,
            "end": 2,
        }
    )
    samples = 2 * 16 + 11 * 50  # at steps 50 and 100; and the evaluations
    assert figures.disk_bytes == 3 * 10**8 + 10**7 + 100 * 2300 + 450_000 + samples * 500
    assert figures.longest_s == pytest.approx(
        104.55 + (40 / 20 - 1) * 92
    )  # 8 + 32 tokens in place of 8 + 12
    assert figures.rows()[0]["estimate"] == "1:45" and figures.memory == {"cpu": 10**9}


def test_memory_is_the_peak_of_this_process_and_its_children() -> None:
    before = memory_now()
    assert list(before) == ["cpu"] or torch.cuda.is_available()
    block = torch.ones(50_000_000)
    assert sum(memory_now().values()) >= block.nbytes
