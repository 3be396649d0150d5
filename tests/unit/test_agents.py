"""Agents that only use an OpenAI client: the requests to the policy, and the replies to the agent."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from tests.support.agents import PROBLEM, agent_task, own_score, played
from tests.support.waiting import until
from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.integrations.agents import load_program, programs
from torchrl_grpo.integrations.agents.programs import Command, Function, printed_reward
from torchrl_grpo.integrations.agents.protocol import (
    CHAT,
    PATHS,
    TEXT,
    BadRequest,
    parse_request,
)
from torchrl_grpo.integrations.agents.server import MAX_BODY_BYTES, Receiver, Server
from torchrl_grpo.integrations.agents.task import TokenCounter, _Episode
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Turn, TurnLimits

openai = pytest.importorskip("openai")

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
DEEP = '{"a":' * 700 + "1" + "}" * 700
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def chat(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


def history(arguments: Any) -> dict[str, Any]:
    """Return an assistant's message that calls a tool."""
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_an_agent_plays_a_problem_and_says_its_reward():
    async def play(client, problem):
        assert problem.pop("messages")[-1]["role"] == "user"
        assert problem == {"level": 3, "prompt": "1+1=?", "answer": "2"}
        answer = await client.chat.completions.create(model="any", messages=chat(problem["prompt"]))
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (0, 3)
        return 0.25 if answer.choices[0].message.content == "two" else 0.0

    turns, end = played(agent_task(play), lambda turn: "two")
    assert turns == [Turn(chat("1+1=?"), None, tools=[])]
    assert end == Turn(None, own_score(0.25))


def test_a_missing_package_is_answered_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(client, problem): ...

    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"package openai, .*torchrl_grpo\[agents\]"):
        Function(play)
    server = "torchrl_grpo.integrations.agents.server"
    monkeypatch.delitem(sys.modules, server)
    monkeypatch.setitem(sys.modules, "h11", None)
    with pytest.raises(ValueError, match=r"env\.agent .*package h11, .*torchrl_grpo\[agents\]"):
        importlib.import_module(server)


def test_a_request_that_continues_an_answer_asks_with_what_is_new():
    async def play(client, problem):
        reply = chat("a")
        for text in ("b", "c"):
            answer = await client.chat.completions.create(model="any", messages=reply)
            reply += [answer.choices[0].message, {"role": "user", "content": text}]
        await client.chat.completions.create(model="any", messages=reply)
        return 1

    turns, end = played(agent_task(play), lambda turn: "yes")
    assert [(turn.sample, turn.messages) for turn in turns] == [
        (0, chat("a")),
        (0, chat("b")),
        (0, chat("c")),
    ]
    assert end.score == own_score(1.0)


def test_compacting_and_sub_agents_begin_samples_and_an_old_one_goes_on():
    async def play(client, problem):
        async def ask(*messages):
            answer = await client.chat.completions.create(model="any", messages=list(messages))
            return {"role": "assistant", "content": answer.choices[0].message.content}

        main = [*chat("a")]
        main += [await ask(*main), *chat("b")]
        await ask(*chat("sub"))
        main += [await ask(*main), *chat("c")]
        await ask(*chat("short: a b"))
        await ask(main[0], {"role": "assistant", "content": "other words"}, *main[2:])
        return 1

    answers = count()
    turns, _ = played(agent_task(play), lambda turn: f"answer {next(answers)}")
    assert [turn.sample for turn in turns] == [0, 1, 0, 2, 3]
    assert turns[2].messages == chat("b")
    assert turns[4].messages == [*chat("a", "other words", "b", "answer 2", "c")]


def test_tool_calls_come_back_and_continue_the_tokens():
    async def play(client, problem):
        reply = chat("a")
        answer = await client.chat.completions.create(model="any", messages=reply, tools=[ADD])
        choice = answer.choices[0]
        content = f"<think>No {CALL}</think> Adding."
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        reply += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        await client.chat.completions.create(model="any", messages=reply, tools=[ADD])
        return 1

    turns, end = played(agent_task(play), lambda turn: f"<think>No {CALL}</think> Adding. {CALL}")
    assert [list(turn.tools) for turn in turns] == [[ADD], [ADD]]
    assert turns[1] == Turn(
        [{"role": "tool", "content": "2", "tool_call_id": "call00000"}], None, tools=[ADD]
    )
    assert end.score == own_score(1.0)


