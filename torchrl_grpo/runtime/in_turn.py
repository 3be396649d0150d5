"""``InTurn``: steps the coroutines of ``Rollouts`` in the caller's thread, without an event loop.

A round of work runs only while a question waits: nothing is sampled before a batch is asked for, or while weights are
published. The parts are ``Here`` and never wait, so a round either goes through, or finds nothing to do and is dropped.
Signals, random states and accelerators are those of the one thread, and an error arrives as the part raised it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torchrl_grpo.runtime.places import Place

T = TypeVar("T")
Round = Callable[[], Coroutine[Any, Any, None]]
"""Work at a place: waits until there is something to do, and does it once."""
Make = Callable[[Any], Coroutine[Any, Any, None]]
"""Makes the part of a place."""
Work = Mapping[Place, Sequence[Round]]
"""The rounds of each place of a kind; the first gives it its weights."""


class InTurn:
    """Drives parts that take turns in this thread.

    Attributes:
        overlaps: whether work goes on between two questions.
    """

    overlaps = False

    def __init__(self) -> None:
        self._rounds: list[Round] = []
        self._missing: Callable[[], str] = str

    def start(self, make: Make, kinds: Sequence[Work], missing: Callable[[], str]) -> None:
        """Make the parts, one after another.

        Args:
            make: makes the part of a place.
            kinds: the places of each kind, in the order in which a task comes to them.
            missing: says what is waited for, in words.
        """
        self._missing = missing
        for place in chain(*kinds):
            self.ask(make(place))
        # Weights first; then tasks, from the end of their way, so that none is begun before others are done.
        last_first = [rounds for work in reversed(kinds) for rounds in work.values()]
        self._rounds = [rounds[0] for rounds in last_first] + [one for rounds in last_first for one in rounds[1:]]

    def ask(self, question: Coroutine[Any, Any, T], noted: str = "") -> T:
        """Return the answer to a question; while it waits, run one round after another.

        Args:
            question: waits with ``until``.
            noted: what takes long, in words; the loop's stages say it here.

        Raises:
            RuntimeError: the question waits for what no round can bring about.
            Exception: what a part raised.
        """
        try:
            while True:
                done, answer = _go_on(question)
                if done:
                    return answer
                for one in self._rounds:  # no ``any``, which would take a part's StopIteration for its own end
                    if _make(one):
                        break
                else:
                    raise RuntimeError(
                        f"what is asked for never comes: {self._missing()}. Publish weights before the first batch and "
                        "after each one."
                    )
        finally:
            question.close()

    async def until(self, get: Callable[[], T | None]) -> T:
        """Wait until ``get`` returns something true; it is called again after each round."""
        while not (value := get()):
            await _pause()
        return value

    def notify(self) -> None:
        """Report a change of state, which nobody waits for here."""

    def close(self, closing: Sequence[Place]) -> None:
        """Close the parts that have something to finish. May be called again."""
        for place in closing:
            self.ask(place.close())


def _make(one: Round) -> bool:
    """Run a round, if it has something to do; return whether it had."""
    coroutine = one()
    try:
        return _go_on(coroutine)[0]
    finally:
        coroutine.close()


def _go_on(coroutine: Coroutine[Any, Any, T]) -> tuple[bool, Any]:
    """Resume a coroutine; return whether it is done, and its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return True, done.value
    except RuntimeError as error:
        if error.args == ("coroutine raised StopIteration",) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    return False, None


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield
