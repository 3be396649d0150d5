"""Tasks that continue after a response, with tools or retries. They wrap any task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrl_grpo.tasks.base import Dialog, Message, Task, Turn, WrappedTask
from torchrl_grpo.tools import Toolbox, tool_message


class WithTools(WrappedTask):
    """A task whose policy may call functions: the reply to a turn with calls is their results.

    Calls are parsed from the policy's own text, and results are the chat template's tool messages.
    The reply to unparsable calls, wrong arguments, exceptions and timeouts is an error message.

    Args:
        task: the task that judges the dialog, and replies to turns without calls.
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

    multi_turn = True

    def __init__(self, task: Task, toolbox: Toolbox) -> None:
        super().__init__(task)
        self.toolbox = toolbox
        self.tools = toolbox.schemas
        self.reads_calls = toolbox.parser is None

    def advance(
        self, dialogs: Sequence[Dialog], timeout_s: float | None = None
    ) -> list[Turn | Exception]:
        calls = [self._calls_tools(dialog) for dialog in dialogs]
        runs = [call and not dialog.last for call, dialog in zip(calls, dialogs, strict=True)]
        others = [dialog for dialog, run in zip(dialogs, runs, strict=True) if not run]
        turns = iter(self.task.advance(others, timeout_s))
        return [
            self._run(dialog) if run else self._extend(next(turns), call)
            for dialog, run, call in zip(dialogs, runs, calls, strict=True)
        ]

    def _calls_tools(self, dialog: Dialog) -> bool:
        """Return whether a dialog's latest turn calls a tool. A stateful task runs its own tools
        itself.
        """
        if dialog.finish_reason != "stop":
            return False
        names = {call.name for call in self.toolbox.calls(dialog)}
        return bool(names & self.toolbox.functions.keys() if self.task.is_stateful else names)

    def _extend(self, turn: Turn | Exception, calls: bool) -> Turn | Exception:
        """Return the task's own turn with our tools; ``calls``: whether the policy's turn has
        calls.

        The calls of a last turn are not run, because nobody would read the results. The dialog is
        scored as if it continued.
        """
        if isinstance(turn, Exception):
            return turn
        if calls:
            turn = replace(turn, messages=[])
        if turn.tools is not None:
            turn = replace(turn, tools=[*turn.tools, *self.toolbox.schemas])
        return turn

    def _run(self, dialog: Dialog) -> Turn:
        messages, counts = self.toolbox.run_all(self.toolbox.calls(dialog))
        return Turn(messages, None, counts)

    def tool_failure_reply(self, dialog: Dialog, why: str) -> list[Message] | None:
        calls = self.toolbox.calls(dialog) if dialog.finish_reason == "stop" else ()
        if not calls:
            return self.task.tool_failure_reply(dialog, why)
        error = f"error: {why}"
        return [tool_message(call.name, error, number) for number, call in enumerate(calls)]


class WithRetry(WrappedTask):
    """A task whose policy may retry after a wrong answer while it has turns left.

    The dialog's score is the score of the last attempt.

    Args:
        task: the task, whose ``Score.correct`` decides whether an answer is wrong.
        prompt: user message after a wrong answer.

    >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
    >>> from torchrl_grpo.tasks.base import Problem
    >>> task = WithRetry(ArithmeticTask(), "That is wrong. Try again.")
    >>> task.advance([Dialog(Problem("2+3=?", "5"), ["#### 6"], last=False)])[0].messages
    [{'role': 'user', 'content': 'That is wrong. Try again.'}]
    >>> task.advance([Dialog(Problem("2+3=?", "5"), ["#### 6", "#### 5"], last=False)])[0].score
    Score(reward=1.0, correct=True)
    """

    multi_turn = True

    def __init__(self, task: Task, prompt: str) -> None:
        super().__init__(task)
        self.prompt = prompt

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
