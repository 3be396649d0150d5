"""A plugin of pytest that writes each test's outcome as soon as it has ended, beside the file of
``--junitxml``: pytest itself writes nothing if it is killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """Collects the outcomes of tests in a JSON file.

    Args:
        path: of the file: by test name the outcome (``passed``, ``failed`` or ``skipped``), the
            seconds, the last line of an error or the reason, and what the test recorded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test: its setup, its call or its teardown."""
        name = report.nodeid.rpartition("::")[2]
        outcome = self._outcomes.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        outcome["seconds"] = round(outcome["seconds"] + report.duration, 3)
        outcome |= dict(report.user_properties)
        if report.outcome != "passed":
            outcome |= {"outcome": report.outcome, "message": _message(report)}
        if report.when == "teardown":
            partial = self._path.with_name(f".{self._path.name}")
            partial.write_text(json.dumps(self._outcomes), encoding="utf-8")
            partial.replace(self._path)


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:300]
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return str(text)[-300:]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    if xml := config.getoption("xmlpath"):
        config.pluginmanager.register(Outcomes(Path(f"{xml}.json")))
