"""The scripts in processes of their own, with small runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.support import forks
from tests.support.configs import ROOT, last_of_each
from tests.support.processes import alive
from torchrl_grpo.host.files import read_jsonl

SYNC, ASYNC = ROOT / "sota" / "grpo" / "grpo.py", ROOT / "sota" / "grpo" / "grpo-async.py"
SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "optimizer.lr=1e-3",
    "logging.tensorboard=false",
    "evaluation.k=2",
)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "metrics.jsonl")


class Script:
    """A script in a process of its own, with all processes that were seen below it.

    Args:
        script: path of the script.
        folder: working directory.
        *arguments: arguments of the command line.
    """

    def __init__(self, script: Path, folder: Path, *arguments: str) -> None:
        self.folder, self.family = folder, set[psutil.Process]()
        self._output = (folder / "printed.txt").open("w")
        # A background process ignores Ctrl-C, and so would this one unless it is a fork.
        default: Any = (
            None
            if sys.platform == "linux"
            else partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        )
        self.process = forks.Popen(
            [
                sys.executable,
                str(script),
                "--config-name",
                "grpo_arithmetic",
                *last_of_each([*SMALL, *arguments]),
                f"hydra.run.dir={folder}",
            ],
            cwd=folder,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V1": "0"},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=default,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()

    def wait(self, until: Callable[[], object] = lambda: False, timeout_s: float = 600) -> None:
        """Wait until a condition holds or the script ends."""
        deadline = time.monotonic() + timeout_s
        while not until() and self.process.poll() is None and time.monotonic() < deadline:
            with suppress(psutil.NoSuchProcess):
                self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            time.sleep(0.5)  # listing all processes takes a while

    def printed(self) -> str:
        return (self.folder / "printed.txt").read_text()

    def left(self) -> list[str]:
        """Return the processes that have not ended a while after the script."""
        return alive(self.family)