@pytest.mark.parametrize(
    "arguments, rendered",
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), (None, {}), ("", {}), ("null", {}), ("{}", {})],
)
def test_a_chat_template_gets_the_arguments_of_calls_as_objects(arguments, rendered):
    body = json.dumps({"messages": [*chat("a"), history(arguments)], "tools": [ADD]}).encode()
    [_, message] = parse_request(CHAT, body).messages
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": rendered}


@pytest.mark.parametrize("arguments", [DEEP, "[1]", '{"a": NaN}', '{"a": 1e999}'])
def test_a_call_that_no_later_request_could_say_is_text(arguments):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'

    async def play(client, problem):
        answer = await client.chat.completions.create(model="any", messages=chat("a"), tools=[ADD])
        message = answer.choices[0].message
        await client.chat.completions.create(
            model="any", messages=[*chat("a"), message, *chat("b")], tools=[ADD]
        )
        return float((message.content, message.tool_calls) == (text, None))

    turns, end = played(agent_task(play), lambda turn: text)
    assert (turns[1].sample, turns[1].messages) == (0, chat("b"))
    assert end.score == own_score(1.0)


def test_thoughts_that_an_agent_sends_apart_reach_the_template():
    message = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    assert (
        parse_request(CHAT, json.dumps({"messages": [*chat("a"), message]}).encode()).messages[1]
        == message
    )


def test_a_stream_has_the_same_text_calls_and_usage():
    async def play(client, problem):
        wants = {"model": "any", "messages": chat("a"), "tools": [ADD], "stream": True}
        stream = await client.chat.completions.create(
            **wants, stream_options={"include_usage": True}
        )
        text = ""
        names = []
        reason = None
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                names += [call.function.name for call in choice.delta.tool_calls or ()]
                reason = choice.finish_reason or reason
        assert (text, names, reason, usage.completion_tokens) == (
            "Adding.",
            ["add"],
            "tool_calls",
            len(CALL) + 8,
        )
        plain = await client.completions.create(model="any", prompt="1, 2,", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in plain]) == " 3"
        return 1

    replies = iter([f"Adding. {CALL}", " 3"])
    turns, end = played(agent_task(play), lambda turn: next(replies))
    assert end.score == own_score(1.0, 1.0, 1.0)
    assert turns[1].messages == [{"role": "", "content": "1, 2,"}]


def test_a_completion_continues_the_text_before_it():
    async def play(client, problem):
        first = await client.completions.create(model="any", prompt="1,")
        await client.completions.create(model="any", prompt=f"1,{first.choices[0].text} 3,")
        await client.completions.create(model="any", prompt="1, 3,")
        return 1

    turns, _ = played(agent_task(play), lambda turn: " 2,")
    assert [(turn.sample, turn.messages[0]["content"]) for turn in turns] == [
        (0, "1,"),
        (0, " 3,"),
        (1, "1, 3,"),
    ]


