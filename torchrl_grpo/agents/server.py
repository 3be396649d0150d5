"""``Server``: HTTP/1.1 on loopback, one for a process, for any number of agents at a time.

It knows neither tasks nor the policy: a request with the key of an episode goes to that episode,
which answers it when the policy has. Plain asyncio in a thread of its own, because no dependency of
the package is a server that starts in a few milliseconds inside a reward worker.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
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

_LARGEST_HEAD = 2**16
LARGEST_BODY = 2**18
"""Bytes of a request: what a worker tells the run of a turn has a limit, too."""
_MOST_STRANGERS = 256
"""Connections that have not shown a key: anybody on the machine can open some, and files are few."""
_IDLE_S = 600.0
"""Seconds for which a connection may say nothing between two requests, or in the middle of one."""
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
            411: "Length Required", 413: "Payload Too Large", 431: "Request Header Fields Too Large"}  # fmt: skip


@dataclass
class Asked:
    """A request that waits for its answer.

    Attributes:
        request: of the agent.
        answer: the policy's turn, or why there is none.
        delivered: whether the client was there to take the answer; set by the server, at the latest
            after ``answer``.
    """

    request: Request
    answer: Future[Answer] = field(default_factory=Future)
    delivered: Future[bool] = field(default_factory=Future)


class Asks(Protocol):
    """Who answers the requests of one key."""

    def ask(self, request: Request) -> Asked: ...


class _Connection(asyncio.StreamReaderProtocol):
    """Notices that the client closes its side, also while nothing is read. As for most servers, it
    has then left.
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
        find: gives the episode of a key, None where there is none.

    Attributes:
        url: what an OpenAI client takes as its base URL.
    """

    def __init__(self, find: Callable[[str], Asks | None]) -> None:
        self._find = find
        self._loop = asyncio.new_event_loop()
        self._strangers: dict[
            asyncio.StreamWriter, None
        ] = {}  # the one that has waited longest is the first
        started: Future[int] = Future()
        threading.Thread(
            target=self._run, args=(started,), name="agents' server", daemon=True
        ).start()
        self.url = f"http://127.0.0.1:{started.result()}/v1"

    def _run(self, started: Future[int]) -> None:
        async def listen() -> None:
            try:
                server = await self._loop.create_server(self._connection, "127.0.0.1", 0)
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(server.sockets[0].getsockname()[1])
            await server.serve_forever()

        self._loop.run_until_complete(listen())

    def _connection(self) -> _Connection:
        reader = asyncio.StreamReader(limit=_LARGEST_HEAD, loop=self._loop)
        return _Connection(reader, self._serve, loop=self._loop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, one after the other."""
        self._strangers[writer] = None
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            stays = True
            while stays:
                try:
                    method, path, headers = await asyncio.wait_for(_head(reader), _IDLE_S)
                    # The answer to HEAD may have no body, and ours has one: nothing may follow it.
                    stays = (
                        headers.get("connection", "keep-alive").lower() != "close"
                        and method != "HEAD"
                    )
                    body = await asyncio.wait_for(_body(reader, writer, headers), _IDLE_S)
                except BadRequest as refusal:  # what follows on the connection cannot be told apart
                    _write(writer, refusal.status, refusal.body(), stays=False)
                    break
                try:
                    await self._answer(writer, method, path, headers, body, stays)
                except BadRequest as refusal:
                    _write(writer, refusal.status, refusal.body(path), stays)
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
        stays: bool,
    ) -> None:
        """Answers a request.

        Raises:
            BadRequest: it is refused.
            ConnectionError: the client left before the answer.
        """
        episode = next(filter(None, map(self._find, _keys(headers))), None)
        if episode is None:
            raise BadRequest(
                "the API key must be that of an episode that is being played, it is not: use "
                "OPENAI_API_KEY of the agent's environment, or the client that it was given.",
                status=401,
                code="invalid_api_key",
            )
        self._strangers.pop(writer, None)
        if path == "/v1/models" and method == "GET":
            _write(writer, 200, models(), stays)
            return
        if path not in PATHS:
            raise BadRequest(f"there is no {path:.60}: use one of {', '.join(PATHS)}.", status=404)
        if method != "POST":
            raise BadRequest(f"the method must be POST, it is {method:.20}: use POST.", status=405)
        request = parse_request(path, body)
        asked, delivered = episode.ask(request), False
        try:
            answer = await _unless_left(asked, writer)
            if request.stream and path == ANTHROPIC:
                _stream(
                    writer,
                    (f"event: {one['type']}\ndata: {json.dumps(one)}" for one in answer.events()),
                    stays,
                )
            elif request.stream:
                _stream(
                    writer,
                    (f"data: {data}" for data in (*map(json.dumps, answer.events()), "[DONE]")),
                    stays,
                )
            else:
                _write(writer, 200, answer.body(), stays)
            await writer.drain()
            delivered = True
        finally:
            asked.delivered.set_result(delivered)


