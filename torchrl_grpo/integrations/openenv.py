"""``OpenEnvKind``: environments on an OpenEnv server, with a session for each dialog.

It implements the server's protocol, JSON over a WebSocket (``openenv.core.EnvClient``), because the
package ``openenv`` cannot be imported without fastmcp, which needs ``mcp<2``, while vLLM needs
``mcp>=2``. Tested with servers of openenv 0.10.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchrl_grpo.checks import check_reward
from torchrl_grpo.integrations.mcp import part_of, tool_schema
from torchrl_grpo.tasks.with_environment import Kind
from torchrl_grpo.tools import Toolbox
from torchrl_grpo.tools.toolbox import Parser

_CALL_TIMEOUT_S = 300.0
_MAX_MESSAGE_BYTES = 2**24
_ACTION = "step"
"""Name of the tool for actions that are not MCP calls."""
_COMMON_FIELD = "metadata"


class Refused(ValueError):
    """The server refused an action as invalid; the policy gets the message."""


class Session:
    """A session on a server: one environment, for the life of the connection.

    Attributes:
        reward: reward of the policy's latest turn; None if no step had one.
        total: sum of the rewards of all steps.
        done: whether the environment is done.
        failure: error that ended the session early.

    Args:
        url: of the server, ``http://host:port``.
        tools: names of the server's MCP tools.

    Raises:
        OSError: there is no connection.
    """

    def __init__(self, url: str, tools: Sequence[str] = ()) -> None:
        self._tools = frozenset(tools)
        self.reward: float | None = None
        self.total = 0.0
        self.done = False
        self.failure: Exception | None = None
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        connect = import_module("websockets.sync.client").connect
        self._open = ExitStack()
        self._socket = self._open.enter_context(
            connect(address, max_size=_MAX_MESSAGE_BYTES, close_timeout=1)
        )

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return the answer's data.

        Raises:
            Refused: the message is invalid.
            RuntimeError: the server failed.
            OSError: the server does not answer.
        """
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(self._socket.recv(timeout=_CALL_TIMEOUT_S))
            body: dict[str, Any] = answer.get("data") or {}
            if answer.get("type") == "error":
                details = body.get("errors") or ""
                error = f"{body.get('code')}: {body.get('message')} {details}".rstrip()
                if body.get("code") == "VALIDATION_ERROR":
                    raise Refused(error)
                raise RuntimeError(f"the OpenEnv server failed: {error}")
        except Refused:
            raise
        except Exception as error:
            self.failure = error
            raise
        return body

    def reset(self, **columns: Any) -> str | list[dict[str, Any]]:
        return _observation_content(self.ask("reset", columns))

    def call(self, tool: str, **arguments: Any) -> str | list[dict[str, Any]]:
        """Take a step, an MCP tool call or an action; return the observation."""
        if self.done:
            return "the episode is over"
        mcp_call = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        outcome = self.ask("step", mcp_call if tool in self._tools else arguments)
        if outcome.get("reward") is not None:
            reward = check_reward(outcome["reward"], "the reward of OpenEnv's server")
            self.reward = (self.reward or 0.0) + reward
            self.total += reward
        self.done = bool(outcome.get("done"))
        return _observation_content(outcome)

    def get_reward(self) -> float:
        return self.total

    def close(self) -> None:
        self._open.close()


def _observation_content(outcome: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """Return the observation: an MCP tool's result with its images, or as text its only text, or
    all of it as JSON.

    Raises:
        ValueError: an MCP tool's result is neither texts nor images.
    """
    observation = {
        name: value
        for name, value in (outcome.get("observation") or {}).items()
        if value not in (None, {}, [])
    }
    observation.pop(_COMMON_FIELD, None)
    if observation.pop("tool_name", None) is not None:
        if "error" in observation:
            return f"error: {observation['error'].get('message')}"
        result = observation.get("result")
        if isinstance(result, dict):
            content = result.get("content")
            listed = content if isinstance(content, list) else []
            blocks = listed if all(isinstance(block, dict) for block in listed) else []
            kinds = [block.get("type") for block in blocks]
            others = any(kind not in (None, "text") for kind in kinds)
            if "image" in kinds or (others and result.get("data") is None):
                return list(map(part_of, blocks))
            result = result.get("data", result)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    if len(observation) == 1 and isinstance(only := next(iter(observation.values())), str):
        return only
    return json.dumps(observation, ensure_ascii=False) if observation else ""


class OpenEnvKind(Kind):
    """The environments of a server, whose MCP tools and actions are the policy's tools.

    Args:
        url: of the server.
        tools: further functions that the policy may call.
        parser: function that finds the calls in a turn; None parses the chat template's format.

    Raises:
        ValueError: the server does not answer, or there is no package ``websockets``.
    """

    def __init__(
        self, url: str, tools: Sequence[Callable[..., Any]] = (), parser: Parser | None = None
    ) -> None:
        where = f"env.environment=openenv:{url}"
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"{where} must be an address: for example, openenv:http://127.0.0.1:8000."
            )
        if find_spec("websockets") is None:
            raise ValueError(
                f"{where} needs the package websockets, which is not installed: pip install "
                "'torchrl_grpo[openenv]'."
            )
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=10) as answer:
                action = json.load(answer)["action"]
            with closing(Session(url)) as session:
                request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
                tool_list = session.ask("mcp", request).get("result") or {}
        except Exception as error:
            raise ValueError(
                f"{where} must be a running OpenEnv server, but it did not answer "
                f"({type(error).__name__}: {error}): start it first, or correct the address."
            ) from error
        of_mcp = [
            tool_schema(
                tool["name"],
                tool.get("description", ""),
                tool.get("inputSchema") or tool.get("input_schema") or {},
            )
            for tool in tool_list.get("tools", ())
        ]
        properties = {
            name: value
            for name, value in action.get("properties", {}).items()
            if name != _COMMON_FIELD
        }
        schemas = list(of_mcp)
        if "tool_name" not in properties:
            schemas.append(
                tool_schema(
                    _ACTION, action.get("description", ""), {**action, "properties": properties}
                )
            )
        self.make = partial(Session, url, [schema["function"]["name"] for schema in of_mcp])
        self.name = "openenv"
        self.steps = False
        self.owns_reward = True
        self._methods = []
        self.toolbox = Toolbox(tools, parser)
        self.toolbox.schemas += schemas
        self._remote = [schema["function"]["name"] for schema in schemas]

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return all columns; the server uses those that its environment's ``reset`` names."""
        return dict(columns)

    def tools_of(self, environment: Any) -> Toolbox:
        remote = {name: partial(environment.call, name) for name in self._remote}
        return self.toolbox.with_functions(self.toolbox.functions | remote)

    def outcome(self, environment: Any) -> tuple[float | None, bool]:
        if environment.failure is not None:
            raise environment.failure
        reward = environment.reward
        environment.reward = None
        return reward, environment.done
