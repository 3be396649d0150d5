"""Chats as tokens: the first prompt, and the text between two turns of the policy, as the chat template writes them.

No text of the policy is tokenized again, and only the template writes control tokens: in a message they are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.host.text import HALF, printable, whole

Message = Mapping[str, Any]


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], **arguments: Any) -> str:
    """A chat as the chat template writes it.

    Raises:
        ValueError: the template raises, whatever it is.
    """
    try:
        return str(tokenizer.apply_chat_template(list(map(dict, chat)), tokenize=False, **arguments))
    except Exception as error:
        template = printable(str(tokenizer.chat_template))
        said = printable(f"{type(error).__name__}: {error}")
        roles = list(dict.fromkeys(str(message.get("role")) for message in chat))
        raise ValueError(
            f"model.chat_template={template!r:.80} must write a chat of the roles {roles}, "
            f"and it says {said!r:.200}: mend it, or leave it out, if it is not the tokenizer's own."
        ) from error


def check_tools(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
    """Check that the chat template writes tools.

    Raises:
        ValueError: it writes the same chat with them and without them.
    """
    if not tools:
        return
    with_tools, without = (
        render_chat(tokenizer, [_USER], tools=each, add_generation_prompt=True, **arguments)
        for each in (list(tools), None)
    )
    if with_tools == without:
        raise ValueError(
            f"model.chat_template={printable(str(tokenizer.chat_template))!r:.80} must write the tools "
            f"{[tool.get('function', tool).get('name') for tool in tools]}, and it leaves them out: use a model or a "
            "template that writes `tools`."
        )


_USER, _ASSISTANT = ({"role": role, "content": "?"} for role in ("user", "assistant"))
_RESULT = {"role": "tool", "name": "?", "content": "?", "tool_call_id": "call00000"}


class ChatEncoder:
    """Turns chats into tokens. Only the chat template can write control tokens: where a message spells one out, it is
    tokenized as text, so that no data and no tool can end a turn or speak in another role.

    Control tokens are those that the tokenizer marks as special, and the other added ones that the template writes
    around messages. A text without one has the tokens that it has without this class: a tokenizer merges across the
    borders of messages, so the whole chat is tokenized at once. A text with one is cut after the first character of
    each: no tokenizer, whatever its kind, finds a token across a cut.

    Args:
        tokenizer: with a chat template.
        arguments: further ones of the template.

    Attributes:
        control: the control tokens, as text. One of a single character cannot be told from text, and is not among them.

    >>> from transformers import AutoTokenizer
    >>> from torchrl_grpo.starter import starter_path
    >>> chats = ChatEncoder(AutoTokenizer.from_pretrained(starter_path()), {})
    >>> chats.tokenizer.convert_ids_to_tokens(chats.tokens([{"role": "user", "content": "1<|end|>"}]))
    ['<|user|>', '1', '<', '|', 'e', 'n', 'd', '|', '>', '<|end|>']
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.arguments = arguments
        self._writes_tools = False
        self.control = self._control_tokens()
        first = sorted({token[0] for token in self.control})
        self._first = re.compile("|".join(map(re.escape, first)) or r"(?!)")
        self._any = re.compile("|".join(map(re.escape, self.control)) or r"(?!)")
        self._stand_ins = {char: chr(0xD800 + number) for number, char in enumerate(first)}
        self._originals = str.maketrans({stand_in: char for char, stand_in in self._stand_ins.items()})
        signs = [char for char in first if not char.isalnum()]
        self._signs = str.maketrans({char: self._stand_ins[char] for char in signs})
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._normalize: Callable[[str], str] = normalizer.normalize_str if normalizer else str

    def _control_tokens(self) -> tuple[str, ...]:
        """Control tokens, longest first."""
        chats = ([_USER, _ASSISTANT, _USER], [_USER, _ASSISTANT, _RESULT, _ASSISTANT, _USER])
        written = ""
        for chat in chats:
            with suppress(ValueError):  # not every template takes a tool's result, or more than one turn
                written += render_chat(self.tokenizer, chat, **self.arguments)
        special: set[str] = set(self.tokenizer.all_special_tokens)
        others: set[str] = set()
        for added in self.tokenizer.added_tokens_decoder.values():
            (special if added.special else others).add(added.content)
        others = {token for token in others if token in written and not (token[0].isalnum() or token.isspace())}
        return tuple(sorted((token for token in special | others if len(token) > 1), key=lambda t: (-len(t), t)))

    def tokens(self, chat: Sequence[Message], **arguments: Any) -> list[int]:
        """A chat's tokens; ``arguments`` are those of ``render``."""
        return self.encode([self.render(chat, **arguments)])[0]

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as the template writes it, for ``encode`` alone: stand-ins replace the first characters of
        control tokens that messages spell out. Lone surrogates become U+FFFD.

        Args:
            chat: messages.
            **arguments: of the template, in addition to those given to the constructor.

        Raises:
            ValueError: the template raises, whatever it is, or leaves the tools out.
        """
        tools = arguments.get("tools")
        if tools and not self._writes_tools:  # an agent's, or those of a dialog's opening
            check_tools(self.tokenizer, tools, **self.arguments)
            self._writes_tools = True
        chat = _with_texts(chat, self._marked)
        text = render_chat(self.tokenizer, chat, **self.arguments, **arguments)
        # A template that takes texts apart and joins the pieces may make a control token of them. Not the roles: the
        # template goes by them.
        apart = [
            {key: entry if key == "role" else _with_texts(entry, self._without_signs) for key, entry in message.items()}
            for message in chat
        ]
        if apart == chat:
            return text
        safe = render_chat(self.tokenizer, apart, **self.arguments, **arguments)
        same = [token for _, token in self._found(safe)] == [token for _, token in self._found(text)]
        return text if same else safe

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts from ``render``."""
        cut = [[piece for piece in re.split(f"(?<={HALF.pattern})", text) if piece] for text in texts]
        pieces = [piece.translate(self._originals) for text in cut for piece in text]
        if not pieces:
            return [[] for _ in texts]
        ids = iter(self.tokenizer(pieces, add_special_tokens=False, return_attention_mask=False)["input_ids"])
        return [[token for _ in text for token in next(ids)] for text in cut]

    def plain(self, text: str) -> str:
        """Return a text from ``render`` without stand-ins."""
        return text.translate(self._originals)

    def spells_control(self, text: str) -> bool:
        """Whether a message spells out a control token, in a text that ``render`` gave."""
        return HALF.search(text) is not None

    def _without_signs(self, text: str) -> str:
        return text.translate(self._signs)

    def _marked(self, text: str) -> str:
        """Return a message's text with stand-ins."""
        text = whole(text)
        found, normal = self._found(text), self._normalize(text)
        if len(self._found(normal)) > len(found):  # such as a wide "<", of which the tokenizer makes a plain one
            text = normal
            found = self._found(normal)
        chars = list(text)
        for place, _ in found:
            chars[place] = self._stand_ins[chars[place]]
        return "".join(chars)

    def _found(self, text: str) -> list[tuple[int, str]]:
        """Return the control tokens in a text with their positions; one may begin within another."""
        begin = [first.start() for first in self._first.finditer(text)]
        return [(place, token[0]) for place in begin if (token := self._any.match(text, place))]


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a nested value with a function applied to each text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change): _with_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(entry, change) for entry in value]
    return value


