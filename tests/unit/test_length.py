"""The length of a run: in trajectories, in passes over the data, or without limit; and the number
of samples that it keeps.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.configs import compose_config, composed
from tests.support.runs import at
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError, GRPOConfig, check_command_line, plain
from torchrl_grpo.config.resumed import check_options, on_saved_config
from torchrl_grpo.config.schema import LENGTHS
from torchrl_grpo.extras.report.summary import summarize
from torchrl_grpo.learner.resume import find_resume
from torchrl_grpo.reporting.metrics import read_jsonl

SMALL = (
    "env.num_envs=16", "env.repeats=4", "env.reward=number", "inference_model.max_new_tokens=4",
    "evaluation.num_prompts=3", "evaluation.k=0", "logging.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write six problems to train on and three to test on."""
    folder = tmp_path_factory.mktemp("data")
    for split, first, count in (("train", 1, 6), ("test", 7, 3)):
        rows = [
            json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)})
            for n in range(first, first + count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def config_of(data: Path, *overrides: str) -> GRPOConfig:
    return compose_config(*SMALL, f"env.dataset={data}", *overrides)


def fit(config: GRPOConfig, folder: Path, *, asynchronous: bool = False) -> list[dict[str, Any]]:
    with closing(build(config, folder, asynchronous=asynchronous)) as run:
        run.fit()
    return read_jsonl(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def epoch(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one pass over the data."""
    folder = tmp_path_factory.mktemp("epoch")
    fit(
        config_of(
            data, "train.total_epochs=1", "logging.sample_rows=all", "logging.sample_frequency=1"
        ),
        folder,
    )
    return folder


@pytest.mark.slow
def test_an_epoch_has_each_problem_once_in_whole_batches(epoch: Path) -> None:
    """24 trajectories are a batch of 16, and another that begins the next epoch."""
    rows = read_jsonl(epoch / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    samples = [row for row in read_jsonl(epoch / "samples.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in samples] == [1] * 16 + [2] * 16  # all rows of each step
    assert sorted(Counter(row["query"] for row in samples[:16]).values()) == [4, 4, 4, 4]
    assert {f"{n}+{n}=" for n in range(1, 7)} == {row["query"] for row in samples}


@pytest.mark.slow
def test_a_run_goes_on_for_further_epochs_and_not_for_fewer(epoch: Path, data: Path) -> None:
    def prepared(epochs: int) -> GRPOConfig:
        config = config_of(data, f"train.total_epochs={epochs}", f"train.resume={at(epoch, 2)}")
        return prepare(config, [], find_resume(config, plain(config))).config

    assert (prepared(2).num_batches, prepared(3).train.total_dialog_turns) == (3, 72)
    with pytest.raises(
        ConfigError,
        match=r"total_epochs=1 .* 32 .*train\.total_epochs=2\.",
    ):
        prepared(1)


@pytest.mark.slow
def test_total_dialog_turns_0_evaluates_a_checkpoint_and_ends(
    epoch: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(data, "train.total_dialog_turns=0", f"train.resume={epoch}")
    rows = fit(config, tmp_path)
    assert [(row["step"], row["eval/pass@1"]) for row in rows] == [
        (2, read_jsonl(epoch / "metrics.jsonl")[-1]["eval/pass@1"])
    ]
    assert len(read_jsonl(tmp_path / "samples.jsonl")) == 3
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "report.html").stat().st_size > 0
    summary = summarize(tmp_path)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (rows[0]["eval/pass@1"], None)
    printed = capsys.readouterr().out
    assert (
        "test after step 2" in printed and "model" not in printed.partition("test after step 2")[2]
    )


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.slow
def test_the_asynchronous_script_evaluates_and_ends_too(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    rows = fit(
        config_of(data, "train.total_dialog_turns=0", "policy.kl_coef=0"),
        tmp_path,
        asynchronous=True,
    )
    assert [row["step"] for row in rows] == [0] and 0 <= rows[0]["eval/pass@1"] <= 1
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_of_so_many_steps_goes_on_for_further_steps(data: Path, tmp_path: Path) -> None:
    rows = fit(config_of(data, "train.total_steps=1"), tmp_path / "one")
    assert [row["step"] for row in rows] == [0, 1]

    def prepared(length: str) -> GRPOConfig:
        config = config_of(data, length, f"train.resume={at(tmp_path / 'one', 1)}")
        return prepare(config, [], find_resume(config, plain(config))).config

    assert prepared("train.total_steps=3").num_batches == 3
    with pytest.raises(ConfigError, match=r"total_steps=1 .*train\.total_steps=2\."):
        prepared("train.total_steps=1")


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_on_the_command_line_replaces_the_saved_one(length: str) -> None:
    composed_here = composed("grpo_arithmetic", (f"{length}=7",))
    for saved in LENGTHS:
        config = compose_config(f"{saved}=9")
        merged = on_saved_config(
            OmegaConf.merge(OmegaConf.structured(GRPOConfig), composed_here),
            [f"{length}=7"], Path("checkpoint_000001"), plain(config),
        )  # fmt: skip
        now = {name: OmegaConf.select(merged, name) for name in LENGTHS}
        assert now.pop(length) == 7
        assert now.pop("train.total_epochs", None) is now.pop("train.total_steps", None) is None


def test_a_checkpoint_with_options_of_earlier_versions_is_resumed() -> None:
    here = OmegaConf.merge(OmegaConf.structured(GRPOConfig), composed("grpo_arithmetic", ()))
    saved: Any = plain(compose_config("optimizer.lr=0.5"))
    saved["inference_model"] |= {"check_sync": True, "check_sync_tolerance": 0.1}
    assert on_saved_config(here, [], Path("checkpoint_000001"), saved).optimizer.lr == 0.5
    saved["inference_model"]["check_synk"] = True
    with pytest.raises(ConfigError, match="check_synk"):
        on_saved_config(here, [], Path("checkpoint_000001"), saved)


def test_an_algorithm_or_a_group_of_keys_replaces_the_saved_one() -> None:
    overrides = "algo=dr_grpo", "optimizer={lr:0.25}", "env.chat_template_kwargs={b:2}"
    here = OmegaConf.merge(OmegaConf.structured(GRPOConfig), composed("grpo_arithmetic", overrides))
    saved = compose_config(
        "algo=gspo", "optimizer.lr=0.5", "optimizer.weight_decay=0.5",
        "env.chat_template_kwargs={a:1}", "env.max_turns=2",
    )  # fmt: skip
    merged: Any = on_saved_config(here, overrides, Path("checkpoint_000001"), plain(saved))
    assert merged.policy == here.policy and merged.policy.aggregation == "constant"
    assert (merged.optimizer.lr, merged.optimizer.weight_decay) == (
        0.25,
        here.optimizer.weight_decay,
    )
    assert merged.env.chat_template_kwargs == {"b": 2}
    assert merged.env.max_turns == 2


@pytest.mark.slow
def test_the_fix_for_a_batch_of_another_size_is_accepted() -> None:
    saved = plain(compose_config("env.num_envs=32"))
    path = Path("checkpoint_000001")
    fix = r"train\.dialog_turns_per_batch=32 and a divisor of it as env\.num_envs\."
    with pytest.raises(ConfigError, match=f"per_batch=64 must be 32, .*use {fix}$"):
        check_options(saved, plain(compose_config("env.num_envs=64")), path)
    fixed = compose_config("env.num_envs=16", "train.dialog_turns_per_batch=32")
    check_options(saved, plain(fixed), path)


def test_two_lengths_on_the_command_line_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"total_dialog_turns=64 .*train\.total_epochs=2"):
        check_command_line(["train.total_dialog_turns=64", "++train.total_epochs=2"])
    check_command_line(["train.total_dialog_turns=64", "train.total_epochs=null"])
