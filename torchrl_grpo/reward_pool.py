"""``RewardPool``: a task's scorer in separate processes, so that one that hangs or crashes takes nothing with it.

Each thread of the pool has a worker process and a pipe to it, so there is no queue or lock that a killed worker could
leave broken. The workers import this module, and start fast because it does not import torch.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from torchrl_grpo.processes import die_with_parent
from torchrl_grpo.tasks.base import Problem, Score, Task

RESTARTS = "workers/restarts_reward"
TIMED_OUT = "workers/rewards_timed_out"

_MOST_ATTEMPTS = 2
_START_S = 600.0  # a machine that is busy, or a slow file system: only something stuck takes longer
_START = "import sys; sys.path[:] = {path!r}; from torchrl_grpo.reward_pool import serve; serve({fd}, {parent})"

Dialog = tuple[Problem, Sequence[str]]
"""A problem and the policy's turns."""


@dataclass(frozen=True)
class Failure:
    """Why a dialog has no score.

    Attributes:
        kind: failures of one kind are logged once.
        text: for the log; a traceback where there is one.
    """

    kind: tuple[Any, ...]
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What a task raised; its kind is the type and the place."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        return cls((type(error).__name__, place.filename, place.lineno), "".join(traceback.format_exception(error)))


def score_dialog(task: Task, problem: Problem, responses: Sequence[str]) -> Score | Failure:
    """A finished dialog's score, with a finite reward, or why there is none."""
    try:
        score = task.score(problem, responses)
        if not math.isfinite(score.reward):
            raise ValueError(f"reward={score.reward} must be finite: fix {type(task).__name__}.score.")
        return Score(float(score.reward), bool(score.correct))
    except Exception as error:
        return Failure.of(error)


class _Worker:
    """A process that scores one dialog after the other; not on Windows."""

    def __init__(self, task: bytes) -> None:
        self.connection, theirs = Pipe()
        code = _START.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
        # In a new process group: the parent handles Ctrl-C in the terminal, and what a scorer started ends with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
        )
        theirs.close()
        self._task: bytes | None = task

    def score(self, dialog: Dialog, timeout_s: float) -> Score | Failure | None:
        """The score of a dialog, None where there was none in time.

        Raises:
            EOFError or OSError: the process has ended.
            RuntimeError: it cannot load the task.
        """
        if self._task is not None:
            self.connection.send_bytes(self._task)
            refused = self.connection.recv() if self.connection.poll(_START_S) else f"no answer within {_START_S} s"
            if refused is not None:
                raise RuntimeError(f"env.reward_workers needs processes that can load the task; one says: {refused}")
            self._task = None
        self.connection.send(dialog)
        return self.connection.recv() if self.connection.poll(timeout_s) else None

    def kill(self) -> None:
        """Kills the process and what it started."""
        if self.process.returncode is None:  # until it is waited for, nobody else has its number
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> int:
        """Kills the process, closes the pipe, and returns the exit status."""
        self.kill()
        self.connection.close()
        return self.process.wait()


class RewardPool(AbstractContextManager["RewardPool"]):
    """Scores dialogs in worker processes, which are made when they are first needed.

    A scorer that takes too long is killed. A worker that dies is replaced, and its dialog tried once more. May be used
    by several threads at a time, and be pickled: the copy makes its own workers. The workers end with this process,
    however it ends (on Linux).

    Args:
        task: its ``score`` is what runs in the workers; pickled already, or not.
        workers: most worker processes, at least 1.

    Keyword Args:
        timeout_s: longest time for one dialog.

    Examples:
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> with RewardPool(ArithmeticTask(), 2, timeout_s=30) as pool:
        ...     pool.score([(Problem("1+1=?", "2"), ["#### 2"]), (Problem("1+2=?", "3"), ["#### 4"])])
        [Score(reward=1.0, correct=True), Score(reward=0.0, correct=False)]
    """

    def __init__(self, task: Task | bytes, workers: int, *, timeout_s: float) -> None:
        self._task = task if isinstance(task, bytes) else cloudpickle.dumps(task)
        self._most, self.timeout_s = workers, timeout_s
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="rewards")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._counts: Counter[str] = Counter()
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RewardPool, timeout_s=self.timeout_s), (self._task, self._most)

    def score(self, dialogs: Iterable[Dialog]) -> list[Score | Failure]:
        """Scores finished dialogs, in order.

        Raises:
            RuntimeError: the pool is closed, or a worker process cannot load the task.
        """
        return list(self._threads.map(self._score, dialogs))

    def take_counts(self) -> dict[str, int]:
        """What happened since this was last called, as metrics: workers that died, and dialogs that took too long."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in (RESTARTS, TIMED_OUT)}

    def pids(self) -> list[int]:
        """The worker processes that there are."""
        with self._lock:
            return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Ends the workers at once, in the middle of a dialog too. May be called again."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _score(self, dialog: Dialog) -> Score | Failure:
        """Scores a dialog with the worker of this thread."""
        status = 0
        for _ in range(_MOST_ATTEMPTS):
            worker = self._living_worker()
            try:
                score = worker.score(dialog, self.timeout_s)
            except (EOFError, OSError):
                status = self._drop(worker, RESTARTS)
                continue
            if score is not None:
                return score
            self._drop(worker, TIMED_OUT)
            return Failure(("timeout",), f"there was no score within env.reward_timeout_s={self.timeout_s:g}.")
        return Failure(("died", status), f"{_MOST_ATTEMPTS} processes ended while they scored it (status {status}).")

    def _living_worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is not None and worker.process.poll() is not None:  # it ended while it had nothing to do
            self._drop(worker, RESTARTS)
            worker = None
        if worker is None:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the reward pool is closed: make a new one.")
                worker = self._own.worker = _Worker(self._task)
                self._workers.add(worker)
        return worker

    def _drop(self, worker: _Worker, reason: str) -> int:
        """Ends a worker and counts why; returns its exit status."""
        self._own.worker = None
        with self._lock:
            self._workers.discard(worker)
            self._counts[reason] += 1
        return worker.close()


def serve(fd: int, parent: int) -> None:
    """What a worker process does: it loads the task that it is sent, and scores until the pipe is closed.

    Args:
        fd: its end of the pipe.
        parent: the process that started it.
    """
    if sys.platform == "linux":
        die_with_parent(parent)
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    with suppress(EOFError, OSError):
        task_bytes = connection.recv_bytes()
        try:
            task = pickle.loads(task_bytes)
        except Exception:
            connection.send(traceback.format_exc())
            return
        connection.send(None)
        while True:
            connection.send(score_dialog(task, *connection.recv()))
