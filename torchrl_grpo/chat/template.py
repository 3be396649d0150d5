"""Chats as tokens: the first prompt, and the text between two turns of the policy, as the chat
template writes them.

No text of the policy is tokenized again, and only the template writes control tokens: in a message
they are text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_grpo.host.clock import run_date
from torchrl_grpo.host.text import LONE_SURROGATE, printable, replace_lone_surrogates

Message = Mapping[str, Any]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern of transformers


def render_chat(
    tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], **arguments: Any
) -> str:
    """Return a chat as the chat template writes it.

    Raises:
        ValueError: the template raises any error.
    """
    return render_spans(tokenizer, chat, **arguments)[0]


def render_spans(
    tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], **arguments: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as the chat template writes it, and the spans between its ``generation``
    markers, if it has any. A template that writes the date gets the run's.

    Raises:
        ValueError: the template raises any error.
    """
    messages = list(map(dict, chat))
    arguments = {"strftime_now": run_date().strftime, **arguments}
    try:
        template = tokenizer.get_chat_template(tools=arguments.get("tools"))
        if _takes_only_parts(tokenizer, template):
            messages = [_in_parts(message) for message in messages]
        if not _GENERATION.search(template):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments)), []
        arguments = {**tokenizer.special_tokens_map, "chat_template": template, **arguments}
        [text], [spans] = render_jinja_template(
            [messages], return_assistant_tokens_mask=True, **arguments
        )
        return text, spans
    except Exception as error:
        template = printable(str(tokenizer.chat_template))
        reason = printable(f"{type(error).__name__}: {error}")
        roles = list(dict.fromkeys(str(message.get("role")) for message in chat))
        raise ValueError(
            f"model.chat_template={template!r:.80} must write a chat with the roles {roles}, but it "
            f"raised {reason!r:.200}: fix it, or leave it out, if it is not the tokenizer's own."
        ) from error


_ONLY_PARTS: dict[str, bool] = {}
"""For each template, whether it leaves out the content of a message that is a text."""


