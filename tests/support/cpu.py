"""CPU seconds that each test file costs, with all the processes that its tests start.

``RUSAGE_CHILDREN`` misses what a server of forks has started, so this adds up ``/proc`` (Linux
only). `make test` records all files with ``--cpu FILE``; ``tests/cpu.json`` has the limits of the
files that may take more than ``LIMIT_S``, and also orders the files of a parallel run.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LIMITS = Path(__file__).parents[1] / "cpu.json"
LIMIT_S = 5.0
"""CPU seconds of a file that ``tests/cpu.json`` does not name."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def limits() -> dict[str, float]:
    """Return the CPU seconds that each file above ``LIMIT_S`` may take, by path below tests/."""
    return dict(json.loads(LIMITS.read_text()))


def over_limits(seconds: Mapping[str, float]) -> list[str]:
    """Return a line for each file that took more than its limit."""
    allowed = limits()
    return [
        f"tests/{path}: {took:.1f} CPU s, {allowed.get(path, LIMIT_S):g} allowed"
        for path, took in sorted(seconds.items())
        if took > allowed.get(path, LIMIT_S)
    ]


def tree_seconds(root: int | None = None) -> float:
    """Return the CPU seconds of a process (this one by default) and all of its descendants, also of
    those that have ended and whose parent has waited for them.
    """
    root = os.getpid() if root is None else root
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                text = Path(entry.path, "stat").read_text()
                fields = text.rpartition(")")[2].split()
                pid = int(entry.name)
                children[int(fields[1])].append(pid)
                ticks[pid] = sum(int(number) for number in fields[11:15])
    total = 0
    pids = [root]
    while pids:
        pid = pids.pop()
        total += ticks.get(pid, 0)
        pids += children[pid]
    return total / _TICKS


class CPUMeter:
    """Plugin that measures each file in a worker and reports the sums in the controller.

    Args:
        out: JSON file of the CPU seconds by file, and of the tests above a second.
    """

    def __init__(self, config: pytest.Config, out: Path) -> None:
        self.config = config
        self.out = out
        self.files: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = tree_seconds()
        try:
            return (yield)
        finally:
            took = tree_seconds() - before
            self.files[item.path.relative_to(LIMITS.parent).as_posix()] += took
            if took > 1:
                self.tests[item.nodeid] = round(took, 2)

    def pytest_testnodedown(self, node: Any) -> None:
        files, tests = getattr(node, "workeroutput", {}).get("cpu", ({}, {}))
        self.files.update(files)
        self.tests.update(tests)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        files = {path: round(took, 2) for path, took in sorted(self.files.items())}
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output["cpu"] = files, self.tests
            return
        text = json.dumps({"files": files, "tests": self.tests, "sum": sum(files.values())}, indent=1)
        self.out.write_text(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{sum(self.files.values()):.0f} CPU s in {self.out}")


def register(config: pytest.Config) -> None:
    if (out := config.getoption("cpu")) and sys.platform == "linux":
        config.pluginmanager.register(CPUMeter(config, Path(out)), "cpu-meter")
