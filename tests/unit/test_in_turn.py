"""InTurn: the order in which the engine and the other roles use a shared device, the staleness check, and resumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.support.tasks import next_task, play
from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.runtime.in_turn import InTurn
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.tasks import ArithmeticTask
from torchrl_grpo.weights import DirectSender, EitherHandle, WeightHandle


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


class Refuses(Recorder):
    """Takes weights in one way alone."""

    def load(self, handle: WeightHandle, version: int) -> None:
        if isinstance(handle, EitherHandle):
            raise TransferRefusedError("no such link")
        super().load(handle, version)


class Scoring:
    """Stands for KLScoring."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, batch: Any) -> Any:
        self.calls.append("reference")
        return batch


def make_tasks(env: LLMEnv, max_staleness: int = 0, task_groups: int = 2) -> TaskQueue:
    buffer = GroupBuffer(2, max_staleness)
    return TaskQueue(env.drawing, buffer, task_groups=task_groups, total_groups=100, group_size=2)


def make_source(tokenizer: PreTrainedTokenizerFast, engine: Recorder, *, sleeps: bool = False) -> InTurn:
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=4, repeats=2)
    params = SamplingParams(1, stop_token_ids=(1,))

    def make_collector(groups: int) -> RolloutCollector:
        return RolloutCollector(env.with_rows(2 * groups), GenerationPolicy(engine, params))

    sampler = Sampler(engine, make_collector, None, params, [], groups_at_a_time=2, sleeps=sleeps)
    return InTurn(make_tasks(env), sampler, Reference(Scoring(engine.calls)))  # type: ignore[arg-type]


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
    source = make_source(tokenizer, engine, sleeps=True)
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
    source.publish(weights(4), 4)
    engine.policy_version = 3
    with pytest.raises(RuntimeError, match=r"group 2 was admitted for version 4 and sampled by 3"):
        source.next_batch()


def test_a_restored_source_goes_on_with_the_same_problems(tokenizer: PreTrainedTokenizerFast) -> None:
    source = make_source(tokenizer, Recorder())
    source.next_batch()
    state = source.state_dict()
    source.publish(weights(1), 1)
    expected = source.next_batch()
    other = make_source(tokenizer, Recorder())
    other.load_state_dict(state)
    other.publish(weights(1), 1)
    got = other.next_batch()
    assert got["query"] == expected["query"]
    assert got["group_id"].tolist() == expected["group_id"].tolist()


def test_groups_that_an_asynchronous_run_drew_ahead_are_played_first(tokenizer: PreTrainedTokenizerFast) -> None:
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=4, repeats=2)
    tasks = make_tasks(env, max_staleness=2, task_groups=1)
    drawn = [next_task(tasks) for _ in range(6)]
    for number in (1, 4, 3):
        play(tasks, drawn[number])
    assert tasks.take() is not None  # groups 1 and 4; 3 waits, and 0, 2 and 5 are being played
    state = tasks.state_dict() | {"engines": [None, {"policy_version": 1}]}
    queries = {progress.task.groups[0]: progress.task.drawn[0].problem.query for progress in drawn}
    source = make_source(tokenizer, Recorder())
    source.load_state_dict(state)
    source.publish(weights(1), 1)
    batches = [source.next_batch()]
    for version in (2, 3):
        source.publish(weights(version), version)
        batches.append(source.next_batch())
    groups = [row["group_id"].item() for batch in batches for row in batch.unbind(0)]
    assert groups == [0, 0, 2, 2, 3, 3, 5, 5, 6, 6, 7, 7]
    for batch in batches[:2]:
        assert [row["query"] for row in batch.unbind(0)] == [
            queries[group] for group in batch["group_id"].reshape(-1).tolist()
        ]
    queries_after = [tasks._drawing.draw().problem.query for _ in range(2)]
    assert [row["query"] for row in batches[2].unbind(0)][::2] == queries_after


def test_seconds_are_of_the_step_and_counts_keep_their_names(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tokenizer, Recorder())
    counted = {"workers/restarts_reward": 1.0, "tools/calls": 2.0}
    monkeypatch.setattr(RolloutCollector, "take_counts", lambda self: dict(counted))
    source.next_batch()
    metrics = source.metrics()
    assert metrics.keys() == {
        "staleness/max", "staleness/mean", "time/generate_s", "time/reward_s", "time/reference_s", *counted,
    }  # fmt: skip
    assert {name: metrics[name] for name in counted} == counted
    assert metrics["time/generate_s"] > 0 and metrics["time/reference_s"] > 0


def test_weights_that_the_engine_refuses_are_sent_again(tokenizer: PreTrainedTokenizerFast) -> None:
    engine, resent = Refuses(), list[tuple[int, str]]()
    source = make_source(tokenizer, engine)

    def resend(version: int, reason: str) -> WeightHandle:
        resent.append((version, reason))
        return weights(version)

    refused = EitherHandle(weights(1), cast(Any, None))
    with pytest.raises(TransferRefusedError):
        source.publish(refused, 1)
    again = InTurn(source.tasks, source.sampler, source.reference, resend)
    again.publish(refused, 1)
    assert resent == [(1, "no such link")] and engine.policy_version == 1
