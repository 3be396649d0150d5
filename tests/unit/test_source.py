"""LocalSource: the order in which the engine and the other roles use a shared device, and the staleness check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from torchrl_grpo.collectors import LocalSource, RolloutCollector, Sampler
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.tasks import ArithmeticTask
from torchrl_grpo.weights import DirectSender, WeightHandle


class Recorder(Engine):
    """Answers with one token, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def generate(self, prompts: Sequence[Tensor], n: int, params: SamplingParams) -> list[list[Completion]]:
        self.calls.append("generate")
        return [[Completion(torch.tensor([1]), torch.zeros(1), "stop") for _ in range(n)] for _ in prompts]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.calls.append("update")
        self.policy_version = version

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")


class Reference:
    """Stands for KLScoring."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, batch: Any) -> Any:
        self.calls.append("reference")
        return batch


def make_source(tokenizer: PreTrainedTokenizerFast, engine: Recorder, **settings: Any) -> LocalSource:
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=4, repeats=2)
    params = SamplingParams(1, stop_token_ids=(1,))
    sampler = Sampler(engine, [RolloutCollector(env, GenerationPolicy(engine, params))], None, params, [])
    return LocalSource(sampler, Reference(engine.calls), **settings)  # type: ignore[arg-type]


def weights(version: int) -> WeightHandle:
    handle = DirectSender().send(Weightless(), version)
    assert handle is not None
    return handle


class Weightless:
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter([])

    def adapters(self) -> Iterator[Any]:
        return iter([])


def test_a_colocated_engine_sleeps_while_the_other_roles_work(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine, colocated=True)
    source.publish(weights(1), 1)
    source.next_batch()
    source.publish(weights(2), 2)
    assert engine.calls == ["wake", "update", "generate", "sleep", "reference", "wake", "update"]


def test_an_engine_of_its_own_never_sleeps(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine)
    source.next_batch()
    source.publish(weights(1), 1)
    assert engine.calls == ["generate", "reference", "update"]


def test_a_batch_of_older_weights_is_refused_with_both_versions(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine)
    source.publish(weights(3), 3)
    assert source.next_batch()["policy_version"].unique().tolist() == [3]
    assert source.metrics()["staleness/max"] == 0
    engine.policy_version = 2
    with pytest.raises(RuntimeError, match=r"of version 2 was about to be trained at version 3.*max_staleness=0"):
        source.next_batch()


def test_a_restored_source_goes_on_with_the_same_problems(tokenizer: PreTrainedTokenizerFast) -> None:
    source = make_source(tokenizer, Recorder())
    source.next_batch()
    state = source.state_dict()
    expected = source.next_batch()
    other = make_source(tokenizer, Recorder())
    other.load_state_dict(state)
    got = other.next_batch()
    assert got["query"] == expected["query"]
    assert got["group_id"].tolist() == expected["group_id"].tolist()
