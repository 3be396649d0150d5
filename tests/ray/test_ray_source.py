"""Rollouts and RayLearner on a real Ray cluster, with an engine whose tokens tell which weights
sampled them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.distributed import TCPStore
from transformers import PreTrainedTokenizerFast

from tests.support.models import make_tiny_model
from tests.support.processes import has_ended
from tests.support.waiting import until
from torchrl_grpo import keys
from torchrl_grpo.assembly.observers import Recorder, Saver
from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.extras.report.alarms import Alarms
from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.loop import Schedule, fit
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger, read_jsonl
from torchrl_grpo.reporting.signal import Signal
from torchrl_grpo.runtime import cluster
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.tasks import ArithmeticTask
from torchrl_grpo.transforms.kl_scoring import KLScoring

pytest.importorskip("ray")

from torchrl_grpo.errors import (
    LearnerLostError,
    MemoryShortError,
    TransferRefusedError,
    WaitedTooLongError,
    WorkersLostError,
)
from torchrl_grpo.runtime.actors import make_seeded, own_address
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.runtime.rollouts import Rollouts
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.runtime.thread_driver import ThreadDriver
from torchrl_grpo.runtime.workers import ActorLostError, RayWorker
from torchrl_grpo.weights import ObjectSender, WeightHandle
from torchrl_grpo.weights.rendezvous import open_store

REPEATS, TASK, BATCH = 2, 2, 4  # rows per group, groups per task, groups per batch


class CountingEngine(Engine):
    """Return the weight version as the token, after a pause; the engine's state is its number of
    calls.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.calls = 0
        self.weight = torch.zeros(1)

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams, on_finished: object = None
    ) -> list[list[Completion]]:
        self.calls += 1
        time.sleep(self.pause_s)
        token = torch.tensor([5 + int(self.weight)])
        return [
            [Completion(token, torch.tensor([-float(self.weight)]), "length") for _ in range(n)]
            for _ in prompts
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weight = dict(weights)["w"].clone()
        self.policy_version = version

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Doubling:
    """Stand-in for KLScoring: twice the behavior log-probs."""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        for row in batch.unbind(0):
            row.set(keys.REF_LOG_PROBS, 2 * row.get(keys.LOG_PROBS))
        return batch


def make_sampler(
    tokenizer: PreTrainedTokenizerFast,
    pause_s: float,
    broken: Path | None,
    kind: Callable[[float], CountingEngine],
    turns: bool,
) -> Sampler:
    if broken is not None and broken.exists():
        raise RuntimeError("this machine has no room for an engine")
    engine = kind(pause_s)
    params = SamplingParams(1)
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=TASK * REPEATS, repeats=REPEATS)
    test_env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=3, repeats=1, split="test")
    evaluator = Evaluator(engine, test_env, None, params=params)
    policy = GenerationPolicy(engine, params)

    def make_collector(groups: int) -> RolloutCollector:
        return RolloutCollector(env.with_rows(groups * REPEATS), policy)

    return Sampler(engine, make_collector, evaluator, groups_at_a_time=TASK, turns=turns)


def on_ray(
    name: str, factory: Callable[..., Any], timeout_s: float = 120.0, threads: int = 1
) -> RayWorker:
    return RayWorker(name, factory, {"num_cpus": 0, "max_concurrency": threads}, timeout_s)


def make_scored(scoring: Callable[[], Any]) -> Reference:
    return Reference(scoring())


