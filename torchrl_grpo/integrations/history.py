"""``HistoryTransforms``: TorchRL's chat transforms for an environment that keeps dialogs as exact
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Composite
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, Transform
from torchrl.modules.llm.policies import ChatHistory

from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.images import text_tokens
from torchrl_grpo.keys import PROMPT, REWARD_PARTS, REWARD_VALID
from torchrl_grpo.tasks.base import Message
from torchrl_grpo.tools import tool_message

_NONE = {"role": "<none>", "content": ""}  # what TorchRL pads with
_FLAGS = ("done", "terminated", "truncated")


class HistoryTransforms(Compose):
    """Transforms that read and extend TorchRL's ``History``, in a ``TransformedEnv`` of an
    ``LLMEnv``.

    Each transform reads ``("history", "full")`` and ``("next", "history", "prompt")``, whose last
    message is the policy's latest turn, and the columns of the problem. The messages that the
    transforms append, in their order, follow that turn instead of the task's reply or score, as the
    tokens that the chat template renders for them. The policy's own tokens stay as sampled. The
    dialog then continues, unless the turn was cut off or was the last of ``max_turns``, or there is
    no room, in which cases the dialog is truncated.

    The reward of a turn that is followed by messages is 0, unless a transform wrote another one or
    unset ``done``. If no message was appended, a transform's reward replaces the task's, and a
    transform that sets ``done`` ends the dialog. Transforms see the rows of finished dialogs as
    empty, and anything they write there is dropped.

    Args:
        *transforms: transforms in their order; not all of them need to be chat transforms.

    Raises:
        ValueError: a transform rewrites the policy's turns, the environment is not an ``LLMEnv``,
            the policy has only one turn although a transform answers it, or the chat template
            rejects the role of the transform's messages.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.envs.llm.transforms import PythonInterpreter
        >>> from transformers import AutoTokenizer
        >>> from torchrl_grpo.starter import starter_path
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> tokenizer = AutoTokenizer.from_pretrained(starter_path())
        >>> env = LLMEnv(ArithmeticTask(), tokenizer, num_envs=2, repeats=2, max_turns=2)
        >>> env = TransformedEnv(env, HistoryTransforms(PythonInterpreter()))
        >>> env.reset()["history"].prompt[0, -1].role
        'user'
    """

    def __init__(self, *transforms: Transform) -> None:
        for transform in transforms:
            if getattr(transform, "edit_last_turn", False):
                raise ValueError(
                    f"{type(transform).__name__} must have edit_last_turn=false, because true "
                    "rewrites text that the policy sampled: use edit_last_turn=false role=user."
                )
        super().__init__(*transforms)
        self._ended: dict[int, TensorDictBase] = {}

    def set_container(self, container: Transform | EnvBase) -> None:
        """Show the environment's dialogs as history."""
        super().set_container(container)
        if self.parent is None:
            return
        env = self.parent.base_env
        if not isinstance(env, LLMEnv):
            raise ValueError(
                f"HistoryTransforms must be around an LLMEnv, not {type(env).__name__}: use one."
            )
        if env.task.is_stateful:
            raise ValueError(
                f"HistoryTransforms must not continue dialogs that task {env.task.name!r} has "
                "closed: leave env.transforms out."
            )
        env.input_mode = "history"
        for transform in self.transforms:
            role = getattr(transform, "tool_role", getattr(transform, "role", None))
            if role is not None and env.max_turns < 2:
                raise ValueError(
                    f"{type(transform).__name__} answers the policy, so max_turns must be at least "
                    f"2, but is {env.max_turns}: use max_turns=2 (env.max_turns=2)."
                )
            if role is not None:
                env.replies.check_role(role)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Add the history. The shape of the reward does not change."""
        rows = output_spec.shape
        reward = output_spec["full_reward_spec", "reward"].clone()
        history = ChatHistory.default_spec(shape=rows, keys=["prompt"])
        for name in set(history["prompt"].keys()) - set(_message(_NONE).keys()):
            del history["prompt", name]
        output_spec["full_observation_spec", "history"] = history
        output_spec = super().transform_output_spec(output_spec)
        output_spec["full_reward_spec", "reward"] = reward
        return output_spec

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        chats = [dialog.messages for dialog in self.parent.base_env.dialogs]
        tensordict_reset.set(
            "history", ChatHistory(prompt=_history(chats), batch_size=tensordict_reset.batch_size)
        )
        return super()._reset(tensordict, tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env: LLMEnv = self.parent.base_env
        size = next_tensordict.batch_size
        chats: list[list[Message]] = [[] for _ in env.dialogs]
        for row, dialog in env.latest.items():
            *before, turn = dialog.messages
            chats[row] = [*before, {**turn, "is_complete": dialog.finish_reason == "stop"}]
        views = {"prompt": _history([chat[:-1] for chat in chats]), "full": _history(chats)}
        tensordict.set("history", ChatHistory(**views, batch_size=size))
        columns = [
            {"answer": dialog.problem.answer, **dialog.problem.extra} for dialog in env.dialogs
        ]
        for name in {name for row in columns for name in row} - set(tensordict.keys()):
            tensordict.set(name, NonTensorStack(*[NonTensorData(row.get(name)) for row in columns]))
        before = next_tensordict.select("reward", *_FLAGS).clone()
        added: list[list[Message]] = [[] for _ in chats]
        for transform in self.transforms:
            next_tensordict.set("history", ChatHistory(prompt=_history(chats), batch_size=size))
            next_tensordict = transform._step(tensordict, next_tensordict)
            for row in env.latest:
                added[row] += _appended(
                    transform, next_tensordict["history"].prompt[row], chats[row]
                )
        rows = zip(tensordict.unbind(0), before.unbind(0), next_tensordict.unbind(0), strict=True)
        steps = [self._settle(env, row, added[row], *tds) for row, tds in enumerate(rows)]
        env.note_outcomes()
        chats = [list(dialog.messages) for dialog in env.dialogs]
        return lazy_stack(steps).set(
            "history", ChatHistory(prompt=_history(chats), batch_size=size)
        )

    def _settle(
        self,
        env: LLMEnv,
        row: int,
        messages: list[Message],
        root: TensorDictBase,
        before: TensorDictBase,
        after: TensorDictBase,
    ) -> TensorDictBase:
        """Combine the results of the environment and then of the transforms into a row's step."""
        if row not in env.latest:
            return self._ended.get(row, after) if before["done"] else after
        after.set("reward", after.get("reward").reshape(1))
        tokens = torch.cat([root.get(PROMPT), root.get(("tokens", "response"))])
        longer = self._resume(env, row, messages, tokens) if messages else None
        terminated, truncated = bool(before["terminated"]), bool(before["truncated"])
        if longer is not None:
            if before["done"] and after["done"] and torch.equal(before["reward"], after["reward"]):
                self._unscore(env, after)
            after.set(PROMPT, longer)
            terminated = truncated = False
        elif before["done"] and messages:
            terminated, truncated = False, True
        elif not before["done"] and after["done"]:
            truncated = bool(after["truncated"])
            terminated = not truncated
        if terminated or truncated:
            env.states[row].end(truncated=truncated)
            self._ended[row] = after
        for name, value in zip(
            _FLAGS, (terminated or truncated, terminated, truncated), strict=True
        ):
            after.set(name, torch.tensor([value]))
        return after

    @staticmethod
    def _resume(
        env: LLMEnv, row: int, messages: Sequence[Message], tokens: Tensor
    ) -> Tensor | None:
        """Continue after a row's latest turn, which ends ``tokens``, with messages that replace the
        task's reply or score. Return all tokens; or return None and change nothing if the turn was
        cut off or was the last one, or if there is no room.
        """
        dialog, state = env.latest[row], env.states[row]
        if dialog.last or dialog.finish_reason == "length":
            return None
        prompt = env.replies.append(tokens, messages, dialog.tokens)
        longer = None if prompt is None else text_tokens(prompt)
        if longer is not None:
            state.reopen([*dialog.messages[len(state.current.chat) :], *messages])
        return longer

    @staticmethod
    def _unscore(env: LLMEnv, after: TensorDictBase) -> None:
        """Remove the task's score of a turn that was not the last one."""
        after.update(
            {
                "reward": torch.zeros(1),
                "correct": torch.tensor([False]),
                REWARD_VALID: torch.tensor([True]),
            }
        )
        if env.task.has_parts:
            after.set(REWARD_PARTS[-1], NonTensorData({}))


