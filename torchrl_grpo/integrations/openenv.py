"""``OpenEnvKind``: environments that a server of OpenEnv plays, a session of it for each dialog.

It speaks the server's protocol itself, JSON over a WebSocket (``openenv.core.EnvClient``): the
package ``openenv`` cannot be imported without fastmcp, which needs ``mcp<2``, and vLLM needs
``mcp>=2``. Tried with servers of openenv 0.10.
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
from torchrl_grpo.tasks.with_environment import Kind
from torchrl_grpo.tools import Toolbox
from torchrl_grpo.tools.toolbox import Parser, parse_tool_calls

_LONGEST_CALL_S = 300.0
_LARGEST_MESSAGE = 2**24
_ACTION = "step"
"""The tool that stands for an action of a server's own."""
_OF_EVERY_ACTION = "metadata"


class Refused(ValueError):
    """The server says that an action is no valid one; the policy is told."""


class Session:
    """A session of a server: an environment of its own, from the connection to its end.

    Attributes:
        reward: of the policy's latest turn; None where no step had one.
        total: the sum of all steps' rewards.
        done: whether the environment said so.
        failure: what ended the session before that.

    Args:
        url: of the server, ``http://host:port``.
        tools: names of its MCP tools.

    Raises:
        OSError: there is no connection.
    """

    def __init__(self, url: str, tools: Sequence[str] = ()) -> None:
        self._tools = frozenset(tools)
        self.reward: float | None = None
        self.total, self.done = 0.0, False
        self.failure: Exception | None = None
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        connect = import_module("websockets.sync.client").connect
        self._open = ExitStack()
        self._socket = self._open.enter_context(
            connect(address, max_size=_LARGEST_MESSAGE, close_timeout=1)
        )

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of the answer.

        Raises:
            Refused: the message is no valid one.
            RuntimeError: the server failed.
            OSError: it does not answer.
        """
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(self._socket.recv(timeout=_LONGEST_CALL_S))
            body: dict[str, Any] = answer.get("data") or {}
            if answer.get("type") == "error":
                details = body.get("errors") or ""
                error = f"{body.get('code')}: {body.get('message')} {details}".rstrip()
                if body.get("code") == "VALIDATION_ERROR":
                    raise Refused(error)
                raise RuntimeError(f"the server of OpenEnv failed: {error}")
        except Refused:
            raise
        except Exception as error:
            self.failure = error
            raise
        return body

    def reset(self, **columns: Any) -> str:
        return _text(self.ask("reset", columns))

    def call(self, tool: str, **arguments: Any) -> str:
        """Take a step: an MCP tool's call, or an action; return what is observed."""
        if self.done:
            return "the episode is over"
        of_mcp = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        outcome = self.ask("step", of_mcp if tool in self._tools else arguments)
        if outcome.get("reward") is not None:
            reward = check_reward(outcome["reward"], "the reward of OpenEnv's server")
            self.reward = (self.reward or 0.0) + reward
            self.total += reward
        self.done = bool(outcome.get("done"))
        return _text(outcome)

    def get_reward(self) -> float:
        return self.total

    def close(self) -> None:
        self._open.close()


def _text(outcome: Mapping[str, Any]) -> str:
    """Return the observation as text: an MCP tool's result, the only text there is, or everything
    as JSON.
    """
    observation = {
        name: value
        for name, value in (outcome.get("observation") or {}).items()
        if value not in (None, {}, [])
    }
    observation.pop(_OF_EVERY_ACTION, None)
    if observation.pop("tool_name", None) is not None:
        if "error" in observation:
            return f"error: {observation['error'].get('message')}"
        result = observation.get("result")
        result = result.get("data", result) if isinstance(result, dict) else result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    if len(observation) == 1 and isinstance(only := next(iter(observation.values())), str):
        return only
    return json.dumps(observation, ensure_ascii=False) if observation else ""


class OpenEnvKind(Kind):
    """The environments of a server, whose MCP tools and whose actions are the policy's tools.

    Args:
        url: of the server.
        tools: functions that the policy may call besides.
        parser: finds calls in the policy's text.

    Raises:
        ValueError: the server does not answer, or there is no package ``websockets``.
    """

    def __init__(
        self, url: str, tools: Sequence[Callable[..., Any]] = (), parser: Parser = parse_tool_calls
    ) -> None:
        where = f"env.environment=openenv:{url}"
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"{where} must be an address: for example, openenv:http://127.0.0.1:8000."
            )
        if find_spec("websockets") is None:
            raise ValueError(
                f"{where} needs the package websockets, which is not installed: pip install "
                "websockets."
            )
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=10) as answer:
                action = json.load(answer)["action"]
            with closing(Session(url)) as session:
                request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
                listed = session.ask("mcp", request).get("result") or {}
        except Exception as error:
            raise ValueError(
                f"{where} must be a server of OpenEnv that runs, it did not answer "
                f"({type(error).__name__}: {error}): start it first, or correct the address."
            ) from error
        of_mcp = [
            _schema(
                tool["name"],
                tool.get("description", ""),
                tool.get("inputSchema") or tool.get("input_schema") or {},
            )
            for tool in listed.get("tools", ())
        ]
        own = {
            name: value
            for name, value in action.get("properties", {}).items()
            if name != _OF_EVERY_ACTION
        }
        schemas = list(of_mcp)
        if "tool_name" not in own:
            schemas.append(
                _schema(_ACTION, action.get("description", ""), {**action, "properties": own})
            )
        self.make = partial(Session, url, [schema["function"]["name"] for schema in of_mcp])
        self.name, self.steps, self.owns_reward, self._methods = "openenv", False, True, []
        self.toolbox = Toolbox(tools, parser)
        self.toolbox.schemas += schemas
        self._remote = [schema["function"]["name"] for schema in schemas]

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return all columns: the server takes those that its environment's ``reset`` names."""
        return dict(columns)

    def tools_of(self, environment: Any) -> Toolbox:
        remote = {name: partial(environment.call, name) for name in self._remote}
        return self.toolbox.replaced(self.toolbox.functions | remote)

    def outcome(self, environment: Any) -> tuple[float | None, bool]:
        if environment.failure is not None:
            raise environment.failure
        reward, environment.reward = environment.reward, None
        return reward, environment.done


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema for the chat template."""
    schema = {
        key: parameters[key] for key in ("properties", "required", "$defs") if key in parameters
    }
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", **schema},
    }
    return {"type": "function", "function": function}
