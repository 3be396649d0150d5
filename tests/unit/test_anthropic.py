"""Agents that only use Anthropic's client: the same tokens as with OpenAI's, in another protocol."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.request import Request, urlopen

import pytest
from transformers import AutoTokenizer

from tests.support.agents import PROBLEM, agent_task, own_score, played
from torchrl_grpo.integrations.agents.task import TokenCounter
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.base import Dialog, Turn, TurnLimits

needed = ("anthropic", "openai")  # not importorskip: each pytest process collects this file
pytestmark = pytest.mark.skipif(
    None in map(find_spec, needed), reason="needs anthropic and openai (make test)"
)
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
OURS = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def of(client: Any) -> Any:
    url = str(client.base_url).removesuffix("/v1/")
    return import_module("anthropic").AsyncAnthropic(
        base_url=url, api_key=client.api_key, max_retries=0
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_message_is_a_turn_of_the_policy():
    async def play(client, problem):
        old = Request(
            f"{client.base_url}models", headers={"x-api-key": client.api_key}
        )  # field of older clients
        with urlopen(old, timeout=300) as models:
            assert models.status == 200
        async with of(client) as claude:
            answer = await claude.messages.create(
                model="any",
                max_tokens=7,
                system="Be short.",
                stop_sequences=["END", "\n"],
                messages=[user("a")],
            )
        assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (
            "two ",
            "stop_sequence",
            "END",
        )
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 2)
        return 1

    dialog = Dialog(PROBLEM, ["two END\n"], tokens=[3, 4], prompt_tokens=5)
    [turn], end = played(agent_task(play), lambda turn: dialog)
    assert turn == Turn(
        [{"role": "system", "content": "Be short."}, user("a")], None, tools=[], limits=turn.limits
    )
    assert turn.limits == TurnLimits(7, ("END", "\n"))
    assert end.score == own_score(1.0)


@pytest.mark.parametrize("streams", [False, True])
def test_tool_calls_and_their_results_continue_the_tokens(streams):
    async def play(client, problem):
        messages = [user([{"type": "text", "text": "a"}])]
        wants: dict[str, Any] = {
            "model": "any",
            "max_tokens": 9,
            "messages": messages,
            "tools": [ADD],
        }
        async with of(client) as claude:
            if streams:
                async with claude.messages.stream(**wants) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await claude.messages.create(**wants)
            assert answer.stop_reason == "tool_use"
            text, call = answer.content
            assert (text.text, call.name, call.input) == ("Adding.", "add", {"a": 1})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "2"}],
                },
                {"type": "text", "text": "Go on."},
            ]
            messages += [{"role": "assistant", "content": answer.content}, user(results)]
            last = await claude.messages.create(**wants)
        assert (last.stop_reason, last.content[0].text) == ("end_turn", "done")
        return 1

    answers = iter([f"Adding. {CALL}", "done"])
    turns, end = played(agent_task(play), lambda turn: next(answers))
    assert [(turn.sample, list(turn.tools)) for turn in turns] == [(0, [OURS]), (0, [OURS])]
    assert turns[1].messages == [
        {"role": "tool", "content": "2", "tool_call_id": "call00000"},
        user("Go on."),
    ]
    assert end.score == own_score(1.0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"messages": []}, "messages=[] must be a list with at least one message"),
        (
            {"messages": [user([{"type": "image", "source": {}}])]},
            "messages[0].content must have images as data URLs",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools must be a list of functions",
        ),
        ({"tools": 3}, "tools must be a list of functions"),
        (
            {"system": "Add.", "messages": [user("a"), user(3)]},
            "messages[1].content=3 must be text",
        ),
        ({"system": 3}, "system.content=3 must be text"),
        ({"stop_sequences": [""]}, "stop_sequences=[''] must be at most 4 non-empty texts"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "name": "a", "input": [1]}],
                    }
                ]
            },
            "messages[0].tool_calls.arguments=[1] must be an object",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice=any must be auto or none"),
    ],
)
def test_unsupported_request_fields_are_errors_in_anthropics_format(wrong, message):
    async def play(client, problem):
        async with of(client) as claude:
            wants = {"model": "any", "max_tokens": 9, "messages": [user("a")]}
            with pytest.raises(import_module("anthropic").BadRequestError) as error:
                await claude.post("/v1/messages", body=wants | wrong, cast_to=object)
            assert (error.value.body["type"], error.value.body["error"]["type"]) == (
                "error",
                "invalid_request_error",
            )
            assert error.value.body["error"]["message"].startswith(message)
            await claude.messages.create(**wants)
        return 1

    _, end = played(agent_task(play), lambda turn: "yes")
    assert end.score == own_score(1.0)


def test_tokens_are_counted_before_a_request_and_only_with_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    chat = [{"role": "system", "content": "Add."}, user("1+1=?")]
    prompt = tokenizer.apply_chat_template(
        chat, tools=[OURS], add_generation_prompt=True, tokenize=False
    )

    async def play(client, problem):
        wants: dict[str, Any] = {"model": "any", "system": "Add.", "messages": chat[1:]}
        async with of(client) as claude:
            if task.counter.tokenizer is None:
                with pytest.raises(import_module("anthropic").BadRequestError) as error:
                    await claude.messages.count_tokens(**wants)
                message = error.value.body["error"]["message"]
                assert message.startswith("messages must be text only")
            else:
                count = await claude.messages.count_tokens(**wants, tools=[ADD])
                assert count.input_tokens == len(tokenizer(prompt).input_ids)
            await claude.messages.create(**wants, max_tokens=9)
        return 1

    for counter in (TokenCounter({"name": "starter"}), TokenCounter()):
        task = agent_task(play)
        task.counter = counter
        turns, end = played(task, lambda turn: "yes")
        assert len(turns) == 1
        assert end.score == own_score(1.0)
