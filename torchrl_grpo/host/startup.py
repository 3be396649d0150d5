"""The seconds between a command and its first step: fast imports, and signs of life for the user.

``say`` names what is going on. It prints nothing unless a command has called ``begin``, and after
``end`` no more. Nothing heavy is imported here.
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
"""Longest time without a sign of life on a terminal, and elsewhere, because a log keeps every line.
"""
_UNUSED = ("vllm", "ray", "torchao", "scipy")
_QUICK = "TORCHRL_GRPO_QUICK_IMPORTS"

_started_at = time.monotonic()
_current: _Signs | None = None
_hides = False


class _Signs:
    """Prints the current activity when it changes, and again after a silence: on a terminal in one
    line with a running count of seconds, elsewhere as a line now and then.
    """

    def __init__(self) -> None:
        self._text = ""
        self._due = math.inf
        self._in_place = 0  # length of the line that counts
        self._terminal = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="signs of life", daemon=True)
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
                    line = line[
                        : shutil.get_terminal_size().columns - 1
                    ]  # a longer one would wrap, and stay
                    print(
                        line, end="\r", flush=True
                    )  # what others print begins in the first column
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
        _current = _Signs()


def say(text: str) -> None:
    """Name the activity that begins now, such as ``loading the model``."""
    if _current is not None:
        _current.say(text)


def elapsed() -> float:
    """Seconds since this module was imported, at the start of a command."""
    return time.monotonic() - _started_at


def end() -> None:
    """End the signs of life, because the run shows its steps. May be called again."""
    global _current
    if _current is not None:
        _current.end()
        _current = None


@contextmanager
def quick_imports(*, whole_torchrl: bool = False) -> Iterator[None]:
    """Import what a run uses of TorchRL, and the imports in the context's body, in about half of
    the usual time.

    TorchRL imports vLLM and Ray wherever they are installed, for wrappers of its own that a run
    does not use, and transformers torchao and SciPy (for the losses of object detection): here they
    are told that these are not, so what needs them does not work in this process. And collecting
    garbage is put off: imports make a million objects and hardly any garbage. What they made is
    never looked at again.

    Args:
        whole_torchrl: whether its wrappers are to work all the same, for components of it that the
            user names.
    """
    global _hides
    _hides = not whole_torchrl and (_hides or "torchrl.collectors" not in sys.modules)
    collects = gc.isenabled()
    gc.disable()
    hidden: dict[str, Any] = {name: None for name in _UNUSED if _hides and name not in sys.modules}
    sys.modules.update(hidden)
    try:
        import_module("torchrl.collectors")
        import_module("transformers.quantizers")
        import_module("transformers.utils").is_scipy_available()  # which keeps the answer
    finally:
        for name in hidden:
            del sys.modules[name]
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else triton lists at the exit what it did not free
        if collects:
            gc.enable()


def leave(status: int = 0) -> None:
    """End this process as usual, but without freeing the million objects of the imports one by one,
    which takes seconds. Register it with ``atexit``, or call it last.
    """
    atexit.unregister(leave)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def actor_environment() -> dict[str, str]:
    """Environment variables with which an actor imports what this process did."""
    return {_QUICK: "1"} if _hides else {}


def import_as_in_driver(module: str) -> None:
    """Use ``quick_imports`` in an actor if its driver did, and import one of our modules that way,
    before anything else.
    """
    if os.environ.get(_QUICK) and "torchrl" not in sys.modules:
        with quick_imports():
            import_module(module)
