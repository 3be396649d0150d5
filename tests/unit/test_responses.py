"""Agents that speak OpenAI's Responses API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.agents import PROBLEM, agent_task, own_score, played
from torchrl_grpo.integrations.agents import load_program
from torchrl_grpo.integrations.agents.protocol import (
    ANTHROPIC,
    CHAT,
    COUNT,
    PATHS,
    RESPONSES,
    TEXT,
    Answer,
    BadRequest,
    parse_request,
)
from torchrl_grpo.tasks.base import Dialog, Turn, TurnLimits
from torchrl_grpo.tools import parse_tool_calls

openai = pytest.importorskip("openai")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
OURS = {"type": "function", "function": {k: v for k, v in ADD.items() if k != "type"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RESULT = {"type": "function_call_output", "call_id": "call00000", "output": "2"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def parsed(**fields: Any) -> Any:
    return parse_request(RESPONSES, json.dumps(fields).encode())


def test_a_response_is_a_turn_of_the_policy():
    async def play(client, problem):
        answer = await client.responses.create(
            model="any", instructions="Be short.", input="a", max_output_tokens=7
        )
        assert (answer.output_text, answer.status, answer.instructions) == (
            "two",
            "incomplete",
            "Be short.",
        )
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 2)
        return 1

    dialog = Dialog(PROBLEM, ["two"], tokens=[3, 4], prompt_tokens=5, finish_reason="length")
    [turn], end = played(agent_task(play), lambda turn: dialog)
    assert turn.messages == [{"role": "system", "content": "Be short."}, user("a")]
    assert turn.limits == TurnLimits(7)
    assert end.score == own_score(1.0)


@pytest.mark.parametrize("form", ["items", "previous", "stream"])
def test_thoughts_calls_and_results_continue_the_tokens(form):
    async def play(client, problem):
        items = [user([{"type": "input_text", "text": "a"}])]
        wants: dict[str, Any] = {"model": "any", "tools": [ADD], "instructions": "Add."}
        if form == "stream":
            async with client.responses.stream(input=items, **wants) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(input=items, **wants)
        thought, text, call = answer.output
        assert (thought.content[0].text, text.content[0].text) == ("No.", "Adding.")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        assert answer.status == "completed"
        items += [*answer.output, RESULT | {"call_id": call.call_id}]
        if form == "previous":
            items, wants["previous_response_id"] = items[-1:], answer.id
        last = await client.responses.create(input=items, **wants)
        assert last.output_text == "done"
        return 1

    answers = iter([f"<think>\nNo.\n</think>\n\nAdding. {CALL}", "done"])
    turns, end = played(agent_task(play), lambda turn: next(answers))
    assert [(turn.sample, list(turn.tools)) for turn in turns] == [(0, [OURS]), (0, [OURS])]
    assert turns[1].messages == [{"role": "tool", "content": "2", "tool_call_id": "call00000"}]
    assert end.score == own_score(1.0)


def test_a_previous_response_brings_its_chat_but_not_its_instructions():
    async def play(client, problem):
        async def ask(text, **wants):
            return await client.responses.create(model="any", input=text, **wants)

        first = await ask("a", instructions="One.")
        await ask("b", instructions="Two.", previous_response_id=first.id)
        hidden = await ask("c", store=False)
        for previous in (hidden.id, "resp_9", [3]):
            with pytest.raises(openai.BadRequestError, match="must name a stored answer") as error:
                await ask("d", previous_response_id=previous)
            assert error.value.body["param"] == "previous_response_id"
            assert error.value.body["code"] == "previous_response_not_found"
        return 1

    turns, end = played(agent_task(play), lambda turn: "yes")
    assert [turn.sample for turn in turns] == [0, 1, 2]
    answer = {"role": "assistant", "content": "yes"}
    assert turns[1].messages == [
        {"role": "system", "content": "Two."},
        user("a"),
        answer,
        user("b"),
    ]
    assert end.score == own_score(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("text, kinds", [("yes", ["message"]), (CALL, ["function_call"])])
@pytest.mark.parametrize("thought", ["", "<think>No.</think>"])
def test_stream_events_are_the_official_ones_in_order(text, kinds, thought):
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    request = parsed(input="a", tools=[ADD])
    dialog = Dialog(PROBLEM, [thought + text], raw=thought + text)
    answer = Answer.of(request, dialog, 3, parse_tool_calls)
    events = [json.loads(json.dumps(event)) for event in answer.events()]
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in events:
        assert adapter.validate_python(event).type == event["type"]
    Response.model_validate(answer.body())
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    inner = {
        "reasoning": [name.format("reasoning_text") for name in part],
        "message": [name.format("output_text") for name in part],
        "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
    }
    kinds = ["reasoning", *kinds] if thought else kinds
    names = ["created", "in_progress"]
    for kind in kinds:
        names += ["output_item.added", *inner[kind], "output_item.done"]
    assert [event["type"] for event in events] == [f"response.{n}" for n in [*names, "completed"]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == events[-1]["response"]["output"] == answer.body()["output"]
    assert [item["type"] for item in done] == kinds


def test_items_are_the_chat_that_chat_completions_would_send():
    image = "data:image/png;base64,YQ=="
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": "Be short."},
        user([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": image}]),
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "No."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        call,
        call,
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    chat_call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": "Be short."},
        user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": image}}]),
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "No.",
            "tool_calls": [chat_call, chat_call],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    body = json.dumps({"messages": chat, "tools": [OURS]}).encode()
    expected = parse_request(CHAT, body)
    request = parsed(input=items, tools=[ADD | {"strict": True}])
    assert (request.messages, request.tools) == (expected.messages, expected.tools)


@pytest.mark.parametrize(
    "wrong, param, message",
    [
        ({"input": []}, "input", "input=[] must be a list with at least one message"),
        ({"input": 3}, "input", "input=3 must be a list"),
        ({"input": [3]}, "input[0]", "input[0]=3 must be an object"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input[0]",
            "input[0].type=item_reference must be message, reasoning, function_call or",
        ),
        (
            {"input": [user([{"type": "input_file", "file_id": "a"}])]},
            "input[0].content",
            "input[0].content must be texts and",
        ),
        (
            {"input": [user("a"), {"type": "reasoning", "content": [3]}]},
            "input[1].reasoning_content",
            "input[1].reasoning_content must be texts",
        ),
        (
            {"input": [{"type": "function_call", "name": "a", "arguments": "{"}]},
            "input[0].tool_calls.arguments",
            "input[0].tool_calls.arguments must be JSON",
        ),
        ({"instructions": 3}, "instructions", "instructions.content=3 must be text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0 must be an integer"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
            "text.format",
            'text.format=json_schema must be "text": describe the form',
        ),
        (
            {"tools": [ADD, {"type": "web_search"}]},
            "tools",
            "tools must be a list of functions with names, but has {'type': 'web_search'}",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}},
            "tool_choice",
            "tool_choice=function must be auto or none",
        ),
        ({"background": True}, "background", "background=True must be false"),
        ({"conversation": "a"}, "conversation", "conversation=a must be null: use previous_"),
        ({"prompt": {"id": "a"}}, "prompt", "prompt={'id': 'a'} must be null"),
        ({"truncation": "auto"}, "truncation", 'truncation=auto must be "disabled"'),
        (
            {"response_format": {"type": "json_object"}},
            "text.format",
            "text.format=json_object must",
        ),
        ({"max_tokens": 0}, "max_output_tokens", "max_output_tokens=0 must be an integer"),
        ({"n": 2}, "n", "n=2 must be 1"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs=3 must be 0"),
    ],
)
def test_unsupported_fields_are_errors_that_name_them(wrong, param, message):
    with pytest.raises(BadRequest) as error:
        parsed(**({"input": "a"} | wrong))
    body = error.value.body(RESPONSES)["error"]
    assert body["message"].startswith(message)
    assert body["param"] == param
    assert (error.value.status, body["type"]) == (400, "invalid_request_error")


IMAGE = "data:image/png;base64,YQ=="
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    user([{"type": "input_image", "image_url": IMAGE}]),
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
    RESULT,
]
CHAT_ITEMS = [
    user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": IMAGE}}]),
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "a",
        "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "a"},
]
SOURCE = {"type": "base64", "media_type": "image/png", "data": "YQ=="}
BLOCKS = [
    user([{"type": "text", "text": "a"}, {"type": "image", "source": SOURCE}]),
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "a", "input": {}}]},
    user([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]}]),
]
MESSAGES = {
    "system": "a",
    "messages": BLOCKS,
    "max_tokens": 3,
    "stop_sequences": ["a"],
    "tools": [{"name": "add", "description": "a", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "stream": True,
}
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "a",
        "messages": CHAT_ITEMS,
        "tools": [OURS],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": ["a"],
        "logprobs": True,
        "stream_options": {"include_usage": True},
    },
    TEXT: {"prompt": ["a"], "max_tokens": 3, "stop": "a", "logprobs": 1, "stream": True},
    RESPONSES: {
        "instructions": "a",
        "input": ITEMS,
        "tools": [ADD],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 3,
        "previous_response_id": "a",
        "store": True,
        "stream": True,
    },
    ANTHROPIC: MESSAGES,
    COUNT: MESSAGES,
}
ODD: list[Any] = [None, True, 3, "a", [], [3], [None], [[]], {}, {"type": 3}, {"type": "text"}]


def variants(value: Any) -> Iterator[Any]:
    """Yield JSON with each of its nodes replaced by each odd value, or left out."""
    yield from ODD
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        for other in variants(value[key]):
            changed = value.copy()
            changed[key] = other
            yield changed
        changed = value.copy()
        del changed[key]
        yield changed


@pytest.mark.parametrize("path", PATHS)
def test_any_request_is_parsed_or_refused(path):
    parse_request(path, json.dumps(REQUESTS[path]).encode())
    outcomes = set()
    for body in variants(REQUESTS[path]):
        try:
            request = parse_request(path, json.dumps(body).encode())
        except BadRequest as error:
            json.dumps(error.body(path))
            outcomes.add(error.status)
        else:
            assert all(isinstance(message["role"], str) for message in request.messages)
            outcomes.add(200)
    assert outcomes == {200, 400}


@given(st.text(max_size=20), st.text(max_size=20), st.booleans(), st.sampled_from(["", "<think>"]))
def test_an_answer_that_comes_back_is_the_message_of_its_sample(thought, text, calls, prefill):
    turn = f"{'' if prefill else '<think>'}{thought}</think>{text}{CALL * calls}"
    request = parsed(input="a", tools=[ADD], include=["reasoning.encrypted_content"])
    dialog = Dialog(PROBLEM, [turn], raw=turn, prefill=prefill)
    answer = Answer.of(request, dialog, 0, parse_tool_calls)
    output = answer.body()["output"]
    opaque = [
        {k: [] if k == "content" and item["type"] == "reasoning" else v for k, v in item.items()}
        for item in output
    ]  # as of clients that drop the text of a thought
    for items in (output, opaque):
        assert parsed(input=[user("a"), *items], tools=[ADD]).messages[1:] == [answer.message]


@pytest.mark.parametrize(
    "turn, thought, text",
    [
        ("<think>No.</think>One. END", "No.", "One."),
        ("<think>No.</think>One. ENDED", "No.", "One."),
        ("<think>No.</think>END", "No.", ""),
        ("<think>No. END", "No.", ""),
        (f"<think>No.</think>One.{CALL}END", "No.", "One."),
        ("One. END", "", "One. "),
    ],
)
def test_a_stop_ends_the_text_or_the_thought(turn, thought, text):
    request = parsed(input="a", tools=[ADD], stop=["END"])
    dialog = Dialog(PROBLEM, [turn], raw=turn, finish_reason="stop")
    answer = Answer.of(request, dialog, 0, parse_tool_calls)
    assert (answer.thought, answer.text, answer.stop) == (thought, text, "END")
    assert len(answer.calls) == turn.count(CALL)
    assert "END" not in json.dumps(answer.body()["output"])


SOLVE = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
items = [{"role": "user", "content": problem["prompt"]}]
def ask():
    body = {"model": "any", "input": items, "stream": True, "store": False, "tools": [TOOL]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/responses"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as stream:
        events = [line.removeprefix(b"data: ") for line in stream if line.startswith(b"data: ")]
        return json.loads(events[-1])["response"]["output"]
*_, call = output = ask()
items += [*output, {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}]
print(float(ask()[-1]["content"][0]["text"] == problem["answer"]))
"""


