"""Where ``fit`` gets its batches: the ``RolloutSource`` interface, and the source that collects in this process."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.weights import WeightHandle
from torchrl_grpo.weights.mismatch import Probe


class RolloutSource(Protocol):
    """Gives batches of finished, scored sequences and takes new weights.

    ``learner_version - policy_version`` of a sequence that ``next_batch`` returns never exceeds ``max_staleness``.
    """

    max_staleness: int

    def next_batch(self) -> Any:
        """The next batch, as the learner that goes with this source takes it."""

    def publish(self, handle: Any, version: int) -> None:
        """Gives the samplers the weights of a trained batch, as that learner gives them."""

    def update_reference(self, handle: Any) -> None:
        """Makes other weights the reference model's, for all that is scored from here on."""

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """What ``Evaluator.evaluate`` gives for the published weights; nothing without a test split."""

    def probes(self) -> list[Any]:
        """What ``Sampler.probe`` gives for each sampler, with the published weights."""

    def metrics(self) -> dict[str, float]:
        """What is known here of the latest batch, named ``section/name``: seconds, staleness, counts."""

    def spans(self) -> list[dict[str, Any]]:
        """What the actors did since this was last called, as spans of ``timeline.jsonl`` (``RolloutReport.spans``)."""

    def state_dict(self) -> dict[str, Any]:
        """What the next batches depend on, apart from the weights.

        ``env`` (where the problems are), ``tasks`` (what was drawn from it and no batch has taken) and ``engines`` (the
        state of each, None where it cannot be told).
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave."""

    def close(self) -> None:
        """Ends the samplers. May be called again."""


class LocalSource:
    """Samples in this process, between two training steps: staleness is 0.

    Args:
        sampler: makes the sequences; it has one collector.
        reference: scores them; None where that is not needed, or the learner does it.

    Keyword Args:
        colocated: whether the engine shares its device with the other roles; it then sleeps while they work.
    """

    max_staleness = 0

    def __init__(self, sampler: Sampler, reference: KLScoring | None = None, *, colocated: bool = False) -> None:
        self.sampler = sampler
        self.reference = reference
        self.colocated = colocated
        self._version = sampler.engine.policy_version
        self._rewards: Counter[str] = Counter()
        self._metrics: dict[str, float] = {}
        self._spans: list[dict[str, Any]] = []

    def next_batch(self) -> TensorDictBase:
        """Collects one batch [N], with reference log-probs where a reference was given.

        Raises:
            MemoryShortError: a device has no more memory.
            RuntimeError: a sequence was sampled by weights that are older than the latest published ones.
        """
        began_at = time.time()
        report, batch = self.sampler.rollout()
        if self.colocated:
            self.sampler.engine.sleep()
        staleness = self._version - min(report.versions)
        if staleness > self.max_staleness:
            raise RuntimeError(
                f"a sequence of version {min(report.versions)} was about to be trained at version {self._version}, "
                f"which is more than max_staleness={self.max_staleness} behind."
            )
        self._spans = report.spans("sampler 0", began_at)
        self._rewards.update(report.rewards)
        self._metrics = {"time/generate_s": report.generate_s, "time/reward_s": report.env_s}
        self._metrics |= {"staleness/max": float(staleness), **self._rewards}
        self._metrics |= self.sampler.collectors[0].base_env.prompts.metrics()
        self._metrics |= {f"rollout/groups_{name}": float(count) for name, count in report.dynamic.items()}
        if self.reference is not None:
            start, began_at = time.perf_counter(), time.time()
            batch = self.reference(batch)
            self._metrics["time/reference_s"] = seconds = time.perf_counter() - start
            scored = {"actor": "reference model 0", "kind": "score", "start": began_at, "seconds": seconds}
            self._spans.append(scored)
        return batch

    def publish(self, handle: WeightHandle, version: int) -> None:
        """Updates the engine; the next batch is sampled by these weights."""
        if self.colocated:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what the trainer's allocator holds is not there for the engine's process
            self.sampler.engine.wake()
        self.sampler.update(handle, version)
        self._version = version

    def update_reference(self, handle: WeightHandle) -> None:
        """See ``RolloutSource``."""
        assert self.reference is not None
        self.reference.update_weights(handle.weights())

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """See ``RolloutSource``."""
        return self.sampler.evaluate(sampled=sampled)

    def probes(self) -> list[Probe]:
        """See ``RolloutSource``."""
        return [self.sampler.probe()]

    def metrics(self) -> dict[str, float]:
        """See ``RolloutSource``."""
        return dict(self._metrics)

    def spans(self) -> list[dict[str, Any]]:
        """See ``RolloutSource``."""
        spans, self._spans = self._spans, []
        return spans

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``. Nothing is drawn ahead here."""
        env = self.sampler.collectors[0].base_env
        return {"env": env.state_dict(), "tasks": [], "engines": [self.sampler.engine.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``RolloutSource``.

        Raises:
            ValueError: there are tasks to be played again, which this source cannot do.
        """
        if state["tasks"]:
            raise ValueError(f"{len(state['tasks'])} tasks were drawn ahead of their training: use a RaySource.")
        self.sampler.collectors[0].base_env.load_state_dict(state["env"])
        if state["engines"][0]:
            self.sampler.engine.load_state_dict(state["engines"][0])
        self._version = self.sampler.engine.policy_version

    def close(self) -> None:
        """Closes the sampler."""
        self.sampler.close()
