"""The records of a run: whole groups token by token, and a timeline of each actor."""

from __future__ import annotations

import itertools
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.support.runs import run, steps
from torchrl_grpo import keys
from torchrl_grpo.collectors.sampler import GroupReport, RolloutReport
from torchrl_grpo.collectors.summary import sample_rows, token_texts
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.reporting.console import one_of_each
from torchrl_grpo.reporting.metrics import MetricsLogger

Row = dict[str, Any]


LATE = 0.25
"""Seconds that a loaded machine may take between two readings of the clock."""


def tokens_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_a_character_of_several_tokens_stands_at_the_last_of_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens = tokens_of(tokenizer, "é計 a")
    assert token_texts(tokenizer, tokens) == ["", "é", "", "", "計", " ", "a"]
    assert token_texts(tokenizer, tokens[:4]) == [
        "",
        "é",
        "",
        "\ufffd",
    ]  # cut off inside a character
    assert token_texts(tokenizer, []) == []


def test_bytes_that_are_no_text_are_told_all_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    [byte] = tokenizer.convert_tokens_to_ids(["ÿ"])  # 0xff, which no character starts with
    tokens = [byte] * 9 + tokens_of(tokenizer, "ok")
    texts = token_texts(tokenizer, tokens)
    assert "".join(texts) == tokenizer.decode(tokens) == "\ufffd" * 9 + "ok" and texts[-1] == "k"


def test_a_space_between_words_is_not_lost() -> None:
    backend = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1, 1]) == [
        "one",
        " two",
        " two",
    ]


