"""``WorkerSlot``: one worker process of a reward pool, which is replaced when it hangs, dies, or
sends an invalid answer.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrl_grpo.host.children import PipedChild
from torchrl_grpo.reward_pool.protocol import MAX_ANSWER_BYTES, Failure, decode
from torchrl_grpo.tasks.base import Dialog, Turn

RESTARTS = "workers/restarts_reward"
TIMED_OUT = "workers/rewards_timed_out"
EXIT_S = 2.0
"""Seconds for a worker to exit by itself after its pipe is closed."""

_MAX_ATTEMPTS = 2
_MAX_KILL_S = 10.0
_MAX_TRANSFER_S = 30
"""Seconds that a pipe may be full, or a message incomplete, before the process at the other end is
stopped.
"""


class RewardWorker(PipedChild):
    """Process that handles one request after another (not on Windows). On Linux the process is a
    guard with a child.
    """

    def __init__(self, task: bytes) -> None:
        super().__init__("torchrl_grpo.reward_pool:serve", os.getpid())
        self._task: bytes | None = task
        self._requests = 0

    def request(
        self, dialogs: Sequence[Dialog], ended: Sequence[str], timeout_s: float
    ) -> list[Turn | Failure] | None:
        """Have the task close the ``ended`` dialogs, and return its answers to ``dialogs``; None
        after a timeout.

        Raises:
            EOFError or OSError: the process died, or closed its pipe.
            ValueError: it sent something other than an answer to this request.
            RuntimeError: it cannot load the task.
        """
        if self._task is not None:
            self.connection.send_bytes(self._task)
            if refusal := self.receive_refusal():
                raise RuntimeError(
                    "env.reward_workers needs processes that can load the task, but one failed: "
                    f"{refusal}"
                )
            self._task = None
            self._limit_transfers()
        self._requests += 1
        self.connection.send((self._requests, dialogs, ended, timeout_s))
        # The process itself enforces the limit for several dialogs, or stateful ones.
        grace_s = len(dialogs) > 1 or any(dialog.episode for dialog in dialogs)
        if not self.connection.poll(timeout_s + grace_s):
            return None
        return decode(self.connection.recv_bytes(MAX_ANSWER_BYTES), self._requests, len(dialogs))

    def _limit_transfers(self) -> None:
        limit = struct.pack("@ll", _MAX_TRANSFER_S, 0)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setblocking(True)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                pipe.setsockopt(socket.SOL_SOCKET, option, limit)

    def describe_end(self) -> str:
        """Describe how the process ended, if it did so by itself."""
        try:
            status = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "after closing its pipe to the run"
        if status == 0:
            return "status 0, after closing its pipe to the run"
        return f"status {status}" + (f", {signal.Signals(-status).name}" if status < 0 else "")

    def kill(self) -> None:
        """End the process and its descendants; ``close`` waits for that."""
        if sys.platform == "linux":
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)  # a stopped process handles no signal
        elif self.process.returncode is None:  # its pid cannot be reused before it is waited for
            os.killpg(self.process.pid, signal.SIGKILL)

    def let_exit(self) -> None:
        """Close the pipe, and give the process time to close its dialogs."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)

    def close(self) -> None:
        """End the process and its descendants, and close the pipe."""
        self.kill()
        self.connection.close()
        try:
            self.process.wait(_MAX_KILL_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class WorkerSlot:
    """Worker that is started when needed and replaced when it dies, with its queue and the dialogs
    whose state it keeps.

    The pool marks a slot as busy, under the lock, for the one thread that may call ``play``.

    Args:
        task: the pickled task.
        timeout_s: timeout of one dialog.
        lock: lock of the pool.

    Attributes:
        worker: the process, if one is running.
        queue: dialogs for only this worker with their futures, and keys of dialogs to close.
        open_episodes: keys of the dialogs whose state the process keeps.
        counts: restarts and timeouts.
        busy: whether a thread works with the process.
        playing: whether the thread plays dialogs, rather than closing some.
        closed: whether starting another process is no longer allowed.
    """

    def __init__(self, task: bytes, timeout_s: float, lock: threading.Lock) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._lock = lock
        self.worker: RewardWorker | None = None
        self.queue: deque[Any] = deque()
        self.open_episodes: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.busy = False
        self.playing = False
        self.closed = False

    def play(self, dialogs: Sequence[Dialog], ended: Sequence[str]) -> list[Turn | Failure]:
        """Close the ``ended`` dialogs, and return the answers to ``dialogs``."""
        if self.worker is not None and self.worker.process.poll() is not None:  # it died while idle
            self._drop(RESTARTS)
        ended = [episode for episode in ended if episode in self.open_episodes]
        alive = [dialog for dialog in dialogs if not self._is_lost(dialog)]
        lost = [self._is_lost(dialog) for dialog in dialogs]
        self.open_episodes.update(dialog.episode for dialog in alive if dialog.episode)
        turns = iter(self._request(alive, ended) if alive or ended else [])
        self.open_episodes.difference_update(ended)
        return [_LOST if is_lost else next(turns) for is_lost in lost]

    def _is_lost(self, dialog: Dialog) -> bool:
        continues = dialog.episode and dialog.responses
        return bool(continues) and dialog.episode not in self.open_episodes

    def _request(self, dialogs: Sequence[Dialog], ended: Sequence[str]) -> list[Turn | Failure]:
        end = ""
        is_stateful = bool(ended) or any(dialog.episode for dialog in dialogs)
        attempts = 1 if is_stateful else _MAX_ATTEMPTS
        for _ in range(attempts):
            worker = self._running_worker()
            try:
                turns = worker.request(dialogs, ended, self._timeout_s)
            except (EOFError, OSError, ValueError) as error:
                # The connection closes itself if a message is too large.
                is_foreign = isinstance(error, ValueError) or not worker.connection.readable
                end = "after sending an invalid answer" if is_foreign else worker.describe_end()
                self._drop(RESTARTS)
                if len(dialogs) > 1:
                    break
                continue
            if turns is not None:
                return turns
            self._drop(TIMED_OUT)
            if is_stateful or len(dialogs) == 1:
                what = "answer" if is_stateful else "score"
                text = f"there was no {what} within env.reward_timeout_s={self._timeout_s:g}."
                message = "" if is_stateful else f"it took longer than {self._timeout_s:g} s"
                return [Failure(("timeout",), text, "timeout", message, text)] * len(dialogs)
            break
        if len(dialogs) > 1 and not is_stateful:
            # one by one, to find the dialog that ended the process
            return [turn for dialog in dialogs for turn in self._request([dialog], ())]
        if is_stateful:
            text = f"its process ended ({end})."
            message = ""
        else:
            text = f"{attempts} processes ended while they scored it ({end})."
            message = "its process ended"
        return [Failure(("died", end), text, "crash", message, text)] * len(dialogs)

    def _running_worker(self) -> RewardWorker:
        with self._lock:
            if self.closed:
                raise RuntimeError("the reward pool is closed: create a new one.")
            if self.worker is None:
                self.worker = RewardWorker(self._task)
            return self.worker

    def _drop(self, reason: str) -> None:
        """End the worker and count the reason."""
        with self._lock:
            worker, self.worker = self.worker, None
            self.counts[reason] += 1
        self.open_episodes.clear()
        if worker is not None:
            worker.close()


_LOST = Failure(
    ("lost",),
    "the process that kept its dialog had ended, because of another dialog or from outside.",
    "lost",
    line="the process that kept its dialog had ended",
)
