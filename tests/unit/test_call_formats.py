"""Formats of tool calls: each is recognized from what a chat template writes, and read back."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError
from transformers import PreTrainedTokenizerFast

from tests.support.agents import agent_task
from tests.support.call_templates import CALLS, HARMONY, TEMPLATES, chatml, rendered
from tests.support.chats import make_chat_tokenizer
from tests.support.envs import respond
from torchrl_grpo.chat.template import TurnTemplate
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.extras.view.strip import strip_of
from torchrl_grpo.integrations.agents.protocol import CHAT, Answer, parse_request
from torchrl_grpo.integrations.call_formats import FORMATS, parse_turn, recognize
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.conversations import WithTools
from torchrl_grpo.tools import Toolbox, ToolCall, tool_message

ARGUMENTS: dict[str, Any] = {
    "text": "a \"b\" 'c'\n\\ <x> } ] é你 <think>",
    "padded": " a\n\nb ",
    "empty": "",
    "digits": "007",
    "count": -3,
    "ratio": 0.5,
    "flag": True,
    "nothing": None,
    "items": [1, "b", None, {"x": []}],
    "options": {"k": {"n": 1.5, "f": False}},
}


def combine(
    text: str,
    padded: str = "",
    empty: str = "",
    digits: str = "",
    count: int = 0,
    ratio: float = 0.0,
    flag: bool = False,
    nothing: int | None = 0,
    items: list[Any] | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """Combine.

    Args:
        text: a.
        padded: b.
        empty: c.
        digits: d.
        count: e.
        ratio: f.
        flag: g.
        nothing: h.
        items: i.
        options: j.
    """
    return text


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


TOOLBOX = Toolbox([combine, add])
TWO: list[dict[str, Any]] = [
    {"name": "combine", "arguments": ARGUMENTS},
    {"name": "add", "arguments": {"a": 1, "b": 2}},
]
CONTROL = {"harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")}
CONTROL["gemma"] = ("<|channel>thought\n", "<channel|>")
CONTROL["command"] = ("<|START_THINKING|>", "<|END_THINKING|>")


def tokenizer_of(
    template: str, response_template: dict[str, Any] | None = None
) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(make_chat_tokenizer("qwen-3"))
    tokenizer.chat_template = template
    tokenizer.response_template = response_template
    return tokenizer


def calls_in(text: str, call_format: Any, prefill: str = "") -> list[ToolCall]:
    dialog = Dialog(Problem("", ""), [text], raw=text, prefill=prefill, call_format=call_format)
    return TOOLBOX.calls(dialog)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_parsed_but_drafts_and_broken_ones_are_not(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    form = recognize(TurnTemplate(tokenizer, {}).chat_text, None)
    assert isinstance(form, str) and name.startswith(form)
    sent = TWO[:1] if name == "harmony" else TWO
    text = rendered(tokenizer, *sent)
    expected = [ToolCall(call["name"], call["arguments"]) for call in sent]
    assert calls_in(text, form) == expected

    begin, end = CONTROL.get(name, ("<think>", "</think>"))
    assert calls_in(f"{begin}{text}{end}{text}", form) == expected
    assert calls_in(f"{begin}{text}", form) == []
    assert calls_in(f"{text}{end}{text}", form, prefill=begin) == expected

    for whole, broken in (
        ('"count": -3', '"count": -'),
        ("count=-3", "count=-"),
        ("count:-3", "count:-"),
        ("parameter>", "parameter"),
        ("</arg_value>", ""),
    ):
        text = text.replace(whole, broken)
    first, *others = calls_in(text, form)
    assert first.error and TOOLBOX.run(first) == (f"error: {first.error}", False)
    assert all(call.error or call == expected[1] for call in others)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tool", ["get-weather", "files/read.v2", "import"])
def test_a_name_that_python_cannot_have_is_parsed(template: str, tool: str) -> None:
    arguments = {"from": "a-b(c)=(x-y='d'), import(\"e\"", "user-id": 3, "$top": [-1, {"k-k": "'"}]}
    if template.endswith("gemma"):  # its keys have no special characters
        arguments = {"from": "a-b(c)=(x-y='d')", "user-id": 3}
    tokenizer = tokenizer_of(TEMPLATES[template])
    form = recognize(TurnTemplate(tokenizer, {}).chat_text, None)
    text = rendered(tokenizer, {"name": tool, "arguments": arguments})
    properties = {
        "from": {"type": "string"},
        "user-id": {"type": "integer"},
        "$top": {"type": "array"},
    }
    schema = {"name": tool, "parameters": {"type": "object", "properties": properties}}
    assert [*parse_turn(text, "", form, [schema]).calls] == [ToolCall(tool, arguments)]


@pytest.mark.parametrize("text", ["-f-g(a=1)", "f-g(a=1) - g-h(a=1)", "f-g(1)", "f-g(a=g-h(b=1))"])
def test_python_that_is_no_call_is_malformed_with_such_names(text: str) -> None:
    (call,) = parse_turn(f"<function_calls>{text}</function_calls>", "", "olmo").calls
    assert call.error and call.arguments is None


def test_text_before_a_call_is_separated_from_thoughts() -> None:
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        f"<|channel|>commentary<|message|>Adding.<|end|><|start|>assistant{call}"
    )
    turn = parse_turn(text, "", "harmony")
    assert (turn.calls, turn.content) == ([ToolCall("add", {"a": 1})], "Adding.")
    assert (turn.thought, turn.spoken) == ("Hm.", "Adding.")
    assert "Hm." not in turn.speech and len(turn.speech) == len(text)
    turn = parse_turn("Hm.</think>\n\nAdding. <tool_call>", "<think>\n", "hermes")
    assert (turn.thought, turn.content, turn.spoken) == (
        "Hm.",
        "Hm.</think>\n\nAdding.",
        "Adding.",
    )


FRAGMENTS = [
    *(part for begin_end in CONTROL.values() for part in begin_end),
    *re.split(r"{[{%].*?[%}]}|add|text", "add".join(CALLS.values())),
    *("<think>", "</think>", "add", "text", "1", "(a=1)", "\n", "\0", "\ud800", '"', "{", "]", "<escape>"),
]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.sampled_from(["", *FORMATS]))
def test_any_text_of_a_policy_is_parsed_or_an_error(parts: list[str], form: str) -> None:
    text = "".join(parts)
    turn = parse_turn(text, "", form, TOOLBOX.schemas)
    assert len(turn.speech) == len(text)
    for call in turn.calls:
        assert call.name or call.error
        assert isinstance(TOOLBOX.run(call)[0], str)


@pytest.mark.parametrize(
    ("value", "argument", "read"),
    [
        ("5", "count", 5),
        ("5.0", "count", "5.0"),
        ("five", "count", "five"),
        ("5", "text", "5"),
        ("True", "flag", True),
        ("None", "nothing", None),
        ("null", "text", "null"),
        ("[1, 2", "items", "[1, 2"),
        ("5", "unknown", "5"),
    ],
)
def test_an_argument_gets_the_type_in_its_schema(value: str, argument: str, read: Any) -> None:
    text = f"<tool_call><function=combine><parameter={argument}>\n{value}\n</parameter></function></tool_call>"
    assert calls_in(text, "qwen_xml") == [ToolCall("combine", {argument: read})]


RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<muse>", "close": "</muse>"},
        "tool_calls": {
            "open_pattern": r"\s*<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}  # fmt: skip
OWN = chatml(CALLS["mistral_args"].replace("[TOOL_CALLS]", "<call ").replace("[ARGS]", ">").replace(
    "{% endfor %}", "</call>{% endfor %}"
))  # fmt: skip
CALL = '<call add>{"a": 1, "b": 2}</call>'
MUSING = OWN.replace("assistant\n{% endif %}", "assistant\n<muse>{% endif %}")


def results(tokenizer: PreTrainedTokenizerFast, text: str, **settings: Any) -> Sequence[Any]:
    """Return the messages that follow a turn in an environment."""
    task = WithTools(ArithmeticTask(), Toolbox([add], settings.pop("parser", None)))
    env = LLMEnv(task, tokenizer, num_envs=1, repeats=1, max_turns=2)
    respond(env, env.reset(), [tokenizer.encode(text, add_special_tokens=False)])
    return [message["content"] for message in env.states[0].current.later if message["role"] == "tool"]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "text", "contents"),
    [
        (OWN, f"{CALL}{CALL}<|im_end|>", ["3", "3"]),
        (OWN, f"<muse>{CALL}</muse>{CALL}<|im_end|>", ["3"]),
        (MUSING, f"{CALL}</muse>#### 4<|im_end|>", []),
        (OWN, "<call add>{1}</call><|im_end|>", None),
    ],
)
def test_a_response_template_comes_first(template: str, text: str, contents: list[str]) -> None:
    found = results(tokenizer_of(template, RESPONSE_TEMPLATE), text)
    if contents is None:
        [error] = found
        assert error.startswith("error: the call cannot be read")
    else:
        assert found == contents


@pytest.mark.parametrize("response_template", [None, {**RESPONSE_TEMPLATE, "start_anchor": ""}])
def test_an_unknown_format_is_refused_unless_a_parser_is_set(
    response_template: dict[str, Any] | None,
) -> None:
    tokenizer = tokenizer_of(OWN, response_template)
    with pytest.raises(ValueError, match=r"<call probe>.*env\.tool_parser"):
        results(tokenizer, CALL)
    assert results(tokenizer, CALL, parser=lambda text: [ToolCall("add", {"a": 4, "b": 5})]) == [
        "9"
    ]


def test_an_agent_gets_typed_arguments_or_no_tools() -> None:
    text = "Adding. <tool_call><function=add><parameter=a>\n1\n</parameter></function></tool_call>"
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLBOX.schemas[1:]}
    request = parse_request(CHAT, json.dumps(body).encode())
    dialog = Dialog(Problem("", ""), [text], raw=text, call_format="qwen_xml")
    answer = Answer.of(request, dialog, 0, None)
    assert (answer.text, answer.calls[0]["function"]) == (
        "Adding.",
        {"name": "add", "arguments": '{"a": 1}'},
    )

    async def play(client: Any, problem: Any) -> float:
        try:
            await client.chat.completions.create(model="m", **body)
        except BadRequestError as error:
            refusals.append(str(error))
        return 1.0

    refusals: list[str] = []
    env = LLMEnv(agent_task(play), tokenizer_of(OWN), num_envs=1, repeats=1, max_turns=2)
    env.reset()
    env.close()
    assert len(refusals) == 1 and "env.tool_parser" in refusals[0]


def test_results_follow_a_call_where_a_template_refuses_them_after_text() -> None:
    tokenizer = tokenizer_of(HARMONY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|end|>"]})
    turns = TurnTemplate(tokenizer, {})
    messages = [tool_message("add", "3")]
    text = (
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"3"<|end|><|start|>assistant'
    )
    assert turns.text(messages) == f"<|call|>{text}"
    sampled = [tokenizer.convert_tokens_to_ids("<|call|>")]
    assert tokenizer.decode(turns.tokens(messages, sampled)) == text


def test_the_dashboard_reads_calls_as_the_run_did() -> None:
    text = '[TOOL_CALLS]add[CALL_ID]call00000[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{'
    rows = {"mistral": text, "hermes": text}
    labels = {
        form: strip_of({"tokens": {"text": [text]}}, form)["turns"][0]["label"]  # type: ignore[index]
        for form, text in rows.items()
    }
    assert labels == {
        "mistral": "turn 1, 1 token, calls add, add (unreadable)",
        "hermes": "turn 1, 1 token",
    }
