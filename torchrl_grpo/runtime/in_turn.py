"""``InTurn``: sampling, scoring and training take turns in one thread of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.errors import TransferRefusedError
from torchrl_grpo.host import clock
from torchrl_grpo.runtime.reference import Reference
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.transforms.ragged import join_groups
from torchrl_grpo.weights import WeightHandle
from torchrl_grpo.weights.mismatch import Probe

_SECONDS = {f"workers/{name}": f"time/{name}" for name in ("generate_s", "reward_s", "reference_s")}
"""Seconds of workers that are seconds of the step here, where nothing overlaps."""


class InTurn:
    """Plays and scores a batch between two training steps: staleness is 0.

    Args:
        tasks: what is to be played, with a bound of 0.
        sampler: plays it.
        reference: scores it; None where that is not needed, or the learner does it.
        resend: gives another handle of a version, because the engine refused the first one for this reason.
    """

    def __init__(
        self,
        tasks: TaskQueue,
        sampler: Sampler,
        reference: Reference | None = None,
        resend: Callable[[int, str], WeightHandle] | None = None,
    ) -> None:
        self.tasks = tasks
        self.sampler = sampler
        self.reference = reference
        self._resend = resend
        self._metrics: dict[str, float] = {}
        self._spans: list[dict[str, Any]] = []

    @property
    def max_staleness(self) -> int:
        """See ``RolloutSource``."""
        return self.tasks.buffer.max_staleness

    def next_batch(self) -> TensorDictBase:
        """Plays one batch [N], with reference log-probs where a reference was given.

        Raises:
            MemoryShortError: a device has no more memory.
            RuntimeError: a sequence was sampled by weights that are older than the latest published ones.
        """
        while (taken := self.tasks.take()) is None:
            progress = self.tasks.next_unplayed()
            assert progress is not None  # with a bound of 0, a batch that is not there has tasks to play
            began_at = clock.now()
            report, groups = self.sampler.play(progress.task)
            self._spans.extend(report.spans("sampler 0", began_at))
            self.tasks.played(progress, report, groups)
            if progress.kept and self.reference is not None:
                began_at = clock.now()
                progress.reference_s, progress.refs = self.reference.score(*progress.refs)
                span = {"actor": "reference model 0", "kind": "score", "start": began_at}
                self._spans.append(span | {"seconds": progress.reference_s})
            self.tasks.finish(progress)
        groups, metrics = taken
        # What waits and who was replaced is nothing that could differ here.
        of_batch = {name: value for name, value in metrics.items() if not name.startswith("buffer/")}
        of_batch.pop("workers/groups_resampled")
        self._metrics = {_SECONDS.get(name, name): value for name, value in of_batch.items()}
        return join_groups([group for _, group in groups])

    def publish(self, handle: WeightHandle, version: int) -> None:
        """Updates the engine; the next batch is sampled by these weights."""
        try:
            self.sampler.update(handle, version)
        except TransferRefusedError as refusal:
            if self._resend is None:
                raise
            self.sampler.update(self._resend(version, str(refusal)), version)
        self.tasks.buffer.publish(version)

    def update_reference(self, handle: WeightHandle) -> None:
        """See ``RolloutSource``."""
        assert self.reference is not None
        self.reference.update(handle)

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """See ``RolloutSource``."""
        return self.sampler.evaluate(sampled)

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
        """See ``RolloutSource``."""
        return self.tasks.state_dict() | {"engines": [self.sampler.engine.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``RolloutSource``."""
        self.tasks.load_state_dict(state)
        if state["engines"] and state["engines"][0]:
            self.sampler.engine.load_state_dict(state["engines"][0])

    def close(self) -> None:
        """Closes the sampler."""
        self.sampler.close()
