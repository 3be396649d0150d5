"""Workers: a sampler, reference model or teacher, called the same way wherever it runs.

``LocalWorker`` runs in this thread. ``RayWorker`` runs an actor, which is replaced if it dies. The
object that does a worker's work is called its part.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import record_function
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
    """The actor has died or did not answer in time, and will be replaced. ``args[0]`` is the
    reason.
    """


class Worker(ABC):
    """Worker with a sampler, a reference model or a teacher.

    Attributes:
        name: name in messages.
        ready: whether the part has been made.
        pid: id of its process, once it is ready.
        restarts: how many times the part was lost.
        error: error with which it was last lost.
        tasks: rollout tasks that the part is working on.
        spans: finished work of the part for the timeline, collected by the driver's thread.
        weights: latest weights of a reference model; None for the base model.
        version: version of a sampler's weights; None before the first sync.
        updating: version that a sampler is receiving.
        engine_state: ``Sampler.state_dict`` after the sampler's latest task.
        responses: number of responses that a sampler has returned.

    Args:
        name: name in messages.
        factory: function that makes the part.
    """

    ready = False
    pid = 0
    restarts = 0
    error: BaseException | None = None

    # of a reference model or a teacher
    weights: Any = None

    # of a sampler
    version: int | None = None
    updating: int | None = None
    engine_state: dict[str, Any] | None = None
    responses = 0

    def __init__(self, name: str, factory: Callable[..., Any]) -> None:
        self.name = name
        self.tasks: list[Any] = []
        self.spans: deque[dict[str, Any]] = deque(maxlen=_MOST_SPANS)
        self._factory = factory

    @abstractmethod
    async def start(self, *arguments: Any) -> None:
        """Make the part, with arguments for its factory.

        Raises:
            ActorLostError: the actor died or was late.
            Exception: any error while making the part.
        """

    @abstractmethod
    async def call(self, what: str, method: str, *arguments: Any, groups: int = 0) -> Any:
        """Call a method of the part and return its result.

        Args:
            what: description of the work, for messages.
            method: name of the method.
            *arguments: its arguments.
            groups: number of groups in the result. If there are any, the result is a pair whose
                second item is the groups; actors return references to them.

        Raises:
            ActorLostError: the actor is dead or late.
            Exception: any error of the method.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let a sampler finish. May be called again."""

    def did(self) -> None:  # noqa: B027
        """Record that the part has done its work."""

    def _note(self, method: str, began_at: float, result: Any) -> None:
        """Add a call of the part that has just returned to the timeline."""
        if isinstance(result, RolloutReport):
            self.spans.extend(result.spans(self.name, began_at))
        elif method in _KINDS:
            kind = "restart" if method == "setup" and self.restarts else _KINDS[method]
            seconds = clock.now() - began_at
            self.spans.append(
                {"actor": self.name, "kind": kind, "start": began_at, "seconds": seconds}
            )


class LocalWorker(Worker):
    """Worker in this thread. Its coroutines never wait, so they need no event loop.

    Attributes:
        part: the part, once it has been made.

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
        with record_function(f"{self.name}: {method}"):
            answer = getattr(self.part, method)(*arguments)
        if groups:  # other calls are stages of the loop itself
            self._note(method, began_at, answer[0])
        return answer

    async def close(self) -> None:
        if self.part is not None:
            self.part.close()


class RayWorker(Worker):
    """Worker with an actor and its replacements. It belongs to the event loop that called
    ``start``.

    Attributes:
        role: kind of worker, in the name of its process: ``ray::SamplerActor.play`` while
            "sampler 0" plays.
        actor: handle of the current actor; None without one.
        alive_at: when it last lost an actor that had done some work or had none to do; initially,
            when the worker was made (``time.monotonic``).
        heard_at: when an actor last returned a result (``time.monotonic``).
        timeout_s: time limit of a call.

    Args:
        name: name in messages.
        factory: function that makes the part of an actor.
        options: Ray's options for the actor.
        timeout_s: time limit of a call, and of the start of an actor.
    """

    actor: Any = None
    _failures = 0  # in a row
    _useful = True
    _open_calls = 0
    _lost: asyncio.Future[BaseException]

    def __init__(
        self, name: str, factory: Callable[..., Any], options: Mapping[str, Any], timeout_s: float
    ) -> None:
        super().__init__(name, factory)
        self.role = f"{name.split()[0].capitalize()}Actor"
        self.alive_at = self.heard_at = time.monotonic()
        self.timeout_s = timeout_s
        self._options = options
        self._start_timeout_s = timeout_s

    async def start(self, *arguments: Any) -> None:
        """Start an actor and wait until its part is made. After repeated failures, pause first."""
        pause_s = 0 if self._failures < 2 else min(2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)
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
        # shown in the name of the process
        remote = remote.options(name=f"{self.role}.{method}", num_returns=1 + groups)
        returned = remote.remote(method, *arguments)
        first, *references = returned if groups else [returned]
        result = await self._answer(what, method, first, self.timeout_s)
        return (result, references) if groups else result

    async def _answer(self, what: str, method: str, reference: Any, timeout_s: float) -> Any:
        """Return the object that a reference points to; see ``call``."""
        lost = self._lost
        answer = asyncio.wrap_future(reference.future())
        began_at = clock.now()
        self._open_calls += 1
        try:
            await asyncio.wait(
                {answer, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            answered = answer.done()
            if not answered:  # nothing awaits it anymore, so retrieve a later error here
                answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        error = answer.exception() if answered else None
        self._note(method, began_at, answer.result() if answered and error is None else None)
        if lost.done():
            raise ActorLostError(lost.result())
        if answered and error is None:
            self._open_calls -= 1
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
        """Record that it has done its work, which is the only end of a series of failures."""
        self._failures = 0
        self._useful = True

    def lose(self, error: BaseException) -> None:
        """Give up the actor, which raises in coroutines that wait for it. May be called again."""
        if self.actor is None:
            return
        torchrl_logger.warning(
            f"{self.name} (process {self.pid}) is lost, starting a new one: {first_line(error)}"
        )
        if self._useful or (self.ready and not self._open_calls):
            self.alive_at = time.monotonic()
        self._useful = False
        self._open_calls = 0
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
        """Kill the actor's process. May be called again."""
        if self.actor is not None:
            import ray

            ray.kill(self.actor)
        self.actor, self.ready = None, False


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that an actor or its engine has died, not that its method
    raised.
    """
    from ray import exceptions

    loss_types = (
        exceptions.RayActorError,
        exceptions.ActorUnschedulableError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, loss_types) or isinstance(cause_of(error), EngineDeadError)


def cause_of(error: BaseException) -> BaseException:
    """Return the error raised in the actor, without Ray's wrapping."""
    return getattr(error, "cause", None) or error


def first_line(error: BaseException | None) -> str:
    """Describe the error raised in the actor in one line."""
    return "" if error is None else str(cause_of(error)).strip().split("\n", 1)[0]
