"""Tools: parsing of calls, checks of arguments, and replies to the policy."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tools import Toolbox, ToolCall, parse_tool_calls

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
TEXT = json.dumps(CALL)


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def shout(text: str) -> str:
    """Says it louder. Args: text: what to say."""
    return text.upper()


def broken(text: str) -> str:
    """Fails.

    Args:
        text: unused.
    """
    raise KeyError(text)


def long(text: str) -> str:
    """Says it ten thousand times.

    Args:
        text: what to say.
    """
    return text * 10_000


def leaves(text: str) -> str:
    """Ends the process.

    Args:
        text: unused.
    """
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{TEXT}\n</tool_call><|im_end|>", [ToolCall("add", {"a": 1, "b": 2})]),
        (
            f"Let me see.\n<tool_call>{TEXT}</tool_call>\n<tool_call>{TEXT}</tool_call>",
            [ToolCall("add", {"a": 1, "b": 2})] * 2,
        ),
        (f"<tool_call>{TEXT}", [ToolCall("add", {"a": 1, "b": 2})]),
        (f"[TOOL_CALLS] [{TEXT}]</s>", [ToolCall("add", {"a": 1, "b": 2})]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>', [ToolCall("add", {"a": 1, "b": 2})]),
        (
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}',
            [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})],
        ),
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
            [ToolCall("add", {"a": 1})],
        ),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}<|eot_id|>',
            [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})],
        ),
        ("The sum is 3.<|im_end|>", []),
        ('{"answer": 3}', []),
        ("", []),
    ],
)
def test_calls_are_found_in_the_forms_of_three_families(text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == calls


HERMES = f"<tool_call>{TEXT}</tool_call>"
QUOTING = '<tool_call>{"name": "add", "arguments": {"a": "<think>1</think>"}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": "<think>1</think>"}}'


@pytest.mark.parametrize(
    ("prefill", "text", "calls"),
    [
        ("", f"<think>I could write {HERMES}, not needed.</think>\n#### 5", 0),
        ("<think>\n", f"I could write {HERMES}, not needed.</think>\n#### 5", 0),
        ("<think>\n\n</think>\n\n", f"The call: {HERMES}", 1),
        ("", f"<think>Plan: {HERMES}</think>\n{HERMES}<|im_end|>", 1),
        ("", f"Well. <think>{HERMES}</think>{HERMES}<think>{HERMES}</think>", 1),
        ("", "<think>The <tool_call> tag is not needed.</think>\n#### 5", 0),
        ("", f"<think>Without an end {HERMES}<|im_end|>", 0),
        ("", f"[THINK][TOOL_CALLS][{TEXT}][/THINK]3</s>", 0),
        ("", f"[THINK]Add.[/THINK][TOOL_CALLS][{TEXT}]</s>", 1),
        ("", QUOTING, 1),
        ("<think>", f"Quote it.</think>{QUOTING}{QUOTING}", 2),
        ("", LLAMA, 1),
        ("<think>", f"Quote it.</think>\n{LLAMA}", 1),
        ("", LLAMA.replace('{"name"', '<|python_tag|>{"name"'), 1),
    ],
)
def test_a_call_drafted_in_a_thought_is_not_made(prefill: str, text: str, calls: int) -> None:
    dialog = Dialog(Problem("1+2=?", "3"), [text], raw=text, prefill=prefill)
    assert len(dialog.speech) == len(text)
    found = dialog.calls()
    assert len(found) == calls and not any(call.error for call in found)
    quoted = ["<think>1</think>"] * calls
    if "<think>1" in text:
        assert [call.arguments["a"] for call in found] == quoted


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>add(1, 2)</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>3</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        f"<tool_call>{TEXT} and more</tool_call>",
        "[TOOL_CALLS]add[ARGS]1, 2",
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str) -> None:
    [call] = parse_tool_calls(text)
    assert call.error and Toolbox([add]).run(call) == (f"error: {call.error}", False)


@pytest.mark.parametrize(
    ("name", "arguments", "reply", "well"),
    [
        ("add", {"a": 1, "b": 2}, "3", True),
        ("add", {"a": 1}, "1", True),
        ("add", {}, "error: add needs the argument 'a'", False),
        ("add", {"a": "1"}, "error: the argument a of add must be of the type integer", False),
        ("add", {"a": True}, "error: the argument a of add must be of the type integer", False),
        ("add", {"a": 1, "c": 2}, "error: add has no argument 'c', it has ['a', 'b']", False),
        ("add", [1, 2], "error: the arguments of add must be an object", False),
        ("shout", {"text": "ab"}, "AB", True),
        ("broken", {"text": "ab"}, "error: KeyError: 'ab'", False),
        ("leaves", {"text": "ab"}, "error: SystemExit: 3", False),
        (
            "sub",
            {"a": 1},
            "error: there is no tool 'sub', there are ['add', 'broken', 'leaves', 'shout']",
            False,
        ),
    ],
)
def test_the_policy_is_told_the_result_or_what_is_wrong(
    name: str, arguments: Any, reply: str, well: bool
) -> None:
    assert Toolbox([add, shout, broken, leaves]).run(ToolCall(name, arguments)) == (reply, well)


def pick(
    count: int | None = None,
    names: list[str] | None = None,
    kind: Literal["a", "b"] = "a",
    either: int | str = 0,
    sizes: dict[str, int] | None = None,
) -> str:
    """GatherIndex.

    Args:
        count: how many.
        names: of what.
        kind: of which kind.
        either: a number or a text.
        sizes: by name.
    """
    return "picked"


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("count", None, ""),
        ("count", 3, ""),
        ("count", "three", "of the type integer or null"),
        ("count", True, "of the type integer or null"),
        ("names", ["a"], ""),
        ("names", "a", "of the type array or null of string"),
        ("names", [1], "of the type array or null of string"),
        ("kind", "b", ""),
        ("kind", "c", "one of ['a', 'b']"),
        ("either", "x", ""),
        ("either", [], "of the type integer or string"),
        ("sizes", {"a": 1}, ""),
        ("sizes", {"a": "1"}, "of the type object or null"),
    ],
)
def test_arguments_are_of_their_types_also_optional_nested_and_listed(
    argument: str, value: Any, wanted: str
) -> None:
    reply = f"error: the argument {argument} of pick must be {wanted}" if wanted else "picked"
    assert Toolbox([pick]).run(ToolCall("pick", {argument: value})) == (reply, not wanted)


def test_an_argument_of_a_servers_schema_may_be_any_of_several() -> None:
    toolbox = Toolbox([pick])
    optional = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    toolbox.schemas[0]["function"]["parameters"]["properties"]["count"] = optional
    assert [toolbox.run(ToolCall("pick", {"count": value}))[1] for value in (3, None, "3")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
        "[TOOL_CALLS]now[ARGS]null",
    ],
)
def test_a_tool_without_parameters_needs_no_arguments(text: str) -> None:
    def now() -> str:
        """Say the time."""
        return "noon"

    [call] = parse_tool_calls(text)
    assert Toolbox([now]).run(call) == ("noon", True)


def test_long_results_are_cut() -> None:
    text, well = Toolbox([long]).run(ToolCall("long", {"text": "xy"}))
    assert well and text.endswith("xy ... (cut)") and len(text) == 8192 + len(" ... (cut)")


def test_the_schema_comes_from_signature_and_docstring() -> None:
    plain, one_line = (schema["function"] for schema in Toolbox([add, shout]).schemas)
    assert plain["description"] == "Adds two numbers."
    assert plain["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "the first."},
        "b": {"type": "integer", "description": "the second."},
    }
    assert plain["parameters"]["required"] == ["a"]
    assert one_line["parameters"]["properties"] == {
        "text": {"type": "string", "description": "what to say."}
    }


def test_a_function_without_hints_or_docstring_is_refused() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(
        ValueError,
        match=r"env\.tools: bare .*docstring",
    ):
        Toolbox([bare])
    with pytest.raises(ValueError, match=r"different names, got \['add', 'add'\]"):
        Toolbox([add, add])


def test_a_turn_has_a_limited_number_of_calls() -> None:
    toolbox = Toolbox([])
    text = 100 * '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    calls = toolbox.calls(Dialog(Problem("", ""), [text], raw=text))
    assert [bool(call.error) for call in calls] == 16 * [False] + [True]
    assert "16" in calls[-1].error
