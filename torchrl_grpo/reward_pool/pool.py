"""``RewardPool``: a task's answers and scores from separate processes, so that a scorer or a tool
that hangs or crashes affects nothing else.

Each worker process has a pipe of its own, which one thread at a time uses, so there is no queue or
lock that a killed worker could leave broken. The workers are new interpreters that import this
module, and start fast because it does not import torch; those of ``multiprocessing`` would import
the script again.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from torchrl_grpo.checks import check_reward
from torchrl_grpo.errors import INVALID_CAUSES, InvalidRewardError
from torchrl_grpo.host import interrupts
from torchrl_grpo.host.processes import go_on_in_guarded_child, show_stack_when_asked
from torchrl_grpo.host.text import clip, printable
from torchrl_grpo.tasks.base import Dialog, Score, Task, Turn, TurnLimits, attempt

RESTARTS = "workers/restarts_reward"
TIMED_OUT = "workers/rewards_timed_out"

_MOST_ATTEMPTS = 2
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_START_S = 600.0  # a machine that is busy, or a slow file system: only something stuck takes longer
_LONGEST_END_S = 10.0
_OWN_END_S = 2.0
"""Seconds in which a worker whose pipe is closed may end by itself, so that its exit status is its
own.
"""
_LONGEST_TEXT = 4000  # characters of an error
_LONGEST_LINE = 200  # of its message on one line
_LARGEST_ANSWER = 2**26  # bytes
_LONGEST_TRANSFER_S = 30
"""Seconds for which a pipe may be full, or a message incomplete, before the process at its other
end is stopped.
"""
_START = "import sys; sys.path[:] = {path!r}; from torchrl_grpo.reward_pool import serve; serve({fd}, {parent})"


@dataclass(frozen=True)
class Failure:
    """Reason why a dialog has no score.

    Attributes: kind: failures of one kind are logged once. text: for the log; a traceback where
        there is one. cause: one of ``INVALID_CAUSES``; ``crash`` is that of a process, ``lost``
        that of one that kept the dialog. told: what the policy is told, if a tool took too long or
        ended its process. line: the same on one line: of an exception its type, its message, and
        the place in the user's file.
    """

    kind: tuple[Any, ...]
    text: str
    cause: str = "exception"
    told: str = ""
    line: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make the failure of a task's exception; its kind is type and place. The text omits our
        own lines.
        """
        places = traceback.extract_tb(error.__traceback__)
        place = (places[-1].filename, places[-1].lineno) if places else ()
        theirs = [place for place in places if not place.filename.startswith(_PACKAGE)]
        shown = theirs or ([] if isinstance(error, InvalidRewardError) else places)
        text = "".join(
            [*traceback.format_list(shown), *traceback.format_exception_only(error)]
        ).rstrip()
        said = error.cause if isinstance(error, InvalidRewardError) else None
        cause = said if isinstance(said, str) and said in INVALID_CAUSES else "exception"
        line = f"{type(error).__name__}: {printable(clip(str(error), _LONGEST_LINE))}"
        own = [
            place for place in theirs if not place.filename.startswith(_STANDARD_LIBRARY)
        ] or theirs
        if own:  # the deepest line of the file that was called
            last = [place for place in own if place.filename == own[0].filename][-1]
            line += f" at {last.filename}:{last.lineno}"
        return cls((type(error).__name__, *place), _short(text), cause, line=line)


def _short(text: str) -> str:
    """Return beginning and end of a text that is too long for a log."""
    left_out = len(text) - _LONGEST_TEXT
    half = _LONGEST_TEXT // 2
    return (
        text
        if left_out <= 0
        else f"{text[:half]}\n... ({left_out:,} characters left out) ...\n{text[-half:]}"
    )


def advance(
    task: Task, dialogs: Sequence[Dialog], timeout_s: float | None = None
) -> list[Turn | Failure]:
    """Return the answer of ``task.advance`` for each dialog, with finite rewards, or why there is
    none.
    """
    try:
        turns = task.advance(dialogs, timeout_s)
    except Exception as error:  # of a task whose advance is the user's
        turns = [error] * len(dialogs)
    return [_checked(turn, task) for turn in turns]


def _checked(turn: Turn | Exception, task: Task) -> Turn | Failure:
    if isinstance(turn, Exception):
        return Failure.of(turn)
    try:
        if turn.reward is not None:
            turn = replace(
                turn, reward=check_reward(turn.reward, f"the reward of a turn of {task.name!r}")
            )
        if turn.score is None:
            return turn
        parts = {
            str(name): None
            if value is None
            else check_reward(value, f"the part {name} of {task.name!r}")
            for name, value in turn.score.parts.items()
        }
        reward = check_reward(turn.score.reward, f"the reward of {task.name!r}")
        return replace(turn, score=Score(reward, bool(turn.score.correct), parts))
    except Exception as error:
        return Failure.of(error)