@pytest.fixture
def source_of(
    ray_cluster: cluster.Cluster, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Callable[..., Rollouts]]:
    sources: list[Rollouts] = []

    def make(
        *,
        samplers: int = 1,
        references: int = 0,
        pause_s: float = 0.01,
        broken: Path | None = None,
        state: dict[str, Any] | None = None,
        engine: Callable[[float], CountingEngine] = CountingEngine,
        reference: Callable[[], Doubling] = Doubling,
        total_groups: int,
        max_staleness: int = 1,
        actor_timeout_s: float = 120.0,
        recovery_timeout_s: float = 900.0,
        **settings: Any,
    ) -> Rollouts:
        env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=TASK * REPEATS, repeats=REPEATS)
        buffer = GroupBuffer(BATCH, max_staleness)
        factory = partial(
            make_sampler, tokenizer, pause_s, broken, engine, settings.get("turns", False)
        )
        threads = 3 if "waits" in settings else 1
        source = Rollouts(
            TaskQueue(
                env.drawing, buffer, task_groups=TASK, total_groups=total_groups, group_size=REPEATS
            ),
            ThreadDriver(actor_timeout_s=actor_timeout_s, recovery_timeout_s=recovery_timeout_s),
            samplers=[
                on_ray(
                    f"sampler {index}",
                    partial(make_seeded, factory, index),
                    actor_timeout_s,
                    threads,
                )
                for index in range(samplers)
            ],
            references=[
                on_ray(f"reference model {index}", partial(make_scored, reference), actor_timeout_s)
                for index in range(references)
            ],
            **settings,
        )
        sources.append(source)
        if state is not None:
            source.load_state_dict(state)
        source.start()
        source.wait_until_ready()
        return source

    yield make
    for source in sources:
        source.close()


class Deadly(Doubling):
    """Stand-in for KLScoring that kills its process."""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        os._exit(1)


class WaitingEngine(CountingEngine):
    """Read weights only once a file exists."""

    def __init__(self, file: Path, pause_s: float) -> None:
        super().__init__(pause_s)
        self.file = file

    def load(self, handle: WeightHandle, version: int) -> None:
        until(self.file.exists)
        super().load(handle, version)


class DeadlyEngine(CountingEngine):
    """Kill the process when weights arrive."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        os._exit(1)


class UpdatedInFlight(CountingEngine):
    """Sample until version 4 arrives, for at most 60 s; an earlier state takes long to restore."""

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        deadline = time.monotonic() + 60
        while self.policy_version < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().generate(prompts, n, params)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(0.5)
        self.policy_version = state["policy_version"]


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class FullEngine(CountingEngine):
    """Sample with a real engine whose device is full."""

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        engine = TransformersEngine(make_tiny_model())
        engine.decoder.start = no_memory  # type: ignore[method-assign]
        return engine.generate(prompts, n, params)


def make_full_scoring() -> KLScoring:
    scoring = KLScoring(TokenScorer(make_tiny_model()))
    scoring.scorer.score_rows = no_memory  # type: ignore[method-assign]
    return scoring


def hang_once(marker: Path) -> None:
    """Hang if the file exists, and delete it, so that only one of two concurrent callers hangs."""
    with suppress(FileNotFoundError):
        marker.unlink()
        time.sleep(1000)


class HangingEngine(CountingEngine):
    """Hang if a file in a folder exists."""

    def __init__(self, folder: Path, pause_s: float) -> None:
        super().__init__(pause_s)
        self.folder = folder

    def generate(
        self, prompts: Sequence[Tensor], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        hang_once(self.folder / "generate")
        return super().generate(prompts, n, params)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        hang_once(self.folder / "update")
        super().update_weights(weights, version)


class HangingScoring(Doubling):
    """Hang if a file in a folder exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        hang_once(self.folder / "score")
        return super().__call__(batch)


class SlowToLoad(Doubling):
    """Take long to load, then write a file."""

    def __init__(self, file: Path) -> None:
        time.sleep(1.0)
        file.touch()


class SecondEngine(CountingEngine):
    """Load only once that file exists."""

    def __init__(self, file: Path, pause_s: float) -> None:
        super().__init__(pause_s)
        if not file.exists():
            raise ValueError("it was not waited for the reference model")


def weights_of(version: int) -> Any:
    import ray

    return ray.put(ObjectSender(None).pack([("w", torch.tensor([float(version)]))], version))


def sequences(refs: list[Any]) -> TensorDictBase:
    import ray

    return lazy_stack([row for group in ray.get(refs) for row in group.unbind(0)])