def test_request_limits_apply_and_the_stop_string_is_cut_off():
    async def play(client, problem):
        answer = await client.chat.completions.create(
            model="any",
            messages=chat("a"),
            max_completion_tokens=7,
            stop=["END", "\n"],
            logprobs=True,
        )
        assert answer.choices[0].message.content == "two "
        [one] = answer.choices[0].logprobs.content
        assert (one.token, one.logprob) == ("two END", -0.5)
        return 1

    dialog = Dialog(
        PROBLEM, ["two END"], tokens=[3], log_probs=[("two END", -0.5)], prompt_tokens=5
    )
    [turn], end = played(agent_task(play), lambda turn: dialog)
    assert turn.limits == TurnLimits(7, ("END", "\n"), True)
    assert end.score == own_score(1.0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"n": 2}, "n=2 must be 1: send one request per answer."),
        ({"messages": []}, "messages=[] must be a list with at least one message: send a message."),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role=robot must be one of",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content must have images as data URLs",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": 1}]},
            "messages[0].tool_calls=1 must be a list: send",
        ),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer of at least 1: for example, 256."),
        ({"stop": [""]}, "stop=[''] must be at most 4 non-empty texts"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs=3 must be 0"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice=required must be auto or none"),
        ({"response_format": {"type": "json_object"}}, "response_format=json_object must be"),
        ({"stream": "yes"}, "stream=yes must be true or false"),
        ({"stream": True, "stream_options": [1]}, "stream_options=[1] must be an object"),
        ({"model": {"name": "a"}}, "model={'name': 'a'} must be text"),
        ({"functions": [{"name": "add"}]}, "functions=[{'name': 'add'}] must be null: use tools."),
        (
            {"messages": [{"role": ["user"], "content": "a"}]},
            "messages[0].role=['user'] must be one of",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content=None must be text",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "name": 3}]},
            "messages[0].name=3 must be text",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
            "messages[0].tool_calls must be the assistant's",
        ),
        (
            {"messages": [history("[1]")]},
            "messages[0].tool_calls.arguments=[1] must be an object or its JSON",
        ),
        (
            {"messages": [history('"{}"')]},
            "messages[0].tool_calls.arguments={} must be an object or its JSON",
        ),
        ({"messages": [history("{")]}, "messages[0].tool_calls.arguments must be JSON"),
        (
            {"messages": [history(DEEP)]},
            "messages[0].tool_calls.arguments must be nested at most 100 levels deep",
        ),
        (
            {"messages": [history(json.loads(DEEP))]},
            "the body must be nested at most 100 levels deep",
        ),
        (
            {"tools": [{"type": "custom", "function": {"name": "a"}}]},
            "tools must be a list of functions",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": "none"}}]},
            "tools must be a list of functions",
        ),
    ],
)
def test_unsupported_request_fields_are_errors_with_a_fix(wrong, message):
    async def play(client, problem):
        wants = {"model": "any", "messages": chat("a")} | wrong
        with pytest.raises(openai.BadRequestError) as error:
            await client.post("/chat/completions", body=wants, cast_to=object)
        assert error.value.body["message"].startswith(message)
        assert error.value.body["type"] == "invalid_request_error"
        await client.chat.completions.create(model="any", messages=chat("a"))
        return 1

    turns, end = played(agent_task(play), lambda turn: "yes")
    assert len(turns) == 1  # an agent continues after a bad request
    assert end.score == own_score(1.0)


def test_half_of_a_surrogate_pair_is_replaced_and_a_whole_one_kept():
    wants = rb'{"prompt": "\ud83d\ude00 \ud83d", "stop": "\udc00", "messages": [{"role": "user", "content": "\ud83d"}]}'
    text, chat_request = parse_request(TEXT, wants), parse_request(CHAT, wants)
    assert text.messages[0]["content"] == "\U0001f600 \ufffd" and text.limits.stop == ("\ufffd",)
    assert chat_request.messages == [{"role": "user", "content": "\ufffd"}]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body, reason",
    [
        (
            b'{"prompt": "\xed\xa0\x80", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
            "UTF-8",
        ),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
        (b'{"max_tokens": NaN}', "JSON"),
        (b'{"max_tokens": -1e999}', "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"metadata": ' + b"[" * 700 + b"]" * 700 + b"}", "levels"),
        (b"3", "object"),
        (b"", "JSON"),
    ],
)
def test_a_body_that_is_no_plain_json_is_refused(path, body, reason):
    with pytest.raises(BadRequest, match=reason) as error:
        parse_request(path, body)
    assert error.value.status == 400


