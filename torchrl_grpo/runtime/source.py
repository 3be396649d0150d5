"""``RaySource``: batches from a ``RolloutManager`` that works on while the learner trains.

The manager lives in an event loop in a thread of its own. Each method here is a question to that loop, and waits for
the answer with a bound: so the caller's thread never touches the manager's state.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrl_grpo.errors import WaitedTooLongError
from torchrl_grpo.host import stalls
from torchrl_grpo.runtime.rollout_manager import RolloutManager

_TICK_S = 1.0

T = TypeVar("T")


@dataclass
class RayBatch:
    """A batch as references.

    Attributes:
        groups: id of each group; with dynamic sampling, of the one that it may stand for.
        refs: reference to each group's data, a lazy stack of its sequences.
    """

    groups: tuple[int, ...]
    refs: list[Any]


class RaySource:
    """Gives batches of references to groups that actors sample and score.

    Lifecycle: ``start`` and ``wait_until_ready``, then ``publish`` and ``next_batch`` in turns, then ``close``, once or
    more. Every method but ``close`` raises what has ended the work of the actors:

    - ``WorkersLostError``: all actors of a kind have been gone for too long, or a task was the end of every actor that
      it met;
    - ``WaitedTooLongError``: no answer, and no sign of life from any actor;
    - what an actor's work raised.

    Args:
        manager: of the actors; this source starts and closes it.

    Keyword Args:
        evaluates: whether the samplers have a test split to evaluate.
    """

    def __init__(self, manager: RolloutManager, *, evaluates: bool = True) -> None:
        self.manager = manager
        self.max_staleness = manager.tasks.buffer.max_staleness
        self._evaluates = evaluates
        self._metrics: dict[str, float] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Starts the actors; returns at once."""
        self._ask(self.manager.start())

    def wait_until_ready(self) -> None:
        """Waits until the parts of all actors are made."""
        self._ask(self.manager.wait_until_ready())

    def next_batch(self) -> RayBatch:
        """The next batch, when it is there."""
        groups, self._metrics = self._ask(self.manager.next_groups())
        return RayBatch(tuple(group for group, _ in groups), [ref for _, ref in groups])

    def publish(self, handle: Any, version: int) -> None:
        """Gives out the weights of a trained batch. Returns at once: each sampler takes them when it can.

        Args:
            handle: reference to a ``WeightHandle``.
            version: of the weights.
        """
        self._ask(self.manager.publish(handle, version))

    def update_reference(self, handle: Any) -> None:
        """See ``RolloutSource``; ``handle`` is a reference to a ``WeightHandle``."""
        self._ask(self.manager.update_reference(handle))

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluates the published weights on one sampler, as ``Evaluator.evaluate`` does."""
        if not self._evaluates:
            return {}, []
        what = "evaluate the test split"
        # A sampler has ray.actor_timeout_s for it: that, and not the run's own limit, ends an evaluation.
        return self._ask(self.manager.ask_any(what, "evaluate", sampled), what)

    def probes(self) -> list[Any]:
        """See ``RolloutSource``; a sampler that is being made again is left out, unless there is no other."""
        return self._ask(self.manager.ask_each("sample a probe", "probe"))

    def metrics(self) -> dict[str, float]:
        """See ``RolloutSource``."""
        return dict(self._metrics)

    def spans(self) -> list[dict[str, Any]]:
        """See ``RolloutSource``."""
        return [worker.spans.popleft() for worker in self.manager.workers for _ in range(len(worker.spans))]

    def pids(self) -> dict[str, int]:
        """The process of each actor that is ready, by its name."""
        return {worker.name: worker.pid for worker in self.manager.workers if worker.ready}

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``. Groups that no batch has taken are played again after a restore."""
        return self._ask(self.manager.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; before ``start``."""
        self.manager.load_state_dict(state)

    def close(self) -> None:
        """Ends all actors. May be called again."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self.manager.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _ask(self, question: Coroutine[Any, Any, T], noted: str = "") -> T:
        """The answer of the manager; it has to come while some actor shows signs of life.

        An actor that is late and then replaced is silent for twice its time-out: only a longer silence ends the wait.
        """
        if self._closed:
            question.close()
            raise RuntimeError("the source is closed: make a new one.")
        start, longest_s = time.monotonic(), 2 * self.manager.actor_timeout_s
        answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            while True:
                try:
                    return answer.result(_TICK_S)
                except TimeoutError:
                    if answer.done():
                        raise
                if noted:
                    stalls.note(noted)
                if time.monotonic() - max(start, self.manager.heard_at) > longest_s:
                    raise WaitedTooLongError(
                        f"heard nothing from any actor for {longest_s:g} s, twice ray.actor_timeout_s: "
                        f"{self.manager.what_is_missing()}."
                    )
        finally:
            answer.cancel()
