"""Tools: plain functions that the policy may call, and the calls in its turns. Does not import
torch.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchrl_grpo.host.event_loop import wait_for_result
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.images import Content, message_content

_MAX_RESULT_CHARACTERS = 8192
_MAX_CALLS = 16
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class ToolCall:
    """Tool call as the policy wrote it; ``error`` says why it cannot be parsed."""

    name: str
    arguments: Any
    error: str = ""


Parser = Callable[[str], Sequence[ToolCall]]
"""Function from the policy's text, including special tokens, to its calls."""


CallFormat = str | Mapping[str, Any]
"""Format in which a chat template writes calls: a response template of transformers, or a name in
``integrations/call_formats.py``; "" if the template writes no calls.
"""


def parse_tool_calls(text: str) -> list[ToolCall]:
    r"""Return the tool calls in a turn of the policy in any format with distinctive markers, such as
    those of Hermes, Llama 3 and Mistral. A call inside a thought is a draft and not returned.

    >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    >>> parse_tool_calls('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]</s>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    >>> parse_tool_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>')
    [ToolCall(name='add', arguments={'a': 1}, error='')]
    >>> parse_tool_calls("no call")
    []
    """
    return [*load_extra("parse_turn")(text).calls]


def tool_message(name: str, content: Content, number: int = 0) -> dict[str, Any]:
    """Return a tool's result as a message; its id has the form that Mistral's templates require."""
    return {"role": "tool", "name": name, "content": content, "tool_call_id": f"call{number:05d}"}


class WithCalls(Protocol):
    """A dialog, see ``tasks.base.Dialog``."""

    def calls(self, tools: Sequence[dict[str, Any]], parser: Parser | None) -> list[ToolCall]: ...


