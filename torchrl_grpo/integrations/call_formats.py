"""Formats in which models write thoughts and tool calls, and a parser for turns in these formats. Does
not import torch.

A run has one format: the tokenizer's response template or, without one, the first row of
``FORMATS`` that parses a call as the chat template writes it (``recognize``). If the chat template
writes no calls, all formats in ``ANY`` are recognized.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from torchrl_grpo.host.text import clip, printable
from torchrl_grpo.tools.toolbox import CallFormat, ToolCall, fits

Reader = Callable[[str, "re.Match[str]"], tuple[list[ToolCall], int]]
"""Function that takes a text and the match of a call's beginning, and returns the calls and the
position after them.
"""

_MAX_ERROR_CHARACTERS = 300
_CONTROL = re.compile(r"<\|[^|<>]*\|>|<\uff5c[^\uff5c<>]*\uff5c>|</s>|\[/?THINK\]")
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHON_NAME = re.compile(
    r"""("{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"|[\w$@][\w$@./-]*(?=\s*[(=])",
    re.S,
)
"""A string (group 1), or the name of a tool or an argument."""
_PYTHON_TO_JSON = {"True": "true", "False": "false", "None": "null"}


def _malformed(name: str | None, reason: object) -> ToolCall:
    return ToolCall(name or "", None, f"the call cannot be read: {clip(str(reason), 200)}")


def _name_of(match: re.Match[str]) -> str | None:
    """Return the function's name from whichever group matched."""
    return next((value for value in match.groupdict().values() if value), None)


def _read_json(closing: str, is_bare: bool = False) -> Reader:
    """Return a reader of JSON: the arguments, if the function's name precedes them; otherwise a call or
    a list of calls.

    Args:
        closing: pattern of the end of the call; the end of the turn also ends it.
        is_bare: whether only its keys distinguish a call from other JSON. Calls are then separated
            by semicolons.
    """
    close = re.compile(rf"\s*(?:{closing}|\Z)")
    separator = re.compile(r"\s*;\s*(?=\{)")

    def read(text: str, match: re.Match[str]) -> tuple[list[ToolCall], int]:
        name = _name_of(match)
        start = len(text) - len(text[match.end() :].lstrip())
        calls: list[ToolCall] = []
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
            calls += [ToolCall(name, _arguments(value))] if name else _calls_in(value)
            while is_bare and (match := separator.match(text, end)):  # type: ignore[assignment]
                value, end = json.JSONDecoder().raw_decode(text, match.end())
                calls += _calls_in(value)
            closed = close.match(text, end)
            if closed is None:
                raise ValueError("it has text after the JSON")
            return calls, closed.end()
        except (ValueError, RecursionError) as error:
            end = close.search(text, start).end()  # type: ignore[union-attr]
            return [_malformed(name, f"it is not JSON ({error})")], end

    def read_bare(text: str, match: re.Match[str]) -> tuple[list[ToolCall], int]:
        is_call = '"name"' in text and '"parameters"' in text
        return read(text, match) if is_call or match[0].strip() else ([], match.end() + 1)

    return read_bare if is_bare else read


def _arguments(value: Any) -> Any:
    return {} if value is None else value


def _calls_in(value: Any) -> list[ToolCall]:
    """Return the calls in a JSON value."""
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        entry = entry if isinstance(entry, dict) else {}
        name = entry.get("name", entry.get("tool_name"))
        if isinstance(name, str):
            arguments = entry.get("arguments", entry.get("parameters"))
            calls.append(ToolCall(name, _arguments(arguments)))
        else:
            calls.append(_malformed(None, 'it must be {"name": ..., "arguments": {...}}'))
    return calls


def _read_tags(parameter: str, closing: str) -> Reader:
    """Return a reader of arguments in tags, with values as text.

    Args:
        parameter: pattern of an argument, with the groups ``key`` and ``value``.
        closing: pattern of the end of the call.
    """
    argument = re.compile(rf"\s*{parameter}", re.S)
    close = re.compile(rf"\s*(?:{closing})")

    def read(text: str, match: re.Match[str]) -> tuple[list[ToolCall], int]:
        name = _name_of(match)
        end = match.end()
        arguments = {}
        while item := argument.match(text, end):
            arguments[item["key"].strip()] = item["value"]
            end = item.end()
        closed = close.match(text, end)
        if name and closed:
            return [ToolCall(name.strip(), arguments)], closed.end()
        closed = close.search(text, end)
        reason = "its name, arguments or end differ from the chat template's format"
        return [_malformed(name, reason)], closed.end() if closed else len(text)

    return read


def _read_gemma(quote: str, closing: str) -> Reader:
    """Return a reader of objects with unquoted keys and special quotes around strings.

    Args:
        quote: marker before and after a string.
        closing: marker at the end of the call.
    """

    def read(text: str, match: re.Match[str]) -> tuple[list[ToolCall], int]:
        body, closed, _ = text[match.end() :].partition(closing)
        end = match.end() + len(body) + len(closed)
        parts = body.split(quote)
        parts[::2] = [re.sub(r"(?<=[{,])\s*([\w.-]+)\s*:", r'"\1":', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        name = _name_of(match)
        try:
            if name is None:
                raise ValueError("it names no tool")
            return [ToolCall(name, json.loads("".join(parts)))], end
        except (ValueError, RecursionError) as error:
            return [_malformed(name, error)], end

    return read


def _read_python(closing: str) -> Reader:
    """Return a reader of calls in Python syntax, in a list or one after another. Names need not be
    Python's (``get-weather``, ``from``).
    """
    close = re.compile(rf"\s*(?:{closing}|\Z)")

    def read(text: str, match: re.Match[str]) -> tuple[list[ToolCall], int]:
        closed = close.search(text, match.end())
        assert closed is not None
        names: dict[str, str] = {}  # Python's names for others

        def renamed(token: re.Match[str]) -> str:
            name = token[0]
            parts = name.split(".")
            is_python = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
            return name if token[1] or is_python else names.setdefault(name, f"_name_{len(names)}")

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes in strings
                code = _PYTHON_NAME.sub(renamed, text[match.end() : closed.start()].strip())
                module = ast.parse(code)
            nodes: list[ast.expr] = []
            for statement in module.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                nodes += value.elts if isinstance(value, ast.List) else [value] if value else []
            originals = {new: name for name, new in names.items()}
            calls = [_python_call(node, originals) for node in nodes]
            if not calls:
                raise ValueError("it must be name(argument=value)")
            return calls, closed.end()
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            return [_malformed(None, error)], closed.end()

    return read


def _python_call(node: ast.expr, names: Mapping[str, str]) -> ToolCall:
    """Return a call; ``names`` has the names that Python's stand for."""
    if not isinstance(node, ast.Call) or node.args or any(key.arg is None for key in node.keywords):
        raise ValueError("it must be name(argument=value)")
    arguments = {
        names.get(str(key.arg), str(key.arg)): _python_value(key.value) for key in node.keywords
    }
    name = ast.unparse(node.func)
    return ToolCall(names.get(name, name), arguments)


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal, which may contain JSON constants."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    return ast.literal_eval(node)


@dataclass(frozen=True)
class Format:
    """Format of thoughts and tool calls.

    Attributes:
        call: pattern of the beginning of a call, with a group for the function's name if it is there.
        read: reads the calls that begin at a match of ``call``.
        thought: patterns of the beginning and the end of a thought.
        is_typed: whether arguments have types; otherwise the tool's schema determines them.
        non_text: pattern of the parts of a turn, besides control tokens, that are not text.
    """

    call: str
    read: Reader
    thought: tuple[str, str] = (
        r"<think>|\[THINK\]|<seed:think>",
        r"</think>|\[/THINK\]|</seed:think>",
    )
    is_typed: bool = True
    non_text: str = r"(?!)"


_AFTER = r"(?:\A|(?<=</think>))\s*"
"""Position where a call without a marker may begin."""
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
_NAMED_PARAMETER = (
    r'<{0}parameter name="(?P<key>[^"\n]+)"[^>\n]*>(?P<value>.*?)</{0}parameter>'
    r"(?=\s*(?:<{0}parameter|</{0}invoke>))"
)
_DSML = "\uff5cDSML\uff5c"
_DEEP = {
    name: f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("call\u2581begin", "call\u2581end", "sep", "calls\u2581begin")
}
_BEGIN, _END, _SEP, _ALL = _DEEP.values()

FORMATS: dict[str, Format] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, Granite 4
    "hermes": Format("<tool_call>", _read_json("</tool_call>")),
    # [TOOL_CALLS][{...}], [TOOL_CALLS]name[ARGS]{...}, [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}
    "mistral": Format(
        r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]|(?=\{)))?",
        _read_json(r"(?=\[TOOL_CALLS\])|</s>|<\|[a-z_]+\|>"),
    ),
    # {"name": ..., "parameters": {...}} as the whole turn, or after <|python_tag|>
    "llama": Format(
        rf"<\|python_tag\|>|{_AFTER}(?=\{{)", _read_json(r"<\|[a-z_]+\|>", is_bare=True)
    ),
    # <TOOLCALL>[{...}]</TOOLCALL>: Nemotron 2 and Nano
    "nemotron": Format("<TOOLCALL>", _read_json("</TOOLCALL>")),
    # <|tool_call|>[{...}]<|/tool_call|>: Granite 3, Phi-4 mini
    "granite": Format(r"<\|tool_call\|>", _read_json(r"<\|/tool_call\|>|<\|[a-z_]+\|>")),
    # <tool_calls>[{...}]</tool_calls>: Jamba
    "jamba": Format("<tool_calls>", _read_json("</tool_calls>")),
    # <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>: Command
    "command": Format(
        r"<\|START_ACTION\|>",
        _read_json(r"<\|END_ACTION\|>"),
        (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    ),
    # DeepSeek V3 and R1 (function, name and a block of JSON), V3.1 (name and JSON)
    "deepseek": Format(
        rf"{_BEGIN}(?:\s*(?:function{_SEP})?(?P<name>[^<\n]+?)\s*(?:{_SEP}|\n```json\n))?",
        _read_json(rf"(?:```)?\s*{_END}"),
    ),
    # <|DSML|invoke name="..."><|DSML|parameter name="...">...: DeepSeek V3.2 and 4
    "deepseek_dsml": Format(
        rf'<{_DSML}invoke(?:\s+name="(?P<name>[^"\n]+)"\s*>)?',
        _read_tags(_NAMED_PARAMETER.format(_DSML), f"</{_DSML}invoke>"),
        is_typed=False,
    ),
    # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>: Kimi
    "kimi": Format(
        r"<\|tool_call_begin\|>(?:\s*(?:functions\.)?(?P<name>[\w./-]+?)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>)?",
        _read_json(r"<\|tool_call_end\|>"),
    ),
    # harmony: a recipient in the header of a message, before or after its channel
    "harmony": Format(
        r"(?:<\|start\|>)?(?:assistant)? ?to=functions\.(?P<name>[\w./-]+)\s*<\|channel\|>[^<]*"
        r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
        r"|<\|channel\|>[^<]*?to=functions\.(?P<other>[\w./-]+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        _read_json(r"<\|(?:call|end|return)\|>"),
        (r"<\|channel\|>analysis[^<]*<\|message\|>", r"<\|end\|>"),
        non_text=r"(?s)<\|channel\|>analysis.*?(?:<\|end\|>|\Z)|<\|start\|>assistant|<\|channel\|>\w+",
    ),
    # [name(argument=value)] between marks: LFM2
    "lfm2": Format(r"<\|tool_call_start\|>", _read_python(r"<\|tool_call_end\|>")),
    # name(argument=value), a line each: Olmo 3
    "olmo": Format("<function_calls>", _read_python("</function_calls>")),
    # [name(argument=value)] as the whole turn: Llama 4
    "llama4": Format(
        rf"{_AFTER}(?:<\|python_start\|>\s*)?(?=\[\s*[A-Za-z_][\w./-]*\()",
        _read_python(r"<\|[a-z_]+\|>"),
    ),
    # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder,
    # Qwen 3.5, Nemotron 3, Seed-OSS
    "qwen_xml": Format(
        r"<(?:seed:)?tool_call>(?:\s*<function=(?P<name>[^>\n]+)>)?|<function=(?P<other>[^>\n]+)>",
        _read_tags(_PARAMETER, r"</function>(?:\s*</(?:seed:)?tool_call>)?"),
        is_typed=False,
    ),
    # <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>: GLM 4.5 and later
    "glm": Format(
        r"<tool_call>(?:\s*(?P<name>[^\s<>{}()]+)\s*(?=<arg_key>|</tool_call>))?",
        _read_tags(
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            r"(?=\s*(?:<arg_key>|</tool_call>))",
            "</tool_call>",
        ),
        is_typed=False,
    ),
    # name and {...} on the next line, as a whole message: GLM 4
    "glm4": Format(
        rf"(?:<\|assistant\|>\s*|{_AFTER})(?P<name>[\w./-]+)[ \t]*\n\s*(?=\{{)",
        _read_json(r"(?=<\|)"),
    ),
    # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>: Gemma 4
    "gemma": Format(
        r"<\|tool_call>(?:call:(?P<name>[\w./-]+))?",
        _read_gemma('<|"|>', "<tool_call|>"),
        (r"<\|channel>thought\n", r"<channel\|>"),
    ),
    # <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>: FunctionGemma
    "functiongemma": Format(
        r"<start_function_call>(?:call:(?P<name>[\w./-]+))?",
        _read_gemma("<escape>", "<end_function_call>"),
        is_typed=False,
    ),
    # <invoke name="..."><parameter name="...">value</parameter></invoke>: MiniMax
    "minimax": Format(
        r'<invoke(?:\s+name="(?P<name>[^"\n]+)"\s*>)?',
        _read_tags(_NAMED_PARAMETER.format(""), "</invoke>"),
        is_typed=False,
    ),
}
"""Formats by name. If several can parse a template's call, the first one is used."""

ANY = ("hermes", "mistral", "llama", "nemotron", "granite", "deepseek", "kimi", "lfm2")
"""Formats that are recognized if the chat template writes no calls: their markers differ."""


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy.

    Attributes:
        calls: its tool calls.
        content: the text before the first call, or the whole text, including thoughts in tags.
        speech: the turn with special tokens, and with spaces in place of thoughts.
        thought: the thoughts before the first call.
        spoken: ``content`` without thoughts.
    """

    calls: Sequence[ToolCall]
    content: str
    speech: str
    thought: str
    spoken: str


def parse_turn(
    text: str,
    prefill: str = "",
    call_format: CallFormat = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> ParsedTurn:
    """Parse a turn of the policy. A call inside a thought is a draft and not returned. An unclosed
    thought extends to the end of the turn.

    Args:
        text: the turn with its special tokens.
        prefill: the beginning of the turn that is part of the prompt, see ``prefill_of``.
        call_format: the run's format, see ``recognize``; by default all formats in ``ANY``.
        tools: JSON schemas, which determine the types of untyped arguments.

    >>> parse_turn("2</think>4", "<think>").speech
    '         4'
    """
    names = [call_format] if isinstance(call_format, str) and call_format in FORMATS else ANY
    turn = _parse(text, prefill, [FORMATS[name] for name in names], tools)
    if isinstance(call_format, str):
        return turn
    calls, thought, content = _by_template(prefill + text, call_format, tools)
    return ParsedTurn(calls, content, turn.speech, thought, content)


def _parse(
    text: str, prefill: str, formats: Sequence[Format], tools: Sequence[Mapping[str, Any]]
) -> ParsedTurn:
    text = prefill + text
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    speech = spoken = ""
    end: int | None = None  # of the text before the first call
    form = formats[0]
    position = 0
    marks = {  # in the order in which they are preferred at one position
        (rank, index): re.compile(pattern)
        for index, each in enumerate(formats)
        for rank, pattern in enumerate((each.call, each.thought[0]))
    }
    nexts: dict[tuple[int, int], re.Match[str] | None] = {}
    while True:
        for key, mark in marks.items():
            match = nexts.get(key)
            if key not in nexts or (match is not None and match.start() < position):
                nexts[key] = mark.search(text, position)
        openings = [(match.start(), *key, match) for key, match in nexts.items() if match]
        start, is_thought, index, match = min(
            openings, key=lambda opening: opening[:3], default=(len(text), 0, 0, None)
        )
        speech += text[position:start]
        if end is None:
            spoken += text[position:start]
        if match is None:
            break
        if is_thought:
            closed = re.compile(formats[index].thought[1]).search(text, match.end())
            position = closed.end() if closed else len(text)
            speech += " " * (position - start)
            if end is None:
                inner = text[match.end() : closed.start() if closed else len(text)]
                thoughts.append(_CONTROL.sub("", inner).strip())
            continue
        new_calls, position = formats[index].read(text, match)
        speech += text[start:position]
        if new_calls and end is None:
            end, form = start, formats[index]
        elif end is None:
            spoken += text[start:position]
        calls += (
            new_calls if formats[index].is_typed else [_typed(call, tools) for call in new_calls]
        )
    content = _text_of(text[len(prefill) : end], form)
    thought = "\n".join(filter(None, thoughts))
    return ParsedTurn(calls, content, speech[len(prefill) :], thought, _text_of(spoken, form))


def _text_of(text: str, form: Format) -> str:
    return _CONTROL.sub("", re.sub(form.non_text, "", text)).strip()


def _typed(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Return a call with its arguments converted to the types in its tool's schema."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = [tool.get("parameters") for tool in functions if tool.get("name") == call.name]
    properties = (schemas[0] or {}).get("properties", {}) if schemas else {}
    if not isinstance(call.arguments, dict):
        return call
    typed = {
        key: _value(value, properties.get(key)) if isinstance(value, str) else value
        for key, value in call.arguments.items()
    }
    return ToolCall(call.name, typed, call.error)


def _value(text: str, schema: Any) -> Any:
    """Return a text's value as one of the schema's types; the text itself if it is none of them."""
    if not isinstance(schema, Mapping) or not {"type", "anyOf", "enum"} & schema.keys():
        return text
    try:
        value = json.loads(_PYTHON_TO_JSON.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, str) and fits(value, schema) else text


def _by_template(
    text: str, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[ToolCall], str, str]:
    """Return the calls, the thought and the text of a turn, by a response template."""
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, dict(template), prefix="", tools=[*map(dict, tools)])
        calls = []
        for entry in message.get("tool_calls") or ():
            function = entry.get("function", entry)
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            calls.append(ToolCall(str(function["name"]), _arguments(arguments)))
    # All errors that the template's patterns and parsers raise on unexpected text.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [_malformed(None, printable(str(error)))], "", ""
    thought = message.get("thinking") or message.get("reasoning_content") or ""
    return calls, str(thought), str(message.get("content") or "").strip()


def prefill_of(prompt: str, call_format: CallFormat = "") -> str:
    """Return the end of a prompt that already belongs to the policy's turn: the text after the anchor
    of a response template; otherwise the beginning of a thought, if there is one.
    """
    if isinstance(call_format, str):
        match = _OPENED.search(prompt)
        return match[0] if match else ""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return str(load_response_template(dict(call_format)).truncate_past_last_anchor(prompt))
    except (ValueError, TypeError):  # it is not a response template
        return ""


_ARGUMENTS: dict[str, Any] = {
    "text": 'two "lines" \\ here,\nsome < others, \u00e9\u4f60',
    "count": 3,
    "ratio": 0.5,
    "flag": True,
    "items": [1, "b"],
    "options": {"a": {"b": "c"}},
}
_TYPES = ("string", "integer", "number", "boolean", "array", "object")
_PROPERTIES = {key: {"type": kind} for key, kind in zip(_ARGUMENTS, _TYPES, strict=True)}
_PROBE: dict[str, Any] = {
    "name": "probe",
    "description": "?",
    "parameters": {"type": "object", "properties": _PROPERTIES},
}
_TURN = "0turn0"  # no mark begins like it


def recognize(
    render: Callable[[Sequence[dict[str, Any]]], str], template: Mapping[str, Any] | None
) -> CallFormat:
    """Return the format of a chat template's calls. The template renders a call with arguments of each
    type, and the format must parse it correctly.

    Args:
        render: renders a chat with the template; raises ``ValueError`` if the template omits calls.
        template: the tokenizer's response template, which takes precedence.

    Returns:
        the response template, a name in ``FORMATS``, or "" if the template writes no calls.

    Raises:
        ValueError: the format is unknown, or the response template cannot parse it.
    """
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": "probe", "arguments": _ARGUMENTS},
    }
    user = {"role": "user", "content": "?"}
    try:
        text = render([user, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except ValueError:
        return template or ""
    try:
        before = commonprefix([text, render([user, {"role": "assistant", "content": _TURN}])])  # noqa: RUF071
    except ValueError:
        before = ""
    if (mark := before.rfind("<")) > before.rfind(">"):  # the beginning of different marks
        before = before[:mark]
    expected = [ToolCall("probe", _ARGUMENTS)]
    tools = [{"type": "function", "function": _PROBE}]
    formats: list[CallFormat] = [template] if template else [*FORMATS]
    for each in formats:
        prefill = prefill_of(before, each)
        if parse_turn(text[len(before) :], prefill, each, tools).calls == expected:
            return each
    reader = "the tokenizer's response_template" if template else "no known format"
    raise ValueError(
        f"model.chat_template must write tool calls that can be parsed, but {reader} can parse "
        f"{printable(text[len(before) :])!r:.{_MAX_ERROR_CHARACTERS}}: set env.tool_parser to a "
        "function that parses the calls, or use another template or model."
    )
