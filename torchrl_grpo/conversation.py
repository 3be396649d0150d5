"""What stands between two turns of the policy, as the chat template writes it. No text of the policy is tokenized."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.records import printable
from torchrl_grpo.tasks.base import Message

_LONGEST_RENDER_S = 5.0
"""Seconds of computing for which a template may go on. One without fault needs less than a thousandth of a second."""


class _TooLongError(BaseException):
    """Not an ``Exception``: of those, Jinja takes some for what is not known before a template is rendered."""


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], **arguments: Any) -> str:
    """A chat as the chat template writes it.

    Raises:
        ValueError: the template raises, whatever it is, or, in the main thread, does not come to an end.
    """
    try:
        with _in_time():
            return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **arguments))
    except (Exception, _TooLongError) as error:
        template, said = printable(str(tokenizer.chat_template)), printable(f"{type(error).__name__}: {error}")
        roles = list(dict.fromkeys(str(message.get("role")) for message in chat))
        found = f"says {said!r:.200}"
        if isinstance(error, _TooLongError):
            found = f"has not done so after {_LONGEST_RENDER_S:g} s"
        raise ValueError(
            f"model.chat_template={template!r:.80} must write a chat of the roles {roles}, "
            f"and it {found}: mend it, or leave it out, if it is not the tokenizer's own."
        ) from error


@contextmanager
def _in_time() -> Iterator[None]:
    """Ends a block that computes for too long. Only the main thread can be ended: it is also what renders first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _end(*_: Any) -> NoReturn:
    raise _TooLongError


_PLACEHOLDER = "@@assistant-turn@@"
_MOST_KNOWN = 1000


class TurnTemplate:
    """The tokens between an assistant's text and the assistant's next text, as a chat template puts them.

    Args:
        tokenizer: with a chat template.
        arguments: further ones of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self.tokenizer, self.arguments = tokenizer, arguments
        self._known: dict[str, list[int]] = {}

    def tokens(self, messages: Sequence[Message], response: Sequence[int]) -> Tensor:
        """[T] int64, what comes between.

        Args:
            messages: such as a user's turn or the results of tools.
            response: the tokens that the policy sampled before. Where it sampled the token that ends its turn, the
                template does not write it a second time.

        Raises:
            ValueError: the template leaves a text out, or refuses such messages.
        """
        key = json.dumps(messages, sort_keys=True, default=str)
        if key not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self.tokenizer(self.text(messages), add_special_tokens=False)["input_ids"]
        turn = self._known[key]
        return torch.tensor(turn[turn[:1] == list(response[-1:]) :], dtype=torch.int64)

    def text(self, messages: Sequence[Message]) -> str:
        """The same as text, the end of the assistant's turn included."""
        chat: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _PLACEHOLDER},
            *messages,
        ]
        text = render_chat(self.tokenizer, chat, add_generation_prompt=True, **self.arguments)
        _, found, between = text.partition(_PLACEHOLDER)
        if not found:
            raise ValueError(
                f"the tokenizer's chat template must keep the text of an assistant turn, it left {_PLACEHOLDER!r} out: "
                "use max_turns=1 or another template."
            )
        for said in map(_text, messages):
            if said.strip() and said.strip() not in between:
                raise ValueError(
                    f"the tokenizer's chat template must write a message after an assistant's turn, it left "
                    f"{said!r:.80} out: use another template (model.chat_template)."
                )
        return between


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