def row_of(
    group: int, tokenizer: PreTrainedTokenizerFast, advantage: torch.Tensor
) -> TensorDictBase:
    """Return a prompt of two tokens, two sampled ones, a tool's result of one, and a sampled one."""
    return TensorDict(
        {
            keys.FULL: torch.tensor([5, 6, *tokens_of(tokenizer, "abXc")]),
            keys.RESPONSE: torch.tensor(tokens_of(tokenizer, "abXc")),
            keys.ASSISTANT_MASK: torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.bool),
            keys.LOG_PROBS: torch.tensor([0, 0, -0.123456, -1.0, 0, -2.0]),
            keys.REF_LOG_PROBS: torch.tensor([0, 0, -0.5, -1.5, 0, -torch.inf]),
            keys.REWARD: torch.tensor([1.0]),
            keys.REWARD_VALID: torch.tensor([True]),
            keys.CORRECT: torch.tensor([True]),
            keys.TRUNCATED: torch.tensor([group == 4]),
            keys.GROUP_ID: torch.tensor([group]),
            keys.POLICY_VERSION: torch.tensor([7]),
            keys.ADVANTAGE: advantage,
            keys.QUERY: "q",
            keys.RESPONSE_TEXT: "abc",
        }
    )


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])  # TorchRL's loss reads the second one
def test_a_row_has_its_tokens_and_where_it_is_from(
    shape: tuple[int, ...], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    advantage = torch.tensor([0, 0, 0.25, 0.5, 0, 0.75]).reshape(shape)
    batch = lazy_stack([row_of(3, tokenizer, torch.tensor([0.5])), row_of(4, tokenizer, advantage)])

    def scores(row: int) -> dict[str, torch.Tensor]:
        return {"entropy": torch.arange(9) / 8} if row == 1 else {}

    plain, with_scores = sample_rows(batch, "train", tokenizer=tokenizer, version=9, scores=scores)
    of_row = {
        "group": 3,
        "version": 7,
        "staleness": 2,
        "length": 3,
        "finish_reason": "stop",
        "advantage": 0.5,
    }
    assert plain.items() >= of_row.items() and with_scores["finish_reason"] == "length"
    prompt = batch[0][keys.FULL][:2]
    assert plain["prompt"] == tokenizer.decode(prompt) != ""
    assert plain["tokens"] == {
        "text": ["a", "b", "X", "c"],
        "log_prob": [-0.1235, -1.0, None, -2.0],
        "reference": [-0.5, -1.5, None, -torch.inf],
    }
    assert with_scores["tokens"]["entropy"] == [0.25, 0.375, None, 0.625]
    assert with_scores["tokens"]["advantage"] == [0.25, 0.5, None, 0.75]
    [first, *_] = sample_rows(batch, "train", 1, tokenizer=tokenizer, scores=scores)
    assert first["group"] == 4  # a scored group comes first
    [tested, _] = sample_rows(batch, "test", tokenizer=tokenizer)
    assert not {"group", "version", "staleness"} & tested.keys()
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log_samples(9, [plain])
    [read] = read_jsonl(tmp_path / "samples.jsonl")
    assert read["tokens"]["reference"] == [-0.5, -1.5, None, None]


@pytest.mark.parametrize(
    ("most", "groups"), [(1, [4] * 3), (3, [4] * 3), (4, [4] * 3 + [2] * 3), (None, [4, 2, 9])]
)
def test_rows_are_rounded_up_to_whole_groups(
    most: int | None, groups: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = lazy_stack(
        [row_of(group, tokenizer, torch.zeros(1)) for group in (4, 4, 4, 2, 2, 2, 9, 9, 9)]
    )
    group_ids = [row["group"] for row in sample_rows(batch, "train", most)]
    assert group_ids == (groups if most else [group for group in groups for _ in range(3)])


def test_one_of_each_group_comes_first_and_rows_without_one_stay() -> None:
    rows = [{"n": n, "group": group} for n, group in enumerate((8, 8, 8, 9, 9))]
    assert [row["n"] for row in one_of_each(rows)] == [0, 3, 1, 4, 2]
    assert [row["n"] for row in one_of_each([{"n": n} for n in range(4)])] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two optimizer steps a batch, each in several micro-batches."""
    folder = tmp_path_factory.mktemp("run")
    run(
        folder, steps(3), "logging.sample_frequency=1", "logging.sample_rows=all", "train.optim_batch_size=8",
        "train.micro_batch_tokens=80", "policy.kl_coef=0.05", "evaluation.num_prompts=3", "train.epochs=2",
    )  # fmt: skip
    return folder


def numbers(rows: list[Row], name: str) -> list[float]:
    return [value for row in rows for value in row["tokens"][name] if value is not None]


@pytest.mark.slow
def test_the_trainers_numbers_are_those_of_its_first_pass(folder: Path) -> None:
    """Of two optimizer steps of 8, the first trains sequences of its own weights, and the second
    one does not.
    """
    metrics = read_jsonl(folder / "metrics.jsonl")
    rows = [
        row
        for row in read_jsonl(folder / "samples.jsonl")
        if row["split"] == "train" and row["step"] == 1
    ]
    assert len(rows) == 16 and metrics[1]["train/micro_batches"] > 1
    assert all(len({len(column) for column in row["tokens"].values()}) == 1 for row in rows)
    sampled, trainer, reference = (
        numbers(rows, name) for name in ("log_prob", "trainer", "reference")
    )
    assert len(sampled) == metrics[1]["rollout/tokens"] == sum(row["length"] for row in rows)
    assert reference == pytest.approx(sampled, abs=2e-4)  # of the sampling weights
    first, second = rows[:8], rows[8:]
    assert numbers(first, "trainer") == pytest.approx(numbers(first, "log_prob"), abs=2e-4)
    assert numbers(second, "trainer") != pytest.approx(numbers(second, "log_prob"), abs=2e-3)
    assert len(trainer) == len(sampled)
    assert {(row["version"], row["staleness"]) for row in rows} == {(0, 0)}


@pytest.mark.slow
def test_without_a_second_pass_entropies_average_to_the_metric(tmp_path: Path) -> None:
    [_, metrics] = run(tmp_path, steps(1), "logging.sample_rows=all", "train.micro_batch_tokens=80")
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert fmean(numbers(rows, "entropy")) == pytest.approx(metrics["train/entropy"], abs=1e-4)
    assert [len(row["tokens"]["text"]) for row in rows] == [row["length"] for row in rows]


def test_test_rows_have_tokens_too(folder: Path) -> None:
    rows = [row for row in read_jsonl(folder / "samples.jsonl") if row["split"] == "test"]
    assert len(rows) == 2 * 3
    for row in rows:
        assert row["tokens"].keys() == {"text", "log_prob"}
        assert "".join(row["tokens"]["text"]).startswith(
            row["response"]
        )  # the end token counts too


def test_the_learners_spans_follow_one_another_and_are_what_was_timed(folder: Path) -> None:
    metrics = {row["step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    spans = read_jsonl(folder / "timeline.jsonl")
    learner = [span for span in spans if span["actor"] == "learner"]
    each = ("wait", "train", "publish")
    kinds = ["publish", "evaluate", *each, "save", *each, "save", *each, "evaluate", "save", "save"]
    assert [span["kind"] for span in learner] == kinds
    for before, after in pairwise(learner):
        assert after["start"] == pytest.approx(before["start"] + before["seconds"], abs=LATE)
    for step in (1, 2, 3):
        seconds = {
            (span["actor"], span["kind"]): span["seconds"] for span in spans if span["step"] == step
        }
        timed = sum(seconds["learner", kind] for kind in each)
        assert timed == pytest.approx(metrics[step]["time/step_s"], abs=LATE)
        assert seconds["sampler 0", "sample"] == pytest.approx(
            metrics[step]["time/generate_s"], abs=LATE
        )
        assert seconds["sampler 0", "score"] == pytest.approx(
            metrics[step]["time/reward_s"], abs=LATE
        )
        assert seconds["reference model 0", "score"] == pytest.approx(
            metrics[step]["time/reference_s"], abs=LATE
        )


@pytest.mark.slow
def test_a_clock_that_is_set_back_makes_no_span_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    readings = itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() - 100 * next(readings))
    run(tmp_path, steps(2))
    spans = read_jsonl(tmp_path / "timeline.jsonl")
    assert len(spans) > 8 and min(span["seconds"] for span in spans) >= 0


def test_a_rollout_is_sampling_and_then_rewards() -> None:
    report = RolloutReport((GroupReport(0, 0),), generate_s=2.0, env_s=0.5, engine=None)
    assert report.spans("sampler 1", 100.0) == [
        {"actor": "sampler 1", "kind": "sample", "start": 100.0, "seconds": 2.0},
        {"actor": "sampler 1", "kind": "score", "start": 102.0, "seconds": 0.5},
    ]


def test_a_resumed_run_drops_the_spans_that_it_makes_again(tmp_path: Path) -> None:
    span = {"actor": "learner", "kind": "train", "start": 1763838000.123456, "seconds": 0.25}
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger.log_spans([{"step": step, **span} for step in range(4)])
        logger.truncate(2)
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": step, **span, "start": 1763838000.1235} for step in (0, 1)
    ]