class _Worker:
    """A process that handles one request after another; not on Windows."""

    def __init__(self, task: bytes) -> None:
        self.connection, theirs = Pipe()
        code = _START.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
        # In a new process group: the parent handles Ctrl-C in the terminal. On Linux it is a guard,
        # with a child.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        theirs.close()
        self._task: bytes | None = task
        self._requests = 0

    def ask(
        self, dialogs: Sequence[Dialog], ended: Sequence[str], timeout_s: float
    ) -> list[Turn | Failure] | None:
        """Return the task's answers to dialogs, None where there is none in time; first have it
        close ``ended`` ones.

        Raises:
            EOFError or OSError: the process has ended, or closed its pipe.
            ValueError: it has sent something else than an answer to this request.
            RuntimeError: it cannot load the task.
        """
        if self._task is not None:
            self.connection.send_bytes(self._task)
            refused = f"no answer within {_START_S:g} s"
            if self.connection.poll(_START_S):
                refused = self.connection.recv_bytes(_LARGEST_ANSWER).decode()
            if refused:
                raise RuntimeError(
                    "env.reward_workers needs processes that can load the task; one failed: "
                    f"{refused}"
                )
            self._task = None
            self._limit_transfers()
        self._requests += 1
        self.connection.send((self._requests, dialogs, ended, timeout_s))
        # One of several that are judged at a time, or one that is kept, is given up by the process
        # itself.
        patience = len(dialogs) > 1 or any(dialog.episode for dialog in dialogs)
        if not self.connection.poll(timeout_s + patience):
            return None
        return _decoded(self.connection.recv_bytes(_LARGEST_ANSWER), self._requests, len(dialogs))

    def _limit_transfers(self) -> None:
        limit = struct.pack("@ll", _LONGEST_TRANSFER_S, 0)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setblocking(True)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                pipe.setsockopt(socket.SOL_SOCKET, option, limit)

    def how_it_ended(self) -> str:
        """Describe how a worker ended, if it did so by itself."""
        try:
            status = self.process.wait(_OWN_END_S)
        except subprocess.TimeoutExpired:
            return "after closing its pipe to the run"
        if status == 0:
            return "status 0, after closing its pipe to the run"
        return f"status {status}" + (f", {signal.Signals(-status).name}" if status < 0 else "")

    def kill(self) -> None:
        """End the process and what it started; ``close`` waits for that."""
        if sys.platform == "linux":
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)  # a stopped one would not hear of it
        elif self.process.returncode is None:  # until it is waited for, nobody else has its number
            os.killpg(self.process.pid, signal.SIGKILL)

    def let_go(self) -> None:
        """Closes the pipe, and leaves the process time to close the dialogs that it keeps."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_OWN_END_S)

    def close(self) -> None:
        """Ends the process and what it started, and closes the pipe."""
        self.kill()
        self.connection.close()
        try:
            self.process.wait(_LONGEST_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class _WorkerSlot:
    """The place of one worker: what waits for it, and the dialogs that it keeps between their
    turns.

    Attributes: worker: its process, if one was started. waiting: dialogs for this worker alone with
        their futures, and keys of those to close, in order. kept: keys of the dialogs that the
        process keeps. busy: whether a thread works with it, which then is the only one that uses
        the process. playing: whether it does so for dialogs, and not to close some.
    """

    def __init__(self) -> None:
        self.worker: _Worker | None = None
        self.waiting: deque[Any] = deque()
        self.kept: set[str] = set()
        self.busy = self.playing = False


class RewardPool(AbstractContextManager["RewardPool"]):
    """Pool of worker processes that answer and score dialogs, made when they are first needed.

    A scorer or tool that takes too long is killed. A worker that dies is replaced, and its dialog
    tried once more. May be used by several threads at a time, and be pickled: the copy makes its
    own workers. On Linux the workers, and all processes that a scorer started, end with this
    process, however it ends.

    A dialog with an ``episode`` stays with the worker that got its first turn, because the task
    keeps something of it there. Where that process ends, its dialogs are lost, and no others; none
    of them is tried again.

    Args:
        task: its ``advance`` is what runs in the workers.
        workers: most worker processes, at least 1.

    Keyword Args:
        timeout_s: longest time for one dialog.

    Examples:
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> from torchrl_grpo.tasks.base import Problem
        >>> with RewardPool(ArithmeticTask(), 2, timeout_s=30) as pool:
        ...     turn = pool.submit(Dialog(Problem("1+1=?", "2"), ["#### 2"]))
        ...     turn.result().score
        Score(reward=1.0, correct=True)
    """

    def __init__(self, task: Task, workers: int, *, timeout_s: float) -> None:
        self._init(cloudpickle.dumps(task), task.at_a_time, workers, timeout_s)

    def _init(self, task: bytes, at_a_time: int, workers: int, timeout_s: float) -> None:
        self._task, self._at_a_time, self._most, self.timeout_s = (
            task,
            at_a_time,
            workers,
            timeout_s,
        )
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="rewards")
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._slots = [_WorkerSlot() for _ in range(workers)]
        self._slot_of: dict[str, _WorkerSlot] = {}  # by episode
        self._waiting: deque[tuple[Dialog, Future[Turn | Failure]]] = deque()  # for any worker
        self._counts: Counter[str] = Counter()
        self._closed = False

    def __getstate__(self) -> tuple[Any, ...]:
        return self._task, self._at_a_time, self._most, self.timeout_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._init(*state)

    def submit(self, dialog: Dialog) -> Future[Turn | Failure]:
        """Give a dialog to a worker as soon as one is free; see ``submit_all``."""
        return self.submit_all([dialog])[0]

    def submit_all(self, dialogs: Sequence[Dialog]) -> list[Future[Turn | Failure]]:
        """Give dialogs to workers as soon as they are free, as many as the task takes at a time to
        each.

        Raises: RuntimeError: the pool is closed; or, from the future, a worker process cannot load
            the task.
        """
        futures: list[Future[Turn | Failure]] = []
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed: make a new one.")
            for dialog in dialogs:
                futures.append(Future())
                self._queue_of(dialog).append((dialog, futures[-1]))
        for _ in dialogs:
            self._threads.submit(self._work)
        return futures

    def _queue_of(self, dialog: Dialog) -> deque[Any]:
        """Return the queue of a dialog: its first turn goes to the worker that keeps the fewest
        dialogs.
        """
        if not dialog.episode:
            return self._waiting
        if not dialog.responses:
            if dialog.episode in self._slot_of:  # given up without a word
                self._slot_of[dialog.episode].waiting.append(dialog.episode)
            loads = Counter(map(id, self._slot_of.values()))
            self._slot_of[dialog.episode] = min(self._slots, key=lambda slot: loads[id(slot)])
        slot = self._slot_of.get(dialog.episode)
        return self._waiting if slot is None else slot.waiting

    def end(self, episode: str) -> None:
        """Have the worker that keeps a dialog close it, after all turns of it that were submitted."""
        with self._lock:
            slot = self._slot_of.pop(episode, None)
            if slot is None or self._closed:
                return
            slot.waiting.append(episode)
        self._threads.submit(self._work)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, as metrics: workers that died, and dialogs that
        took too long.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in (RESTARTS, TIMED_OUT)}

    def pids(self) -> list[int]:
        """The worker processes that there are."""
        with self._lock:
            return [slot.worker.process.pid for slot in self._slots if slot.worker is not None]

    def close(self) -> None:
        """Ends the workers, those in the middle of a dialog at once. May be called again."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(
                lambda: not any(one.busy and not one.playing for one in self._slots), _OWN_END_S
            )
            workers = [slot.worker for slot in self._slots if slot.worker is not None]
            keeping = [
                slot.worker
                for slot in self._slots
                if slot.worker is not None and slot.kept and not slot.busy
            ]
        leaving = [threading.Thread(target=worker.let_go) for worker in keeping]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()
        queues: list[deque[Any]] = [self._waiting, *(slot.waiting for slot in self._slots)]
        for queue in queues:
            while queue:
                left = queue.popleft()
                if not isinstance(left, str):
                    left[1].set_exception(RuntimeError("the reward pool was closed."))

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _work(self) -> None:
        """Works for slots that nobody works for, as long as something waits."""
        while (slot := self._idle_slot()) is not None:
            taken: list[tuple[Dialog, Future[Turn | Failure]]] = []
            try:
                ended, taken = self._take(slot)
                turns = self._advance(slot, [dialog for dialog, _ in taken], ended)
                for (_, future), turn in zip(taken, turns, strict=True):
                    future.set_result(turn)
            except BaseException as error:
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
            finally:
                with self._idle:
                    slot.busy = slot.playing = False
                    self._idle.notify_all()

    def _idle_slot(self) -> _WorkerSlot | None:
        """A slot for which something waits, marked as busy."""
        with self._lock:
            if self._closed:
                return None
            idle = [slot for slot in self._slots if not slot.busy]
            own = [slot for slot in idle if slot.waiting]
            if not own and not (idle and self._waiting):
                return None
            # Where any will do, one that has a process is first.
            slot = own[0] if own else min(idle, key=lambda slot: slot.worker is None)
            slot.busy = True
            return slot

    def _take(
        self, slot: _WorkerSlot
    ) -> tuple[list[str], list[tuple[Dialog, Future[Turn | Failure]]]]:
        """Takes what waits: episodes to close or, if there are none, as many dialogs as are played
        at a time.
        """
        ended: list[str] = []
        taken: list[tuple[Dialog, Future[Turn | Failure]]] = []
        with self._lock:
            while slot.waiting and isinstance(slot.waiting[0], str):
                ended.append(slot.waiting.popleft())
            queue: deque[Any] = slot.waiting or self._waiting
            while (
                queue
                and not ended
                and len(taken) < self._at_a_time
                and not isinstance(queue[0], str)
            ):
                taken.append(queue.popleft())
            slot.playing = bool(taken)
        return ended, taken

    def _advance(
        self, slot: _WorkerSlot, dialogs: list[Dialog], ended: Sequence[str] = ()
    ) -> list[Turn | Failure]:
        """The answers to dialogs; all of them stay with the slot's worker, or none does."""
        if (
            slot.worker is not None and slot.worker.process.poll() is not None
        ):  # it ended while it had nothing to do
            self._drop(slot, RESTARTS)
        ended = [episode for episode in ended if episode in slot.kept]
        lost = {
            id(dialog)
            for dialog in dialogs
            if dialog.episode and dialog.responses and dialog.episode not in slot.kept
        }
        alive = [dialog for dialog in dialogs if id(dialog) not in lost]
        slot.kept.update(dialog.episode for dialog in alive if dialog.episode)
        turns = iter(self._asked(slot, alive, ended) if alive or ended else [])
        slot.kept.difference_update(ended)
        return [_LOST if id(dialog) in lost else next(turns) for dialog in dialogs]

    def _asked(
        self, slot: _WorkerSlot, dialogs: list[Dialog], ended: Sequence[str]
    ) -> list[Turn | Failure]:
        how, keeps = "", bool(ended) or any(dialog.episode for dialog in dialogs)
        attempts = 1 if keeps else _MOST_ATTEMPTS
        for _ in range(attempts):
            worker = self._living_worker(slot)
            try:
                turns = worker.ask(dialogs, ended, self.timeout_s)
            except (EOFError, OSError, ValueError) as error:
                foreign = (
                    isinstance(error, ValueError) or not worker.connection.readable
                )  # it was too large
                how = (
                    "after sending something that is no answer"
                    if foreign
                    else worker.how_it_ended()
                )
                self._drop(slot, RESTARTS)
                if len(dialogs) > 1:
                    break
                continue
            if turns is not None:
                return turns
            self._drop(slot, TIMED_OUT)
            if keeps or len(dialogs) == 1:
                what = "answer" if keeps else "score"
                text = f"there was no {what} within env.reward_timeout_s={self.timeout_s:g}."
                told = "" if keeps else f"it took longer than {self.timeout_s:g} s"
                return [Failure(("timeout",), text, "timeout", told, text)] * len(dialogs)
            break
        if (
            len(dialogs) > 1 and not keeps
        ):  # one of them took the others with it: which, they show alone
            return [turn for dialog in dialogs for turn in self._asked(slot, [dialog], ())]
        text = f"{attempts} processes ended while they scored it ({how})."
        text = f"its process ended ({how})." if keeps else text
        told = "" if keeps else "its process ended"
        return [Failure(("died", how), text, "crash", told, text)] * len(dialogs)

    def _living_worker(self, slot: _WorkerSlot) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed: make a new one.")
            if slot.worker is None:
                slot.worker = _Worker(self._task)
            return slot.worker

    def _drop(self, slot: _WorkerSlot, reason: str) -> None:
        """End a worker and count the cause."""
        with self._lock:
            worker, slot.worker = slot.worker, None
            self._counts[reason] += 1
        slot.kept.clear()
        if worker is not None:
            worker.close()