@pytest.mark.parametrize("text, fits", [("\U0001f600", False), ("\u4e2d", True)])
def test_a_chat_that_no_worker_could_pass_on_is_too_large(text, fits):
    body = json.dumps({"messages": chat(text * 60_000)}, ensure_ascii=False).encode()
    assert len(body) < MAX_BODY_BYTES
    if fits:
        assert parse_request(CHAT, body).messages == chat(text * 60_000)
        return
    with pytest.raises(BadRequest, match="at most 500,000 characters") as error:
        parse_request(CHAT, body)
    assert (error.value.status, error.value.code) == (413, "context_length_exceeded")


def test_tools_are_refused_where_the_chat_template_leaves_them_out():
    async def play(client, problem):
        with pytest.raises(openai.BadRequestError, match=r"model\.chat_template") as error:
            await client.chat.completions.create(model="any", messages=chat("a"), tools=[ADD])
        assert error.value.body["param"] == "tools"
        await client.chat.completions.create(
            model="any", messages=chat("a"), tools=[ADD], tool_choice="none"
        )
        return 1

    task = agent_task(play)
    opening = Dialog(PROBLEM, [], last=False, episode="0", takes_tools=False)
    [turn] = task.advance([opening], 300)
    assert turn == Turn(chat("a"), None, tools=[])
    [end] = task.advance([replace(opening, responses=["yes"])], 300)
    assert end.score == own_score(1.0)
    task.close("0")


def test_strangers_that_only_connect_leave_files_for_others():
    def connect() -> socket.socket:
        return socket.create_connection((place.hostname, place.port), timeout=300)

    server = Server(
        lambda key: cast("Receiver", "an episode") if key == "key" else None, TokenCounter()
    )
    place = urlsplit(server.url)
    known = http.client.HTTPConnection(place.hostname, place.port, timeout=300)

    def ask() -> int:
        known.request("GET", "/v1/models", headers={"Authorization": "Bearer key"})
        answer = known.getresponse()
        answer.read()
        return answer.status

    with ExitStack() as held:
        held.callback(known.close)
        assert ask() == 200
        strangers = [held.enter_context(connect()) for _ in range(300)]
        with suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        assert ask() == 200


