"""SIGTERM, SIGINT and SIGHUP: the first signal ends a run gracefully, after work that must not be
interrupted; a second one ends the process at once. Also lost standard streams: a run continues
without its output.

Each signal raises ``KeyboardInterrupt``, which no code that isolates a user's functions catches,
unlike ``SystemExit``, which such a function may raise. A signal that such a function swallows is
raised again after it (``delivered``).

Python calls signal handlers in the main thread, between any two of its instructions. Only that
thread may use this module. Saving, and writing the lines of one step to ``metrics.jsonl`` and
``samples.jsonl``, are ``shielded``, so the newest checkpoint and the last row belong to the same
step.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_signal: int | None = None
_status: int | None = None
_watching = 0
_exits = True
_depth = 0
_max_wait_s: float | None = None


@contextmanager
def watched(*, exits: bool = True) -> Iterator[None]:
    """Handle the signals within the context, but not a SIGHUP that ``nohup`` ignores.

    Args:
        exits: whether the process is a script of ours, which a second signal ends at once. In a
            notebook it raises ``KeyboardInterrupt`` again.

    Raises:
        KeyboardInterrupt: there was a SIGINT.
        SystemExit: there was another one; the status is 128 plus its number.
    """
    global _signal, _status, _watching, _exits
    outer = _signal, _status, _exits
    _watching += 1
    _exits = exits
    previous = [(number, signal.getsignal(number)) for number in _SIGNALS]
    for number, handler in previous:
        if number != signal.SIGHUP or handler != signal.SIG_IGN:
            signal.signal(number, _handle)
    try:
        yield
    except KeyboardInterrupt:
        if _signal in (None, signal.SIGINT):
            raise
        sys.exit(status())
    finally:
        _signal, _status, _exits = outer
        _watching -= 1
        for number, handler in previous:
            signal.signal(number, handler)


@contextmanager
def expendable() -> Iterator[None]:
    """Let a signal end this process at once within the context, because there is nothing to save
    and an import may swallow an exception.
    """
    numbers = [number for number in _SIGNALS if _exits and signal.getsignal(number) == _handle]
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, _handle)


class _Pipe(io.FileIO):
    """A standard stream that accepts output even when its reader is gone, as after ``| head`` or a
    terminal that was closed.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def ignore_broken_pipes() -> None:
    """Keep this process alive when a standard stream is a pipe or terminal whose reader ends, or is
    closed from the start (``>&-``).
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        # Leave streams alone that a test or a notebook has replaced.
        if type(stream) is not io.TextIOWrapper:
            continue
        if not (stream.isatty() or stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)):
            continue
        stream.flush()
        wrapper = io.TextIOWrapper(
            io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapper)


def in_script() -> bool:
    """Return whether this process is one of our scripts, which ends with the run."""
    return _watching > 0 and _exits


def in_call() -> bool:
    """Return whether a run was called from Python, whose process stays."""
    return _watching > 0 and not _exits


def status() -> int | None:
    """Return the exit status requested by the first signal or ``end_with``; None before that."""
    return _status if _signal is None else 128 + _signal


def end_with(status: int) -> None:
    """Make the script end with this status, however the work in progress ends."""
    global _status
    _status = status


@contextmanager
def delivered() -> Iterator[None]:
    """Context of a user's code, which may catch anything: a signal is raised again at its end."""
    signaled_before = _signal is not None
    yield
    if _depth == 0 and _signal is not None and not signaled_before:
        raise KeyboardInterrupt


@contextmanager
def shielded(max_wait_s: float | None = None) -> Iterator[None]:
    """Context that delays the first signal until the block ends.

    Args:
        max_wait_s: longest time to wait for the end of the block; then the signal is raised inside.
            None waits as long as it takes.
    """
    global _depth, _max_wait_s
    with delivered():
        _depth += 1
        _max_wait_s = max_wait_s if _depth == 1 else _max_wait_s
        try:
            yield
        finally:
            _depth -= 1
            if _depth == 0:
                signal.setitimer(signal.ITIMER_REAL, 0)


def _handle(number: int, _: Any) -> None:
    global _signal
    if _signal is not None and _exits:
        os._exit(128 + number)
    is_second, _signal = _signal is not None, number
    if _depth == 0 or is_second:
        raise KeyboardInterrupt
    if _max_wait_s is not None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _max_wait_s)
    # Not sys.stderr, which raises if the signal arrives while it is being written to.
    with suppress(OSError):
        os.write(2, b"\nending after this step; the same signal again ends at once\n")
