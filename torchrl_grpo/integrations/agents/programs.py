"""An agent's program: a Python function that takes a client, or a command with the endpoint in its
environment.

Each runs in its own thread or process, so that one that blocks does not delay others.
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
from torchrl_grpo.host.objects import load_function
from torchrl_grpo.host.plugins import plugins
from torchrl_grpo.host.processes import guarded

_MAX_OUTPUT = 2**20
_MAX_ERROR_CHARACTERS = 2000
_END_S = 2.0


class Program(ABC):
    """Interface of an agent, which plays a problem with an OpenAI client."""

    @abstractmethod
    def start(
        self, problem: Mapping[str, Any], url: str, key: str, reward: Callable[..., None]
    ) -> tuple[Future[float | None], Callable[[], None]]:
        """Play a problem in the background.

        Args:
            problem: the columns of its row, ``prompt``, ``messages`` and ``answer``.
            url: URL of the endpoint.
            key: key of the episode.
            reward: function that sets the reward of an answer (``client.reward``).

        Returns:
            The agent's reward (None if it has none) or exception, and a function that ends it
            early.
        """


def load_program(spec: str) -> Program:
    """Load the program that a config names.

    Args:
        spec: ``path/to/file.py:function``, ``package.module:function``, or a command line.

    Raises:
        ValueError: there is no such function or command, or it is not an agent.
    """
    words = shlex.split(spec)
    named = ":" in spec or spec.endswith(".py") or spec in plugins("env.agent")
    if len(words) == 1 and named:
        return Function(load_function(spec, "env.agent"), f"env.agent={spec}")
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"env.agent={spec} must be file.py:function, package.module:function or a command, but "
            f"there is no command {''.join(words[:1])!r}: for example, env.agent=my_agent.py:play, "
            "or env.agent='python solve.py'."
        )
    return Command(words)


class Function(Program):
    """``async def play(client, problem)``, called with an ``openai.AsyncOpenAI`` in its own thread
    and event loop. ``client.reward(value, answer=None)`` sets the reward of an answer, by default the
    latest one.

    Args:
        play: the function; returns the reward or None.
        what: name of the function in messages.

    Raises:
        ValueError: it is not asynchronous, or there is no package ``openai``.
    """

    def __init__(self, play: Callable[..., Any], what: str = "the agent") -> None:
        if not iscoroutinefunction(getattr(play, "__wrapped__", play)):
            raise ValueError(
                f"{what} must be asynchronous, but it is not: write async def play(client, "
                "problem)."
            )
        if find_spec("openai") is None:
            raise ValueError(
                f"{what} needs the package openai, which is not installed: pip install "
                "'torchrl_grpo[agents]'."
            )
        self._play = play
        self._what = what

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        import_module("openai")  # takes a second, and the first agent should not wait for it

    def start(
        self, problem: Mapping[str, Any], url: str, key: str, reward: Callable[..., None]
    ) -> tuple[Future[float | None], Callable[[], None]]:
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        ended = threading.Event()

        async def main() -> Any:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient

            task: Any = asyncio.current_task()
            running.append((asyncio.get_running_loop(), task))
            if ended.is_set():
                raise asyncio.CancelledError
            # Loopback needs neither certificates, which take 70 ms to load, nor a proxy. Requests
            # have no timeout, because the policy answers when its batch is sampled.
            plain = DefaultAsyncHttpxClient(verify=False, trust_env=False)
            async with AsyncOpenAI(
                base_url=url, api_key=key, http_client=plain, timeout=None, max_retries=0
            ) as client:
                vars(client)["reward"] = reward
                return await self._play(client, dict(problem))

        def run() -> float | None:
            return _reward(asyncio.run(main()), self._what)

        def end() -> None:
            ended.set()
            with suppress(RuntimeError, IndexError):  # its loop has ended, or not started
                loop, task = running[0]
                loop.call_soon_threadsafe(task.cancel)

        return _in_thread(run), end


class Command(Program):
    """A command line. Its environment has the endpoint as ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY``, and as Anthropic's two variables. The problem is JSON on its standard input,
    and its last line of output may be the reward: a number, or ``{"reward": number}``.

    Args:
        words: words of the command line.
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def start(
        self, problem: Mapping[str, Any], url: str, key: str, reward: Callable[..., None]
    ) -> tuple[Future[float | None], Callable[[], None]]:
        anthropic = {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        openai = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if hosts != "*":
            hosts = f"{hosts},127.0.0.1".lstrip(",")
        no_proxy = {"NO_PROXY": hosts, "no_proxy": hosts}  # clients differ
        environment = os.environ | openai | anthropic | no_proxy
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
                errors = err.decode(errors="replace").strip()[-_MAX_ERROR_CHARACTERS:]
                raise RuntimeError(
                    f"{shlex.join(self._words)} must exit with status 0, but it exited with "
                    f"{process.returncode}: {errors}"
                )
            return printed_reward(out.decode(errors="replace"), shlex.join(self._words))

        def end() -> None:
            ended.set()
            for process in processes:
                _kill(process)

        return _in_thread(run), end


def _in_thread(run: Callable[[], float | None]) -> Future[float | None]:
    """Call a function in its own thread."""
    future: Future[float | None] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="agent", daemon=True).start()
    return future


def _talk(process: subprocess.Popen[bytes], text: bytes) -> tuple[bytes, bytes]:
    """Write a process's input; return the ends of its standard output and standard error."""
    assert process.stdin and process.stdout and process.stderr
    ends: list[bytes] = [b"", b""]

    def read(index: int, pipe: Any) -> None:
        with pipe:
            while data := pipe.read1(2**16):
                ends[index] = (ends[index] + data)[-_MAX_OUTPUT:]

    readers = [
        threading.Thread(target=read, args=arguments, daemon=True)
        for arguments in enumerate((process.stdout, process.stderr))
    ]
    for reader in readers:
        reader.start()
    with suppress(OSError), process.stdin as pipe:  # the process need not read it
        pipe.write(text)
    # Its pid cannot be reused before it is waited for.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _kill(process)  # and processes that it left behind, which may hold the pipes
    process.wait()
    for reader in readers:
        reader.join(_END_S)
    return ends[0], ends[1]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":  # its guard ends the rest
            process.terminate()
            process.send_signal(signal.SIGCONT)  # the command may have stopped it
        elif process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


def printed_reward(output: str, what: str) -> float | None:
    """Return the reward in the last line; None if it is not JSON, or JSON without a reward.

    Raises:
        InvalidRewardError: the reward is a number as text, or not a number.
    """
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        return None
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return None
    return _reward(value.get("reward") if isinstance(value, dict) else value, what)


def _reward(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "shape", None) == ()):
        return float(value)
    raise InvalidRewardError(
        f"{what} must return a number or None, but it returned {value!r:.60}: return one of them.",
        "exception",
    )
