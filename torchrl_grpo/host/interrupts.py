"""SIGTERM and SIGINT: the first signal ends a run in an orderly way, after work that must not be
interrupted; a second one ends the process at once. Also closed pipes: a run continues without its
output.

Python calls a signal's handler in the main thread, between any two steps of it. Only that thread
may use this module. A save, and the lines of one step in ``metrics.jsonl`` and ``samples.jsonl``,
are ``shielded``: so the newest checkpoint and the last row are of the same step.
"""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_told: int | None = None
_status: int | None = None
_watching = 0
_depth = 0
_longest_s: float | None = None


@contextmanager
def watched() -> Iterator[None]:
    """Handle the two signals here meanwhile. They raise ``SystemExit(143)`` and
    ``KeyboardInterrupt``.
    """
    global _told, _status, _watching
    outer, _watching = (_told, _status), _watching + 1
    previous = [(number, signal.getsignal(number)) for number in _SIGNALS]
    for number in _SIGNALS:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        (_told, _status), _watching = outer, _watching - 1
        for number, handler in previous:
            signal.signal(number, handler)


class _Pipe(io.FileIO):
    """A standard stream that accepts output even when its reader is gone, as after ``| head``."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def ignore_broken_pipes() -> None:
    """Keep this process alive when a standard stream is a pipe whose reader ends."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Not what a test or a notebook has put there.
        if type(stream) is not io.TextIOWrapper or not stat.S_ISFIFO(
            os.fstat(stream.fileno()).st_mode
        ):
            continue
        stream.flush()
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False)),
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            ),
        )


def in_script() -> bool:
    """Whether this process is one of our scripts, which ends with the run."""
    return _watching > 0


def status() -> int | None:
    """The exit status requested by the first signal or ``end_with``; None before that."""
    return _status if _told is None else 128 + _told


def end_with(status: int) -> None:
    """Make the script end with this status, whatever becomes of the work in progress."""
    global _status
    _status = status


@contextmanager
def shielded(longest_s: float | None = None) -> Iterator[None]:
    """Context that delays the first signal until the block ends.

    Args:
        longest_s: of the wait for it; then the signal is raised inside. None waits as long as it
            takes.
    """
    global _depth, _longest_s
    _depth += 1
    _longest_s = longest_s if _depth == 1 else _longest_s
    came_before = _told is not None
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if _depth == 0 and _told is not None and not came_before:
        _raise(_told)


def _handle(number: int, _: Any) -> None:
    global _told
    if _told is not None:
        os._exit(128 + number)
    _told = number
    if _depth == 0:
        _raise(number)
    if _longest_s is not None:
        signal.signal(signal.SIGALRM, lambda *_: _raise(number))
        signal.setitimer(signal.ITIMER_REAL, _longest_s)
    with suppress(
        OSError
    ):  # not sys.stderr, which raises where the signal comes while it is being written to
        os.write(2, b"\nending after this step; the same signal again ends at once\n")


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