def group_ids(refs: list[Any]) -> list[int]:
    """Return the id of each group in a batch."""
    numbers: list[int] = sequences(refs).get(keys.GROUP_ID).reshape(-1).tolist()
    return numbers[::REPEATS]


def gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rsplit(")", 1)[1].split()[0] == "Z"


def test_the_staleness_bound_holds_under_a_slow_trainer(
    source_of: Callable[..., Rollouts],
) -> None:
    steps, bound = 6, 2
    source = source_of(references=1, total_groups=steps * BATCH, max_staleness=bound)
    source.publish(weights_of(0), 0)
    trained: list[int] = []
    for version in range(steps):
        batch = source.next_batch()
        assert {type(ref).__name__ for ref in batch} == {
            "ObjectRef"
        }  # the driver holds numbers and references only
        data = sequences(batch)
        versions = data.get(keys.POLICY_VERSION).reshape(-1)
        assert version - int(versions.min()) <= bound
        metrics = source.metrics()
        assert metrics["staleness/max"] == version - int(versions.min())
        assert metrics["staleness/mean"] == pytest.approx(version - versions.float().mean().item())
        assert metrics["buffer/waiting_max"] <= (bound + 1) * BATCH
        assert metrics["buffer/waiting"] + metrics["buffer/pending"] <= bound * BATCH
        # A sequence's version must be the one that its tokens show, and it must have been scored.
        assert torch.equal(
            torch.cat([row.get(keys.RESPONSE) for row in data.unbind(0)]), 5 + versions
        )
        for row in data.unbind(0):
            torch.testing.assert_close(row.get(keys.REF_LOG_PROBS), 2 * row.get(keys.LOG_PROBS))
        groups = group_ids(batch)
        assert data.get(keys.GROUP_ID).reshape(-1).tolist() == [
            g for g in groups for _ in range(REPEATS)
        ]
        trained += groups
        ahead = (
            min(bound, steps - version - 1) * BATCH
        )  # sampling runs ahead as far as the bound allows
        until(lambda ahead=ahead: source.tasks.buffer.waiting == ahead)
        source.publish(weights_of(version + 1), version + 1)
    assert sorted(trained) == list(range(steps * BATCH))
    assert metrics["staleness/max"] == bound
    assert source.metrics()["buffer/pending"] == 0  # nothing is sampled that no batch will train


def test_weights_stay_while_a_sampler_reads_them_and_are_then_freed(
    source_of: Callable[..., Rollouts], tmp_path: Path
) -> None:
    released, file = list[int](), tmp_path / "may read"
    source = source_of(
        total_groups=BATCH,
        max_staleness=2,
        engine=partial(WaitingEngine, file),
        release=released.append,
    )
    source.publish(weights_of(0), 0)
    until(lambda: source.samplers[0].updating == 0)
    for version in (1, 2):
        source.publish(weights_of(version), version)
    assert released == [1]  # never read
    file.touch()
    until(lambda: source.samplers[0].version == 2)
    assert released == [1, 0]