def test_a_question_for_the_head_alone_is_no_error_of_the_server(caplog):
    place = urlsplit(Server(lambda key: None, TokenCounter()).url)
    with socket.create_connection((place.hostname, place.port), timeout=300) as connection:
        connection.sendall(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
        while connection.recv(2**16):
            pass
    assert not caplog.records


def test_the_server_refuses_strangers_and_what_is_no_http():
    seen: list[tuple[int, str]] = []

    async def play(client, problem):
        def raw(data: bytes) -> bytes:
            with socket.create_connection((place.hostname, place.port)) as connection:
                connection.sendall(data)
                return connection.recv(2**16)

        def say(method, path, body=b"", **headers):
            connection = http.client.HTTPConnection(place.hostname, place.port)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            seen.append((answer.status, json.loads(answer.read())))

        place = urlsplit(str(client.base_url))
        key = f"Bearer {client.api_key}"
        say("POST", "/v1/chat/completions", b"{}", Authorization="Bearer wrong")
        say("GET", "/v1/models", Authorization=key)
        say("POST", "/v1/embeddings", b"{}", Authorization=key)
        say("GET", "/v1/chat/completions", Authorization=key)
        say("POST", "/v1/chat/completions", b"no json", Authorization=key)
        say("POST", "/v1/chat/completions", b"x" * 2**22, Authorization=key)
        host = b" HTTP/1.1\r\nHost: a\r\n"
        answer = raw(b"HEAD /" + host + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 401") and answer.endswith(b"\r\n\r\n")
        assert raw(b"hello\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert raw(b"GET /" + host + b"A: " + b"x" * 2**17 + b"\r\n\r\n").startswith(
            b"HTTP/1.1 431"
        )
        chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        assert raw(b"POST /" + host + chunked).startswith(b"HTTP/1.1 401")
        lengths = b"Content-Length: 3\r\nContent-Length: 4\r\n"
        for headers in (lengths, b"no header\r\n", b": a\r\n"):
            assert raw(b"POST /" + host + headers + b"\r\n").startswith(b"HTTP/1.1 400")
        await client.chat.completions.create(model="any", messages=chat("a"))
        return 1

    _, end = played(agent_task(play), lambda turn: "yes")
    assert end.score == own_score(1.0)
    assert [status for status, _ in seen] == [401, 200, 404, 405, 400, 413]
    assert seen[0][1]["error"]["type"] == "authentication_error"
    assert seen[1][1]["data"][0]["id"] == "policy"


def test_requests_at_the_same_time_are_answered_in_turn():
    async def play(client, problem):
        async def ask(text):
            answer = await client.chat.completions.create(model="any", messages=chat(text))
            return answer.choices[0].message.content

        return float(await asyncio.gather(ask("a"), ask("b"), ask("c")) == ["A", "B", "C"])

    turns, end = played(agent_task(play), lambda turn: turn.messages[0]["content"].upper())
    assert sorted(turn.messages[0]["content"] for turn in turns) == ["a", "b", "c"]
    assert end.score == own_score(1.0, 1.0, 1.0, 1.0)


def test_without_a_reward_of_its_own_an_agent_is_scored_by_the_task():
    async def play(client, problem):
        await client.chat.completions.create(model="any", messages=chat("a"))

    _, end = played(agent_task(play, "gsm8k"), lambda turn: "#### 2")
    assert end.score.reward == 1.0
    assert end.score.parts == {"gsm8k": 1.0}


def test_an_agent_that_asks_too_often_is_refused_and_truncated():
    async def play(client, problem):
        replies = 0
        with pytest.raises(openai.BadRequestError, match=r"env\.max_turns=2 requests"):
            for _ in range(5):
                await client.chat.completions.create(model="any", messages=chat("a"))
                replies += 1
        return replies / 4

    _, end = played(agent_task(play), lambda turn: "yes", turns=2)
    assert end == Turn([], own_score(0.5, 0.5, 0.5))  # messages: it would have continued


def test_a_chat_without_room_is_refused_and_scored_by_the_task():
    async def play(client, problem):
        for _ in range(2):
            await client.chat.completions.create(model="any", messages=chat("a"))

    task = agent_task(play, "gsm8k")
    first = task.advance([Dialog(PROBLEM, [], last=False, episode="0")], 300)[0]
    dialog = Dialog(PROBLEM, ["#### 2"], last=False, episode="0")
    second = task.advance([dialog], 300)[0]
    no_room = task.advance(
        [Dialog(PROBLEM, ["#### 2"], finish_reason="length", last=False, episode="0")], 20
    )[0]
    assert first.score is second.score is None
    assert (no_room.messages, no_room.score.reward) == ([], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, kind, message",
    [
        ("raises", ZeroDivisionError, "division by zero"),
        ("exits", RuntimeError, "exit"),
        ("never asks", InvalidRewardError, "an agent must query the policy, but it ended without"),
        (
            "never ends",
            InvalidRewardError,
            "an agent must send a request or end within env.reward_timeout_s=5",
        ),
        (
            "blocks",
            InvalidRewardError,
            "an agent must send a request or end within env.reward_timeout_s=5",
        ),
        (
            "says no number",
            InvalidRewardError,
            "must return a number or None, but it returned 'good'",
        ),
    ],
)
def test_an_agents_mistake_costs_only_its_own_dialog(case, kind, message):
    over = threading.Event()

    async def play(client, problem):
        if case == "never asks":
            return 1
        answer = await client.chat.completions.create(model="any", messages=chat("a"))
        if answer.choices[0].message.content == "wrong":
            if case == "raises":
                raise ZeroDivisionError("division by zero")
            if case == "exits":
                sys.exit("exit")
            if case == "never ends":
                await asyncio.sleep(600)
            if case == "blocks":
                over.wait()
            return "good"
        return 1

    task = agent_task(play)
    texts = ["right", "wrong", "right"]
    dialogs = [Dialog(PROBLEM, [], last=False, episode=str(i)) for i in range(3)]
    opened = task.advance(dialogs, 300)
    if case == "never asks":
        assert all(isinstance(turn, kind) and message in str(turn) for turn in opened)
        return
    dialogs = [Dialog(PROBLEM, [text], last=False, episode=str(i)) for i, text in enumerate(texts)]
    ends = task.advance(dialogs, 5 if case in ("never ends", "blocks") else 60)
    over.set()
    assert [end.score.reward for end in (ends[0], ends[2])] == [1, 1]
    assert isinstance(ends[1], kind), ends[1]
    assert message in str(ends[1])


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, GeneratorExit, SystemExit, asyncio.CancelledError]
)
def test_an_agent_interrupts_no_run(kind):
    async def play(client, problem):
        await client.chat.completions.create(model="any", messages=chat("a"))
        raise kind("enough")

    _, end = played(agent_task(play), lambda turn: "yes")
    assert isinstance(end, RuntimeError)
    assert kind.__name__ in str(end)


