"""Checks on a row of a data set, and its conversion to a text, a chat, or a template with the
columns filled in.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchrl_grpo.tasks.base import Message
from torchrl_grpo.tasks.sources import Row

_FIELD = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^{}]+)\}")


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    r"""Return a template with its fields replaced by a row's columns.

    ``{name}`` is the column, with a format if there is one (``{name:.2f}``), and ``{{name}}`` the
    text ``{name}``. Other braces stay as they are.

    Raises:
        ValueError: a field names no column.

    >>> fill_template(r"{question} Write {{n}} as \boxed{} or {1}.", {"question": "1+1?"})
    '1+1? Write {n} as \\boxed{} or {1}.'
    """

    def fill(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        column = name if name in row else re.split(r"[.:!\[]", name, maxsplit=1)[0]
        if column in row:
            if row[column] is None:
                raise ValueError(
                    f"must have a value in the column {column!r}, which prompt_template uses: give "
                    "it one."
                )
            return str(row[name]) if name in row else _formatted(match[0], row)
        if name.isidentifier():
            close = difflib.get_close_matches(name, list(row), 1)
            hint = (
                f"did you mean {{{close[0]}}}?"
                if close
                else f"write {{{{{name}}}}} for the text {match[0]}."
            )
            raise ValueError(
                f"must have the column {match[0]} of prompt_template, it has {sorted(row)}: {hint}"
            )
        return match[0]

    return _FIELD.sub(fill, template)


def _formatted(field: str, row: Mapping[str, Any]) -> str:
    try:
        return field.format_map(row)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"must fit the format of {field} in prompt_template ({error}): use the column alone."
        ) from error


def checked_text(row: Row, column: str) -> str:
    """Return the text in a column.

    Raises:
        ValueError: there is none.
    """
    value = row[column]
    if isinstance(value, str) and value.strip():
        return value
    actual = f"{value!r:.80}"
    if value is None:
        names = sorted(name for name, value in row.items() if value is not None)
        actual = f"none (the row has {names})"
    raise ValueError(
        f"must have text in the column {column!r}, it has {actual}: write text there, or "
        "remove the row."
    )


def first_turn(chat: Sequence[Any]) -> int:
    """Return the index of the assistant's first message in a chat, its length where there is none.

    >>> first_turn([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}])
    1
    """
    turns = (
        index
        for index, message in enumerate(chat)
        if isinstance(message, dict) and message.get("role") == "assistant"
    )
    return next(turns, len(chat))


def without_nones(value: Any) -> Any:
    """Return a nested value without keys that have no value: a parquet file gives each row the keys
    of all rows.

    >>> without_nones({"arguments": {"city": "Rome", "x": None}, "name": None})
    {'arguments': {'city': 'Rome'}}
    """
    if isinstance(value, dict):
        return {key: without_nones(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nones(entry) for entry in value]
    return value


def checked_messages(chat: Sequence[Any], column: str) -> list[Message]:
    """Return the messages in a column. A message that only calls tools may have no content.

    Raises:
        ValueError: they are something else.
    """
    messages = []
    for message in chat:
        clean = without_nones(message)
        calls = clean.get("tool_calls", []) if isinstance(clean, dict) else None
        fits = isinstance(calls, list) and all(map(_is_call, calls))
        if fits and calls and clean.get("role") == "assistant":
            clean.setdefault("content", "")
        if not fits or not all(isinstance(clean.get(key), str) for key in ("role", "content")):
            more = "" if fits or calls is None else " and tool_calls that name functions"
            raise ValueError(
                f"must have chat messages in the column {column!r}, each with role{more} and "
                f"content as text, it has {message!r:.80}: fix the row, or remove it."
            )
        messages.append(clean)
    return messages


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def checked_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools in a column, as a list or as its JSON.

    Raises:
        ValueError: it has something else.
    """
    tools = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            tools = json.loads(value)
    tools = without_nones(tools)
    if not (isinstance(tools or [], list) and all(map(_is_call, tools or []))):
        raise ValueError(
            f"must have a list of tools in the column {column!r}, each the JSON schema of a "
            f"function with its name, it has {value!r:.80}: fix the row, or rename the column."
        )
    return tools or []


def checked_demonstration(chat: Sequence[Any], column: str) -> list[Message]:
    """Messages after a prompt, the assistant's first and last.

    Raises:
        ValueError: they are something else.
    """
    messages = checked_messages(chat, column)
    if not messages or {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise ValueError(
            f"must have in the column {column!r} what the assistant is to answer to the prompt, "
            f"ending with the assistant's, it has {list(chat[-1:])!r:.80}: fix the row, or remove "
            "it."
        )
    return messages


def checked_chat(chat: Sequence[Any], column: str, template: str | None) -> list[Message]:
    """Return the chat in a column, which ends before the policy's turn.

    Raises:
        ValueError: it is none, or there is a template, which it cannot be filled in.
    """
    if template is not None:
        raise ValueError(
            f"must have text in the column {column!r} with prompt_template, it has a list of "
            "messages: leave the template out."
        )
    messages = checked_messages(chat, column)
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            f"must have chat messages in the column {column!r} that end before the assistant's, it "
            f"has {list(chat[-1:])!r:.80}: remove the last message, which the policy is to write."
        )
    return messages
