"""A run on the dashboard, from its files."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.extras.view.files import (
    Tail,
    changed_at,
    read_row,
)
from torchrl_grpo.extras.view.index import Criteria, Samples
from torchrl_grpo.extras.view.strip import strip_of
from torchrl_grpo.extras.view.timeline import Timeline
from torchrl_grpo.host.files import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    is_number,
    is_step,
    load_yaml,
    read_inside,
)
from torchrl_grpo.host.text import clip, printable_lines
from torchrl_grpo.host.trees import dotted
from torchrl_grpo.reporting.alarms import Alarm, Alarms
from torchrl_grpo.reporting.panels import (
    COLORS,
    STAGES,
    Panel,
    Record,
    curve_of,
    label_of,
    panels_of,
    series,
    times,
)
from torchrl_grpo.reporting.records import reward_text, run_title

_FRESH_S = 0.5
"""Seconds during which files are not checked again after they were read."""
_MAX_TEXT_LENGTH = 2000
_FACTS = (
    "step",
    "split",
    "dataset",
    "advantage",
    "parts",
    "length",
    "finish_reason",
    "version",
    "staleness",
)


class RunView:
    """One run. Several threads can call its methods at once.

    Args:
        folder: of the run.
        name: name that distinguishes it from other runs.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.samples = Samples(folder)
        self.timeline = Timeline(folder)
        self.metrics = Metrics(folder)
        self._title = ""
        self._reading = threading.Lock()
        self._searching = threading.Lock()
        self._read_at = float("-inf")

    def refresh(self) -> None:
        """Read what the run has written since the last time, unless another thread does."""
        if time.monotonic() - self._read_at < _FRESH_S or not self._reading.acquire(blocking=False):
            return
        try:
            for part in (self.metrics, self.timeline, self.samples):
                part.refresh()
        finally:
            self._read_at = time.monotonic()
            self._reading.release()

    def status(self) -> dict[str, Any]:
        """Return the state of the run, and how much of its files was read: a client is out of date
        when these counts grow.
        """
        written_at = changed_at(self.folder, METRICS_FILE)
        ended = changed_at(self.folder, "report.html") >= written_at > 0
        index, record = self.samples.index, self.metrics.records[-1:]
        return {
            "name": self.name,
            "title": self.title(),
            "ended": ended,
            "reading": self._reading.locked(),
            "age": max(0.0, time.time() - written_at) if written_at else None,
            "step": record[0]["step"] if record else None,
            "alarms": len(self.alarms(ended)),
            "versions": {
                "metrics": self.metrics.version,
                "samples": index.count,
                "timeline": len(self.timeline),
            },
            "splits": list(index.splits),
            "datasets": [name for name in list(index.datasets) if name],
        }

    def title(self) -> str:
        """Return model, data and algorithm."""
        if not self._title:
            texts = [
                read_inside(self.folder, f".hydra/{name}.yaml") for name in ("config", "hydra")
            ]
            self._title = printable_lines(run_title(*texts))
        return self._title

    def alarms(self, ended: bool) -> list[Alarm]:
        """Return the alarms so far."""
        return self.metrics.alarms(ended)

    def groups(self, criteria: Criteria, page: int, size: int) -> dict[str, Any]:
        """Return a page of the groups with matching rows, newest first.

        Args:
            criteria: criteria that at least one row of a group must match.
            page: number of the page, from 0.
            size: number of groups on a page.
        """
        index = self.samples.index
        with self._searching:
            found = index.search(criteria)
            groups = list(found)[::-1]
            shown = {group: set(found[group]) for group in groups[page * size : (page + 1) * size]}
        return {
            "groups": [
                [
                    _cell(index.row(row), row) | {"wanted": row in rows}
                    for row in list(index.groups[group])
                ]
                for group, rows in shown.items()
            ],
            "found": len(groups),
            "all": len(index.groups),
            "rows": index.count,
            "steps": index.step_range(),
        }

    def response(self, number: int) -> dict[str, Any] | None:
        """Return a row with its tokens, and the rows of its group; None if there is no such row."""
        index = self.samples.index
        if not 0 <= number < index.count:
            return None
        row, whole = index.row(number), index.row(number, tokens=True)
        strip = strip_of(row | {"tokens": whole.get("tokens")})
        return _cell(row, number, longest=None) | {"tokens": strip, "group": index.group_of(number)}

    def config(self) -> dict[str, str]:
        """Return the config by dotted key, and the run's environment; if it cannot be read, why."""
        try:
            config = load_yaml(read_inside(self.folder, ".hydra/config.yaml")) or {}
            if not isinstance(config, dict):
                raise yaml.YAMLError("it is not a mapping")
        except yaml.YAMLError as error:
            config = {"config": f"not shown: {error}"}
        environment = read_row(read_inside(self.folder, ENVIRONMENT_FILE).encode())
        try:
            values = {
                key: value if isinstance(value, str) else json.dumps(value, default=str)
                for key, value in dotted(config | {"environment": environment})
            }
        except RecursionError:
            values = {"config": "not shown: it, or environment.json, is nested too deeply"}
        return {key: printable_lines(text) for key, text in values.items()}