async def _unless_left(asked: Asked, writer: asyncio.StreamWriter) -> Answer:
    """Wait for the answer to a request.

    Raises:
        BadRequest: it is refused.
        ConnectionError: the client has left.
    """
    connection: Any = writer.transport.get_protocol()
    answer = asyncio.wrap_future(asked.answer)
    left = asyncio.ensure_future(connection.left.wait())
    await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
    if connection.left.is_set():
        answer.add_done_callback(lambda done: done.exception())  # nobody else asks for it
        raise ConnectionResetError
    left.cancel()
    return answer.result()


def _keys(headers: dict[str, str]) -> list[str]:
    """Candidates for the key of an episode: OpenAI's key, Anthropic's, and the name of a session of
    verifiers.
    """
    session = headers.get("x-session-id", "").partition(".")[0]
    return [
        headers.get("authorization", "").removeprefix("Bearer ").strip(),
        headers.get("x-api-key", ""),
        session,
    ]


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers of a request.

    Raises:
        BadRequest: it is no HTTP, or it is too long.
        IncompleteReadError: there is none.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise BadRequest(
            f"a request's head must be under {_LARGEST_HEAD:,} bytes: send less.", status=431
        ) from error
    first, *lines = head.strip("\r\n").split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, version = rest.rpartition(" ")
    if not version.startswith("HTTP/1."):
        raise BadRequest(
            f"a request must be HTTP/1.1, it begins with {first!r:.60}: use an HTTP client."
        )
    headers: dict[str, str] = {}
    for name, colon, value in (line.partition(":") for line in lines):
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise BadRequest(
                f"a header must be a name and a value, one is {name!r:.60}: use an HTTP client."
            )
        if name == "content-length" and headers.get(name, value) != value:
            raise BadRequest(
                "a request must have one Content-Length, it has several: send the bytes of the "
                "body."
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
            "a request must say how long its body is: send Content-Length.", status=411
        )
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise BadRequest(
            f"Content-Length={length:.20} must be a whole number: send the bytes of the body."
        )
    if len(length) > 12 or int(length) > LARGEST_BODY:
        raise BadRequest(
            f"a request must be of at most {LARGEST_BODY:,} bytes, it has {length:.20}: send a shorter chat.",
            status=413,
            code="context_length_exceeded",
        )
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await reader.readexactly(int(length))


def _write(writer: asyncio.StreamWriter, status: int, body: Any, stays: bool) -> None:
    data = json.dumps(body).encode()
    _write_head(writer, status, "application/json", f"Content-Length: {len(data)}", stays)
    writer.write(data)


def _stream(writer: asyncio.StreamWriter, events: Iterable[str], stays: bool) -> None:
    """Writes server-sent events."""
    _write_head(writer, 200, "text/event-stream", "Transfer-Encoding: chunked", stays)
    for event in events:
        data = f"{event}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    writer.write(b"0\r\n\r\n")


def _write_head(
    writer: asyncio.StreamWriter, status: int, kind: str, length: str, stays: bool
) -> None:
    connection = "keep-alive" if stays else "close"
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n{length}\r\n"
        f"Connection: {connection}\r\n\r\n"
    )
    writer.write(head.encode())