_LOST = Failure(
    ("lost",),
    "the process that kept its dialog had ended, because of another dialog or from outside.",
    "lost",
    line="the process that kept its dialog had ended",
)


def _encoded(turns: Sequence[Turn | Failure], number: int) -> bytes:
    """Encode an answer as JSON, which is never unpickled: what a worker sends may come from what it
    scores.
    """
    return json.dumps([number, [_as_json(turn) for turn in turns]]).encode()


def _as_json(turn: Turn | Failure) -> Any:
    failed: Failure
    if isinstance(turn, Turn):
        messages = None if turn.messages is None else list(turn.messages)
        counts = {str(name): float(count) for name, count in turn.counts.items()}
        score = turn.score and [turn.score.reward, turn.score.correct, dict(turn.score.parts)]
        tools = None if turn.tools is None else list(turn.tools)
        made: dict[str, Any] = {
            "messages": messages,
            "score": score,
            "counts": counts,
            "reward": turn.reward,
            "tools": tools,
        }
        made |= {
            "sample": turn.sample,
            "wish": [turn.limits.max_tokens, list(turn.limits.stop), turn.limits.log_probs],
        }
        made["undelivered"] = turn.undelivered
        try:
            if len(json.dumps(made)) > _LARGEST_ANSWER // 128:
                raise ValueError(
                    f"a turn must be under {_LARGEST_ANSWER // 128:,} bytes: return shorter "
                    "messages."
                )
            return made
        except (TypeError, ValueError, RecursionError) as error:
            failed = Failure.of(error)
    else:
        failed = turn
    return {
        "kind": list(failed.kind),
        "text": failed.text,
        "cause": failed.cause,
        "line": failed.line,
    }


