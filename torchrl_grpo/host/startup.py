"""The time between a command and its first step: fast imports, and progress messages.

``say`` prints the current activity, between ``begin`` and ``end`` only. Imports nothing heavy.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from torchrl_grpo.compat.python import run_exit_functions

_SILENCE_S, _SPARSE_S = 5.0, 30.0
"""Longest time without a message on a terminal, and elsewhere, where every line stays in a log."""
_UNUSED = ("vllm", "ray", "torchao", "scipy")
_QUICK = "TORCHRL_GRPO_QUICK_IMPORTS"

_started_at = time.monotonic()
_current: _Progress | None = None
_skips_imports = False


class _Progress:
    """Prints the current activity when it changes, and again after a silence: on a terminal in one
    line with a running count of seconds, elsewhere as an occasional line.
    """

    def __init__(self) -> None:
        self._text = ""
        self._due = math.inf
        self._in_place = 0  # length of the line with the running count
        self._terminal = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        with self._lock:
            self._text = text
            self._clear()
            print(self._line(text), flush=True)
            self._due = time.monotonic() + (_SILENCE_S if self._terminal else _SPARSE_S)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._clear()

    def _repeat(self) -> None:
        while not self._ended.wait(min(0.5, _SILENCE_S / 4)):
            with self._lock:
                if time.monotonic() < self._due or self._ended.is_set():
                    continue
                line = self._line(f"still {self._text}")
                if self._terminal:
                    self._clear()
                    width = shutil.get_terminal_size().columns
                    line = line[: width - 1]  # a wrapped line could not be cleared
                    print(line, end="\r", flush=True)  # other output begins in the first column
                    self._in_place = len(line)
                else:
                    print(line, flush=True)
                    self._due = time.monotonic() + _SPARSE_S

    def _clear(self) -> None:
        if self._in_place:
            print(" " * self._in_place, end="\r", flush=True)
            self._in_place = 0

    @staticmethod
    def _line(text: str) -> str:
        return f"[{time.monotonic() - _started_at:5.1f} s] {text}"


def begin() -> None:
    """Allow ``say`` to print."""
    global _current
    if _current is None:
        _current = _Progress()


def say(text: str) -> None:
    """Name the activity that begins now, such as ``loading the model``."""
    if _current is not None:
        _current.say(text)


def restart() -> None:
    """Begin to count the seconds now: a notebook imports this module long before a run."""
    global _started_at
    _started_at = time.monotonic()


def elapsed() -> float:
    """Return the seconds since this module was imported, at the start of a command, or since
    ``restart``.
    """
    return time.monotonic() - _started_at


def end() -> None:
    """Stop printing, because the run now shows its steps. Can be called more than once."""
    global _current
    if _current is not None:
        _current.end()
        _current = None


@contextmanager
def quick_imports(*, whole_torchrl: bool = False) -> Iterator[None]:
    """Import the parts of TorchRL that a run uses, and what the context's body imports, in about
    half the usual time.

    If they are installed, TorchRL imports vLLM and Ray, for wrappers that a run does not use, and
    transformers imports torchao and SciPy (for object detection losses). Here these packages look
    as if they were not installed, so whatever needs them does not work in this process. Garbage
    collection is postponed too: imports create a million objects and hardly any garbage. These
    objects are then exempt from collection.

    Args:
        whole_torchrl: whether TorchRL's wrappers must work anyway, for components that the user
            names.
    """
    global _skips_imports
    _skips_imports = not whole_torchrl and (
        _skips_imports or "torchrl.collectors" not in sys.modules
    )
    collects = gc.isenabled()
    gc.disable()
    hidden: dict[str, Any] = {
        name: None for name in _UNUSED if _skips_imports and name not in sys.modules
    }
    sys.modules.update(hidden)
    try:
        import_module("torchrl.collectors")
        import_module("transformers.quantizers")
        import_module("transformers.utils").is_scipy_available()  # it caches the answer
    finally:
        for name in hidden:
            del sys.modules[name]
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise triton reports leaks at exit
        if collects:
            gc.enable()


def leave(status: int = 0) -> None:
    """Exit as usual, but without freeing the million imported objects one by one, which takes
    seconds. Register it with ``atexit``, or call it last.
    """
    atexit.unregister(leave)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def actor_environment() -> dict[str, str]:
    """Return the environment variables that make an actor import what this process imported."""
    return {_QUICK: "1"} if _skips_imports else {}


def import_as_in_driver(module: str) -> None:
    """Use ``quick_imports`` in an actor if its driver did, and import one of our modules that way,
    before anything else.
    """
    if os.environ.get(_QUICK) and "torchrl" not in sys.modules:
        with quick_imports():
            import_module(module)