def _history(chats: Sequence[Sequence[Message]]) -> History:
    """Return chats as history [B, T], padded on the left, so that each row ends with its chat."""
    longest = max(len(chat) for chat in chats)
    padded: list[list[Any]] = [
        [_NONE] * (max(1, longest) - len(chat)) + list(chat) for chat in chats
    ]
    return lazy_stack([lazy_stack([_message(message) for message in chat]) for chat in padded])


def _message(message: Message) -> History:
    content = message.get("content")
    text = content if isinstance(content, str) else str(content or "")
    return History(role=message["role"], content=text, is_complete=message.get("is_complete", True))


def _appended(transform: Transform, history: History, chat: Sequence[Message]) -> list[Message]:
    """Return the messages that a transform appended to a chat."""
    messages = [
        (message.role, message.content)
        for message in history.unbind(0)
        if message.role != _NONE["role"]
    ]
    before = [(message.role, message.content) for message in map(_message, chat)]
    if messages[: len(chat)] != before:
        raise RuntimeError(
            f"{type(transform).__name__} must only append messages, but it changed a message that "
            "the policy read or wrote: leave it out."
        )
    return [
        tool_message("tool", content, number)
        if role == "tool"
        else {"role": role, "content": content}
        for number, (role, content) in enumerate(messages[len(chat) :])
    ]