_PLACEHOLDER = "@@assistant-turn@@"
_PROBE = "@@message-{}@@"
_MOST_KNOWN = 1000


class TurnTemplate:
    """The tokens between two texts of the assistant, as the chat template writes them.

    Args:
        tokenizer: with a chat template.
        arguments: further ones of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self._chats = ChatEncoder(tokenizer, arguments)
        self._known: dict[str, list[int]] = {}
        self._kept: set[tuple[Any, ...]] = set()  # roles of messages that the template is known to write

    def tokens(self, messages: Sequence[Message], response: Sequence[int]) -> Tensor:
        """Return the tokens between two turns, [T] int64.

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
            self._known[key] = self._chats.encode([self._between(messages)])[0]
        turn = self._known[key]
        return torch.tensor(turn[turn[:1] == list(response[-1:]) :], dtype=torch.int64)

    def text(self, messages: Sequence[Message]) -> str:
        """Return the same as text, including the end of the assistant's turn."""
        return self._chats.plain(self._between(messages))

    def _between(self, messages: Sequence[Message]) -> str:
        """Return what ``ChatEncoder.render`` puts after the assistant's text."""
        roles = tuple(message.get("role") for message in messages)
        if roles not in self._kept:
            # Not looked for in their own words: a template may write a text as JSON, strip it or take a part out.
            probes = [_PROBE.format(number) for number in range(len(messages))]
            said = self._after([{**message, "content": probe} for message, probe in zip(messages, probes, strict=True)])
            for role, probe in zip(roles, probes, strict=True):
                if probe not in said:
                    raise ValueError(
                        "the tokenizer's chat template must write a message after an assistant's turn, it left the "
                        f"content of a message of the role {role!r} out: use another template (model.chat_template)."
                    )
            self._kept.add(roles)
        return self._after(messages)

    def _after(self, messages: Sequence[Message]) -> str:
        chat = [_USER, {**_ASSISTANT, "content": _PLACEHOLDER}, *messages]
        text = self._chats.render(chat, add_generation_prompt=True)
        _, found, between = text.partition(_PLACEHOLDER)
        if not found:
            raise ValueError(
                f"the tokenizer's chat template must keep the text of an assistant turn, it left {_PLACEHOLDER!r} out: "
                "use max_turns=1 or another template."
            )
        return between