def test_a_request_that_comes_while_its_episode_is_closed_is_refused():
    episode = _Episode(Dialog(Problem("?", None), []))
    episode.close()
    refusal = episode.submit(parse_request(TEXT, b'{"prompt": "a"}')).answer.exception(timeout=300)
    assert isinstance(refusal, BadRequest) and refusal.status == 401


def test_an_agent_that_is_given_up_ends_and_its_key_with_it():
    ended: list[str] = []

    async def play(client, problem):
        try:
            await client.chat.completions.create(model="any", messages=chat("a"))
        except asyncio.CancelledError:
            ended.append(client.api_key)
            raise

    task = agent_task(play)
    task.advance([Dialog(PROBLEM, [], last=False, episode="0")], 300)
    task.close("0")
    task.close("0")  # closing twice does nothing
    until(lambda: ended)
    assert len(ended) == 1
    assert task._keys == {}


SOLVE = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
def ask(text):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def command(tmp_path: Path, code: str) -> Command:
    (tmp_path / "solve.py").write_text(SOLVE + code)
    program = load_program(f"{sys.executable} {tmp_path}/solve.py")
    assert isinstance(program, Command)
    return program


def test_a_command_gets_the_endpoint_and_prints_its_reward(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "http_proxy", "http://127.0.0.1:1"
    )  # as on a cluster, whose own hosts need no proxy
    monkeypatch.setenv("no_proxy", "a.example")
    code = "assert urllib.request.proxy_bypass('a.example'); print(0.5 * (ask(problem['prompt']) == problem['answer']))"
    program = command(tmp_path, code)
    turns, end = played(agent_task(program), lambda turn: "2")
    assert turns[0].messages == chat("1+1=?")
    assert end.score == own_score(0.5)


@pytest.mark.parametrize(
    "line, reward",
    [("-1", -1.0), ('{"reward": -1}', -1.0), ("true", 1.0), ('{"reward": false}', 0.0)]
    + [
        (line, None)
        for line in ("", "done", "null", '"done"', "[1]", '{"steps": 3}', '{"reward": null}', "{")
    ],
)
def test_the_last_line_of_a_command_may_be_its_reward(line, reward):
    assert printed_reward(f"a log\n{line}\n", "solve") == reward


@pytest.mark.parametrize(
    "line", ['"1"', '{"reward": "1"}', '{"reward": "good"}', '{"reward": [1]}']
)
def test_a_reward_of_a_command_that_is_no_number_is_invalid(line):
    with pytest.raises(InvalidRewardError, match="solve must return a number"):
        printed_reward(line, "solve")


def test_a_command_may_leave_the_reward_to_the_task(tmp_path):
    program = command(tmp_path, "ask('a'); print('done')")
    assert played(agent_task(program, "gsm8k"), lambda turn: "#### 2")[1].score.reward == 1.0


def test_a_command_that_fails_is_invalid_with_its_last_words(tmp_path):
    _, end = played(
        agent_task(command(tmp_path, "ask('a'); raise SystemExit('bad luck')")), lambda turn: "2"
    )
    assert isinstance(end, RuntimeError)
    assert "must exit with status 0, but it exited with 1: bad luck" in str(end)