class Refusing(CountingEngine):
    """Refuse the weights of one version."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        received = dict(weights)
        if "refused" in received:
            raise TransferRefusedError("no such link")
        super().update_weights(received.items(), version)


def refused_weights(version: int) -> Any:
    named = [("w", torch.tensor([float(version)])), ("refused", torch.zeros(1))]
    import ray

    return ray.put(ObjectSender(None).pack(named, version))


@pytest.mark.nightly
def test_weights_that_are_refused_are_sent_again_and_none_is_lost(
    source_of: Callable[..., Rollouts],
) -> None:
    resent: list[tuple[int, str]] = []

    def resend(version: int, reason: str) -> Any:
        resent.append((version, reason))
        return weights_of(version)

    source = source_of(
        samplers=2,
        total_groups=3 * BATCH,
        engine=Refusing,
        max_staleness=0,
        resend=resend,
        together=True,
    )
    pids = source.pids()
    for version in range(3):
        source.publish((weights_of if version == 2 else refused_weights)(version), version)
        batch = source.next_batch()
        assert sequences(batch).get(keys.RESPONSE).unique().tolist() == [5 + version]
    # The second worker only pulls weights by itself if it got them before the first one refused.
    assert set(resent) == {(0, "no such link"), (1, "no such link")} and len(resent) == 2
    assert source.pids() == pids


class Unequal(CountingEngine):
    """Record which versions are read; one of the two workers reads slowly."""

    folder: Path

    def __init__(self, pause_s: float) -> None:
        super().__init__(pause_s)
        with suppress(FileExistsError):
            (self.folder / "slow").symlink_to(str(os.getpid()))

    def load(self, handle: WeightHandle, version: int) -> None:
        if (self.folder / "slow").readlink().name == str(os.getpid()):
            until((self.folder / "published").exists)
        super().load(handle, version)
        with (self.folder / f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{version} ")


def unequal(folder: Path, pause_s: float) -> Unequal:
    Unequal.folder = folder
    return Unequal(pause_s)


def test_samplers_that_take_weights_together_all_take_the_same_versions(
    source_of: Callable[..., Rollouts], tmp_path: Path
) -> None:
    """More versions are published meanwhile than the slow worker can read."""
    engine = partial(unequal, tmp_path)
    source = source_of(samplers=2, total_groups=BATCH, engine=engine, together=True, waits=False)
    for version in range(8):
        source.publish(weights_of(version), version)
    (tmp_path / "published").touch()
    until(lambda: all(sampler.version == 7 for sampler in source.samplers))
    one, other = (path.read_text() for path in tmp_path.glob("*.txt"))
    assert one == other and one.endswith("7 ") and len(one.split()) < 8


class Sleeper(CountingEngine):
    """Record when the engine is awake: a line for each start, sleep and update."""

    folder = Path()

    def __init__(self, pause_s: float) -> None:
        super().__init__(pause_s)
        self.note("start")

    def note(self, what: str) -> None:
        with (self.folder / "calls.txt").open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.note("update")
        super().update_weights(weights, version)

    def sleep(self) -> None:
        self.note("sleep")


def sleeper(folder: Path, pause_s: float) -> Sleeper:
    Sleeper.folder = folder
    return Sleeper(pause_s)


@pytest.mark.nightly
def test_engines_sleep_in_the_learners_turn_and_none_starts_then(
    source_of: Callable[..., Rollouts], tmp_path: Path
) -> None:
    """Engines are killed before the learner's turn and during it."""
    steps = 4
    calls = tmp_path / "calls.txt"
    source = source_of(
        samplers=3, total_groups=steps * BATCH, max_staleness=0, pause_s=0.1, turns=True,
        engine=partial(sleeper, tmp_path),
    )  # fmt: skip
    source.publish(weights_of(0), 0)
    for version in range(steps):
        if version == 1:
            os.kill(source.pids()["sampler 0"], signal.SIGKILL)
        assert source.evaluate(sampled=False)[0]["eval/response_length"] == 1
        assert len(source.next_batch()) == BATCH
        states = {}
        for line in calls.read_text().splitlines():
            what, pid = line.split()
            states[int(pid)] = what
        assert {what for pid, what in states.items() if not has_ended(pid)} == {"sleep"}
        if version == 2:
            os.kill(source.pids()["sampler 1"], signal.SIGKILL)
            source._driver.run(source._end_turn())  # a call notices that it is dead
        before = calls.read_text()
        time.sleep(0.5)  # the learner trains
        assert calls.read_text() == before
        lost = [sampler.actor is None for sampler in source.samplers]
        assert lost[1:] == [version == 2, False]
        assert version == 1 or not lost[0]  # worker 1 may have started before the turn began
        source.publish(weights_of(version + 1), version + 1)
    until(lambda: all(map(source._is_current, source.samplers)))
    assert calls.read_text().count("start") == 5
    assert [sampler.restarts for sampler in source.samplers] == [1, 1, 0]


