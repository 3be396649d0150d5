"""Client of one HTTP server: connection, API key, timeouts, retries and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

CONNECT_S = 10.0
"""Timeout for opening a connection, in seconds."""
_RETRY_STATUSES = {408, 409, 425, 429}
_MAX_PAUSE_S = 8.0
_MIN_SECRET_LENGTH = 8
"""Minimum length of a key that is masked in answers: a shorter one may occur there by chance."""
_KEEPALIVE_S = 1.0
"""Seconds for which an idle connection is reused. Servers close idle connections (uvicorn after 5
s), which must not happen while a request is on its way.
"""


class NoAnswerError(RuntimeError):
    """A server does not answer, or answers with an error.

    Attributes:
        status: HTTP status; None without an answer.
        problem: what went wrong in the latest attempt.
        attempts: number of attempts.
    """

    def __init__(self, status: int | None, problem: str, attempts: int) -> None:
        super().__init__(f"after {attempts} attempts: {problem}")
        self.status, self.problem, self.attempts = status, problem, attempts


class BadAnswerError(RuntimeError):
    """A server's answer cannot be read; the message says which rule it breaks."""


def may_pass(status: int | None) -> bool:
    """Return whether a failure may be temporary: the server does not answer, fails or is
    overloaded.
    """
    return status is None or status >= 500 or status in _RETRY_STATUSES


class HttpClient:
    """Sends concurrent requests to a server, in one event loop.

    Args:
        url: beginning of all routes.
        key_variable: environment variable with the API key, if the server requires one.
        concurrency: maximum number of concurrent requests; None for no limit.
        proxies: whether to use the proxies in the environment variables.
    """

    def __init__(
        self,
        url: str,
        *,
        key_variable: str,
        concurrency: int | None = None,
        proxies: bool = True,
    ) -> None:
        import httpx2

        logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs each request
        self.url = url.rstrip("/")
        self._key_variable = key_variable
        self._slots = asyncio.Semaphore(concurrency or 2**31)
        self._broken: type[Exception] = httpx2.TransportError
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=concurrency, keepalive_expiry=_KEEPALIVE_S),
            trust_env=proxies,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # they would accumulate
            # Even if trust_env is False: SSL_CERT_FILE may name a private authority.
            verify=httpx2.create_ssl_context(),
        )

    async def request(
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
        """Return the JSON of an answer; None if it is empty.

        Args:
            method: HTTP method.
            route: with its leading slash.
            body: sent as JSON.
            query: parameters of the URL.
            timeout_s: timeout of one attempt, in seconds.
            largest: maximum size of the answer, in bytes.
            retries: further attempts if the server does not answer, is too slow or reports that it
                is overloaded.

        Raises:
            NoAnswerError: the server did not answer, or answered with an error.
            ValueError: the key has characters that a header cannot carry.
            BadAnswerError: the answer is too large, not JSON, or compressed, so that its size is
                unknown.
        """
        headers = {"Accept-Encoding": "identity"}
        secret = ""
        if key := os.environ.get(self._key_variable, "").strip():
            if not (key.isascii() and key.isprintable()):  # the library's own message would show it
                raise ValueError(
                    f"the environment variable {self._key_variable} must be a key of printable "
                    "ASCII characters, but it has others: set it again."
                )
            headers["Authorization"] = f"Bearer {key}"
            secret = key if len(key) >= _MIN_SECRET_LENGTH else ""
        status: int | None = None
        problem = ""
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, _MAX_PAUSE_S))
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
                    problem = problem.replace(secret, "***") if secret else problem
                    continue
            # Servers and proxies that echo a request would leak the key into messages and logs.
            answer = answer.replace(secret.encode(), b"***") if secret else answer
            if status < 300:
                try:
                    return json.loads(answer) if answer else None
                except (ValueError, RecursionError) as error:
                    raise BadAnswerError(f"it must be JSON, got {_excerpt(answer)}") from error
            problem = f"status {status}, {_excerpt(answer)}"
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
        ) as response:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise BadAnswerError(f"it must not be compressed, as requested, got {encoding!a}")
            answer = bytearray()
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > largest:
                    raise BadAnswerError(f"it must be under {largest / 2**20:.3g} MiB")
            return response.status_code, bytes(answer)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _excerpt(answer: bytes) -> str:
    """Return the beginning of an answer on one line, without control characters."""
    return ascii(answer[:300].decode(errors="replace"))
