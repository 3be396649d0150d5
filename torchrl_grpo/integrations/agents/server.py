"""``Server``: HTTP/1.1 server on loopback, one per process, for any number of concurrent agents.

It knows neither tasks nor the policy: a request goes to the episode of its key, which answers it
after the policy's turn. It is h11 on asyncio's streams, in a thread, which starts in a few
milliseconds inside a reward worker.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

try:
    import h11
except ModuleNotFoundError as error:
    raise ValueError(
        "env.agent needs the package h11, which is not installed: pip install "
        "'torchrl_grpo[agents]'."
    ) from error

from torchrl_grpo.integrations.agents.protocol import (
    APIS,
    COUNT,
    PATHS,
    Answer,
    BadRequest,
    Request,
    models,
    parse_request,
)

_MAX_HEAD_BYTES = 2**16
MAX_BODY_BYTES = 7 * 2**19
"""Maximum size of a request, because a worker's answers (``MAX_TURN_BYTES``) are limited too."""
_MAX_STRANGER_BYTES = 2**18
"""Maximum size of a request without a key."""
_MAX_STRANGERS = 256
"""Maximum number of connections without a key, because any user of the machine can open some, and
file descriptors are limited.
"""
_DISCARD_S = 2.0
"""Seconds that a refused client may go on sending."""
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

    def reward(self, value: Any, answer: Any = None) -> None: ...


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
    """Serves ``agents.protocol.PATHS`` of any number of episodes.

    Args:
        find: function that returns the episode of a key, or None.
        count: function that returns the number of tokens of a request's prompt.

    Attributes:
        url: base URL for an OpenAI client.
    """

    def __init__(
        self, find: Callable[[str], Receiver | None], count: Callable[[Request], int]
    ) -> None:
        self._find = find
        self._count = count
        self._loop = asyncio.new_event_loop()
        self._counting = ThreadPoolExecutor(1)  # loading a tokenizer takes seconds
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
        reader = asyncio.StreamReader(loop=self._loop)
        return _Connection(reader, self._serve, loop=self._loop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another."""
        self._strangers[writer] = None
        if len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        client = _Client(reader, writer)
        # h11 refuses the body of an answer to HEAD.
        with suppress(ConnectionError, TimeoutError, h11.LocalProtocolError):
            while client.may_continue():
                try:
                    request, body = await client.receive(self._most_bytes)
                except BadRequest as refusal:  # the beginning of the next request is unknown
                    client.send_json(refusal.status, refusal.body(), [("Connection", "close")])
                    await client.discard()
                    break
                path = request.target.decode("latin-1").partition("?")[0]
                try:
                    await self._answer(client, request, path, body)
                except BadRequest as refusal:
                    client.send_json(refusal.status, refusal.body(path))
                await writer.drain()
        self._strangers.pop(writer, None)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    def _episode(self, head: h11.Request) -> Receiver | None:
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        return next(filter(None, map(self._find, _keys(headers))), None)

    def _most_bytes(self, head: h11.Request) -> int:
        """Return the maximum size of a request's body."""
        return _MAX_STRANGER_BYTES if self._episode(head) is None else MAX_BODY_BYTES

    async def _answer(self, client: _Client, head: h11.Request, path: str, body: bytes) -> None:
        """Answer a request.

        Raises:
            BadRequest: it is refused.
            ConnectionError: the client left before the answer.
        """
        episode = self._episode(head)
        if episode is None:
            raise BadRequest(
                "the API key must belong to an episode in progress, but it is not: use "
                "OPENAI_API_KEY of the agent's environment, or the client that is passed to it.",
                status=401,
                code="invalid_api_key",
            )
        self._strangers.pop(client.writer, None)
        headers = {name: value.decode("latin-1") for name, value in head.headers}
        if (reward := headers.get(b"x-reward")) is not None:
            episode.reward(reward, headers.get(b"x-reward-id"))
        if path == "/v1/models" and head.method == b"GET":
            client.send_json(200, models())
            return
        if path not in PATHS:
            raise BadRequest(f"there is no {path:.60}: use one of {', '.join(PATHS)}.", status=404)
        if head.method != b"POST":
            method = head.method.decode("latin-1")
            raise BadRequest(
                f"the method must be POST, but it is {method:.20}: use POST.", status=405
            )
        request = parse_request(path, body)
        if path == COUNT:
            count = self._loop.run_in_executor(self._counting, self._count, request)
            client.send_json(200, {"input_tokens": await count})
            return
        pending = episode.submit(request)
        delivered = False
        try:
            answer = await _unless_left(pending, client.writer)
            if request.stream:
                client.send(200, [("Content-Type", "text/event-stream")], _events(answer))
            else:
                client.send_json(200, answer.body())
            await client.writer.drain()
            delivered = True
        finally:
            pending.delivered.set_result(delivered)


class _Client:
    """Requests and answers of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)

    def may_continue(self) -> bool:
        """Return whether another request may follow."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        return self._http.our_state is h11.IDLE

    async def receive(self, most_bytes: Callable[[h11.Request], int]) -> tuple[h11.Request, bytes]:
        """Return the next request and its body.

        Args:
            most_bytes: function that returns the maximum size of a request's body.

        Raises:
            BadRequest: it is not HTTP, or it is too long.
            ConnectionError: there is no request.
            TimeoutError: the client does not continue.
        """
        body, limit = bytearray(), 0
        try:
            while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request, limit = event, most_bytes(event)
                elif isinstance(event, h11.Data):
                    body += event.data
                elif event is h11.NEED_DATA:
                    if self._http.they_are_waiting_for_100_continue:
                        self._write(h11.InformationalResponse(status_code=100, headers=[]))
                    chunk = await asyncio.wait_for(self._reader.read(_MAX_HEAD_BYTES), _IDLE_S)
                    self._http.receive_data(chunk)
                else:
                    raise ConnectionResetError
                if len(body) > limit:
                    raise BadRequest(
                        f"a request must have at most {limit:,} bytes, but it has more: "
                        "send a shorter chat, or fewer or smaller images.",
                        status=413,
                        code="context_length_exceeded",
                    )
        except h11.RemoteProtocolError as error:
            raise BadRequest(
                f"a request must be HTTP/1.1, but it is not ({error}): use an HTTP client.",
                status=error.error_status_hint,
            ) from error
        return request, bytes(body)

    async def discard(self) -> None:
        """End the answers, and read what the client is still sending: otherwise it may lose the
        last answer.
        """
        with suppress(OSError):  # the client has left, or the time is over
            self.writer.write_eof()
            async with asyncio.timeout(_DISCARD_S):
                while await self._reader.read(_MAX_HEAD_BYTES):
                    pass

    def send_json(
        self, status: int, body: Any, headers: list[tuple[str, str]] | None = None
    ) -> None:
        """Answer with an object."""
        data = json.dumps(body).encode()
        kind = ("Content-Type", "application/json")
        self.send(status, [kind, ("Content-Length", str(len(data))), *(headers or [])], [data])

    def send(self, status: int, headers: list[tuple[str, str]], parts: Iterable[bytes]) -> None:
        """Answer with the parts of a body, in chunks unless there is a ``Content-Length``."""
        self._write(h11.Response(status_code=status, headers=headers))
        for part in parts:
            self._write(h11.Data(data=part))
        self._write(h11.EndOfMessage())

    def _write(self, event: h11.Event) -> None:
        self.writer.write(self._http.send(event) or b"")


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


def _events(answer: Answer) -> Iterator[bytes]:
    """Yield an answer as server-sent events."""
    names_events = answer.request.path in APIS
    for event in answer.events():
        name = f"event: {event['type']}\n" if names_events else ""
        yield f"{name}data: {json.dumps(event)}\n\n".encode()
    if not names_events:
        yield b"data: [DONE]\n\n"
