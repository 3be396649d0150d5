"""An agent's program: a Python function that is given a client, or a command that has the endpoint
in its environment.

Each runs in a thread or a process of its own, so that one that blocks holds up no other.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from inspect import iscoroutinefunction
from numbers import Real
from typing import Any

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.host.processes import guarded
from torchrl_grpo.host.text import clip
from torchrl_grpo.rewards.functions import load_function

_MOST_OUTPUT = 2**20
_LONGEST_ERROR = 2000
_END_S = 2.0


class Program(ABC):
    """Interface of an agent: it plays a problem with an OpenAI client."""

    @abstractmethod
    def start(
        self, problem: Mapping[str, Any], url: str, key: str
    ) -> tuple[Future[float | None], Callable[[], None]]:
        """Plays a problem in the background.

        Args:
            problem: the columns of its row, ``prompt``, ``messages`` and ``answer``.
            url: of the endpoint.
            key: of the episode.

        Returns:
            its reward, None where it has none to say, or what it raised; and what ends it before
            its time.
        """


def load_program(spec: str, field: str = "env.agent") -> Program:
    """The program that a config names.

    Args:
        spec: ``path/to/file.py:function``, ``package.module:function``, or a command line.
        field: what the user who wrote it calls it.

    Raises:
        ValueError: there is no such function or command, or it cannot be an agent.
    """
    words = shlex.split(spec)
    if len(words) == 1 and ":" in spec:
        return Function(load_function(spec, field, {}), f"{field}={spec}")
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"{field}={spec} must be file.py:function, package.module:function or a command, there "
            f"is no command {''.join(words[:1])!r}: for example, {field}=my_agent.py:play, or "
            f"{field}='python solve.py'."
        )
    return Command(words)


class Function(Program):
    """``async def play(client, problem)``, called with an ``openai.AsyncOpenAI``; in a thread and
    an event loop of its own.

    Args:
        play: the function; what it returns is the reward, or None.
        what: names it in messages.

    Raises:
        ValueError: it is not asynchronous, or there is no package ``openai``.
    """

    def __init__(self, play: Callable[..., Any], what: str = "the agent") -> None:
        if not iscoroutinefunction(getattr(play, "__wrapped__", play)):
            raise ValueError(
                f"{what} must be asynchronous, it is not: write async def play(client, problem)."
            )
        if find_spec("openai") is None:
            raise ValueError(
                f"{what} needs the package openai, which is not installed: pip install openai."
            )
        self._play, self._what = play, what

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        import_module("openai")  # takes a second, which is not to be the first agent's

    def start(
        self, problem: Mapping[str, Any], url: str, key: str
    ) -> tuple[Future[float | None], Callable[[], None]]:
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        ended = threading.Event()

        async def main() -> Any:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient

            running.append((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
            if ended.is_set():
                raise asyncio.CancelledError
            # Loopback needs neither certificates, which take 70 ms to load, nor a proxy. Nothing
            # limits the time of a request, because the policy answers when its batch is sampled.
            plain = DefaultAsyncHttpxClient(verify=False, trust_env=False)
            async with AsyncOpenAI(
                base_url=url, api_key=key, http_client=plain, timeout=None, max_retries=0
            ) as client:
                return await self._play(client, dict(problem))

        def run() -> float | None:
            return _reward(asyncio.run(main()), self._what)

        def end() -> None:
            ended.set()
            with suppress(RuntimeError, IndexError):  # its loop has ended, or has not begun
                loop, task = running[0]
                loop.call_soon_threadsafe(task.cancel)

        return _in_thread(run), end


class Command(Program):
    """A command line. The endpoint is ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its
    environment, and Anthropic's two; the problem is JSON on its standard input, and its last line
    of output may be the reward: a number, or ``{"reward": number}``.

    Args:
        words: of the command line.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def start(
        self, problem: Mapping[str, Any], url: str, key: str
    ) -> tuple[Future[float | None], Callable[[], None]]:
        anthropic = {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        openai = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        kept = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        direct = kept if kept == "*" else f"{kept},127.0.0.1" if kept else "127.0.0.1"
        environment = (
            os.environ | openai | anthropic | {"NO_PROXY": direct, "no_proxy": direct}
        )  # clients differ
        text = json.dumps(problem, default=str).encode()
        processes: list[subprocess.Popen[bytes]] = []
        ended = threading.Event()

        def run() -> float | None:
            if ended.is_set():
                raise RuntimeError("the agent was ended.")
            process = subprocess.Popen(
                guarded(self._words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                process_group=0,
            )
            processes.append(process)
            if ended.is_set():
                _kill(process)
            out, err = _talk(process, text)
            if process.returncode:
                raise RuntimeError(
                    f"{shlex.join(self._words)} must end with status 0, it ended with "
                    f"{process.returncode}: "
                    f"{clip(err.decode(errors='replace').strip()[-_LONGEST_ERROR:], _LONGEST_ERROR)}"
                )
            return _printed_reward(out.decode(errors="replace"), shlex.join(self._words))

        def end() -> None:
            ended.set()
            for process in processes:
                _kill(process)

        return _in_thread(run), end


def _in_thread(run: Callable[[], float | None]) -> Future[float | None]:
    """Call a function in a thread of its own."""
    done: Future[float | None] = Future()

    def call() -> None:
        try:
            done.set_result(run())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, name="agent", daemon=True).start()
    return done


def _talk(process: subprocess.Popen[bytes], given: bytes) -> tuple[bytes, bytes]:
    """Gives a process its input; returns the ends of what it writes to its output and as errors."""
    assert process.stdin and process.stdout and process.stderr
    ends: list[bytes] = [b"", b""]

    def read(place: int, pipe: Any) -> None:
        with pipe:
            while data := pipe.read1(2**16):
                ends[place] = (ends[place] + data)[-_MOST_OUTPUT:]

    readers = [
        threading.Thread(target=read, args=one, daemon=True)
        for one in enumerate((process.stdout, process.stderr))
    ]
    for reader in readers:
        reader.start()
    with suppress(OSError), process.stdin as pipe:  # it need not read it
        pipe.write(given)
    os.waitid(
        os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
    )  # until it is waited for, nobody else has its number
    _kill(process)  # what it has left behind, which may hold the pipes
    process.wait()
    for reader in readers:
        reader.join(_END_S)
    return ends[0], ends[1]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":  # its guard ends the rest
            process.terminate()
            process.send_signal(signal.SIGCONT)  # where the command has stopped it
        elif process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def _printed_reward(output: str, what: str) -> float | None:
    """The reward in the last line; None where it is no JSON, or JSON that says no reward.

    Raises:
        InvalidRewardError: it is a number as text, or another value where a number must be.
    """
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        return None
    if isinstance(value, str) and not _is_number(value):
        return None
    return _reward(value.get("reward") if isinstance(value, dict) else value, what)


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _reward(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "shape", None) == ()):
        return float(value)
    raise InvalidRewardError(
        f"{what} must return a number or None, it returned {value!r:.60}: return one of them.",
        "exception",
    )
