"""Resuming on Ray: with a different number of ranks, and after an asynchronous run was stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from tests.support.runs import (
    LORA,
    SMALL,
    at,
    differences,
    numbers,
    run,
    state_in,
    state_of,
    steps,
)
from torchrl_grpo.assembly.run import build
from torchrl_grpo.extras.export.command import main
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.starter import starter_path

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    run(folder, *LORA, steps(6), "train.checkpoint_frequency=3")
    return folder


@pytest.mark.nightly
def test_a_run_moves_from_one_process_to_several_ranks_and_back(
    lora_run: Path, tmp_path: Path
) -> None:
    """The same number of ranks resumes bit by bit; another number adds in a different order."""
    two = ("train_model.num_devices=2", "train.checkpoint_frequency=1")
    expected = numbers(read_jsonl(lora_run / "metrics.jsonl"), 4)
    ranks = run(tmp_path / "ranks", *LORA, *two, steps(6), f"train.resume={at(lora_run, 3)}")
    assert [row["step"] for row in ranks] == [3, 4, 5, 6]
    again = run(
        tmp_path / "again",
        *LORA,
        *two,
        steps(6),
        f"train.resume={at(tmp_path / 'ranks', 5)}",
    )
    assert numbers(again, 6) == numbers(ranks, 6)
    assert (
        differences(state_of(at(tmp_path / "again", 6)), state_of(at(tmp_path / "ranks", 6))) == []
    )
    main([str(at(tmp_path / "ranks", 6))])
    training_run, model = (
        tmp_path / "ranks" / "checkpoints" / name for name in ("checkpoint_000006_model", "model")
    )
    assert {path.name for path in training_run.iterdir()} == {path.name for path in model.iterdir()}
    assert (training_run / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    back = run(tmp_path / "back", *LORA, steps(6), f"train.resume={at(tmp_path / 'ranks', 4)}")
    for got in (ranks[1:], back[1:]):
        for row, numbers_there in zip(numbers(got, 4), expected[-len(got) :], strict=True):
            assert row == pytest.approx(numbers_there, rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_a_sharded_reference_model_scores_as_a_whole_one(tmp_path: Path) -> None:
    job = (
        "policy.kl_coef=0.05",
        "ref_model.refresh_every=2",
        "train.checkpoint_frequency=2",
        steps(4),
    )
    expected = numbers(run(tmp_path / "one process", *job), 1)
    assert numbers(run(tmp_path / "one rank", *job, "ref_model.sharded=true"), 1) == expected
    job = (*job, "ref_model.sharded=true", "train_model.num_devices=2")
    rows = run(tmp_path / "two ranks", *job)
    assert numbers(rows, 1) == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in expected]
    assert (
        rows[3]["train/kl_k3_to_ref"] == 0 < rows[2]["train/kl_k3_to_ref"]
    )  # of a reference that was refreshed
    resumed = run(tmp_path / "resumed", *job, f"train.resume={at(tmp_path / 'two ranks', 2)}")
    assert numbers(resumed, 3) == numbers(rows, 3)


@pytest.mark.nightly
def test_bfloat16_with_8_bit_moments_resumes_exactly_on_two_ranks(tmp_path: Path) -> None:
    """The model's weights have few distinct shapes, because each rank compiles one update per
    shape.
    """
    pytest.importorskip("torchao")
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    make_tiny_model(
        **sizes, num_key_value_heads=4, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "reward.py").write_text("def length(response):\n    return float(len(response))\n")
    job = (
        f"model.name={tmp_path / 'm'}", f"env.reward={tmp_path / 'reward.py'}:length", "train_model.dtype=bfloat16",
        "optimizer.name=adamw_8bit", "train_model.num_devices=2", "policy.kl_coef=0",
        "train.checkpoint_frequency=2", steps(3),
    )  # fmt: skip
    whole = run(tmp_path / "whole", *job)
    resumed = run(tmp_path / "resumed", *job, f"train.resume={at(tmp_path / 'whole', 2)}")
    assert resumed[-1]["train/loss"] == whole[-1]["train/loss"]
    assert resumed[-1]["train/grad_norm"] == whole[-1]["train/grad_norm"] > 0
    states = [state_of(at(tmp_path / name, 3)) for name in ("whole", "resumed")]
    assert differences(*states) == []
    assert {weight.dtype for weight in states[0]["trainer"]["model"].values()} == {torch.bfloat16}


def train(
    folder: Path, stop_at: int | None, *overrides: str, asynchronous: bool = True
) -> list[int]:
    """Return the groups that a run trains, in exact mode, until it is stopped or complete."""
    trained: list[int] = []
    fixed = ["policy.kl_coef=0", "inference_model.exact=true"]
    fixed += ["train.max_staleness=2"] if asynchronous else []
    training_run = build(
        compose_config(*SMALL, steps(10), *fixed, *overrides), folder, asynchronous=asynchronous
    )
    real = training_run.learner.train_groups

    def train_groups(*groups: Any) -> dict[str, float]:
        if training_run.learner.version == stop_at:
            raise KeyboardInterrupt
        while (
            stop_at is not None
            and training_run.rollouts.state_dict()["drawing"]["next_group"]
            < 4 * training_run.learner.version + 12
        ):
            time.sleep(0.05)  # until as many groups are drawn ahead as the staleness bound allows
        held = ray.get(list(groups)) if asynchronous else groups
        trained.extend(group[0]["group_id"].item() for group in held)
        return real(*groups)

    training_run.learner.train_groups = train_groups  # type: ignore[method-assign]
    try:
        training_run.fit()
    except KeyboardInterrupt:
        assert stop_at is not None
    finally:
        training_run.close()
    return trained


@pytest.fixture(scope="module")
def stopped_and_resumed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[int], list[int]]:
    """Return the folder of both runs, and the groups that each of them trained."""
    folder = tmp_path_factory.mktemp("asynchronous")
    first = train(folder / "first", 4)
    return folder, first, train(folder / "rest", None, f"train.resume={folder / 'first'}")


def test_a_resumed_asynchronous_run_loses_and_repeats_no_group(
    stopped_and_resumed: tuple[Path, list[int], list[int]],
) -> None:
    folder, first, rest = stopped_and_resumed
    ahead = state_in(at(folder / "first", 4))["source"]
    assert (
        ahead["drawing"]["next_group"] > len(first) == 16
    )  # groups were drawn that were not trained
    assert sorted(first + rest) == list(range(40))
    rows = read_jsonl(folder / "rest" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(4, 11))
    assert max(row["staleness/max"] for row in rows[1:]) <= 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("asynchronous", "overrides"), [(False, []), (True, ["inference_model.num_devices=2"])]
)
def test_what_was_drawn_ahead_is_played_by_whoever_goes_on(
    asynchronous: bool,
    overrides: list[str],
    stopped_and_resumed: tuple[Path, list[int], list[int]],
    tmp_path: Path,
) -> None:
    """The run is resumed in one process, and with another number of samplers."""
    folder, first, _ = stopped_and_resumed
    ahead = [group for group, _ in state_in(at(folder / "first", 4))["source"]["ahead"]]
    assert len(ahead) >= 4 and set(ahead).isdisjoint(first)
    rest = train(
        tmp_path, None, f"train.resume={folder / 'first'}", *overrides, asynchronous=asynchronous
    )
    assert sorted(first + rest) == list(range(40))
    if not asynchronous:
        assert rest[: len(ahead)] == ahead
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows[1:]) <= (2 if asynchronous else 0)


def test_on_policy_an_exact_asynchronous_run_has_no_kl_to_its_engine(
    stopped_and_resumed: tuple[Path, list[int], list[int]],
) -> None:
    """With stale samples the KL is that of the weight updates in between."""
    folder, _, _ = stopped_and_resumed
    rows = [
        row for name in ("first", "rest") for row in read_jsonl(folder / name / "metrics.jsonl")
    ]
    kl = {
        stale: [
            row["train/kl_k3_to_inference"] for row in rows if row.get("staleness/max") == stale
        ]
        for stale in (0, 2)
    }
    assert len(kl[0]) >= 1 and set(kl[0]) == {0.0}
    assert kl[2] and min(kl[2]) > 0