def test_killed_actors_are_replaced_and_every_group_is_trained_once(
    source_of: Callable[..., Rollouts],
) -> None:
    steps = 12
    source = source_of(samplers=2, references=1, total_groups=steps * BATCH, pause_s=0.1)
    first_pids = source.pids()
    source.publish(weights_of(0), 0)
    trained: list[int] = []
    for version in range(steps):
        if version == 3:
            os.kill(first_pids["sampler 0"], signal.SIGKILL)
        if version == 6:
            os.kill(first_pids["reference model 0"], signal.SIGKILL)
        batch = source.next_batch()
        data = sequences(batch)
        versions = data.get(keys.POLICY_VERSION).reshape(-1)
        assert version - int(versions.min()) <= 1
        # A sequence's worker had the weights of the version that the sequence states.
        assert torch.equal(
            torch.cat([row.get(keys.RESPONSE) for row in data.unbind(0)]), 5 + versions
        )
        assert all(row.get(keys.REF_LOG_PROBS, None) is not None for row in data.unbind(0))
        trained += group_ids(batch)
        if version == steps - 2:  # all workers are back for the last step
            until(lambda: len(source.pids()) == 3)
        source.publish(weights_of(version + 1), version + 1)
    assert sorted(trained) == list(range(steps * BATCH))
    metrics = source.metrics()
    assert (metrics["workers/restarts_rollout"], metrics["workers/restarts_reference"]) == (1, 1)
    assert metrics["workers/groups_resampled"] in (
        0,
        TASK,
    )  # it may have been killed between two units
    kinds = Counter((span["actor"], span["kind"]) for span in source.spans())
    names = ("sampler 0", "sampler 1", "reference model 0")
    assert [[kinds[name, kind] for name in names] for kind in ("start", "restart")] == [
        [1, 1, 1],
        [1, 0, 1],
    ]
    plays = kinds["sampler 0", "sample"] + kinds["sampler 1", "sample"]
    assert plays - steps * BATCH // TASK in (0, 1) and source.spans() == []
    served = [metrics[f"workers/responses_rollout_{index}"] for index in range(2)]
    assert sum(served) == steps * BATCH * REPEATS and min(served) > 0
    pids = source.pids()
    assert pids["sampler 1"] == first_pids["sampler 1"]
    assert pids["sampler 0"] != first_pids["sampler 0"]
    until(lambda: [sampler.version for sampler in source.samplers] == [steps, steps])
    source.close()
    until(lambda: all(map(gone, pids.values())))


def test_weights_arrive_while_the_only_unit_of_a_replica_is_played(
    source_of: Callable[..., Rollouts], tokenizer: PreTrainedTokenizerFast
) -> None:
    """A replica plays one unit at a time, and the engine's random state must be restored before the
    weights arrive.
    """
    env = LLMEnv(ArithmeticTask(2), tokenizer, num_envs=TASK * REPEATS, repeats=REPEATS)
    state = {"drawing": env.state_dict(), "ahead": [], "engines": [{"policy_version": 0}]}
    source = source_of(
        total_groups=5 * BATCH,
        max_staleness=9,
        engine=UpdatedInFlight,
        waits=False,
        state=state,
    )
    source.publish(weights_of(3), 3)
    until(lambda: source.samplers[0].tasks)
    source.publish(weights_of(4), 4)
    data = sequences(source.next_batch())
    assert {int(row.get(keys.RESPONSE)) for row in data.unbind(0)} == {5 + 4}