DAEMON = """
import subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.Popen(["sleep", "61.{}"], stdin=-3, stdout=-3, stderr=-3, env={{}})
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("ending", ["given up", "ends", "fails"])
def test_a_command_is_killed_with_all_that_it_started(tmp_path, ending):
    stopped = "os.kill(os.getppid(), 19); subprocess.run(['sleep', '61'], start_new_session=True)"
    rest = {"given up": stopped, "ends": "print(1)", "fails": "1 / 0"}
    mark = f"61.{os.getpid()}{len(ending)}"
    code = f"import subprocess; ask('a')\n{DAEMON.format(mark.removeprefix('61.'))}\n{rest[ending]}"

    def asleep() -> list[int]:
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended in the meantime
                pids += [int(path.parent.name)] * (mark.encode() in path.read_bytes().split(b"\0"))
        return pids

    limit = 2 if ending == "given up" else 60
    _, end = played(agent_task(command(tmp_path, code)), lambda turn: "2", timeout_s=limit)
    words = {
        "given up": "must send a request or end within",
        "ends": "",
        "fails": "must exit with status 0, but it exited with 1",
    }
    assert isinstance(end, Turn) if ending == "ends" else words[ending] in str(end)
    deadline = time.monotonic() + 300
    while asleep() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asleep() == []


@pytest.mark.skipif(sys.platform != "linux", reason="a guard needs Linux")
@pytest.mark.parametrize(
    "code, message",
    [("os.kill(os.getpid(), 9)", "exited with -9"), ("sys.exit(3)", "exited with 3")],
)
def test_a_command_has_the_exit_status_that_it_would_have_alone(tmp_path, code, message):
    _, end = played(agent_task(command(tmp_path, f"ask('a'); {code}")), lambda turn: "2")
    assert message in str(end)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("no_such_file.py:play", "env.agent=no_such_file.py:play must name a file that exists"),
        ("no_such_file.py", "env.agent=no_such_file.py must name a file that exists"),
        ("no_such_command_anywhere", "there is no command 'no_such_command_anywhere'"),
        (
            "torchrl_grpo.integrations.agents.programs:load_program",
            "must be asynchronous, but it is not: write async def play",
        ),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load_program(spec)


@pytest.mark.slow
def test_a_task_with_an_agent_travels_before_it_plays(tmp_path):
    import cloudpickle

    (tmp_path / "mine.py").write_text("async def play(client, problem):\n    return 1\n")
    task = agent_task(load_program(f"{tmp_path}/mine.py:play"))
    assert isinstance(cloudpickle.loads(cloudpickle.dumps(task)).program, Function)


@pytest.mark.slow
def test_scorers_that_wait_are_asked_for_all_agents_at_a_time() -> None:
    async def play(client, problem):
        await client.chat.completions.create(model="any", messages=chat("a"))

    barrier = asyncio.Barrier(7)

    async def slow(response: str) -> float:
        await (asyncio.sleep(600) if response == "0" else barrier.wait())
        return 1.0

    task = agent_task(play, slow)
    opening = [Dialog(PROBLEM, [], last=False, episode=str(number)) for number in range(8)]
    task.advance(opening, 300)
    dialogs = [replace(dialog, responses=[str(number)]) for number, dialog in enumerate(opening)]
    late, *others = task.advance(dialogs, 10)
    assert isinstance(late, InvalidRewardError) and late.cause == "timeout"
    assert [turn.score for turn in others] == [Score(1.0, True, {"slow": 1.0})] * 7
    for dialog in opening:
        task.close(dialog.episode)


def test_a_completion_goes_on_after_the_stop_string_that_its_tokens_have() -> None:
    """An agent that repeats the stop string, as it must, does not show it to the policy twice."""

    async def play(client, problem):
        text = "Q: "
        for _ in range(2):
            answer = await client.completions.create(model="any", prompt=text, stop=["END"])
            text += answer.choices[0].text + "END and"
        return 1

    turns, _ = played(agent_task(play), lambda turn: "yesEND")
    assert [(turn.sample, turn.messages[0]["content"]) for turn in turns] == [
        (0, "Q: "),
        (0, " and"),
    ]
