"""A task whose scorer does what the response says. Reward workers import this module, so it stays free of torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.tasks.base import Problem, Score, Split, Task


class ObedientTask(Task):
    """``hang``, ``exit``, ``kill``, ``boom``, ``pid``, ``modules``, or a number, which is the reward."""

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
        elif order == "meet":  # ends when somebody has made the second file
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
