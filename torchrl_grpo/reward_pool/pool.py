"""``RewardPool``: a task's replies and scores from separate processes, so that a scorer or a tool
that hangs or crashes affects nothing else.

Each worker process has its own pipe, which one thread at a time uses, so there is no queue or lock
that a killed worker could leave broken. The workers are new interpreters, which start fast because
they do not import torch.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle

from torchrl_grpo.reward_pool.protocol import Failure
from torchrl_grpo.reward_pool.slot import EXIT_S, RESTARTS, TIMED_OUT, WorkerSlot
from torchrl_grpo.tasks.base import Dialog, Task, Turn

_Job = tuple[Dialog, Future[Turn | Failure]]


class RewardPool(AbstractContextManager["RewardPool"]):
    """Pool of worker processes that reply to dialogs and score them. They are started when needed.

    A scorer or tool that takes too long is killed. A worker that dies is replaced, and its dialog
    is tried once more. Several threads can use the pool at a time. It can be pickled: the copy
    starts its own workers. On Linux the workers, and all processes that a scorer started, end with
    this process, however it ends.

    A dialog with an ``episode`` stays with the worker that got its first turn, because the task
    keeps its state there. If that process dies, its dialogs, and no others, are lost and not tried
    again.

    Args:
        task: the task, whose ``advance`` runs in the workers.
        workers: maximum number of worker processes, at least 1.

    Keyword Args:
        timeout_s: timeout of one dialog.

    Examples:
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> from torchrl_grpo.tasks.base import Problem
        >>> with RewardPool(ArithmeticTask(), 2, timeout_s=30) as pool:
        ...     turn = pool.submit(Dialog(Problem("1+1=?", "2"), ["#### 2"]))
        ...     turn.result().score
        Score(reward=1.0, correct=True)
    """

    def __init__(self, task: Task, workers: int, *, timeout_s: float) -> None:
        self.__setstate__((cloudpickle.dumps(task), task.at_a_time, workers, timeout_s))

    def __getstate__(self) -> tuple[bytes, int, int, float]:
        return self._state

    def __setstate__(self, state: tuple[bytes, int, int, float]) -> None:
        self._state = state
        task, self._at_a_time, workers, self.timeout_s = state
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._slots = [WorkerSlot(task, self.timeout_s, self._lock) for _ in range(workers)]
        self._slot_of: dict[str, WorkerSlot] = {}  # slots by episode
        self._queue: deque[_Job] = deque()  # for any worker
        self._closed = False

    def submit(self, dialog: Dialog) -> Future[Turn | Failure]:
        """Submit a dialog to the next free worker; see ``submit_all``."""
        return self.submit_all([dialog])[0]

    def submit_all(self, dialogs: Sequence[Dialog]) -> list[Future[Turn | Failure]]:
        """Submit dialogs to workers as they become free, each as many as the task handles at a
        time.

        Raises:
            RuntimeError: the pool is closed, or (raised by the future) a worker process cannot load
                the task.
        """
        futures: list[Future[Turn | Failure]] = []
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed: create a new one.")
            for dialog in dialogs:
                futures.append(Future())
                self._queue_of(dialog).append((dialog, futures[-1]))
        for _ in dialogs:
            self._threads.submit(self._work)
        return futures

    def _queue_of(self, dialog: Dialog) -> deque[Any]:
        """Return the queue of a dialog; its first turn goes to the worker with the fewest
        dialogs.
        """
        if not dialog.episode:
            return self._queue
        if not dialog.responses:
            if dialog.episode in self._slot_of:  # abandoned without ``end``
                self._slot_of[dialog.episode].queue.append(dialog.episode)
            loads = Counter(map(id, self._slot_of.values()))
            self._slot_of[dialog.episode] = min(self._slots, key=lambda slot: loads[id(slot)])
        slot = self._slot_of.get(dialog.episode)
        return self._queue if slot is None else slot.queue

    def end(self, episode: str) -> None:
        """Have a dialog's worker close it, after all its submitted turns."""
        with self._lock:
            slot = self._slot_of.pop(episode, None)
            if slot is None or self._closed:
                return
            slot.queue.append(episode)
        self._threads.submit(self._work)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call as metrics: workers that died, and dialogs that
        timed out.
        """
        with self._lock:
            counts = sum((slot.counts for slot in self._slots), Counter())
            for slot in self._slots:
                slot.counts.clear()
        return {name: counts[name] for name in (RESTARTS, TIMED_OUT)}

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        with self._lock:
            return [slot.worker.process.pid for slot in self._slots if slot.worker is not None]

    def close(self) -> None:
        """End the workers, immediately if they are in a dialog. Can be called more than once."""
        with self._idle:
            self._closed = True
            for slot in self._slots:
                slot.closed = True
            self._idle.wait_for(
                lambda: all(slot.playing or not slot.busy for slot in self._slots), EXIT_S
            )
            workers = [slot.worker for slot in self._slots if slot.worker is not None]
            exiting = [
                threading.Thread(target=slot.worker.let_exit)
                for slot in self._slots
                if slot.worker is not None and slot.open_episodes and not slot.busy
            ]
        for thread in exiting:
            thread.start()
        for thread in exiting:
            thread.join()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()
        for queue in (self._queue, *(slot.queue for slot in self._slots)):
            while queue:
                job = queue.popleft()
                if not isinstance(job, str):
                    job[1].set_exception(RuntimeError("the reward pool was closed."))

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _work(self) -> None:
        """Run jobs on idle slots while any are waiting."""
        while (slot := self._claim_slot()) is not None:
            jobs: list[_Job] = []
            try:
                ended, jobs = self._next_jobs(slot)
                turns = slot.play([dialog for dialog, _ in jobs], ended)
                for (_, future), turn in zip(jobs, turns, strict=True):
                    future.set_result(turn)
            except BaseException as error:
                for _, future in jobs:
                    if not future.done():
                        future.set_exception(error)
            finally:
                with self._idle:
                    slot.busy = slot.playing = False
                    self._idle.notify_all()

    def _claim_slot(self) -> WorkerSlot | None:
        """Return an idle slot with waiting jobs, after marking it as busy."""
        with self._lock:
            if self._closed:
                return None
            idle = [slot for slot in self._slots if not slot.busy]
            candidates = [slot for slot in idle if slot.queue]
            if not candidates and self._queue:  # running workers first
                candidates = sorted(idle, key=lambda slot: slot.worker is None)
            if not candidates:
                return None
            candidates[0].busy = True
            return candidates[0]

    def _next_jobs(self, slot: WorkerSlot) -> tuple[list[str], list[_Job]]:
        """Take episodes to close from a slot's queue or, if there are none, as many dialogs as the
        task handles at a time.
        """
        ended: list[str] = []
        jobs: list[_Job] = []
        with self._lock:
            while slot.queue and isinstance(slot.queue[0], str):
                ended.append(slot.queue.popleft())
            queue: deque[Any] = slot.queue or self._queue
            while queue and not ended and len(jobs) < self._at_a_time:
                if isinstance(queue[0], str):
                    break
                jobs.append(queue.popleft())
            slot.playing = bool(jobs)
        return ended, jobs
