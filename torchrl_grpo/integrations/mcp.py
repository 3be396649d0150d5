"""Tools of MCP servers (Model Context Protocol): ``env.tools=[mcp:COMMAND]`` or ``mcp:URL``.

Each process that calls the tools of a server has one session with it, opened by the first call. A
command is a server of its own for each session, and ends with it. A call that takes too long, and a
server that dies, end the session: the policy reads why, and the next call opens another one.

It uses the official client, the package ``mcp``. Tested with servers of mcp 2.3.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from torchrl_grpo.checks import MCP
from torchrl_grpo.host.event_loop import event_loop
from torchrl_grpo.host.processes import guarded
from torchrl_grpo.images import Content

_LINES = 20
_CLOSE_S = 10.0
_SHARE = 0.8
"""Share of a turn's time limit that one call may take, so that its reward worker goes on."""


class ToolError(RuntimeError):
    """Error of a server, for the policy."""


class Session:
    """A session, which a task of this process's event loop opens and closes.

    Attributes:
        client: the client, once the session is open, or the reason why it cannot be opened.
        held: done when the session has ended.
        output: the last lines that the server printed to its standard error.

    Args:
        address: command line or URL of the server.
        timeout_s: seconds for opening the session.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.client: Future[Any] = Future()
        self.output: deque[str] = deque(maxlen=_LINES)
        self._address = address
        self._closing = asyncio.Event()
        self.held = asyncio.run_coroutine_threadsafe(self._hold(timeout_s), event_loop())

    async def _hold(self, timeout_s: float) -> None:
        from mcp import Client

        try:
            async with asyncio.timeout(timeout_s) as limit:
                with self._transport() as transport:
                    async with Client(transport) as client:
                        limit.reschedule(None)
                        self.client.set_result(client)
                        await self._closing.wait()
        except Exception as error:
            cause: Exception = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            if not self.client.done():
                self.client.set_exception(cause)

    @contextmanager
    def _transport(self) -> Iterator[Any]:
        """Context with the argument of the client."""
        from mcp.client.stdio import StdioServerParameters, stdio_client

        if is_url(self._address):
            yield self._address
            return
        command, *words = guarded(shlex.split(self._address))
        server = StdioServerParameters(command=command, args=words, env=dict(os.environ))
        reader, writer = os.pipe()
        threading.Thread(target=self._read_errors, args=(reader,), daemon=True).start()
        with open(writer, "w") as errors:
            yield stdio_client(server, errors)

    def _read_errors(self, reader: int) -> None:
        with open(reader, errors="replace") as lines:
            self.output.extend(line.strip() for line in lines)

    def close(self, timeout_s: float = 0) -> None:
        """End the session, and wait some seconds for the end."""
        event_loop().call_soon_threadsafe(self._closing.set)
        wait([self.held], timeout_s)


class Server:
    """A server, with a session for each process that asks it something.

    Args:
        address: command line or URL.
        timeout_s: seconds for an answer, and for opening the session before the first one.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._session: Session | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Server, (self.address, self.timeout_s)

    def ask(self, request: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Return a client's answer to a request. Any number of threads may ask at a time.

        Raises:
            ToolError: the server cannot be started, refuses the request, has died, or did not
                answer in time.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        end = time.monotonic() + self.timeout_s
        with self._lock:
            if self._session is None or self._session.held.done():
                self._session = Session(self.address, self.timeout_s)
            session = self._session
        try:
            client = session.client.result(self.timeout_s)
            answer = asyncio.wait_for(request(client), end - time.monotonic())
            return asyncio.run_coroutine_threadsafe(answer, event_loop()).result()
        except TimeoutError as error:
            self._end(session)
            raise ToolError(f"the server did not answer within {self.timeout_s:g} s") from error
        except Exception as error:
            is_answer = isinstance(error, MCPError) and error.code not in (
                CONNECTION_CLOSED,
                INVALID_REQUEST,  # also of a session that the server no longer knows
            )
            if is_answer and session.client.exception() is None:
                raise ToolError(str(error)) from error
            self._end(session, _CLOSE_S)
            printed = "".join(f": {line}" for line in list(session.output)[-1:])
            raise ToolError(f"the server's session ended ({error}){printed}") from error

    def close(self) -> None:
        """End the session, and with it the server of a command."""
        if self._session is not None:
            self._end(self._session, _CLOSE_S)

    def _end(self, session: Session, wait_s: float = 0) -> None:
        """End a session, so that the next request opens another one."""
        with self._lock:
            if self._session is session:
                self._session = None
        session.close(wait_s)


class Tool:
    """A tool of a server, as a function.

    Attributes:
        tool_schema: JSON schema, for the chat template. The server checks the arguments.

    Args:
        server: the server.
        schema: see above.
    """

    def __init__(self, server: Server, schema: dict[str, Any]) -> None:
        self.server = server
        self.tool_schema = schema
        self.__name__ = schema["function"]["name"]

    def __call__(self, /, **arguments: Any) -> Content:
        """Call the tool; return its texts and images.

        Raises:
            ToolError: see ``Server.ask``; or the tool failed.
        """
        result = self.server.ask(lambda client: client.call_tool(self.__name__, arguments))
        parts = [part_of(block.model_dump(mode="json", by_alias=True)) for block in result.content]
        if not parts and result.structured_content is not None:
            return json.dumps(result.structured_content, ensure_ascii=False)
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if result.is_error:
            raise ToolError(text)
        return parts if any(part["type"] == "image" for part in parts) else text


def is_url(address: str) -> bool:
    return address.startswith(("http://", "https://"))


def mcp_tools(spec: str, timeout_s: float) -> list[Tool]:
    """Return the tools of a server, after starting it, or a session with it, to list them.

    Args:
        spec: ``mcp:`` and a command line or a URL.
        timeout_s: time limit of a turn (``env.reward_timeout_s``).

    Raises:
        ValueError: there is no package ``mcp``, no such command, no answer, or no tool.
    """
    where = f"env.tools={spec}"
    address = spec.removeprefix(MCP).strip()
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{where} needs the package mcp, version 2 ({error}): pip install 'torchrl_grpo[mcp]'."
        ) from error
    words = [] if is_url(address) else shlex.split(address)
    if not is_url(address) and (not words or shutil.which(words[0]) is None):
        raise ValueError(
            f"{where} must be mcp: and a command or a URL, but there is no command "
            f"{''.join(words[:1])!r}: for example, 'mcp:python my_server.py' or "
            "mcp:http://localhost:8000/mcp."
        )
    server = Server(address, timeout_s)
    try:
        tools = server.ask(_all_tools)
    except ToolError as error:
        fix = "run the command in a terminal to see why"
        if is_url(address):
            fix = "start it first, or correct the address"
        raise ValueError(
            f"{where} must be a server that lists its tools within env.reward_timeout_s="
            f"{timeout_s:g}, but {error}: {fix}."
        ) from error
    finally:
        server.close()
    if not tools:
        raise ValueError(f"{where} must be a server with tools, but it has none: leave it out.")
    server = Server(address, _SHARE * timeout_s)
    return [
        Tool(server, tool_schema(tool.name, tool.description or "", tool.input_schema))
        for tool in tools
    ]


async def _all_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


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
    """Return a block of a tool's result as a part of a message: its text, its image, or, of a link
    to a resource, its JSON.

    Raises:
        ValueError: it is neither.
    """
    kind = block["type"]
    if kind == "image":
        return {"type": "image", "image": b64decode(block["data"], validate=True)}
    text = block.get("resource", block).get("text")
    if kind == "resource_link":
        text = json.dumps({key: value for key, value in block.items() if value is not None})
    if text is None:
        raise ValueError(f"a result must have texts and images, but it has {kind!r:.60}.")
    return {"type": "text", "text": text}
