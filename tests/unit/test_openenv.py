"""Dialogs that an OpenEnv server plays: its tools, its rewards, and the price of its failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import ROOT
from tests.support.pictures import picture
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config.env import EnvConfig
from torchrl_grpo.integrations.openenv import _observation_content
from torchrl_grpo.tasks.base import Dialog, Score, Turn

PACKAGES = Path(sys.prefix, "openenv")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PACKAGES.exists(), reason="needs the packages in requirements-openenv.txt (make test)"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    command = [sys.executable, str(ROOT / "tests/support/openenv_server.py")]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{PACKAGES}"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


class Play:
    """A dialog with a server's environments, turn by turn."""

    def __init__(self, server: str, number: int = 4, prompt: str | None = None) -> None:
        self.task = make_task(
            EnvConfig(environment=f"openenv:{server}", prompt_template=prompt, max_turns=4)
        )
        self.problem = self.task.problems("train")[number - 1]
        self.said: list[str] = []
        self.chat = self.task.messages(self.problem)
        self.opened = self.turn(None)

    def turn(self, response: str | None, last: bool = False) -> Any:
        self.said += [] if response is None else [response]
        dialog = Dialog(
            self.problem, list(self.said), self.chat, raw=response or "", last=last, episode="e"
        )
        return self.task.advance([dialog], 60)[0]


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def replies(turn: Turn) -> list[str]:
    return [message["content"] for message in turn.messages or ()]


def test_an_action_is_a_tool_and_its_rewards_add_up(server: str) -> None:
    play = Play(f"{server}/actions")
    assert replies(play.opened) == ["Guess 1-7."]
    assert play.opened.tools == [
        {
            "type": "function",
            "function": {
                "name": "step",
                "description": "Guess the number.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "number": {
                            "description": "from 1 to 7",
                            "title": "Number",
                            "type": "integer",
                        }
                    },
                    "required": ["number"],
                },
            },
        }
    ]
    first = play.turn(call("step", number=2))
    assert (replies(first), first.reward, first.score) == (["higher"], -0.25, None)
    wrong = play.turn(call("step", number="two"))
    assert "must be of the type integer" in replies(wrong)[0] and wrong.reward is None
    end = play.turn(call("step", number=4) + call("step", number=5))
    assert (end.messages, end.reward, end.score) == (None, 1.0, Score(0.75, False))
    play.task.close("e")


def test_an_mcp_tool_is_a_tool_with_the_reward_of_its_step(server: str) -> None:
    play = Play(f"{server}/tools", prompt="Guess.")
    assert replies(play.opened) == ["Guess."]
    tool, _ = play.opened.tools
    assert tool["function"]["name"] == "guess" and tool["function"]["parameters"]["required"] == [
        "number"
    ]
    first = play.turn(call("guess", number=6))
    assert (replies(first), first.reward) == (["lower"], -0.25)
    assert play.turn("I give up.").score == Score(-0.25, False)
    play.task.close("e")


def test_an_mcp_tool_shows_images(server: str) -> None:
    play = Play(f"{server}/tools", prompt="Guess.")
    [message] = play.turn(call("show", kind="png")).messages
    image = {"type": "image", "image": picture(3)}
    assert message["content"] == [{"type": "text", "text": "look"}, image]
    [message] = play.turn(call("show", kind="wav")).messages
    assert message["content"].startswith("error: ") and "'audio'" in message["content"]
    play.task.close("e")


def test_a_step_that_fails_and_a_server_that_dies_are_invalid_and_no_zero(server: str) -> None:
    play, other = Play(f"{server}/actions"), Play(f"{server}/actions")
    failed = play.turn(call("step", number=500))
    assert isinstance(failed, RuntimeError) and "EXECUTION_ERROR: the game is broken" in str(failed)
    play.task.close("e")
    assert replies(other.turn(call("step", number=5))) == ["lower"]
    lost = other.turn(call("step", number=9))
    assert isinstance(lost, Exception) and "ConnectionClosed" in type(lost).__name__
    other.task.close("e")
    with pytest.raises(ValueError, match=r"env\.environment=openenv:http.* must be"):
        Play(f"{server}/actions")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "hello"}, '{"content": "hello"}'),
        ({"content": [{"type": "resource"}], "data": "fine"}, "fine"),
    ],
)
def test_a_result_of_another_form_is_read_as_data(result: dict[str, object], text: str) -> None:
    assert _observation_content({"observation": {"tool_name": "read", "result": result}}) == text
