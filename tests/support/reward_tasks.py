"""A task whose scorer obeys the response. Reward workers import this module, so it stays free of
torch.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.tasks.base import Problem, Score, Split, Task


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class WithCause(Exception):
    """An error with a cause."""

    def __init__(self, cause: Any) -> None:
        self.cause = cause


def sockets() -> list[int]:
    """Return the open sockets of this process."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                names.append(int(name))
        except OSError:  # the one that lists the folder
            pass
    return names


def framed(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


class ObedientTask(Task):
    """Obeys ``hang``, ``exit``, ``kill``, ``boom``, ``pid``, ``modules`` and others, or a number,
    which is the reward.
    """

    name = "obedient"

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(letter, letter) for letter in "abcd"]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        order, *paths = responses[-1].split()
        if order == "hang":
            time.sleep(1000)
        elif order == "hang-child":
            Path(paths[0]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            time.sleep(1000)
        elif order == "daemon":  # a child that has left the session and lost its parent
            own = f"setsid sleep 1000 & echo $! > {paths[0]}"
            subprocess.run(["sh", "-c", own], check=True, stdout=subprocess.DEVNULL)
            time.sleep(1000 if "hang" in paths else 0)
            if "exit" in paths:
                os._exit(3)
        elif order == "exit":
            os._exit(3)
        elif order == "exit-once" and not Path(paths[0]).exists():
            Path(paths[0]).touch()
            os._exit(3)
        elif order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == "boom":
            raise KeyError("boom")
        elif order == "interrupt":
            raise KeyboardInterrupt
        elif order == "cause":  # not a protocol message
            raise WithCause(" ".join(paths))
        elif order == "invalid":
            raise InvalidRewardError("no", " ".join(paths))
        elif order == "unpicklable":
            raise WithCause(threading.Lock())
        elif order == "long":
            raise ValueError("x" * 10_000_000)
        elif order == "part":
            return Score(1.0, True, {"part": threading.Lock()})  # type: ignore[dict-item]
        elif (
            order == "forks"
        ):  # a fork bomb of another user, with a limit of 150 processes, which goes on for a while whatever happens
            os.setuid(65534)
            resource.setrlimit(resource.RLIMIT_NPROC, (150, 150))
            # All of its processes hold the lock.
            fcntl.flock(os.open(paths[0], os.O_CREAT | os.O_WRONLY, 0o666), fcntl.LOCK_EX)
            end = time.monotonic() + 300
            while time.monotonic() < end:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.001)
            os._exit(0)
        elif order == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            blocks = []
            while True:
                blocks.append(bytearray(10**7))
        elif order == "close":
            for number in sockets():
                os.close(number)
            time.sleep(float(paths[0]))
        elif order == "send":
            sent = {
                "pickle": framed(pickle.dumps(Payload(paths[1]))),
                "text": framed(b"[1, 2"),
                "answer": framed(
                    b'[7, [{"messages": null, "score": [5.0, true, {}], "counts": {}}]]'
                ),
                "huge": struct.pack("!i", 2**31 - 1),
            }[paths[0]]
            for number in sockets():
                os.write(number, sent)
        elif order == "meet":  # ends when the second file appears
            Path(paths[0]).touch()
            while not Path(paths[1]).exists():
                time.sleep(0.01)
        elif order == "pid":
            return Score(os.getpid(), True)
        elif order == "modules":
            return Score("torch" in sys.modules or "tensordict" in sys.modules, True)
        return Score(float(order) if order.replace(".", "").isdigit() else 1.0, True)


def refuse(*_: Any) -> None:
    raise ImportError("no such library here")


class UnloadableTask(ObedientTask):
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()
