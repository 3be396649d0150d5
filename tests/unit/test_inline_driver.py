"""Rollouts in one thread: the order of the parts' work, the staleness check, resumes, errors and
interrupts.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.support.configs import compose_config
from tests.support.runs import SMALL, steps
from tests.support.tasks import next_task, play
from torchrl_grpo.assembly.run import build
from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.runtime.actors import make_seeded
from torchrl_grpo.runtime.inline_driver import InlineDriver
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.runtime.rollouts import Rollouts
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.runtime.workers import LocalWorker
from torchrl_grpo.tasks import ArithmeticTask
from torchrl_grpo.weights import DirectSender, WeightHandle
from torchrl_grpo.weights.ipc import IpcStream


class Recorder(Engine):
    """Answer with one token, and record the requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        self.calls.append("generate")
        return [
            [Completion(torch.tensor([1]), torch.zeros(1), "stop") for _ in range(n)]
            for _ in prompts
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.calls.append("update")
        self.policy_version = version

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")


class Refuses(Recorder):
    """Accept weights in only one way."""

    def load(self, handle: WeightHandle, version: int) -> None:
        if isinstance(handle, IpcStream):
            raise TransferRefusedError("no such link")
        super().load(handle, version)


class Scoring:
    """Stand-in for KLScoring."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, batch: Any) -> Any:
        self.calls.append("reference")
        return batch


def make_tasks(
    env: LLMEnv, max_staleness: int = 0, task_groups: int = 2, most_played: int | None = None
) -> TaskQueue:
    settings: dict[str, Any] = {"task_groups": task_groups, "total_groups": 100, "group_size": 2}
    return TaskQueue(
        env.drawing, GroupBuffer(2, max_staleness), most_played=most_played, **settings
    )


def make_source(
    tokenizer: PreTrainedTokenizerFast,
    engine: Recorder,
    *,
    turns: bool = False,
    state: dict[str, Any] | None = None,
    resend: Callable[[int, str], WeightHandle] | None = None,
    **settings: Any,
) -> Rollouts:
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=4, repeats=2)
    params = SamplingParams(1, stop_token_ids=(1,))

    def make_collector(groups: int) -> RolloutCollector:
        return RolloutCollector(env.with_rows(2 * groups), GenerationPolicy(engine, params))

    sampler = Sampler(engine, make_collector, None, groups_at_a_time=2, turns=turns)
    reference = Reference(Scoring(engine.calls))  # type: ignore[arg-type]
    source = Rollouts(
        make_tasks(env, **settings),
        InlineDriver(),
        samplers=[LocalWorker("sampler 0", partial(make_seeded, lambda: sampler, 0))],
        references=[LocalWorker("reference model 0", lambda: reference)],
        resend=resend,
        turns=turns,
    )
    if state is not None:
        source.load_state_dict(state)
    source.start()
    return source


def rows_of(groups: Sequence[Any]) -> list[Any]:
    return [row for group in groups for row in group.unbind(0)]


def weights(version: int) -> WeightHandle:
    handle = DirectSender().send(Weightless(), version)
    assert handle is not None
    return handle


class Weightless:
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter([])

    def adapters(self) -> Iterator[Any]:
        return iter([])


@pytest.fixture
def in_turns(tokenizer: PreTrainedTokenizerFast) -> Rollouts:
    """Return a source whose engine shares its device with the other roles, and has its weights."""
    source = make_source(tokenizer, Recorder(), turns=True)
    source.publish(weights(1), 1)
    return source


def test_a_colocated_engine_sleeps_while_the_other_roles_work(in_turns: Rollouts) -> None:
    in_turns.next_batch()
    in_turns.publish(weights(2), 2)  # new weights wake it
    sampler = in_turns.samplers[0].part
    assert sampler.engine.calls == ["update", "generate", "sleep", "reference", "update"]
    assert not sampler._asleep


def test_a_colocated_engine_is_woken_for_a_second_task_of_a_batch(in_turns: Rollouts) -> None:
    progress = in_turns.tasks.next_unplayed()
    assert progress is not None
    sampler = in_turns.samplers[0].part
    for _ in range(2):
        sampler.play(progress.task)
    assert sampler.engine.calls == ["update", "generate", "sleep", "wake", "generate", "sleep"]


def test_an_engine_woken_after_its_task_sleeps_in_the_learners_turn(in_turns: Rollouts) -> None:
    sampler, reference = in_turns.samplers[0].part, in_turns.references[0].part
    score = reference.scoring
    reference.scoring = lambda batch: (sampler._wake(), score(batch))[1]
    in_turns.next_batch()
    calls = ["update", "generate", "sleep", "wake", "reference", "sleep"]
    assert sampler.engine.calls == calls


def test_an_engine_of_its_own_never_sleeps(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine)
    source.publish(weights(0), 0)
    source.next_batch()
    source.publish(weights(1), 1)
    assert engine.calls == ["update", "generate", "reference", "update"]


def test_a_batch_of_older_weights_is_refused_with_both_versions(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine)
    source.publish(weights(3), 3)
    assert {row["policy_version"].item() for row in rows_of(source.next_batch())} == {3}
    assert source.metrics()["staleness/max"] == 0
    source.publish(weights(4), 4)
    engine.policy_version = 3
    with pytest.raises(RuntimeError, match=r"group 2 .* version 4 .* 3"):
        source.next_batch()


def test_a_restored_source_goes_on_with_the_same_problems(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    source = make_source(tokenizer, Recorder())
    source.publish(weights(0), 0)
    source.next_batch()
    state = source.state_dict()
    source.publish(weights(1), 1)
    expected = rows_of(source.next_batch())
    other = make_source(tokenizer, Recorder(), state=state)
    other.publish(weights(1), 1)
    got = rows_of(other.next_batch())
    assert [row["query"] for row in got] == [row["query"] for row in expected]
    assert [row["group_id"] for row in got] == [row["group_id"] for row in expected]


def test_groups_that_an_asynchronous_run_drew_ahead_are_played_first(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=4, repeats=2)
    tasks = make_tasks(env, max_staleness=2, task_groups=1)
    drawn = [next_task(tasks) for _ in range(6)]
    for number in (1, 4, 3):
        play(tasks, drawn[number])
    assert tasks.take() is not None  # groups 1 and 4; 3 waits, and 0, 2 and 5 are in progress
    state = tasks.state_dict() | {"engines": [None, {"policy_version": 1}]}
    queries = {progress.task.groups[0]: progress.task.drawn[0].problem.query for progress in drawn}
    source = make_source(tokenizer, Recorder(), state=state)
    batches = []
    for version in (1, 2, 3):
        source.publish(weights(version), version)
        batches.append(rows_of(source.next_batch()))
    groups = [row["group_id"].item() for batch in batches for row in batch]
    assert groups == [0, 0, 2, 2, 3, 3, 5, 5, 6, 6, 7, 7]
    for batch in batches[:2]:
        assert [row["query"] for row in batch] == [queries[row["group_id"].item()] for row in batch]
    queries_after = [tasks._drawing.draw().problem.query for _ in range(2)]
    assert [row["query"] for row in batches[2]][::2] == queries_after


def test_seconds_are_of_the_step_and_counts_keep_their_names(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tokenizer, Recorder())
    counted = {"workers/restarts_reward": 1.0, "tools/calls": 2.0}
    monkeypatch.setattr(RolloutCollector, "take_counts", lambda self: dict(counted))
    source.publish(weights(0), 0)
    source.next_batch()
    metrics = source.metrics()
    assert metrics.keys() == {
        "staleness/max", "staleness/mean", "time/generate_s", "time/reward_s", "time/reference_s", *counted,
    }  # fmt: skip
    assert {name: metrics[name] for name in counted} == counted
    assert metrics["time/generate_s"] > 0 and metrics["time/reference_s"] > 0


def test_nothing_is_sampled_before_a_batch_is_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine)
    source.publish(weights(0), 0)
    source.state_dict()
    source.publish(weights(1), 1)
    assert engine.calls == ["update", "update"]
    assert source.tasks.buffer.pending == source.tasks.buffer.waiting == 0


def test_a_task_is_scored_before_the_next_one_is_played(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = Recorder()
    source = make_source(tokenizer, engine, task_groups=1)
    source.publish(weights(0), 0)
    source.next_batch()
    assert engine.calls == ["update", *["generate", "reference"] * 2]
    spans = [(span["actor"], span["kind"]) for span in source.spans()]
    assert (
        spans
        == [("sampler 0", "sample"), ("sampler 0", "score")] * 2
        + [("reference model 0", "score")] * 2
    )


def test_a_batch_that_can_never_come_is_an_error_and_no_hang(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    source = make_source(tokenizer, Recorder())
    with pytest.raises(RuntimeError, match=r"0 of the 2 groups.*Publish weights"):
        source.next_batch()
    source.publish(weights(0), 0)
    source.next_batch()
    with pytest.raises(RuntimeError, match=": publish version 1 first"):
        source.next_batch()


class Failing(Recorder):
    """Raise an error once, while sampling."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().generate(prompts, n, params)


@pytest.mark.parametrize(
    "kind", [ValueError, RuntimeError, StopIteration, StopAsyncIteration, KeyboardInterrupt]
)
def test_an_error_arrives_as_the_part_raised_it_and_no_task_is_lost(
    kind: type[BaseException], tokenizer: PreTrainedTokenizerFast
) -> None:
    error = kind("of the engine")
    source = make_source(tokenizer, Failing(error))
    source.publish(weights(0), 0)
    with pytest.raises(kind) as raised:
        source.next_batch()
    assert raised.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "generate"
    message = "".join(traceback.format_exception(error))
    assert "During handling" not in message and "direct cause" not in message
    assert [group for group, _ in source.state_dict()["ahead"]] == [0, 1]
    assert [row["group_id"].item() for row in rows_of(source.next_batch())] == [0, 0, 1, 1]


@pytest.mark.slow
def test_a_run_inside_an_event_loop_makes_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's cells run inside the event loop of its kernel."""

    async def main() -> tuple[int, bool]:
        around = asyncio.get_running_loop()
        monkeypatch.setattr(
            asyncio, "new_event_loop", lambda: pytest.fail("an event loop was made")
        )
        with closing(
            build(compose_config(*SMALL, "evaluation.num_prompts=0", steps(1)), tmp_path)
        ) as training_run:
            training_run.fit()
        return training_run.learner.version, asyncio.get_running_loop() is around

    assert asyncio.run(main()) == (1, True)


def test_weights_that_the_engine_refuses_are_sent_again(tokenizer: PreTrainedTokenizerFast) -> None:
    resent = list[tuple[int, str]]()

    def resend(version: int, reason: str) -> WeightHandle:
        resent.append((version, reason))
        return weights(version)

    refused = IpcStream(weights(1).weights, None)
    with pytest.raises(TransferRefusedError):
        make_source(tokenizer, Refuses()).publish(refused, 1)
    engine = Refuses()
    make_source(tokenizer, engine, resend=resend).publish(refused, 1)
    assert resent == [(1, "no such link")] and engine.policy_version == 1