def test_a_command_that_streams_responses_is_an_agent(tmp_path):
    (tmp_path / "solve.py").write_text(f"TOOL = {ADD!r}{SOLVE}")
    answers = iter([CALL, "2"])
    program = load_program(f"{sys.executable} {tmp_path}/solve.py")
    turns, end = played(agent_task(program), lambda turn: next(answers))
    assert [turn.sample for turn in turns] == [0, 0]
    assert end.score == own_score(1.0)


@pytest.mark.skipif(find_spec("agents") is None, reason="needs openai-agents")
@pytest.mark.parametrize("streams", [False, True])
def test_the_agents_sdk_calls_tools_and_continues_the_tokens(streams):
    async def play(client, problem):
        from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

        set_tracing_disabled(True)

        @function_tool
        def add(a: int) -> str:
            return str(a + 1)

        model = OpenAIResponsesModel("policy", client)
        agent = Agent("A", instructions="Add.", tools=[add], model=model)
        if streams:
            result = Runner.run_streamed(agent, problem["prompt"])
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, problem["prompt"])
        return float(result.final_output == problem["answer"])

    answers = iter([f"<think>No.</think>Adding. {CALL}", "2"])
    turns, end = played(agent_task(play), lambda turn: next(answers))
    assert [turn.sample for turn in turns] == [0, 0]
    assert turns[1].messages == [{"role": "tool", "content": "2", "tool_call_id": "call00000"}]
    assert isinstance(end, Turn) and end.score == own_score(1.0), end