def _takes_only_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a template writes the parts of a content, but no content that is a text, as
    those of some vision-language models do.
    """
    if template not in _ONLY_PARTS:
        message: dict[str, Any] = {"role": "user", "content": _PLACEHOLDER}
        written = []
        for form in (message, _in_parts(message)):
            with suppress(Exception):  # a template may refuse either, or a chat of one message
                text = tokenizer.apply_chat_template([form], tokenize=False, chat_template=template)
                written.append(_PLACEHOLDER in text)
        _ONLY_PARTS[template] = written == [False, True]
    return _ONLY_PARTS[template]


def _in_parts(message: Message) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if content else []
    return {**message, "content": parts if isinstance(content, str | None) else content}


_USER, _ASSISTANT = ({"role": role, "content": "?"} for role in ("user", "assistant"))
_RESULT = {"role": "tool", "name": "?", "content": "?", "tool_call_id": "call00000"}
_PLACEHOLDER = "@@assistant-turn@@"
_MARK = "@@{}@@"  # no letters, which a template may change
_FUNCTION = {"name": "?", "arguments": {"?": _PLACEHOLDER}}
_CALL = {"type": "function", "id": "call00000", "function": _FUNCTION}


class ChatEncoder:
    """Turns chats into tokens. Only the chat template can write control tokens: if a message spells
    one out, it is tokenized as text, so that no data and no tool can end a turn or speak in another
    role.

    Control tokens are those that the tokenizer marks as special, and other added tokens that the
    template writes around messages. Text without control tokens gets its usual tokens: tokenizers
    merge across message boundaries, so the whole chat is tokenized at once. Text with control
    tokens is cut after the first character of each, because no kind of tokenizer finds a token
    across a cut.

    Args:
        tokenizer: with a chat template.
        arguments: further arguments of the template.

    Attributes:
        control: the control tokens, as text. Single characters are not included, because they
            cannot be told from text.

    >>> from transformers import AutoTokenizer
    >>> from torchrl_grpo.starter import starter_path
    >>> chats = ChatEncoder(AutoTokenizer.from_pretrained(starter_path()), {})
    >>> chats.tokenizer.convert_ids_to_tokens(chats.tokens([{"role": "user", "content": "1<|end|>"}]))
    ['<|user|>', '1', '<', '|', 'e', 'n', 'd', '|', '>', '<|end|>']
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.arguments = arguments
        self._complete: set[tuple[Any, ...]] = set()
        self.control = self._control_tokens()
        first = sorted({token[0] for token in self.control})
        self._first = re.compile("|".join(map(re.escape, first)) or r"(?!)")
        self._any = re.compile("|".join(map(re.escape, self.control)) or r"(?!)")
        self._stand_ins = {char: chr(0xD800 + number) for number, char in enumerate(first)}
        self._originals = str.maketrans(
            {stand_in: char for char, stand_in in self._stand_ins.items()}
        )
        signs = [char for char in first if not char.isalnum()]
        self._signs = str.maketrans({char: self._stand_ins[char] for char in signs})
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._normalize: Callable[[str], str] = normalizer.normalize_str if normalizer else str

    def _control_tokens(self) -> tuple[str, ...]:
        """Return the control tokens, longest first."""
        chats = ([_USER, _ASSISTANT, _USER], [_USER, _ASSISTANT, _RESULT, _ASSISTANT, _USER])
        written = ""
        for chat in chats:
            with suppress(ValueError):  # the template may refuse tool results, or several turns
                written += render_chat(self.tokenizer, chat, **self.arguments)
        control: set[str] = set(self.tokenizer.all_special_tokens)
        for added in self.tokenizer.added_tokens_decoder.values():
            token = added.content
            is_text = token not in written or token[0].isalnum() or token.isspace()
            if added.special or not is_text:
                control.add(token)
        tokens = (token for token in control if len(token) > 1)
        return tuple(sorted(tokens, key=lambda token: (-len(token), token)))

    def tokens(self, chat: Sequence[Message], **arguments: Any) -> list[int]:
        """Return a chat's tokens; see ``render`` for ``arguments``."""
        return self.encode([self.render(chat, **arguments)])[0]

    def render(self, chat: Sequence[Message], **arguments: Any) -> str:
        """Return the chat as the template writes it, for use in ``encode``: stand-ins replace the
        first characters of control tokens that messages spell out. Lone surrogates become U+FFFD.

        Args:
            chat: messages.
            **arguments: arguments of the template, in addition to the constructor's.

        Raises:
            ValueError: the template raises any error or leaves something out (see ``check``), or
                the messages are nested too deeply.
        """
        return self.render_turns(chat, len(chat), **arguments)[0]

    def check(
        self,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> None:
        """Check that the template writes the content and the calls of each message, and the tools.

        It renders a mark in place of each text, because a template may leave out a part of a text,
        such as a thought, strip it, or write it as JSON. Chats of one form are rendered once.

        Args:
            chat: messages.
            tools: JSON schemas.
            **arguments: further arguments of the template.

        Raises:
            ValueError: the template leaves one out, or raises any error.
        """
        marks: dict[str, str] = {}

        def with_marks(content: Any, what: str) -> Any:
            if isinstance(content, list):
                return [with_marks(part, what) for part in content]
            if isinstance(content, Mapping) and "text" in content:
                return {**content, "text": with_marks(content["text"], what)}
            if not isinstance(content, str) or not content.strip():
                return content
            mark = _MARK.format(len(marks))
            marks[mark] = what
            return mark

        marked_chat = []
        for message in chat:
            message = dict(message)
            which = f"of each message, but it leaves out one with the role {message.get('role')!r}"
            if content := message.get("content"):
                message["content"] = with_marks(content, f"the content {which}")
            if isinstance(calls := message.get("tool_calls"), list | tuple):
                message["tool_calls"] = [
                    with_arguments(call, True, with_marks("?", f"tool_calls {which}"))
                    for call in calls
                ]
            marked_chat.append(self._with_call_form(message))
        parts = ((message.get("role"), bool(message.get("content"))) for message in chat)
        form = (*parts, len(marks), bool(tools))
        if form in self._complete:
            return
        arguments = {**self.arguments, **arguments}
        text = render_chat(self.tokenizer, marked_chat, tools=tools, **arguments)
        missing = [what for mark, what in marks.items() if mark not in text]
        with suppress(ValueError):  # a template may require tools
            if tools and text == render_chat(self.tokenizer, marked_chat, **arguments):
                names = [tool.get("function", tool).get("name") for tool in tools]
                missing.append(f"the tools of a chat, but it leaves out {names}")
        if missing:
            raise ValueError(
                f"model.chat_template={printable(str(self.tokenizer.chat_template))!r:.80} must "
                f"write {missing[0]}: use another template or model, or move the text into the "
                "user's message."
            )
        self._complete.add(form)

    def render_turns(
        self, chat: Sequence[Message], num_escaped: int, **arguments: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the result of ``render``, and the assistant's spans by the template's
        ``generation`` markers.

        Args:
            chat: messages.
            num_escaped: number of leading messages to escape; in later messages of the assistant,
                which the policy would write itself, control tokens stay control tokens.
            **arguments: arguments of ``render``.
        """
        try:
            return self._render_turns(chat, num_escaped, arguments)
        except RecursionError as error:
            raise ValueError(
                "messages must not be nested so deeply: the limit is a few hundred levels."
            ) from error

    def _render_turns(
        self, chat: Sequence[Message], num_escaped: int, arguments: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        trusted = [
            index >= num_escaped and message.get("role") == "assistant"
            for index, message in enumerate(chat)
        ]
        chat = [
            _with_texts(
                self._with_call_form(message), replace_lone_surrogates if trusts else self._escape
            )
            for message, trusts in zip(chat, trusted, strict=True)
        ]
        self.check(chat, **arguments)
        arguments = {**self.arguments, **arguments}
        text, spans = render_spans(self.tokenizer, chat, **arguments)
        # A template that splits texts and joins the pieces may create a control token. Roles are
        # left alone, because templates depend on them.
        without_signs = [
            {
                key: entry
                if trusts or key == "role"
                else _with_texts(entry, lambda text: text.translate(self._signs))
                for key, entry in message.items()
            }
            for message, trusts in zip(chat, trusted, strict=True)
        ]
        if without_signs == chat:
            return text, spans
        safe, safe_spans = render_spans(self.tokenizer, without_signs, **arguments)
        tokens = [token for _, token in self._control_in(text)]
        same = tokens == [token for _, token in self._control_in(safe)]
        return (text, spans) if same else (safe, safe_spans)

    def _with_call_form(self, message: Message) -> Message:
        """Return a message with its tool calls in the form that the template takes; other messages
        are unchanged.
        """
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list | tuple):
            return message
        content, as_object = self._call_form
        calls = [with_arguments(call, as_object) for call in calls]
        return {**message, "content": message.get("content") or content, "tool_calls": calls}

    @cached_property
    def _call_form(self) -> tuple[str | None, bool]:
        """The content of a message that only calls tools, and whether arguments are an object: the
        first form whose arguments the template writes.
        """
        for content, as_object in (("", True), ("", False), (None, True), (None, False)):
            call = with_arguments(_CALL, as_object)
            message = {**_ASSISTANT, "content": content, "tool_calls": [call]}
            chat: list[Message] = [_USER, message, _RESULT]
            with suppress(ValueError):
                if _PLACEHOLDER in render_chat(self.tokenizer, chat, **self.arguments):
                    return content, as_object
        return "", True

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts from ``render``."""
        split_texts = [self._split_at_stand_ins(text) for text in texts]
        pieces = [piece.translate(self._originals) for text in split_texts for piece in text]
        if not pieces:
            return [[] for _ in texts]
        encoded = self.tokenizer(pieces, add_special_tokens=False, return_attention_mask=False)
        ids = iter(encoded["input_ids"])
        return [[token for _ in text for token in next(ids)] for text in split_texts]

    def plain(self, text: str) -> str:
        """Return a text from ``render`` without stand-ins."""
        return text.translate(self._originals)

    def spells_control(self, text: str) -> bool:
        """Return whether a message spells out a control token, in a text from ``render``."""
        return LONE_SURROGATE.search(text) is not None

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[range]]:
        """Return the tokens of a text from ``render_turns``, and the range of tokens that overlap
        each span.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for piece in self._split_at_stand_ins(text):
            out = self.tokenizer(
                piece.translate(self._originals),
                add_special_tokens=False,
                return_offsets_mapping=True,
            )
            ids += out["input_ids"]
            offsets += [
                (start + first, start + max(last, first + 1))
                for first, last in out["offset_mapping"]
            ]
            start += len(piece)
        firsts, lasts = zip(*offsets, strict=True) if offsets else ((), ())
        return ids, [
            range(bisect_right(lasts, first), bisect_left(firsts, last)) for first, last in spans
        ]

    def _split_at_stand_ins(self, text: str) -> list[str]:
        return [piece for piece in re.split(f"(?<={LONE_SURROGATE.pattern})", text) if piece]

    def _escape(self, text: str) -> str:
        """Return a message's text with stand-ins."""
        text = replace_lone_surrogates(text)
        tokens = self._control_in(text)
        normal = self._normalize(text)
        normal_tokens = self._control_in(normal)
        if len(normal_tokens) > len(
            tokens
        ):  # the tokenizer turns a full-width "<" into a plain one
            text = normal
            tokens = normal_tokens
        chars = list(text)
        for position, _ in tokens:
            chars[position] = self._stand_ins[chars[position]]
        return "".join(chars)

    def _control_in(self, text: str) -> list[tuple[int, str]]:
        """Return the control tokens in a text with their positions; they may overlap."""
        starts = [match.start() for match in self._first.finditer(text)]
        matches = [(start, self._any.match(text, start)) for start in starts]
        return [(start, match[0]) for start, match in matches if match]


def with_arguments(call: Any, as_object: bool, mark: str = "") -> Any:
    """Return a tool call with its arguments as an object or as JSON, and a mark among them, if
    there is one; other values are unchanged.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            value = json.loads(arguments)
            arguments = value if isinstance(value, dict) else arguments
    if mark:
        arguments = {**arguments, mark: ""} if isinstance(arguments, dict) else f"{arguments}{mark}"
    if not as_object and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a nested value with a function applied to each text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            _with_texts(key, change): _with_texts(entry, change) for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_texts(entry, change) for entry in value]
    return value


_MAX_CACHED = 1000


class TurnTemplate:
    """The tokens between two texts of the assistant, as the chat template writes them.

    Args:
        tokenizer: with a chat template.
        arguments: further arguments of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self._chats = ChatEncoder(tokenizer, arguments)
        self._cache: dict[str, list[int]] = {}

    def tokens(self, messages: Sequence[Message], response: Sequence[int]) -> Tensor:
        """Return the tokens between two turns, [T] int64.

        Args:
            messages: the messages between the turns, such as a user's turn or the results of tools.
            response: the tokens that the policy sampled before. If it sampled the token that ends
                its turn, the result does not repeat it.

        Raises:
            ValueError: the template leaves a text out, or refuses the messages.
        """
        try:
            key = json.dumps(messages, sort_keys=True, default=str)
        except RecursionError as error:
            raise ValueError(
                "messages must not be nested so deeply: the limit is a few hundred levels."
            ) from error
        if key not in self._cache:
            if len(self._cache) > _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = self._chats.encode([self._between(messages)])[0]
        turn = self._cache[key]
        return torch.tensor(turn[turn[:1] == list(response[-1:]) :], dtype=torch.int64)

    def text(self, messages: Sequence[Message]) -> str:
        """Return the same as text, including the end of the assistant's turn."""
        return self._chats.plain(self._between(messages))

    def chat_text(self, chat: Sequence[Message]) -> str:
        """Return a chat as text, see ``ChatEncoder.render``."""
        return self._chats.plain(self._chats.render(chat))

    def _between(self, messages: Sequence[Message]) -> str:
        """Return what ``ChatEncoder.render`` writes after the assistant's text."""
        chat = [_USER, {**_ASSISTANT, "content": _PLACEHOLDER}, *messages]
        try:
            return self._chats.render(chat, add_generation_prompt=True).partition(_PLACEHOLDER)[2]
        except ValueError:
            names = [message.get("name") for message in messages if message["role"] == "tool"]
            with suppress(ValueError):
                if names:
                    return self._after_calls(messages, names)
            raise

    def _after_calls(self, messages: Sequence[Message], names: Sequence[Any]) -> str:
        """Return the same for a template that accepts results only after their calls."""
        calls = [{**_CALL, "function": {**_FUNCTION, "name": name}} for name in names]
        chat: list[Message] = [_USER, {**_ASSISTANT, "content": "", "tool_calls": calls}]
        before = self._chats.render(chat).rstrip()
        text = self._chats.render([*chat, *messages], add_generation_prompt=True)
        if not text.startswith(before):
            raise ValueError("the chat template must write a turn with calls as it was sampled.")
        ends = (token for token in self._chats.control if before.endswith(token))
        return next(ends, "") + text[len(before) :]
