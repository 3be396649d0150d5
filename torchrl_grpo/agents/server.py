"""``Server``: HTTP/1.1 server on loopback, one per process, for any number of concurrent agents.

It knows neither tasks nor the policy: a request goes to the episode of its key, which answers it
after the policy's turn. It is plain asyncio in a thread, because no dependency of the package has a
server that starts in a few milliseconds inside a reward worker.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from torchrl_grpo.agents.protocol import (
    ANTHROPIC,
    PATHS,
    Answer,
    BadRequest,
    Request,
    models,
    parse_request,
)

_MAX_HEAD_BYTES = 2**16
MAX_BODY_BYTES = 2**18
"""Maximum size of a request, because a worker's answers are limited too."""
_MAX_STRANGERS = 256
"""Maximum number of connections without a key, because any user of the machine can open some, and
file descriptors are limited.
"""
_IDLE_S = 600.0
"""Seconds that a connection may be idle between two requests, or within one."""


@dataclass
class PendingRequest:
    """A request that waits for its answer.

    Attributes:
        request: the agent's request.
        answer: the policy's turn, or the refusal.
        delivered: whether the client received the answer; set by the server, at the latest after
            ``answer``.
    """

    request: Request
    answer: Future[Answer] = field(default_factory=Future)
    delivered: Future[bool] = field(default_factory=Future)


class Receiver(Protocol):
    """Interface of an episode, which receives the requests with its key."""

    def submit(self, request: Request) -> PendingRequest: ...


