"""What stands between two turns of the policy, as the chat template writes it. No text of the policy is tokenized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.records import printable
from torchrl_grpo.tasks.base import Message


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], **arguments: Any) -> str:
    """A chat as the chat template writes it.

    Raises:
        ValueError: the template raises, whatever it is.
    """
    try:
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **arguments))
    except Exception as error:
        template, said = printable(str(tokenizer.chat_template)), printable(f"{type(error).__name__}: {error}")
        roles = list(dict.fromkeys(str(message.get("role")) for message in chat))
        raise ValueError(
            f"model.chat_template={template!r:.80} must write a chat of the roles {roles}, "
            f"and it says {said!r:.200}: mend it, or leave it out, if it is not the tokenizer's own."
        ) from error


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
