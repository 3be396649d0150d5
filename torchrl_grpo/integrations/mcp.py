"""Tools of MCP servers (Model Context Protocol): ``env.tools=[mcp:COMMAND]`` or ``mcp:URL``.

Each process that calls a server's tools has one session with it, which the first call opens. For a
command, each session starts its own server, which ends with the session. A timeout or a server that
dies ends the session: the policy sees the reason, and the next call opens a new session.

Uses the official client, the package ``mcp``. Tested with servers of mcp 1.30 and 2.3.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from base64 import b64decode
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torchrl_grpo.checks import MCP
from torchrl_grpo.host.processes import guarded
from torchrl_grpo.images import Content

_SHARE = 0.8
"""Share of a turn's time limit that one call may take, so that its reward worker continues."""
_SESSION_ENDED = (-32001, -32000, -32600)
"""Error codes that end a session: a timeout, a closed connection, and a session that the server no
longer knows.
"""
_CLOSE_S = 1.0


class ToolError(RuntimeError):
    """Error from a server, as shown to the policy."""


class Server:
    """MCP server, with one session for each process that uses it.

    Args:
        address: command line or URL.
        timeout_s: seconds for an answer.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._session: Callable[[Any], Any] | None = None
        self._output: deque[str] = deque(maxlen=1)  # the last line of the server's standard error

    def __reduce__(self) -> tuple[Any, ...]:
        return Server, (self.address, self.timeout_s)

    def ask(self, request: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send a request and return the answer. Thread-safe.

        Raises:
            ToolError: the server cannot be started, refuses the request, has died, or did not
                answer in time.
        """
        session = None
        try:
            with self._lock:
                session = self._session = self._session or self._connect()
            return session(request)
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if getattr(error, "code", _SESSION_ENDED[0]) not in _SESSION_ENDED:
                raise ToolError(str(error)) from error
            closing = threading.Thread(target=self.close, args=(session,), daemon=True)
            closing.start()
            closing.join(_CLOSE_S)  # a server that hangs takes longer
            why = [f"the server's session ended ({error})", *self._output]
            raise ToolError(": ".join(why).rstrip()) from error

    def _connect(self) -> Callable[[Any], Any]:
        from anyio.from_thread import start_blocking_portal
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        portal = self._open.enter_context(start_blocking_portal())
        transport: Any = self.address
        if not self.address.startswith(("http://", "https://")):
            command, *words = guarded(shlex.split(self.address) or [""])
            server = StdioServerParameters(command=command, args=words, env=dict(os.environ))
            self._output.clear()
            reader, writer = os.pipe()
            lines = open(reader, errors="replace")  # noqa: SIM115
            threading.Thread(target=self._output.extend, args=(lines,), daemon=True).start()
            errors = self._open.enter_context(open(writer, "w"))  # noqa: SIM115
            transport = stdio_client(server, errors)
        client = Client(transport, read_timeout_seconds=self.timeout_s)
        session = self._open.enter_context(portal.wrap_async_context_manager(client))
        return lambda request: portal.call(request, session)

    def close(self, session: Any = None) -> None:
        """End a session, by default the open one; for a command, this also ends its server."""
        with self._lock:
            if session in (None, self._session):
                self._session = None
                with suppress(Exception):  # the connection may be broken
                    self._open.close()

    def call(self, tool: str, /, **arguments: Any) -> Content:
        """Call a tool; return its texts and images.

        Raises:
            ToolError: the tool failed; see also ``ask``.
        """
        result = self.ask(lambda client: client.call_tool(tool, arguments, self.timeout_s))
        parts = [
            part_of(block.model_dump(mode="json", exclude_none=True)) for block in result.content
        ]
        if not parts and result.structured_content is not None:
            return json.dumps(result.structured_content, ensure_ascii=False)
        texts = [part["text"] for part in parts if "text" in part]
        if result.is_error:
            raise ToolError("\n".join(texts))
        return "\n".join(texts) if len(texts) == len(parts) else parts


def mcp_tools(spec: str, timeout_s: float) -> list[Callable[..., Content]]:
    """Return the tools of a server as functions; a temporary session lists them.

    Args:
        spec: ``mcp:`` and a command line or a URL.
        timeout_s: time limit of a turn (``env.reward_timeout_s``).

    Raises:
        ValueError: the package ``mcp`` is missing, the command does not exist, or the server does not
            answer or has no tools.
    """
    server = Server(spec.removeprefix(MCP), timeout_s)
    try:
        tools = server.ask(_all_tools)
        if not tools:
            raise ToolError("it has none")
    except ToolError as error:
        raise ValueError(
            f"env.tools={spec} must be mcp: and the URL or command of a server that lists its tools "
            f"within env.reward_timeout_s={timeout_s:g}, but {error}: for example, use 'mcp:python "
            "my_server.py' or mcp:http://localhost:8000/mcp, after pip install 'torchrl_grpo[mcp]'."
        ) from error
    finally:
        server.close()
    server.timeout_s *= _SHARE
    functions: list[Callable[..., Content]] = []
    for tool in tools:
        function = partial(server.call, tool.name)
        schema = tool_schema(tool.name, tool.description or "", tool.input_schema)
        vars(function).update(__name__=tool.name, tool_schema=schema)
        functions.append(function)
    return functions


async def _all_tools(client: Any, cursor: str | None = None) -> list[Any]:
    page = await client.list_tools(cursor=cursor)
    more = await _all_tools(client, page.next_cursor) if page.next_cursor else []
    return [*page.tools, *more]


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema for the chat template."""
    schema = {
        key: parameters[key] for key in ("properties", "required", "$defs") if key in parameters
    }
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": {}, **schema},
    }
    return {"type": "function", "function": function}


def part_of(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block of a tool's result as a part of a message: an image, a text or, for a link, its
    address.

    Raises:
        ValueError: it is none of these.
    """
    if block["type"] == "image":
        return {"type": "image", "image": b64decode(block["data"], validate=True)}
    text = block.get("resource", block).get("text", block.get("uri"))
    if text is None:
        raise ValueError(f"a result must have texts and images, but it has {block['type']!r:.60}.")
    return {"type": "text", "text": text}