class _Connection(asyncio.StreamReaderProtocol):
    """Protocol that notices when the client closes its side, even while nothing is read. As in most
    servers, this means that the client has left.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.left.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.left.set()
        super().connection_lost(exc)


class Server:
    """Serves ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/messages`` of any number of
    episodes.

    Args:
        find: function that returns the episode of a key, or None.

    Attributes:
        url: base URL for an OpenAI client.
    """

    def __init__(self, find: Callable[[str], Receiver | None]) -> None:
        self._find = find
        self._loop = asyncio.new_event_loop()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        port_future: Future[int] = Future()
        threading.Thread(
            target=self._run, args=(port_future,), name="agents' server", daemon=True
        ).start()
        self.url = f"http://127.0.0.1:{port_future.result()}/v1"

    def _run(self, port_future: Future[int]) -> None:
        async def listen() -> None:
            try:
                server = await self._loop.create_server(self._connection, "127.0.0.1", 0)
            except OSError as error:
                port_future.set_exception(error)
                return
            port_future.set_result(server.sockets[0].getsockname()[1])
            await server.serve_forever()

        self._loop.run_until_complete(listen())

    def _connection(self) -> _Connection:
        reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES, loop=self._loop)
        return _Connection(reader, self._serve, loop=self._loop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        self._strangers[writer] = None
        if len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            keep_alive = True
            while keep_alive:
                try:
                    method, path, headers = await asyncio.wait_for(_head(reader), _IDLE_S)
                    keep_alive = headers.get("connection", "").lower() != "close"
                    if method == "HEAD":  # our answer has a body, so nothing may follow it
                        keep_alive = False
                    body = await asyncio.wait_for(_body(reader, writer, headers), _IDLE_S)
                except BadRequest as refusal:  # the beginning of the next request is unknown
                    _write(writer, refusal.status, refusal.body(), keep_alive=False)
                    break
                try:
                    await self._answer(writer, method, path, headers, body, keep_alive)
                except BadRequest as refusal:
                    _write(writer, refusal.status, refusal.body(path), keep_alive)
                await writer.drain()
        self._strangers.pop(writer, None)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        keep_alive: bool,
    ) -> None:
        """Answer a request.

        Raises:
            BadRequest: it is refused.
            ConnectionError: the client left before the answer.
        """
        episode = next(filter(None, map(self._find, _keys(headers))), None)
        if episode is None:
            raise BadRequest(
                "the API key must be that of an episode in progress, but it is not: use "
                "OPENAI_API_KEY of the agent's environment, or the client that is passed to it.",
                status=401,
                code="invalid_api_key",
            )
        self._strangers.pop(writer, None)
        if path == "/v1/models" and method == "GET":
            _write(writer, 200, models(), keep_alive)
            return
        if path not in PATHS:
            raise BadRequest(f"there is no {path:.60}: use one of {', '.join(PATHS)}.", status=404)
        if method != "POST":
            raise BadRequest(
                f"the method must be POST, but it is {method:.20}: use POST.", status=405
            )
        request = parse_request(path, body)
        pending = episode.submit(request)
        delivered = False
        try:
            answer = await _unless_left(pending, writer)
            if request.stream:
                _stream(writer, answer, keep_alive)
            else:
                _write(writer, 200, answer.body(), keep_alive)
            await writer.drain()
            delivered = True
        finally:
            pending.delivered.set_result(delivered)


async def _unless_left(pending: PendingRequest, writer: asyncio.StreamWriter) -> Answer:
    """Wait for the answer to a request.

    Raises:
        BadRequest: it is refused.
        ConnectionError: the client has left.
    """
    connection: Any = writer.transport.get_protocol()
    answer = asyncio.wrap_future(pending.answer)
    left = asyncio.ensure_future(connection.left.wait())
    await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
    if connection.left.is_set():
        answer.add_done_callback(lambda future: future.exception())  # nobody else retrieves it
        raise ConnectionResetError
    left.cancel()
    return answer.result()


def _keys(headers: dict[str, str]) -> list[str]:
    """Return candidates for an episode's key: OpenAI's key, Anthropic's, and the name of a session
    of verifiers.
    """
    return [
        headers.get("authorization", "").removeprefix("Bearer ").strip(),
        headers.get("x-api-key", ""),
        headers.get("x-session-id", "").partition(".")[0],
    ]


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Return method, path and headers of a request.

    Raises:
        BadRequest: it is not HTTP, or it is too long.
        IncompleteReadError: there is no request.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise BadRequest(
            f"a request's head must be under {_MAX_HEAD_BYTES:,} bytes: send less.", status=431
        ) from error
    first, *lines = head.strip("\r\n").split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, version = rest.rpartition(" ")
    if not version.startswith("HTTP/1."):
        raise BadRequest(
            f"a request must be HTTP/1.1, but it begins with {first!r:.60}: use an HTTP client."
        )
    headers: dict[str, str] = {}
    for name, colon, value in (line.partition(":") for line in lines):
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise BadRequest(
                f"a header must be a name and a value, but one is {name!r:.60}: use an HTTP client."
            )
        if name == "content-length" and headers.get(name, value) != value:
            raise BadRequest(
                "a request must have one Content-Length, but it has several: send the size of the "
                "body once."
            )
        headers[name] = value
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return method, path.partition("?")[0], headers


async def _body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]
) -> bytes:
    if "transfer-encoding" in headers:
        raise BadRequest(
            "a request must declare the length of its body: send Content-Length.", status=411
        )
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise BadRequest(
            f"Content-Length={length:.20} must be an integer: send the size of the body."
        )
    if len(length) > 12 or int(length) > MAX_BODY_BYTES:
        raise BadRequest(
            f"a request must have at most {MAX_BODY_BYTES:,} bytes, but it has {length:.20}: send "
            "a shorter chat.",
            status=413,
            code="context_length_exceeded",
        )
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await reader.readexactly(int(length))


def _write(writer: asyncio.StreamWriter, status: int, body: Any, keep_alive: bool) -> None:
    data = json.dumps(body).encode()
    length = f"Content-Length: {len(data)}"
    _write_head(writer, status, "application/json", length, keep_alive)
    writer.write(data)


def _stream(writer: asyncio.StreamWriter, answer: Answer, keep_alive: bool) -> None:
    """Write an answer as server-sent events."""
    _write_head(writer, 200, "text/event-stream", "Transfer-Encoding: chunked", keep_alive)
    is_named = answer.request.path == ANTHROPIC
    events = [
        f"event: {event['type']}\ndata: {json.dumps(event)}"
        if is_named
        else f"data: {json.dumps(event)}"
        for event in answer.events()
    ]
    for event in events if is_named else [*events, "data: [DONE]"]:
        data = f"{event}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    writer.write(b"0\r\n\r\n")


def _write_head(
    writer: asyncio.StreamWriter, status: int, kind: str, length: str, keep_alive: bool
) -> None:
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n{length}\r\n"
        f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    writer.write(head.encode())