class Toolbox:
    """Functions that the policy may call.

    Args:
        functions: plain or ``async`` functions; ``transformers.utils.get_json_schema`` derives the
            schema from the signature and the docstring (with ``Args:``).
        parser: function that finds the calls in a turn; None parses the chat template's format.

    Attributes:
        schemas: JSON schemas, for the chat template.

    Raises:
        ValueError: a function has no type hint or no description for an argument, or two have the
            same name.

    >>> def add(a: int, b: int) -> int:
    ...     '''Adds two numbers. Args: a: the first. b: the second.'''
    ...     return a + b
    >>> Toolbox([add]).run(ToolCall("add", {"a": 1, "b": 2}))
    ('3', True)
    >>> Toolbox([add]).run(ToolCall("add", {"a": 1}))
    ("error: add needs the argument 'b'", False)
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], parser: Parser | None = None
    ) -> None:
        # A server's tool brings its schema.
        self.schemas = [
            getattr(function, "tool_schema", None) or _schema(function) for function in functions
        ]
        self.functions = {function.__name__: function for function in functions}
        if len(self.functions) < len(functions):
            raise ValueError(
                "env.tools must have different names, got "
                f"{[function.__name__ for function in functions]}: rename one."
            )
        self.parser = parser

    def calls(self, dialog: WithCalls) -> list[ToolCall]:
        """Return the calls in the policy's latest turn, with one error for all calls beyond the limit."""
        calls = dialog.calls(self.schemas, self.parser)
        if len(calls) > _MAX_CALLS:
            error = f"a turn may have {_MAX_CALLS} calls, so the others were not run"
            calls[_MAX_CALLS:] = [ToolCall("", None, error)]
        return calls

    def with_functions(self, functions: Mapping[str, Callable[..., Any]]) -> Toolbox:
        """Return the same tools with other functions by name, such as an object's methods."""
        other = copy.copy(self)
        other.functions = dict(functions)
        return other

    def run(self, call: ToolCall) -> tuple[Content, bool]:
        """Return the content of the message to the policy, and whether the call succeeded."""
        problem = call.error or self._problem(call)
        if problem:
            return f"error: {problem}", False
        try:
            result = wait_for_result(self.functions[call.name](**call.arguments))
            content = message_content(result, f"the result of {call.name}")
            if isinstance(content, list):
                texts = (part for part in content if part["type"] == "text")
                for part in texts:
                    part["text"] = _cut(part["text"])
                return content, True
            if content is not None:
                result = content
            elif not isinstance(result, str):
                result = json.dumps(result, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}"[:_MAX_RESULT_CHARACTERS], False
        return _cut(result), True

    def run_all(self, calls: Sequence[ToolCall]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Run the calls of a turn. Return a message for each result, and counts for metrics."""
        start = time.perf_counter()
        messages = []
        errors = 0
        for number, call in enumerate(calls):
            content, succeeded = self.run(call)
            errors += not succeeded
            messages.append(tool_message(call.name, content, number))
        seconds = time.perf_counter() - start
        return messages, {
            "tools/calls": len(messages),
            "tools/errors": errors,
            "tools/seconds": seconds,
        }

    def _problem(self, call: ToolCall) -> str:
        if call.name not in self.functions:
            return f"there is no tool {call.name!r:.100}, there are {sorted(self.functions)}"
        if not isinstance(call.arguments, dict):
            return f"the arguments of {call.name} must be an object"
        if hasattr(self.functions[call.name], "tool_schema"):  # its server checks them
            return ""
        tools = [schema["function"] for schema in self.schemas]
        schema = next(tool["parameters"] for tool in tools if tool["name"] == call.name)
        known = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in call.arguments:
                return f"{call.name} needs the argument {name!r}"
        for name, value in call.arguments.items():
            if name not in known:
                return f"{call.name} has no argument {name!r:.100}, it has {sorted(known)}"
            if not fits(value, known[name]):
                return f"the argument {name} of {call.name} must be {_expected_type(known[name])}"
        return ""


def _cut(result: str) -> str:
    """Return a result without what is too long."""
    if len(result) <= _MAX_RESULT_CHARACTERS:
        return result
    return f"{result[:_MAX_RESULT_CHARACTERS]} ... (cut)"


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether an argument, including the items of a list and the values of an object, has
    the types of its schema.
    """
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    types = _types(schema)
    if types and not any(_is(value, kind) for kind in types):
        return False
    if "enum" in schema:
        return value in schema["enum"]
    if isinstance(value, list):
        items, inner = value, schema.get("items")
    elif isinstance(value, dict):
        items, inner = list(value.values()), schema.get("additionalProperties")
    else:
        return True
    return not isinstance(inner, dict) or all(fits(item, inner) for item in items)


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type") or []
    return [types] if isinstance(types, str) else list(types)


def _expected_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {schema['enum']}"
    types = [
        *_types(schema),
        *(kind for option in schema.get("anyOf", ()) for kind in _types(option)),
    ]
    if schema.get("nullable"):
        types.append("null")
    items = schema.get("items")
    item_types = _types(items) if isinstance(items, dict) else []
    inner = f" of {' or '.join(item_types)}" if item_types else ""
    return f"of the type {' or '.join(types)}{inner}"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    name = function.__name__
    doc = inspect.getdoc(function) or ""
    names = [re.escape(parameter) for parameter in inspect.signature(function).parameters]
    full_doc = doc
    if names and re.search(r"\S[ \t]+Args:[ \t]", doc):  # all in one line
        before, _, after = doc.partition("Args:")
        parts = re.sub(rf"\s*\b({'|'.join(names)}):", r"\n    \1:", after)
        full_doc = f"{before.strip()}\n\nArgs:{parts}\n"
    twin = _with_doc(function, full_doc)
    try:
        schema: dict[str, Any] = get_json_schema(twin)
    except Exception as error:
        raise ValueError(
            f"env.tools: {name} must have type hints and a docstring that describes each argument "
            f"under 'Args:' (transformers: {str(error).partition(chr(10))[0].rstrip('.!')}): write "
            "them as in examples/my_tools.py."
        ) from error
    return schema


def _with_doc(function: Callable[..., Any], doc: str) -> Callable[..., Any]:
    def twin() -> None: ...

    twin.__name__ = function.__name__
    twin.__doc__ = doc
    twin.__module__ = function.__module__
    twin.__annotations__ = inspect.get_annotations(function, eval_str=True)
    twin.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return twin
