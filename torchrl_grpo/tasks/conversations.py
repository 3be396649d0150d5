"""Tasks that continue after a response, with tools or retries. They wrap any task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torchrl_grpo.tasks.base import Dialog, Message, Task, Turn, WrappedTask
from torchrl_grpo.tools import Toolbox, tool_message


class WithTools(WrappedTask):
    """A task whose policy may call functions: a turn with calls is answered by their results.

    Calls are found in the policy's own text, and results come back as the chat template's tool
    messages. What cannot be read, wrong arguments, exceptions and time-outs are told to the policy
    as text.

    Args:
        task: judges the dialog, and what it says to turns without calls.
        toolbox: the functions.

    >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
    >>> from torchrl_grpo.tasks.base import Problem
    >>> def add(a: int, b: int) -> int:
    ...     '''Adds two numbers. Args: a: the first. b: the second.'''
    ...     return a + b
    >>> text = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    >>> dialog = Dialog(Problem("2+3=?", "5"), [text], raw=text, last=False)
    >>> WithTools(ArithmeticTask(), Toolbox([add])).advance([dialog])[0].messages
    [{'role': 'tool', 'name': 'add', 'content': '5', 'tool_call_id': 'call00000'}]
    """

    def __init__(self, task: Task, toolbox: Toolbox) -> None:
        super().__init__(task)
        self.toolbox = toolbox
        self.tools = toolbox.schemas

    @property
    def multi_turn(self) -> bool:
        return True

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        calling = [
            dialog.finish_reason == "stop" and self._is_for_tools(dialog) for dialog in dialogs
        ]
        run = [calls and not dialog.last for calls, dialog in zip(calling, dialogs, strict=True)]
        other = iter(
            self.task.advance(
                [d for d, runs in zip(dialogs, run, strict=True) if not runs], timeout_s
            )
        )
        turns = [
            self._run(dialog) if runs else next(other)
            for dialog, runs in zip(dialogs, run, strict=True)
        ]
        # The calls of a last turn are not made, nobody would read the results; it is scored as one
        # that goes on.
        turns = [
            replace(turn, messages=[]) if calls and not runs and isinstance(turn, Turn) else turn
            for turn, calls, runs in zip(turns, calling, run, strict=True)
        ]
        return [
            self._with_tools(turn) if isinstance(turn, Turn) and turn.tools is not None else turn
            for turn in turns
        ]

    def _is_for_tools(self, dialog: Dialog) -> bool:
        """Whether a dialog's latest turn calls; a task that opens may have tools of its own, which
        it runs itself.
        """
        names = {name for _, name in self._calls(dialog)}
        return bool(names & self.toolbox.functions.keys() if self.task.opens else names)

    def _with_tools(self, opening: Turn) -> Turn:
        return replace(opening, tools=[*(opening.tools or ()), *self.toolbox.schemas])

    def _calls(self, dialog: Dialog) -> list[tuple[int, str]]:
        return [(number, call.name) for number, call in enumerate(self.toolbox.calls(dialog.raw))]

    def _run(self, dialog: Dialog) -> Turn:
        messages: list[Message] = []
        start, errors = time.perf_counter(), 0
        for number, call in enumerate(self.toolbox.calls(dialog.raw)):
            text, well = self.toolbox.run(call)
            errors += not well
            messages.append(tool_message(call.name, text, number))
        seconds = time.perf_counter() - start
        return Turn(
            messages,
            None,
            {"tools/calls": len(messages), "tools/errors": errors, "tools/seconds": seconds},
        )

    def tool_failure_reply(self, dialog: Dialog, why: str) -> list[Message] | None:
        calls = self._calls(dialog) if dialog.finish_reason == "stop" else []
        if not calls:
            return self.task.tool_failure_reply(dialog, why)
        return [tool_message(name, f"error: {why}", number) for number, name in calls]


class WithRetry(WrappedTask):
    """A task whose policy may retry after a wrong answer, as long as it has turns left.

    The dialog's score is that of the last try.

    Args:
        task: says what is wrong, by ``Score.correct``.
        prompt: what the policy is told.

    >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
    >>> from torchrl_grpo.tasks.base import Problem
    >>> task = WithRetry(ArithmeticTask(), "That is wrong. Try again.")
    >>> task.advance([Dialog(Problem("2+3=?", "5"), ["#### 6"], last=False)])[0].messages
    [{'role': 'user', 'content': 'That is wrong. Try again.'}]
    >>> task.advance([Dialog(Problem("2+3=?", "5"), ["#### 6", "#### 5"], last=False)])[0].score
    Score(reward=1.0, correct=True)
    """

    def __init__(self, task: Task, prompt: str) -> None:
        super().__init__(task)
        self.prompt = prompt

    @property
    def multi_turn(self) -> bool:
        return True

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        turns = self.task.advance(dialogs, timeout_s)
        return [self._retry(dialog, turn) for dialog, turn in zip(dialogs, turns, strict=True)]

    def _retry(self, dialog: Dialog, turn: Turn | Exception) -> Turn | Exception:
        over = isinstance(turn, Exception) or turn.score is None or turn.score.correct
        if over or dialog.last or dialog.finish_reason == "length":
            return turn
        assert isinstance(turn, Turn)
        return Turn([{"role": "user", "content": self.prompt}], None, turn.counts)