def _decoded(answer: bytes, number: int, count: int) -> list[Turn | Failure]:
    """The turns of an answer.

    Raises:
        ValueError: it is no answer to the request of this number, of so many dialogs.
    """
    try:
        answered, given = json.loads(answer)
        turns = [_from_json(one) for one in given]
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ValueError("it is no answer") from error
    if answered != number or len(turns) != count:
        raise ValueError("it is no answer to this request")
    return turns


def _from_json(one: dict[str, Any]) -> Turn | Failure:
    if "cause" in one:
        cause = INVALID_CAUSES[INVALID_CAUSES.index(one["cause"])]
        return Failure(tuple(map(str, one["kind"])), str(one["text"]), cause, line=str(one["line"]))
    score = None
    if one["score"] is not None:
        reward, correct, parts = one["score"]
        score = Score(
            float(reward), bool(correct), {name: _number(value) for name, value in parts.items()}
        )
    messages = None if one["messages"] is None else [dict(message) for message in one["messages"]]
    tools = None if one["tools"] is None else [dict(tool) for tool in one["tools"]]
    counts = {name: float(count) for name, count in one["counts"].items()}
    most, stop, log_probs = one["wish"]
    limits = TurnLimits(None if most is None else int(most), tuple(map(str, stop)), bool(log_probs))
    sample, undelivered = int(one["sample"]), bool(one["undelivered"])
    return Turn(messages, score, counts, _number(one["reward"]), tools, sample, limits, undelivered)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def serve(fd: int, parent: int) -> None:
    """Main function of a worker process: load the task that it is sent, advance dialogs until the
    pipe is closed, and then close those that it keeps.

    Args:
        fd: its end of the pipe.
        parent: the process that started it.
    """
    os.set_inheritable(fd, False)
    if sys.platform == "linux":
        go_on_in_guarded_child(parent, closing=fd)
        show_stack_when_asked()
    interrupts.ignore_broken_pipes()  # a scorer may print
    connection = Connection(fd)
    with suppress(EOFError, OSError):
        task_bytes = connection.recv_bytes()
        try:
            task = pickle.loads(task_bytes)
        except Exception:
            connection.send_bytes(_short(traceback.format_exc()).encode(errors="replace"))
            return
        connection.send_bytes(b"")
        kept: set[str] = set()
        told: set[tuple[Any, ...]] = set()
        try:
            while True:
                number, dialogs, ended, timeout_s = connection.recv()
                _close(task, ended, told)
                kept = (kept - set(ended)) | {
                    dialog.episode for dialog in dialogs if dialog.episode
                }
                try:
                    turns = advance(task, dialogs, timeout_s)
                except (
                    BaseException
                ) as error:  # of a scorer: nobody interrupts a worker by the keyboard
                    turns = [Failure.of(error)] * len(dialogs)
                connection.send_bytes(_encoded(turns, number))
        finally:
            _close(task, sorted(kept), told)


def _close(task: Task, episodes: Iterable[str], told: set[tuple[Any, ...]]) -> None:
    """Closes dialogs; what fails is told once of each kind."""
    for episode in episodes:
        error = attempt(task.close, episode)
        if isinstance(error, Exception) and (failure := Failure.of(error)).kind not in told:
            told.add(failure.kind)
            print(
                f"task {task.name!r} failed to close a dialog.\n{failure.text}",
                file=sys.stderr,
                flush=True,
            )
