"""``Replies``: a task's messages to the policy, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.chat.template import TurnTemplate
from torchrl_grpo.envs.dialog_state import SampleState
from torchrl_grpo.envs.prompts import USER, Prompts
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.images import Prompt, Spans, images_in, images_of, tokens_of
from torchrl_grpo.tasks.base import Message, Turn
from torchrl_grpo.tools.toolbox import CallFormat, tool_message

_PREFILL_TOKENS = 32
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Replies:
    """Prompts of a dialog: the first one, if a task makes it itself, and the one after each turn.

    Args:
        prompts: prompts of the task's problems.
        tokenizer: a tokenizer with a chat template.
        template_arguments: arguments for the chat template.
        max_tokens: maximum length of a prompt; None allows any.
    """

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: PreTrainedTokenizerBase,
        template_arguments: Mapping[str, Any],
        max_tokens: int | None,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._template = TurnTemplate(tokenizer, template_arguments)

    def check_role(self, role: str) -> None:
        """Raise ``ValueError`` if the chat template rejects messages of a role after the policy's
        turn.
        """
        is_tool = role == "tool"
        self._template.text([tool_message("@", "@") if is_tool else {"role": role, "content": "@"}])

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template renders a task's tools."""
        function = {"name": "probe", "description": "?", "parameters": _NO_PARAMETERS}
        try:
            self._prompts.of_chat(USER, [{"type": "function", "function": function}])
        except ValueError:
            return False
        return True

    @cached_property
    def call_format(self) -> CallFormat:
        """Format in which the chat template writes tool calls.

        Raises:
            ValueError: it writes calls that cannot be parsed.
        """
        template = getattr(self._tokenizer, "response_template", None)
        call_format: CallFormat = load_extra("recognize_calls")(self._template.chat_text, template)
        return call_format

    @cached_property
    def image_roles(self) -> tuple[str, ...]:
        """The roles in whose messages the model reads images."""
        return tuple(role for role in ("user", "tool") if self._prompts.reads_images(role))

    def prefill(self, prompt: Tensor | Prompt) -> str:
        """Return the end of a prompt with which the chat template begins the policy's turn, such as
        the beginning of a thought.
        """
        return _prefill(self._tokenizer, tuple(tokens_of(prompt)[-_PREFILL_TOKENS:].tolist()))

    def opening(self, turn: Turn) -> Tensor | Prompt:
        """Return the first prompt of a stateful task, [T] int64 if it has no images.

        Raises:
            ValueError: there is none, it is empty or too long, or the chat template rejects it.
        """
        if turn.messages is None:
            raise ValueError("the dialog was over before its first prompt.")
        prompt = self._first_prompt(turn)
        if not len(prompt) or not self._fits(prompt):
            limit = "" if self._max_tokens is None else f" to {self._max_tokens}"
            raise ValueError(
                f"the first prompt of a dialog must have 1{limit} tokens, but has {len(prompt)}."
            )
        return prompt

    def after(self, sample: SampleState | None, turn: Turn) -> Tensor | Prompt | None:
        """Return a sample's tokens with a task's reply or, without a sample, the prompt that the
        reply begins; None if they do not fit.

        Raises:
            ValueError: the chat template rejects the messages.
        """
        if sample is None or sample.tokens is None:
            prompt = self._first_prompt(turn)
            return prompt if self._fits(prompt) else None
        return self.append(sample.tokens, turn.messages or (), sample.turn_tokens, sample.images)

    def append(
        self,
        tokens: Tensor,
        messages: Sequence[Message],
        turn_tokens: Sequence[int],
        images: Spans = (),
    ) -> Tensor | Prompt | None:
        """Return the tokens with messages after the latest turn; None if they do not fit.

        Args:
            tokens: [T] int64, all tokens up to the end of the latest turn.
            messages: messages after that turn.
            turn_tokens: the tokens of that turn.
            images: the images among ``tokens``.

        Raises:
            ValueError: the chat template rejects the messages.
        """
        reply: Tensor | Prompt
        if messages and not messages[0]["role"]:
            reply = self._without_template(messages, add_special_tokens=False)
        else:
            reply = self._template.tokens(messages, turn_tokens)
            if images_in(messages):
                reply = self._prompts.with_images(reply.tolist(), messages)
        reply_spans = (replace(span, offset=len(tokens) + span.offset) for span in images_of(reply))
        spans = (*images, *reply_spans)
        all_tokens = torch.cat([tokens, tokens_of(reply)])
        if not self._fits(all_tokens):
            return None
        return Prompt(all_tokens, spans) if spans else all_tokens

    def _first_prompt(self, turn: Turn) -> Tensor | Prompt:
        """Return the prompt of a whole chat or, if its only message has no role, of that message's
        text, [T] int64 if it has no images.
        """
        messages = list(turn.messages or ())
        if messages and not messages[0]["role"]:
            return self._without_template(messages, add_special_tokens=True)
        tools = self._prompts.task.tools if turn.tools is None else turn.tools
        return self._prompts.of_chat(messages, tools)

    def _without_template(self, messages: Sequence[Message], *, add_special_tokens: bool) -> Tensor:
        """Return the tokens of the first message's text, [T] int64. Control tokens in the text
        remain control tokens.
        """
        text = messages[0]["content"]
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def _fits(self, prompt: Tensor | Prompt) -> bool:
        return self._max_tokens is None or len(prompt) <= self._max_tokens


@lru_cache(maxsize=256)  # the members of a group have the same prompt
def _prefill(tokenizer: PreTrainedTokenizerBase, end: tuple[int, ...]) -> str:
    template = getattr(tokenizer, "response_template", None)
    return str(load_extra("prefill_of")(tokenizer.decode(end), template or ""))