@pytest.mark.nightly
def test_actors_that_hang_are_replaced_and_every_group_is_trained_once(
    source_of: Callable[..., Rollouts], tmp_path: Path
) -> None:
    """One replica hangs while sampling, the other while receiving weights, and the reference while
    scoring.
    """
    steps, (update, score, generate) = (
        20,
        [tmp_path / name for name in ("update", "score", "generate")],
    )
    source = source_of(
        samplers=2, references=1, total_groups=steps * BATCH, max_staleness=steps, pause_s=0.1, actor_timeout_s=600.0,
        engine=partial(HangingEngine, tmp_path), reference=partial(HangingScoring, tmp_path),
    )  # fmt: skip
    first_pids = source.pids()
    for worker in (*source.samplers, *source.references):
        worker.timeout_s = 5.0  # of everything from here on, except for a restart
    for marker in (update, score):
        marker.touch()
    source.publish(weights_of(0), 0)
    until(lambda: not score.exists())
    generate.touch()
    until(lambda: not update.exists() and not generate.exists())
    until(lambda: sum(worker.restarts for worker in (*source.samplers, *source.references)) == 3)
    for worker in (*source.samplers, *source.references):
        worker.timeout_s = 600.0  # nothing hangs from here on, however slow the machine is
    trained: list[int] = []
    for version in range(steps):
        trained += group_ids(source.next_batch())
        source.publish(weights_of(version + 1), version + 1)
    assert sorted(trained) == list(range(steps * BATCH))
    metrics = source.metrics()
    assert (metrics["workers/restarts_rollout"], metrics["workers/restarts_reference"]) == (2, 1)
    assert metrics["workers/groups_resampled"] == TASK
    until(lambda: all(map(gone, first_pids.values())))


def test_an_actor_that_hangs_while_it_starts_ends_the_run(
    source_of: Callable[..., Rollouts],
) -> None:
    with pytest.raises(WorkersLostError, match=r"model 0 .* within 2 s"):
        source_of(
            references=1,
            reference=partial(time.sleep, 1000),
            total_groups=BATCH,
            actor_timeout_s=2.0,
        )


@pytest.mark.nightly
def test_the_driver_does_not_grow_with_the_run(source_of: Callable[..., Rollouts]) -> None:
    """The driver keeps only numbers per group, and drops those of trained groups."""
    steps, settled = 150, 50
    source = source_of(total_groups=steps * BATCH, pause_s=0.0)
    memory = []
    for version in range(steps):
        source.publish(weights_of(version), version)
        source.next_batch()
        if version >= settled:
            memory.append(psutil.Process().memory_info().rss)
    assert source.state_dict()["ahead"] == []
    assert memory[-1] - memory[0] < 4 * 2**20


class CountingLearner:
    """A learner in this process whose weights are its version; the engine's actor dies during its
    second step.
    """

    def __init__(self, source: Rollouts, before_step: dict[int, Callable[[], None]]) -> None:
        self.source, self.before_step = source, before_step
        self.version, self.resumable = 0, True

    def train_groups(self, *groups: Any) -> dict[str, float]:
        self.before_step.get(self.version, lambda: None)()
        self.version += 1
        return {"train/loss": 0.0, "rollout/tokens": 1.0}

    def samples(self, most: int) -> list[dict[str, Any]]:
        return []

    def weights(self) -> Any:
        return weights_of(self.version)

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path:
        path = checkpointer.path(self.version)
        torch.save(checkpointer.state(self.version, {}, source), path)
        return path

    def finish_save(self) -> None:
        """Nothing is written in the background."""


