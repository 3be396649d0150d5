"""A client of one HTTP server, for all that asks servers: connection, key, time limits, retries and
errors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

CONNECT_S = 10.0
"""Seconds in which a connection must be made."""
_TRY_AGAIN = {408, 409, 425, 429}
_LONGEST_PAUSE_S = 8.0
_SHORTEST_SECRET = 8
"""Characters of a key that an answer may repeat by chance where it has fewer."""
_KEPT_S = 1.0
"""Seconds for which an idle connection is used again: a server that closes it after some (uvicorn's
five) must not do so when a request is on its way."""


class NoAnswerError(RuntimeError):
    """A server does not answer, or not with a success.

    Attributes:
        status: of HTTP; None where there was no answer.
        problem: in words, of the latest attempt.
        attempts: how many there were.
    """

    def __init__(self, status: int | None, problem: str, attempts: int) -> None:
        super().__init__(f"after {attempts} attempts: {problem}")
        self.status, self.problem, self.attempts = status, problem, attempts


class BadAnswerError(RuntimeError):
    """A server's answer cannot be read; the message says which rule it breaks."""


def may_pass(status: int | None) -> bool:
    """Whether a failure says nothing of the request: a server that does not answer, fails or is
    overloaded.
    """
    return status is None or status >= 500 or status in _TRY_AGAIN


class HttpClient:
    """Sends requests to a server, many at a time, in one event loop.

    Args:
        url: that all routes begin with.
        key_variable: environment variable that has the key, where the server wants one.
        concurrency: most requests at a time; None is no limit.
        proxies: whether the proxies that environment variables name are used.
    """

    def __init__(
        self,
        url: str,
        *,
        key_variable: str,
        concurrency: int | None = None,
        proxies: bool = True,
    ) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(
            logging.WARNING
        )  # at INFO it has a line for each request
        self.url = url.rstrip("/")
        self._key_variable = key_variable
        self._slots = asyncio.Semaphore(concurrency or 2**31)
        self._broken: type[Exception] = httpx.TransportError
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=concurrency, keepalive_expiry=_KEPT_S),
            trust_env=proxies,
            cookies=CookieJar(
                DefaultCookiePolicy(allowed_domains=())
            ),  # a server's cookies would add up
            verify=httpx.create_ssl_context(),  # with or without proxies: SSL_CERT_FILE may name a private authority
        )

    async def ask(
        self,
        method: str,
        route: str,
        body: Any = None,
        query: dict[str, str] | None = None,
        *,
        timeout_s: float,
        largest: int,
        retries: int = 0,
    ) -> Any:
        """Return the JSON of an answer; None is that of an empty one.

        Args:
            method: of HTTP.
            route: with its slash.
            body: sent as JSON.
            query: parameters of the URL.
            timeout_s: longest time for one attempt, in seconds.
            largest: most bytes of the answer.
            retries: further attempts where the server does not answer, is too slow or says that it
                is overloaded.

        Raises:
            NoAnswerError: it did not answer with a success.
            ValueError: the key cannot be one.
            BadAnswerError: the answer is too large, no JSON, or compressed: then nothing is known
                of its size.
        """
        headers, hidden = {"Accept-Encoding": "identity"}, ""
        if key := os.environ.get(self._key_variable, "").strip():
            if not (key.isascii() and key.isprintable()):  # the library's own message would show it
                raise ValueError(
                    f"the environment variable {self._key_variable} must be a key of printable "
                    "ASCII characters, it has others: set it again."
                )
            headers["Authorization"] = f"Bearer {key}"
            hidden = key if len(key) >= _SHORTEST_SECRET else ""
        status: int | None = None
        problem = ""
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, _LONGEST_PAUSE_S))
            status = None
            async with self._slots:
                try:
                    async with asyncio.timeout(timeout_s):
                        status, answer = await self._send(
                            method, route, body, query, headers, largest
                        )
                except TimeoutError:
                    problem = f"no answer within {timeout_s:g} s"
                    continue
                except self._broken as error:
                    problem = f"{type(error).__name__} {error}".rstrip()
                    problem = problem.replace(hidden, "***") if hidden else problem
                    continue
            # Servers and proxies that show what they were asked would bring the key into messages
            # and logs.
            answer = answer.replace(hidden.encode(), b"***") if hidden else answer
            if status < 300:
                try:
                    return json.loads(answer) if answer else None
                except (ValueError, RecursionError) as error:
                    raise BadAnswerError(f"it must be JSON, got {_shown(answer)}") from error
            problem = f"status {status}, {_shown(answer)}"
            if not may_pass(status):
                break
        raise NoAnswerError(status, problem, attempt + 1)

    async def _send(
        self,
        method: str,
        route: str,
        body: Any,
        query: dict[str, str] | None,
        headers: dict[str, str],
        largest: int,
    ) -> tuple[int, bytes]:
        url = self.url + route
        async with self._client.stream(
            method, url, json=body, params=query, headers=headers
        ) as got:
            encoding = got.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise BadAnswerError(
                    f"it must come without compression, as it was asked for, got {encoding!a}"
                )
            answer = bytearray()
            async for part in got.aiter_raw():
                answer += part
                if len(answer) > largest:
                    raise BadAnswerError(f"it must be under {largest / 2**20:.3g} MiB")
            return got.status_code, bytes(answer)

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()


def _shown(answer: bytes) -> str:
    """Return the beginning of an answer on one line, without what moves a cursor."""
    return ascii(answer[:300].decode(errors="replace"))
