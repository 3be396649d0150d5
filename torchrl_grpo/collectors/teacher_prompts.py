"""``TeacherPrompts``: the prompt that a teacher reads in place of the policy's, with what the policy
does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

from torchrl_grpo import keys
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.host.objects import load_function
from torchrl_grpo.images import Prompt, images_of, tokens_of
from torchrl_grpo.tasks.base import Message, Problem
from torchrl_grpo.tasks.drawing import Drawn

BUILTINS = {name: f"{__name__}:with_{name}" for name in ("solution", "best_response", "feedback")}
"""Functions that ``teacher.prompt`` names without a file."""
_AGAIN = "Now answer the question yourself."
_NOTHING = torch.zeros(0, dtype=torch.int64)
"""Prompt for a response that the teacher does not score."""


def with_solution(messages: list[Message], completion: str) -> list[Message]:
    """Show the reference solution (arXiv 2601.18734), the column ``env.columns.completion``."""
    return extended(messages, f"A correct solution:\n\n{completion}\n\n{_AGAIN}")


def with_best_response(
    messages: list[Message], peers: list[dict[str, Any]]
) -> list[Message] | None:
    """Show the group's other response with the highest reward, if it is correct (arXiv
    2601.20802).
    """
    right = [peer for peer in peers if peer["correct"]]
    if not right:
        return None
    best = max(right, key=lambda peer: float(peer["reward"]))
    return with_solution(messages, best["response"])


def with_feedback(messages: list[Message], feedback: str) -> list[Message] | None:
    """Show what the scorer says about the response (arXiv 2601.20802)."""
    if not feedback:
        return None
    text = f"Feedback on an earlier attempt:\n\n{feedback}\n\n{_AGAIN}"
    return extended(messages, text)


def extended(messages: Sequence[Message], text: str) -> list[Message]:
    """Return a chat whose last message has a further paragraph.

    >>> extended([{"role": "user", "content": "1+1?"}], "It is 2.")
    [{'role': 'user', 'content': '1+1?\\n\\nIt is 2.'}]
    """
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": f"{content}\n\n{text}"}]
    return [*before, {**last, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}]


class TeacherPrompts:
    """Writes the teacher's prompt for each response, ``("teacher", "prompt")``.

    A function returns the prompt as messages, or None if the teacher shall not score the response.
    Its arguments, by name, are ``prompt``, ``messages`` (the policy's prompt), ``answer``, all
    columns, ``completion`` (the text of the reference solution; None without one), ``response``,
    ``feedback`` (of its scorer; may be empty), and ``peers``: the group's other valid responses,
    each a dict of ``response``, ``reward`` and ``correct``.

    Args:
        env: source of the problems, and of the chat template.
        name: ``file.py:function``, ``package.module:function``, or one of ``BUILTINS``.
        longest: maximum number of tokens of such a prompt and the response. A response that would
            be longer is not scored.

    Raises:
        ValueError: there is no such function, it fails for a first problem without a response, or
            the task writes the prompts itself (it is stateful).
    """

    def __init__(self, env: LLMEnv, name: str, longest: int) -> None:
        if env.task.is_stateful:
            raise ValueError(
                f"teacher.prompt={name} must be left out with env.agent, env.environment and other "
                "tasks that write the prompts themselves: leave one of them out."
            )
        self.env = env
        self.name = name
        self.longest = longest
        self._function = load_function(name, "teacher.prompt", BUILTINS)
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        needed = {p.name for p in parameters if p.default is p.empty} & self._names
        problem = env.prompts.problems[env.prompts.usable[0]]
        arguments = {**self._arguments(problem), "response": "", "feedback": "", "peers": []}
        if missing := sorted(needed - arguments.keys()):
            raise ValueError(
                f"teacher.prompt={name} needs {' and '.join(missing)}, which must be a column or a "
                f"built-in argument: use only {', '.join(sorted(arguments))}."
            )
        if "completion" in needed and arguments["completion"] is None:
            raise ValueError(
                f"teacher.prompt={name} needs the reference solution of each problem: name its "
                "column as env.columns.completion."
            )
        self._tokens(problem, arguments)

    def __call__(self, drawn: Drawn, rows: Sequence[TensorDictBase]) -> None:
        """Write the teacher's prompt into each row of a group, in place."""
        outcomes = [
            {
                "response": str(row[keys.RESPONSE_TEXT]),
                "reward": float(row.get(keys.REWARD)),
                "correct": bool(row.get(keys.CORRECT)),
            }
            for row in rows
        ]
        valid = [bool(row.get(keys.REWARD_VALID)) for row in rows]
        for index, row in enumerate(rows):
            feedback = row.get(keys.FEEDBACK, None)
            arguments = {
                **self._arguments(drawn.problem),
                "response": outcomes[index]["response"],
                "feedback": "" if feedback is None else str(row[keys.FEEDBACK]),
                "peers": [
                    outcome
                    for other, outcome in enumerate(outcomes)
                    if valid[other] and other != index
                ],
            }
            prompt = self._tokens(drawn.problem, arguments)
            if len(prompt) + len(row.get(keys.RESPONSE)) > self.longest:
                prompt = _NOTHING
            row.set(keys.TEACHER_PROMPT, tokens_of(prompt))
            if self.env.has_images:
                row.set(keys.TEACHER_IMAGES, NonTensorData(images_of(prompt)))

    def _arguments(self, problem: Problem) -> dict[str, Any]:
        """Return the arguments that the problem gives, new ones, as a function may change them."""
        task = self.env.task
        completion = None
        with suppress(ValueError):
            contents = [message.get("content") for message in task.demonstration(problem)]
            completion = "\n".join(map(str, filter(None, contents)))
        return {
            **problem.extra,
            "prompt": problem.query,
            "messages": task.messages(problem),
            "answer": problem.answer,
            "completion": completion,
        }

    def _tokens(self, problem: Problem, arguments: Mapping[str, Any]) -> Tensor | Prompt:
        """Return the teacher's prompt; empty if the function returns None."""
        taken = {
            name: value
            for name, value in arguments.items()
            if name in self._names or (self._takes_rest and name in problem.extra)
        }
        try:
            messages = self._function(**taken)
            if messages is None:
                return _NOTHING
            tools = [dict(tool) for tool in self.env.task.tools_for(problem)]
            return self.env.prompts.of_chat(messages, tools)
        except Exception as error:  # a user's function may raise anything
            raise ValueError(
                f"teacher.prompt={self.name} must return messages for the chat template, or None, "
                f"but for {problem.query!r:.200} it failed: {type(error).__name__}: {error}."
            ) from error