def test_a_run_whose_engines_stay_dead_is_saved_and_says_why(
    source_of: Callable[..., Rollouts], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    source = source_of(total_groups=100 * BATCH, broken=broken, recovery_timeout_s=2.0)

    def break_it() -> None:
        broken.touch()
        os.kill(source.pids()["sampler 0"], signal.SIGKILL)

    learner: Any = CountingLearner(source, {2: break_it})
    with (
        MetricsLogger(tmp_path, tensorboard=False, config={}) as logger,
        Console(file=(tmp_path / "out").open("w")) as console,
        pytest.raises(WorkersLostError, match=r"sampler 0 .*dead for \d+ s, .* 2 s"),
    ):
        recorder = Recorder(
            learner,
            logger,
            console,
            Alarms(),
            Signal(),
            schedule=Schedule(100),
            sequences_per_batch=8,
        )
        saver = Saver(learner, source, Checkpointer(tmp_path, {}), lambda: None, Schedule(100))
        fit(learner, source, Schedule(100), [recorder, saver])
    [checkpoint] = tmp_path.glob("checkpoint_*")
    step = len([row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row])
    state = torch.load(checkpoint, weights_only=True)
    assert state["step"] == step >= 3
    # The state contains what was sampled and not trained, so that a resumed run draws it again and
    # loses nothing.
    waiting = [group for group, _ in state["source"]["ahead"]]
    assert len(waiting) == state["source"]["drawing"]["next_group"] - step * BATCH


def test_what_an_actor_refuses_is_raised_as_it_was(
    ray_cluster: cluster.Cluster, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    factory: Any = partial(make_sampler, None, 0.0, broken, CountingEngine, False)  # type: ignore[arg-type]
    tasks: Any = SimpleNamespace(buffer=GroupBuffer(1, 0))  # the factory itself fails
    source = Rollouts(
        tasks, ThreadDriver(), samplers=[on_ray("sampler 0", partial(make_seeded, factory, 0))]
    )
    source.start()
    try:
        with pytest.raises(RuntimeError, match=r"^this machine has no room for an engine$"):
            source.wait_until_ready()
    finally:
        source.close()


class SlowStep:
    """Stand-in for PolicyTrainer in a rank."""

    def __init__(self) -> None:
        self.version = self.optim_steps = 0
        self.model = torch.nn.Linear(1, 1)
        self.parameters, self.update_size = list(self.model.parameters()), 0.0
        self.optimizer = torch.optim.AdamW(self.parameters)
        self.loss, self.device = SimpleNamespace(actor_network=None), torch.device("cpu")

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.tensor([1.5], dtype=torch.bfloat16)
        yield "v", torch.arange(6.0).reshape(2, 3)

    def progress(self) -> dict[str, Any]:
        return {}

    def averages_by_name(self) -> dict[str, Tensor]:
        return {}

    def train_batch(self, batch: Any) -> dict[str, float]:
        time.sleep(60)
        return {}


def make_learner(mesh: object) -> Learner:
    assert mesh is None
    return Learner(SlowStep(), [], ObjectSender(None))  # type: ignore[arg-type]


def test_ranks_that_do_not_answer_end_the_run(ray_cluster: cluster.Cluster) -> None:
    import ray

    learner = RayLearner(make_learner, options=[{"num_cpus": 0}], actor_timeout_s=600.0)
    learner.start()
    learner.actor_timeout_s = 1.0
    waited = r"^waited 1 s \(ray\.actor_timeout_s\) for the training ranks to train a batch \(version 0\)"
    with pytest.raises(WaitedTooLongError, match=waited):
        learner.train_groups(ray.put(lazy_stack([TensorDict({})])))
    assert not learner.resumable
    learner.close()


def test_the_port_that_the_ranks_meet_at_is_held_from_the_start(
    ray_cluster: cluster.Cluster,
) -> None:
    store = open_store(own_address(), timeout_s=10.0)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("", store.port))
    TCPStore(store.host, store.port, timeout=timedelta(seconds=10)).set("there", "yes")


def test_a_dead_training_rank_ends_the_run_with_the_last_checkpoint_named(
    ray_cluster: cluster.Cluster, tmp_path: Path
) -> None:
    import ray

    learner = RayLearner(make_learner, options=[{"num_cpus": 0}])
    learner.start()
    packed = dict(ray.get(learner.weights()).weights())
    assert packed["w"].dtype == torch.bfloat16 and packed["w"].item() == 1.5
    assert packed["v"].tolist() == [[0, 1, 2], [3, 4, 5]]
    learner.save(Checkpointer(tmp_path, {}), {})
    threading.Timer(0.5, os.kill, (learner.pids[0], signal.SIGKILL)).start()
    with pytest.raises(
        LearnerLostError, match=r"training rank died .* train\.resume=.*checkpoint_000000"
    ):
        learner.train_groups(ray.put(lazy_stack([TensorDict({})])))
    assert not learner.resumable  # inside a step there is no state that could be saved
    learner.close()


def test_a_unit_that_every_reference_actor_dies_of_ends_the_run(
    source_of: Callable[..., Rollouts],
) -> None:
    source = source_of(references=1, total_groups=BATCH, reference=Deadly)
    source.publish(weights_of(0), 0)
    with pytest.raises(WorkersLostError, match=r"groups \d to \d .* reference model 0 .* 3 times"):
        source.next_batch()


@pytest.mark.parametrize(
    ("full", "message"),
    [
        (
            {"engine": FullEngine},
            r"Sampling ran out of memory \(CUDA out of memory\)\. .* half of env\.num_envs",
        ),
        pytest.param(
            {"references": 1, "reference": make_full_scoring},
            r"Scoring with the .* train\.micro_batch_tokens=\d+",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_actor_without_memory_ends_the_run_with_what_would_save_some(
    source_of: Callable[..., Rollouts], full: dict[str, Any], message: str
) -> None:
    source = source_of(total_groups=BATCH, **full)
    source.publish(weights_of(0), 0)
    with pytest.raises(MemoryShortError, match=message) as raised:
        source.next_batch()
    assert "\n" not in str(raised.value)
    assert not any(worker.restarts for worker in (*source.samplers, *source.references))


def test_engines_on_a_shared_accelerator_start_after_the_reference(
    source_of: Callable[..., Rollouts], tmp_path: Path
) -> None:
    file = tmp_path / "made"
    settings: dict[str, Any] = {
        "references": 1,
        "reference": partial(SlowToLoad, file),
        "total_groups": BATCH,
    }
    source = source_of(engine=partial(SecondEngine, file), references_first=True, **settings)
    assert source.pids().keys() == {"sampler 0", "reference model 0"}


def test_a_question_is_answered_where_the_thread_starts_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def question() -> int:
        return 3

    real = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda self: (time.sleep(0.3), real(self)))
    driver = ThreadDriver()
    assert driver.run(question()) == 3
    driver.close([])
    driver.close([])
    with pytest.raises(RuntimeError, match="the rollouts are closed"):
        driver.run(question())


class Answer:
    """Stand-in for a Ray reference that never resolves."""

    def options(self, **_: Any) -> Answer:
        return self

    def remote(self, *_: Any) -> Answer:
        return self

    def future(self) -> Future[None]:
        return Future()


def test_time_with_nothing_to_do_does_not_count_as_dead() -> None:
    """Otherwise a second loss after a long pause would count the pause as downtime."""

    async def lose_it(worker: RayWorker, was_called: bool) -> None:
        worker.actor, worker.ready = SimpleNamespace(call=Answer()), True
        worker._lost = asyncio.get_running_loop().create_future()
        if was_called:
            question = asyncio.create_task(worker.call("load weights", "update"))
            await asyncio.sleep(0.01)
        worker.lose(RuntimeError("gone"))
        if was_called:
            with pytest.raises(ActorLostError, match="gone"):
                await question

    worker = on_ray("sampler 0", lambda: None, 60.0)
    worker.kill = lambda: setattr(worker, "actor", None)  # type: ignore[method-assign]
    asyncio.run(lose_it(worker, was_called=False))
    first = worker.alive_at
    asyncio.run(lose_it(worker, was_called=True))
    assert worker.alive_at == first
    asyncio.run(lose_it(worker, was_called=False))
    assert worker.alive_at > first


@pytest.mark.nightly
def test_actors_that_start_and_die_again_and_again_count_as_dead(
    source_of: Callable[..., Rollouts],
) -> None:
    source = source_of(total_groups=BATCH, engine=DeadlyEngine, recovery_timeout_s=4.0)
    source.publish(weights_of(0), 0)
    with pytest.raises(WorkersLostError, match=r"sampler 0 .*dead for \d+ s, .* 4 s"):
        source.next_batch()
