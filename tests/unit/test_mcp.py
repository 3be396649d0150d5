"""Tools of MCP servers, with real servers over standard input and over HTTP."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.support.configs import ROOT, compose_config
from tests.support.ports import free_port
from tests.support.processes import alive, below, command_line
from tests.support.scripts import SYNC, Script, rows_of
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.images import ImageFile
from torchrl_grpo.integrations.mcp import mcp_tools
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Turn
from torchrl_grpo.tasks.conversations import WithTools
from torchrl_grpo.tools import Toolbox, ToolCall

pytest.importorskip("mcp.server", exc_type=ImportError)
SERVER = [sys.executable, "-m", "tests.support.mcp_server"]
STDIO = f"mcp:env PYTHONPATH={ROOT} {' '.join(SERVER)}"
START_S = 120.0
CALL = '<tool_call>{"name": "%s", "arguments": {"a": 20, "b": 1}}</tool_call>'
PARSER = """
from torchrl_grpo.tools import ToolCall

def parse(text):
    return [ToolCall(CALL)]
"""


class HTTPServer:
    """The server over HTTP, at one port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    @property
    def spec(self) -> str:
        return f"mcp:http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*SERVER, str(self.port)], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.port)).close()
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def http() -> Iterator[HTTPServer]:
    server = HTTPServer()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stdio() -> list[Any]:
    return mcp_tools(STDIO, START_S)


@pytest.fixture(scope="module", params=["stdio", "http"])
def tools(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    if request.param == "http":
        listed = mcp_tools(request.getfixturevalue("http").spec, START_S)
    else:
        listed = request.getfixturevalue("stdio")
    copies: list[Any] = cloudpickle.loads(cloudpickle.dumps(listed))
    yield copies
    copies[0].func.__self__.close()


@pytest.fixture
def call(tools: list[Any]) -> Callable[..., Any]:
    toolbox = Toolbox(tools)
    return lambda name, **arguments: toolbox.run(ToolCall(name, arguments))


def test_tools_are_listed_with_their_schemas_and_called(
    tools: list[Any], call: Callable[..., Any]
) -> None:
    assert Toolbox(tools).schemas[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"title": "A", "type": "integer"},
                    "b": {"title": "B", "type": "integer", "default": 1},
                },
                "required": ["a"],
            },
        },
    }
    assert call("add", a=2, b=3) == ("5", True)
    assert call("add", a="2") == ("3", True)  # the server decides what it takes
    assert call("lines", texts=["a", "b"]) == ("a\nb", True)
    assert call("lines", texts=[]) == ('{"result": []}', True)


def test_a_result_has_images(call: Callable[..., Any]) -> None:
    content, succeeded = call("picture", color="red")
    text, image = content
    assert succeeded and text == {"type": "text", "text": "A square:"}
    assert isinstance(image["image"], ImageFile) and image["image"].size == (4, 3)


def test_the_policy_sees_errors_of_a_tool_and_its_session_continues(
    call: Callable[..., Any],
) -> None:
    first, _ = call("count")
    for name, arguments, part in (
        ("fail", {"why": "x"}, "fail"),
        ("add", {"a": "x"}, "valid integer"),
        ("add", {}, "Field required"),
    ):
        text, succeeded = call(name, **arguments)
        assert text.startswith("error: ") and part in text and not succeeded
    assert call("count") == (str(int(first) + 1), True)


