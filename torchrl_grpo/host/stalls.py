"""Stalled runs: report the stacks of all processes, save, and exit.

``note`` names what a run does next, and is its sign of progress. Without a note for too long, a
thread writes the stacks of the run's processes to ``stacks.txt`` and raises ``StalledError`` in the
main thread.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import STALLED_STATUS, StalledError
from torchrl_grpo.host import interrupts
from torchrl_grpo.host.processes import descendants, stacks_of

STACKS_FILE = "stacks.txt"
_LONGEST_END_S = 300.0
"""Seconds that a stalled run may take to save and close."""

_current: Watch | None = None


class Watch:
    """Thread that waits for progress.

    Attributes:
        where: returns where the batch's groups are, if more is known than the last note.
        pids: returns further processes of the run on this machine, besides descendants of this one.
        elsewhere: returns the stacks of the run's processes on other machines.

    Args:
        timeout_s: longest time without progress.
        folder: where the stacks are written.
    """

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self.where: Callable[[], str] = str
        self.pids: Callable[[], list[int]] = list
        self.elsewhere: Callable[[], str] = str
        self._timeout_s = timeout_s
        self._folder = folder
        self._ended = threading.Event()
        self._activity = ""
        self._since = math.inf  # nothing is late before the first note
        threading.Thread(target=self._wait, name="progress", daemon=True).start()

    def note(self, text: str) -> None:
        """Name the work that begins now."""
        self._activity = text
        self._since = time.monotonic()
        # In case the main thread hangs while it holds the GIL, so that no other thread can run.
        faulthandler.dump_traceback_later(self._timeout_s + _LONGEST_END_S, exit=True, file=2)

    def end(self) -> None:
        """End the wait."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def _wait(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout_s / 4)):
            if time.monotonic() - self._since > self._timeout_s:
                self._stop()
                return

    def _stop(self) -> None:
        why = (
            f"no progress for {self._timeout_s:g} s (train.stall_timeout_s); current task: "
            f"{self._activity}"
        )
        path = self._folder / STACKS_FILE
        try:
            where = self.where()
            why += f": {where}" if where else ""
            self._write_stacks(path, why)
            message = f"{why}. The stacks of all processes are in {path}."
        except Exception as error:  # such as a full disk: the run must end anyway
            message = f"{why}. Its stacks could not be written ({type(error).__name__}: {error})."
        sys.stderr.write(f"\nerror: {message}\n")
        sys.stderr.flush()
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGUSR1)
        if not self._ended.wait(_LONGEST_END_S):
            os._exit(STALLED_STATUS)

    def _write_stacks(self, path: Path, why: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n\nprocess {os.getpid()}, the run "
                "itself\n"
            )
            file.flush()
            faulthandler.dump_traceback(file)
            file.write(stacks_of([*descendants(os.getpid()), *self.pids()]))
            file.flush()
            file.write(self.elsewhere())


@contextmanager
def watched(timeout_s: float | None, folder: Path) -> Iterator[Watch | None]:
    """Watch a run within the context, but only in one of our scripts, which ends with the run.

    Args:
        timeout_s: longest time without progress; None watches nothing.
        folder: where the stacks are written.
    """
    global _current
    if timeout_s is None or not interrupts.in_script():
        yield None
        return
    previous = signal.signal(signal.SIGUSR1, _raise)
    _current = watch = Watch(timeout_s, folder)
    try:
        yield watch
    finally:
        _current = None
        watch.end()
        signal.signal(signal.SIGUSR1, previous)


def note(text: str) -> None:
    """Name the run's next work: ``"train step 7"``."""
    if _current is not None:
        _current.note(text)


def _raise(*_: Any) -> None:
    interrupts.end_with(STALLED_STATUS)
    raise StalledError
