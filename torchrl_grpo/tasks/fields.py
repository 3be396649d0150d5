"""Checks of a data set's rows, and their conversion to text, a chat, or a filled-in template."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchrl_grpo.images import ImageFile, text_of
from torchrl_grpo.tasks.base import Message
from torchrl_grpo.tasks.sources import Files, Hub, Row

_FIELD = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^{}]+)\}")


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    r"""Return a template with its fields replaced by a row's columns.

    ``{name}`` is the column, optionally with a format (``{name:.2f}``), and ``{{name}}`` is the
    text ``{name}``. Other braces are unchanged.

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
                    f"must have a value in the column {column!r}, which prompt_template uses: fill "
                    "it in."
                )
            return str(row[name]) if name in row else _format(match[0], row)
        if name.isidentifier():
            close = difflib.get_close_matches(name, list(row), 1)
            hint = (
                f"did you mean {{{close[0]}}}?"
                if close
                else f"use one of them, or write {{{{{name}}}}} for the text {match[0]}."
            )
            raise ValueError(
                f"must have the column {match[0]} of prompt_template, but it has {sorted(row)}: "
                f"{hint}"
            )
        return match[0]

    return _FIELD.sub(fill, template)


def _format(field: str, row: Mapping[str, Any]) -> str:
    try:
        return field.format_map(row)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"must fit the format of {field} in prompt_template ({error}): use only the column."
        ) from error


def checked_text(row: Row, column: str) -> str:
    """Return the text in a column.

    Raises:
        ValueError: it has none.
    """
    value = row[column]
    if isinstance(value, str) and value.strip():
        return value
    actual = f"{value!r:.80}"
    if value is None:
        names = sorted(name for name, value in row.items() if value is not None)
        actual = f"none (the row has {names})"
    raise ValueError(
        f"must have text in the column {column!r}, but it has {actual}: write text there, or "
        "remove the row."
    )


def first_turn(chat: Sequence[Any]) -> int:
    """Return the index of the assistant's first message in a chat, or the chat's length without
    one.

    >>> first_turn([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}])
    1
    """
    turns = (
        index
        for index, message in enumerate(chat)
        if isinstance(message, dict) and message.get("role") == "assistant"
    )
    return next(turns, len(chat))


def checked_messages(
    chat: Sequence[Any], column: str, *, has_images: bool = False
) -> list[Message]:
    """Return the messages in a column, without their fields that are None. A message that only
    calls tools may have no content. With images, a content may be a list of parts.

    Raises:
        ValueError: it has something else.
    """
    messages = []
    for message in chat:
        cleaned = message
        if isinstance(message, dict):
            cleaned = {name: value for name, value in message.items() if value is not None}
        calls = cleaned.get("tool_calls", []) if isinstance(cleaned, dict) else None
        is_valid = isinstance(calls, list) and all(map(_is_call, calls))
        if is_valid and calls and cleaned.get("role") == "assistant":
            cleaned.setdefault("content", "")
        content = cleaned.get("content") if is_valid else None
        is_content = isinstance(content, str) or (has_images and _are_parts(content))
        if not is_content or not isinstance(cleaned.get("role"), str):
            more = "" if is_valid or calls is None else " and tool_calls that name functions"
            raise ValueError(
                f"must have chat messages in the column {column!r}, each with role{more} and "
                f"content as text, but it has {message!r:.80}: fix the row, or remove it."
            )
        messages.append(cleaned)
    return messages


def _are_parts(content: Any) -> bool:
    """Return whether a content is a list of texts and images."""
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and (
            part.get("type") == "image"
            or (part.get("type") == "text" and isinstance(part.get("text"), str))
        )
        for part in content
    )


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def checked_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools in a column, which has a list or its JSON.

    Raises:
        ValueError: it has something else.
    """
    tools = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            tools = json.loads(value)
    if not (isinstance(tools or [], list) and all(map(_is_call, tools or []))):
        raise ValueError(
            f"must have a list of tools in the column {column!r}, each the JSON schema of a "
            f"function with its name, but it has {value!r:.80}: fix the row, or rename the column."
        )
    return tools or []


def checked_images(value: Any, column: str, source: Files | Hub) -> list[ImageFile]:
    """Return the images in a column: a path, the bytes of a file, the bytes or the path of a data
    set's image, a PIL image, or a list of these. None has no image.

    Args:
        value: the value of the column.
        column: name of the column.
        source: source of the rows, which says what paths may be read.

    Raises:
        ValueError: it has something else, a path that may not be read, or a file that is not an
            image.
    """
    files = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        image = entry
        if isinstance(entry, dict):
            image = entry.get("bytes") or entry.get("path")
        if hasattr(image, "save"):
            image = ImageFile.of(image).data
        if isinstance(image, str):
            path = source.file(image)
            if path is None:
                raise ValueError(
                    f"must have images, not paths of files, in the column {column!r} "
                    f"(env.columns.images), because it is not from this machine, but it has "
                    f"{image!r:.200}: download the data set with its files (hf download "
                    "--repo-type dataset) and use the folder as env.dataset."
                )
            try:
                image = path.read_bytes()
            except OSError as error:
                raise ValueError(
                    f"must have the path of an image in the column {column!r}, relative to the "
                    f"data's file or folder, but {str(path)!r:.200} cannot be read "
                    f"({error.strerror}): fix the path."
                ) from error
        if image is None and entry is None:
            continue
        if not isinstance(image, bytes):
            raise ValueError(
                f"must have images in the column {column!r}, as paths, bytes of files, or a data "
                f"set's images, but it has {entry!r:.80}: fix the row, or remove it."
            )
        file = ImageFile(image)
        try:
            _ = file.size
        except ValueError as error:
            raise ValueError(f"has a broken file in the column {column!r}: {error}") from error
        files.append(file)
    return files


def checked_demonstration(
    chat: Sequence[Any], column: str, *, has_images: bool = False
) -> list[Message]:
    """Return the messages after a prompt; the first and the last must be the assistant's, which
    have no images.

    Raises:
        ValueError: they are something else.
    """
    messages = checked_messages(chat, column, has_images=has_images)
    if not messages or {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise ValueError(
            f"must have the assistant's reply to the prompt in the column {column!r}, beginning "
            f"and ending with a message of the assistant, but it has {list(chat[-1:])!r:.80}: fix "
            "the row, or remove it."
        )
    for message in messages:
        is_own, content = message["role"] == "assistant", message["content"]
        parts = content if isinstance(content, list) else []
        images = [part.get("image") for part in parts if part["type"] == "image"]
        if images and (is_own or None in images):
            raise ValueError(
                f"must have images before the first reply in the column {column!r}, or in messages "
                f"of whole chats (env.columns.messages) that are not the assistant's, but one of "
                f"the {message['role']} has an image: move it."
            )
        message["content"] = text_of(content) if is_own else content
    return messages


def checked_chat(
    chat: Sequence[Any], column: str, template: str | None, *, has_images: bool = False
) -> list[Message]:
    """Return the chat in a column, which ends before the policy's turn.

    Raises:
        ValueError: it is not a chat, or there is a template, which needs text.
    """
    if template is not None:
        raise ValueError(
            f"must have text in the column {column!r} with prompt_template, but it has a list of "
            "messages: leave the template out."
        )
    messages = checked_messages(chat, column, has_images=has_images)
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            f"must have chat messages in the column {column!r} that end before the assistant's "
            f"turn, but it has {list(chat[-1:])!r:.80}: remove the last message, which the policy "
            "should write."
        )
    return messages