@pytest.mark.slow
def test_a_call_without_an_answer_times_out_with_an_error(
    tools: list[Any], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of a command is started anew, because it may hang."""
    counted, _ = call("count")
    with monkeypatch.context() as patch:
        patch.setattr(tools[0].func.__self__, "timeout_s", 0.5)
        text, succeeded = call("wait", seconds=600)
    assert text.startswith("error: ") and "timed out" in text and not succeeded
    goes_on = tools[0].func.__self__.address.startswith("http")
    assert call("count") == (str(int(counted) + 1) if goes_on else "1", True)


def test_a_dead_server_is_an_error_and_the_next_call_starts_another(
    tools: list[Any], call: Callable[..., Any], http: HTTPServer
) -> None:
    detached, _ = call("leave")
    text, succeeded = call("die")
    assert text.startswith("error: ") and "session ended" in text and not succeeded
    if tools[0].func.__self__.address.startswith("http"):
        text, succeeded = call("add", a=1)
        assert "session ended" in text and not succeeded
        psutil.Process(int(detached)).kill()
        http.start()
        assert call("count") == ("1", True)
    else:
        assert "out of paper" in text and alive([int(detached)]) == []


def test_the_tools_of_a_server_are_those_of_a_run(http: HTTPServer) -> None:
    task = make_task(
        compose_config(
            "env.dataset=arithmetic",
            f"env.tools=[{http.spec},examples/my_tools.py:calculator]",
            "env.max_turns=2",
        ).env
    )
    names = [schema["function"]["name"] for schema in task.tools]
    assert {"add", "calculator"} < set(names)
    dialog = Dialog(task.problems("train")[0], [CALL % "add"], raw=CALL % "add", last=False)
    [turn] = task.advance([dialog])
    assert isinstance(turn, Turn) and turn.messages is not None
    assert turn.messages[0]["content"] == "21"


@pytest.mark.slow
def test_a_server_and_its_children_end_with_their_reward_worker(
    stdio: list[Any],
) -> None:
    task = WithTools(ArithmeticTask(), Toolbox(stdio))
    problem = task.problems("train")[0]
    before = below()
    with RewardPool(task, 1, timeout_s=START_S) as pool:
        dialogs = [Dialog(problem, [text], raw=text, last=False) for text in (CALL % "leave",) * 2]
        turns = [pool.submit(dialog).result() for dialog in dialogs]
        pids = set(below()) - set(before)
        for turn in turns:
            assert isinstance(turn, Turn) and turn.messages is not None
            assert int(turn.messages[0]["content"]) in pids
    assert alive(pids) == []


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("mcp:", ["cannot be empty", "mcp:python my_server.py"]),
        ("mcp:no_such_command 3", ["FileNotFoundError"]),
        (f"mcp:{sys.executable} -c 'raise OSError(\"no paper\")'", ["OSError: no paper"]),
        ("mcp:http://127.0.0.1:9/mcp", ["connection attempts failed"]),
    ],
)
def test_a_server_that_cannot_start_is_refused(spec: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"env\.tools=mcp:") as refusal:
        mcp_tools(spec, START_S)
    assert all(part in str(refusal.value) for part in parts)


def test_a_missing_package_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"env\.tools=mcp:x .*torchrl_grpo\[mcp\]"):
        mcp_tools("mcp:x", START_S)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["stdio", "http"])
def test_a_run_calls_a_server_and_leaves_no_process(
    kind: str, http: HTTPServer, tmp_path: Path
) -> None:
    spec, call = http.spec, "'add', {'a': 2, 'b': 3}"
    if kind == "stdio":
        spec = f"mcp:{sys.executable} {ROOT / 'examples' / 'my_mcp_server.py'}"
        call = "'calculator', {'expression': '2+3'}"
    (tmp_path / "parser.py").write_text(PARSER.replace("CALL", call))
    steps = 2 if kind == "http" else 1000
    options = (
        f"env.tools=['{spec}']",
        "env.tool_parser=parser.py:parse",
        "env.max_turns=2",
        "env.reward_timeout_s=120",
        "env.reward_workers=2",
        "evaluation.num_prompts=0",
        f"train.total_dialog_turns={16 * steps}",
        "train.optim_batch_size=16",
    )
    with Script(SYNC, tmp_path, *options) as script:
        script.wait(lambda: (tmp_path / "metrics.jsonl").is_file() and len(rows_of(tmp_path)) > 1)
        if kind == "stdio":
            assert any("my_mcp_server" in command_line(child) for child in script.family)
            script.process.send_signal(signal.SIGTERM)
        script.wait()
        assert script.left() == []
    assert script.process.returncode == (128 + signal.SIGTERM if kind == "stdio" else 0)
    row = rows_of(tmp_path)[1]
    assert row["tools/calls"] > 0 and row["tools/errors"] == 0
