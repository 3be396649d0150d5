"""CPU seconds of each test file, with all the processes that its tests start (Linux only).

``RUSAGE_CHILDREN`` misses what a server of forks has started, so this adds up ``/proc``.
``tests/cpu.json`` has the limits of the files that may take more than ``LIMIT_S``; it also orders
the files of a parallel run. `make test` names the files above their limits, and passes: the same
file takes twice as long on a slower or a busier machine. On the machine that set the limits:

    python -m tests.support.cpu .pytest_cache/cpu.json           # exits with 1 if a file is above
    python -m tests.support.cpu --set .pytest_cache/cpu.json     # after a whole `make test`
"""

from __future__ import annotations

import json
import math
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
START_S = 10.0
"""CPU seconds that any file may take in addition: the first one of a worker that needs a server of
forks starts it."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def limits() -> dict[str, float]:
    """Return the CPU seconds that files above ``LIMIT_S`` may take, by path below tests/, and that
    all may take together (``"all"``).
    """
    return dict(json.loads(LIMITS.read_text()))


def over_limits(seconds: Mapping[str, float], allowed: Mapping[str, float]) -> list[str]:
    """Return a line for each file that took more than its limit, and for their sum.

    >>> over_limits({"a.py": 16.0, "b.py": 17.0, "c.py": 1.0}, {"b.py": 9, "all": 10})
    ['a.py took 16.0 CPU s of 5', 'all took 34.0 CPU s of 10']
    """
    lines = []
    for path, took in sorted((dict(seconds) | {"all": sum(seconds.values())}).items()):
        limit = allowed.get(path, LIMIT_S)
        if took > limit + START_S * (path != "all"):
            lines.append(f"{path} took {took:.1f} CPU s of {limit:g}")
    return lines


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
    """Plugin that measures each file in a worker and compares the sums in the controller.

    Args:
        out: JSON file of the CPU seconds of the files, and of the tests above a second.
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

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        files, tests = getattr(node, "workeroutput", {}).get("cpu", ({}, {}))
        self.files.update(files)
        self.tests.update(tests)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        files = {path: round(took, 2) for path, took in sorted(self.files.items())}
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output["cpu"] = files, self.tests
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"files": files, "tests": self.tests}, indent=1))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{sum(self.files.values()):.0f} CPU s, see {self.out}")
        for line in over_limits(self.files, limits()):
            terminalreporter.write_line(f"{line}: see tests/support/cpu.py", yellow=True)


def register(config: pytest.Config) -> None:
    """Measure if there is ``--cpu`` and Linux."""
    if (out := config.getoption("cpu")) and sys.platform == "linux":
        config.pluginmanager.register(CPUMeter(config, Path(out)), "cpu-meter")


def limits_for(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return limits that leave files, and their sum, 1.4 times what they took.

    >>> limits_for({"a.py": 1.0, "b.py": 10.0})
    {'all': 16, 'b.py': 14}
    """
    files = {path: math.ceil(1.4 * took) for path, took in seconds.items() if 1.4 * took > LIMIT_S}
    return {"all": math.ceil(1.4 * sum(seconds.values())), **dict(sorted(files.items()))}


if __name__ == "__main__":
    recorded = json.loads(Path(sys.argv[-1]).read_text())["files"]
    if "--set" in sys.argv:
        LIMITS.write_text(json.dumps(limits_for(recorded), indent=1) + "\n")
    else:
        sys.exit("\n".join(over_limits(recorded, limits())) or 0)
