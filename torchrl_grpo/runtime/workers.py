"""Places: homes of the parts of a run. A part is called the same way in each of them.

``LocalWorker`` is this very thread. ``RayWorker`` is an actor, which may die and is then made
again.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torchrl import torchrl_logger

from torchrl_grpo.collectors.sampler import RolloutReport
from torchrl_grpo.generation.base import EngineDeadError
from torchrl_grpo.host import clock
from torchrl_grpo.runtime.actors import start_actor

_LONGEST_PAUSE_S = 30.0
_KINDS = {
    "setup": "start",
    "play": "sample",
    "score": "score",
    "update": "update",
    "evaluate": "evaluate",
}
"""Methods shown in the timeline, and their labels."""
_MOST_SPANS = 10_000


class ActorLostError(Exception):
    """The actor is gone, or did not answer in time, and will be replaced. ``args[0]`` is the
    reason.
    """


class Worker(ABC):
    """Home of a sampler or a reference model.

    Attributes:
        name: for messages.
        ready: whether the part is made.
        pid: of its process, once it is ready.
        restarts: how many times the part was lost.
        error: why it was lost the latest time.
        tasks: rollout tasks that the part is at work on.
        spans: what the part did, for the timeline; the driver's thread takes them.
        weights: what a reference model was given last; None is the base model.
        version: of the weights that a sampler has; None before the first.
        updating: version of the weights that a sampler is being given.
        engine_state: of a sampler, after its latest task.
        responses: how many a sampler gave.

    Args:
        name: for messages.
        factory: makes the part.
    """

    def __init__(self, name: str, factory: Callable[..., Any]) -> None:
        self.name = name
        self.ready = False
        self.pid = 0
        self.restarts = 0
        self.error: BaseException | None = None
        self.tasks: list[Any] = []
        self.spans: deque[dict[str, Any]] = deque(maxlen=_MOST_SPANS)
        self.weights: Any = None
        self.version: int | None = None
        self.updating: int | None = None
        self.engine_state: dict[str, Any] | None = None
        self.responses = 0
        self._factory = factory

    @abstractmethod
    async def start(self, *arguments: Any) -> None:
        """Make the part, with arguments for its factory.

        Raises:
            ActorLostError: the actor died or was late.
            Exception: what making the part raised.
        """

    @abstractmethod
    async def call(self, what: str, method: str, *arguments: Any, groups: int = 0) -> Any:
        """Call a method of the part and return its result.

        Args:
            what: what it is to do, in words.
            method: its name.
            *arguments: of the method.
            groups: number of groups that the method gives beside something else; actors give
                references to them.

        Raises:
            ActorLostError: the actor is gone or late.
            Exception: what the method raised.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let a sampler finish. May be called again."""

    def did(self) -> None:  # noqa: B027
        """Note that the part has done its work."""

    def _note(self, method: str, began_at: float, result: Any) -> None:
        """Add a call of the part, which ends now, to the timeline."""
        if isinstance(result, RolloutReport):
            self.spans.extend(result.spans(self.name, began_at))
        elif method in _KINDS:
            kind = "restart" if method == "setup" and self.restarts else _KINDS[method]
            seconds = clock.now() - began_at
            self.spans.append(
                {"actor": self.name, "kind": kind, "start": began_at, "seconds": seconds}
            )


class LocalWorker(Worker):
    """A part in this thread: its coroutines never wait, so they need no event loop.

    Attributes:
        part: once it is made.

    Example:
        >>> from torchrl_grpo.runtime.inline_driver import InlineDriver
        >>> worker = LocalWorker("list", lambda: [3, 1, 2])
        >>> run = InlineDriver().run
        >>> run(worker.start())
        >>> run(worker.call("look for 2", "index", 2))
        2
    """

    part: Any = None

    async def start(self, *arguments: Any) -> None:
        self.part = self._factory(*arguments)
        self.pid, self.ready = os.getpid(), True

    async def call(self, what: str, method: str, *arguments: Any, groups: int = 0) -> Any:
        began_at = clock.now()
        answer = getattr(self.part, method)(*arguments)
        if groups:  # all else is a stage of the loop's own
            self._note(method, began_at, answer[0])
        return answer

    async def close(self) -> None:
        if self.part is not None:
            self.part.close()


class RayWorker(Worker):
    """A part as an actor, and its replacements. It belongs to the event loop in which ``start`` was
    called.

    Attributes:
        role: kind of part, and its process's name: ``ray::SamplerActor.play`` while a "sampler 0"
            plays.
        actor: the handle of the current actor, None while there is none.
        alive_at: when the last of its actors was lost that had done something, or had nothing to
            do; at first when it was made itself (``time.monotonic``).
        heard_at: when an actor last gave an answer (``time.monotonic``).
        timeout_s: longest wait for an answer.

    Args:
        name: for messages.
        factory: makes the part of an actor.
        options: Ray's, for the actor.
        timeout_s: longest wait for an answer, and for the start of an actor.
    """

    def __init__(
        self, name: str, factory: Callable[..., Any], options: Mapping[str, Any], timeout_s: float
    ) -> None:
        super().__init__(name, factory)
        self.role = f"{name.split()[0].capitalize()}Actor"
        self.actor: Any = None
        self.alive_at = self.heard_at = time.monotonic()
        self.timeout_s = timeout_s
        self._options = options
        self._start_timeout_s = timeout_s
        self._failures = 0  # in a row
        self._useful = True
        self._asked = 0  # questions without an answer
        self._lost: asyncio.Future[BaseException]

    async def start(self, *arguments: Any) -> None:
        """Make an actor and wait until its part is made; after repeated failures, pause first."""
        await asyncio.sleep(
            0 if self._failures < 2 else min(2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
        )
        self.actor = start_actor(self.role, self._factory, self._options)
        self._lost = asyncio.get_running_loop().create_future()
        self.pid = await self._answer(
            "start", "setup", self.actor.setup.remote(*arguments), self._start_timeout_s
        )
        self.ready = True

    async def call(self, what: str, method: str, *arguments: Any, groups: int = 0) -> Any:
        if self._lost.done():
            raise ActorLostError(self._lost.result())
        remote = self.actor.call_for_groups if groups else self.actor.call
        options = {
            "name": f"{self.role}.{method}",
            "num_returns": 1 + groups,
        }  # the name is that of the process
        given = remote.options(**options).remote(method, *arguments)
        first, *references = given if groups else [given]
        answer = await self._answer(what, method, first, self.timeout_s)
        return (answer, references) if groups else answer

    async def _answer(self, what: str, method: str, reference: Any, timeout_s: float) -> Any:
        """Return what a reference gives; see ``call``."""
        lost = self._lost
        answer = asyncio.wrap_future(reference.future())
        began_at = clock.now()
        self._asked += 1
        try:
            await asyncio.wait(
                {answer, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            answered = answer.done()
            if not answered:  # nobody waits any more; its error, if one comes, is not news
                answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        error = answer.exception() if answered else None
        self._note(method, began_at, answer.result() if answered and error is None else None)
        if lost.done():
            raise ActorLostError(lost.result())
        if answered and error is None:
            self._asked -= 1
            self.heard_at = time.monotonic()
            return answer.result()
        if error is None:
            error = TimeoutError(f"it did not {what} within {timeout_s:g} s (ray.actor_timeout_s)")
        elif not is_loss(error) and not isinstance(cause_of(error), TimeoutError):
            raise cause_of(error)
        self.lose(error)
        raise ActorLostError(error)

    async def until_lost(self) -> None:
        """Raise ``ActorLostError`` when the actor is lost."""
        raise ActorLostError(await asyncio.shield(self._lost))

    def did(self) -> None:
        """Note that it has done its work; only that ends a series of failures."""
        self._failures, self._useful = 0, True

    def lose(self, error: BaseException) -> None:
        """End the actor and raise in everything that waits for it. May be called again."""
        if self.actor is None:
            return
        torchrl_logger.warning(
            f"{self.name} (process {self.pid}) is lost, a new one starts: {first_line(error)}"
        )
        if self._useful or (self.ready and not self._asked):
            self.alive_at = time.monotonic()
        self._useful, self._asked = False, 0
        self._failures += 1
        self.restarts += 1
        self.error = error
        self.kill()
        if not self._lost.done():
            self._lost.set_result(error)

    async def close(self) -> None:
        if self.ready:
            await asyncio.wait({asyncio.wrap_future(self.actor.call.remote("close").future())})

    def kill(self) -> None:
        """End the actor's process at once. May be called again."""
        if self.actor is not None:
            import ray

            ray.kill(self.actor)
        self.actor, self.ready = None, False


def is_loss(error: BaseException) -> bool:
    """Whether an error means that an actor or its engine is gone, not that its work raised."""
    from ray import exceptions

    gone = (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone) or isinstance(cause_of(error), EngineDeadError)


def cause_of(error: BaseException) -> BaseException:
    """Return the error raised in the actor, without Ray's wrapping."""
    return getattr(error, "cause", None) or error


def first_line(error: BaseException | None) -> str:
    """Describe the error raised in the actor in one line."""
    return "" if error is None else str(cause_of(error)).strip().split("\n", 1)[0]