class Metrics:
    """The metrics of a run that may still be running.

    Attributes:
        records: one mapping per step, in order.
        version: number that changes whenever the records do.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder, METRICS_FILE)
        self._watching = threading.Lock()  # one thread adds alarms while others copy them
        self.records: list[dict[str, Any]] = []
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self._steps: dict[int, dict[str, Any]] = {}
        self._alarms = Alarms()
        self._last_checked = -1

    def refresh(self) -> None:
        """Read what was appended; in one thread at a time."""
        anew = self._tail.reopen()
        if anew:
            self._begin()
        added = [row for _, line in self._tail.lines() if _is_plottable(row := read_row(line))]
        for row in added:
            self._steps[row["step"]] = self._steps.get(row["step"], {}) | row
        if added or anew:  # until now others see the records of the previous file
            self.records = [self._steps[step] for step in sorted(self._steps)]
            self.version += 1
            for record in self.records[:-1]:  # the last one may still grow
                if record["step"] > self._last_checked:
                    self._last_checked = record["step"]
                    with self._watching:
                        self._alarms.take(record)

    def alarms(self, ended: bool) -> list[Alarm]:
        """Return the alarms of all records."""
        with self._watching:
            alarms = copy.deepcopy(self._alarms)
        for record in self.records[-1:]:
            alarms.take(record)
        if ended:
            alarms.end()
        return alarms.raised


def _is_plottable(row: dict[str, Any]) -> bool:
    """Return whether a row is a step with valid numbers."""
    return is_step(row.get("step")) and all(
        value is None or is_number(value) for value in row.values()
    )


def panels(runs: dict[int, RunView], first: int | None, last: int | None) -> list[dict[str, Any]]:
    """Return the panels of the report, with the curves of several runs.

    Args:
        runs: runs by number.
        first: first step to show; None for no limit.
        last: last step to show; None for no limit.
    """
    low = -1 if first is None else first
    high = float("inf") if last is None else last
    records_of = {
        run: [record for record in list(view.metrics.records) if low <= record["step"] <= high]
        for run, view in runs.items()
    }
    panels_by_run = {run: panels_of(records) for run, records in records_of.items()}
    out = []
    for panel in dict.fromkeys(panel for of_run in panels_by_run.values() for panel in of_run):
        stacked = panel.metrics == ("time/*_s",) and len(runs) == 1
        if stacked:
            [(run, records)] = records_of.items()
            curves = [
                {
                    "run": run,
                    "label": part,
                    "color": COLORS[STAGES.index(part)],
                    "steps": steps,
                    "values": values,
                }
                for part, (steps, values) in times(records).items()
            ]
        else:
            own = {
                run: records for run, records in records_of.items() if panel in panels_by_run[run]
            }
            curves = [
                curve for run, records in own.items() for curve in _curves(run, panel, records)
            ]
        out.append(
            {"title": panel.title, "note": panel.note, "percent": panel.percent, "stacked": stacked}
        )
        out[-1]["curves"] = curves
    return [panel for panel in out if panel["curves"]]


def _curves(run: int, panel: Panel, records: Sequence[Record]) -> list[dict[str, Any]]:
    curves_by_name = series(panel, records)
    if panel.metrics == ("time/*_s",):
        curves_by_name = {
            name: points for name, points in curves_by_name.items() if name == ("time/step_s")
        }
    curves = []
    for name, points in curves_by_name.items():
        steps, values, smoothed = curve_of(name, points)
        curve = {"run": run, "label": label_of(name), "steps": steps, "values": values}
        curves.append(curve | ({"smooth": smoothed} if smoothed else {}))
    return curves


def _cell(
    row: dict[str, Any], number: int, longest: int | None = _MAX_TEXT_LENGTH
) -> dict[str, Any]:
    """Return the columns of a row for display; its texts have no unprintable characters."""
    texts = {name: str(row.get(name)) for name in ("query", "response")}
    facts = {name: row[name] for name in _FACTS if row.get(name) is not None}
    return {
        "row": number,
        "reward": reward_text(row),
        "good": bool(row.get("correct")),
        **{
            name: printable_lines(text if longest is None else clip(text, longest))
            for name, text in texts.items()
        },
        **facts,
    }
