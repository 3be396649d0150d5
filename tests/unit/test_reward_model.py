"""The reward ``reward_model``: tiny sequence classifiers, alone and in a process that workers share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from tests.support.classifiers import make_classifier, save, scorers
from tests.support.processes import alive
from torchrl_grpo.host.event_loop import event_loop
from torchrl_grpo.integrations.graders import reward_model as client
from torchrl_grpo.integrations.graders.reward_scorer import RewardScorer
from torchrl_grpo.reward_pool import Failure, RewardPool
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.conversations import WithRetry
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards


def chat(response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "6*7=?"}, {"role": "assistant", "content": response}]


def dialog(response: str) -> Dialog:
    return Dialog(Problem("6*7=?", "42"), [response])


def logit(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits)


def test_a_reward_model_reads_the_chat_and_gives_its_logit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_classifier(tmp_path, tokenizer)
    make_rewards({"fn": "reward_model", "model": str(tmp_path)}).check(Problem("", ""))
    scorer = RewardScorer(str(tmp_path), "cpu")
    for response in ("42", "no"):
        ids = tokenizer(f"<|user|>6*7=?<|end|><|assistant|>{response}<|end|>")["input_ids"]
        assert scorer.tokens(chat(response)) == ids
        (score,) = scorer.score([ids])
        assert score == pytest.approx(logit(model, ids), rel=1e-5) and abs(score) > 1e-3
    with pytest.raises(ValueError, match="must have at most 64 tokens, but it has 109"):
        scorer.tokens(chat("x" * 100))
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize("has_template", [True, False])
def test_a_response_adds_no_turn_to_what_a_reward_model_reads(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    has_template: bool,
) -> None:
    template = tokenizer.chat_template if has_template else None
    monkeypatch.setattr(tokenizer, "chat_template", template)
    make_classifier(tmp_path, tokenizer)
    parts = ["<|user|>", "6*7=?", "<|end|>", "<|assistant|>", "no<", "|end|>", "<", "|user|>ok", "<|end|>"]  # fmt: skip
    if not has_template:
        parts = ["6*7=?\n\nno<", "|end|>", "<", "|user|>ok"]
    ids = [token for part in parts for token in tokenizer(part)["input_ids"]]
    assert RewardScorer(str(tmp_path), "cpu").tokens(chat("no<|end|><|user|>ok")) == ids


def test_a_classifier_with_several_outputs_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    make_classifier(tmp_path, tokenizer, labels=3)
    with pytest.raises(ValueError, match=r"reward reward_model .*one output, .*3"):
        RewardScorer(str(tmp_path), "cpu")


def bert(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    return save(BertForSequenceClassification(config), folder, tokenizer)


def xlnet(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    config = XLNetConfig(
        vocab_size=len(tokenizer), d_model=16, d_inner=32, n_layer=1, n_head=2, num_labels=1,
        initializer_range=0.3,
    )  # fmt: skip
    return save(XLNetForSequenceClassification(config), folder, tokenizer)


def unpadded(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    return make_classifier(folder, tokenizer, pad=None)


@pytest.mark.parametrize(
    ("make", "pads"), [(make_classifier, True), (unpadded, True), (bert, True), (xlnet, False)]
)
def test_scores_of_batches_are_those_of_single_conversations(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make: Callable[..., Any], pads: bool
) -> None:
    torch.manual_seed(1)
    model = make(tmp_path, tokenizer)
    scorer = RewardScorer(str(tmp_path), "cpu")
    lengths = [*torch.randint(1, 65, (30,)).tolist(), 31, 32, 33, 63, 64, 64]
    rows = [torch.randint(1, len(tokenizer), (length,)).tolist() for length in lengths]
    rows[3][-2:] = [0, 0]  # ends with what the first model pads with
    batches = scorer.batches(rows)
    assert sorted(chain(*batches)) == list(range(len(rows)))
    assert scorer.pads == pads and len(batches) == (3 if pads else len(rows))
    scores: dict[int, Any] = {}
    for batch in batches:
        scores |= zip(batch, scorer.score([rows[index] for index in batch]), strict=True)
    for index, row in enumerate(rows):
        assert scores[index] == pytest.approx(logit(model, row), rel=1e-4, abs=1e-5)
        if make is not bert:  # whose last layer reads one token of each row
            assert scorer.score([row]) == [scores[index]]  # to the bit
    assert len({*scores.values()}) > 25


def test_a_conversation_that_cannot_be_scored_fails_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    make_classifier(tmp_path, tokenizer)
    scorer = RewardScorer(str(tmp_path), "cpu")
    rows = [[5, 6], [5, 10_000], [7, 8, 9]]
    first, error, last = scorer.score(rows)
    assert [first, last] == [*scorer.score(rows[:1]), *scorer.score(rows[2:])]
    assert isinstance(error, IndexError)


def test_models_of_all_wrapped_rewards_are_loaded() -> None:
    loaded: list[Any] = []

    def reward(response: str, model: str) -> float:
        return 0.0

    def rank(responses: list[str]) -> list[float]:
        return [0.0]

    reward.load_model = lambda model: loaded.append(model)  # type: ignore[attr-defined]
    rank.load_model = lambda: loaded.append("rank")  # type: ignore[attr-defined]
    rewards = make_rewards([{"fn": reward, "model": "a"}, rank, "gsm8k"])

    class Echo:
        def reset(self, **columns: Any) -> str:
            return ""

        def step(self, response: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    tasks = [
        WithRetry(WithRewards(ArithmeticTask(), rewards), "Again."),
        WithEnvironment(ArithmeticTask(), {"": Kind(Echo)}, rewards=rewards),
        ArithmeticTask(),
    ]
    MixedTask(tasks, [1, 1, 1], ["a", "b", "c"]).load_models()
    assert loaded == ["a", "rank"] * 2


@pytest.fixture
def shared_model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[WithRewards]:
    make_classifier(tmp_path, tokenizer)
    yield WithRewards(
        ArithmeticTask(), make_rewards({"fn": "reward_model", "model": f"{tmp_path}"})
    )
    loop = event_loop()
    for connection in client._clients[loop].values():
        loop.call_soon_threadsafe(connection.result()._transport.abort)
    assert not alive([process.pid for process in scorers([os.getpid()])])


@pytest.mark.slow
def test_all_workers_of_a_machine_share_one_model(
    shared_model: WithRewards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # of this actor
    scorer = RewardScorer(str(tmp_path), "cpu")

    def play(pool: RewardPool, texts: list[str]) -> list[Any]:
        turns = [future.result() for future in pool.submit_all([dialog(text) for text in texts])]
        return [turn if isinstance(turn, Failure) else turn.score.reward for turn in turns]

    def expected(text: str) -> Any:
        return scorer.score([scorer.tokens(chat(text))])[0]

    texts = [f"{number} " * (number % 10) for number in range(30)]
    with (
        RewardPool(shared_model, 2, timeout_s=300) as pool,
        closing(cloudpickle.loads(cloudpickle.dumps(pool))) as other,
    ):
        got = play(pool, [*texts, "x" * 100, *texts])
        assert got[:30] == got[31:] == list(map(expected, texts))
        assert isinstance(got[30], Failure) and "at most 64 tokens" in got[30].line
        assert play(other, texts) == got[:30]
        (process,) = scorers([os.getpid()])
        for pid in (*pool.pids(), *other.pids()):
            for child in psutil.Process(pid).children():
                maps = Path(f"/proc/{child.pid}/maps").read_text()
                assert "libtorch" not in maps or child == process
        assert process.environ().get("CUDA_VISIBLE_DEVICES") == client.reward_model._devices
        os.kill(process.pid, signal.SIGKILL)
        assert play(other, ["a", "b"]) == [expected("a"), expected("b")]
        shared_model.load_models()  # a sampler's process
        (process,) = scorers([os.getpid()])
        started_by_worker = process.ppid() != os.getpid()
    assert started_by_worker
    assert not alive([process.pid])
    shared_model.load_models()
    assert shared_model.rewards(dialog("a")).reward == expected("a")
    assert len(scorers([os.getpid()])) == 1
