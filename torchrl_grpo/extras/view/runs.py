"""A run on the dashboard, from its files."""

from __future__ import annotations

import copy
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from glob import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.extras.report.alarms import Alarm, Alarms
from torchrl_grpo.extras.report.panels import (
    LOSS,
    PANELS,
    REWARD,
    SMOOTHING,
    TIMES,
    Curve,
    Panel,
    Record,
    curve_of,
    heights_of,
    label_of,
    panels_of,
    series,
    times,
)
from torchrl_grpo.extras.report.records import run_title
from torchrl_grpo.extras.report.summary import stage_seconds
from torchrl_grpo.extras.run_files import load_yaml, read_inside
from torchrl_grpo.extras.view.files import (
    Tail,
    changed_at,
)
from torchrl_grpo.extras.view.index import Criteria, Samples
from torchrl_grpo.extras.view.strip import strip_of
from torchrl_grpo.extras.view.timeline import Timeline
from torchrl_grpo.host.files import (
    ENVIRONMENT_FILE,
    METRICS_FILE,
    TRACE_FILE,
    is_number,
    is_step,
    read_row,
)
from torchrl_grpo.host.text import clip, printable_lines, reward_text
from torchrl_grpo.host.trees import dotted

_FRESH_S = 0.5
"""Seconds during which files are not checked again after they were read."""
_MAX_TEXT_LENGTH = 2000
MOST_POINTS = 1000
"""Maximum points of a curve, and of a zoomed part of it."""
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
    "images",
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
            "trace": (self.folder / TRACE_FILE).exists(),
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

    def groups(
        self, criteria: Criteria, page: int, size: int, *, by_spread: bool = False
    ) -> dict[str, Any]:
        """Return a page of the groups with matching rows, newest first.

        Args:
            criteria: criteria that at least one row of a group must match.
            page: number of the page, from 0.
            size: number of groups on a page.
            by_spread: whether those whose rewards differ most come before newer ones.
        """
        index = self.samples.index
        with self._searching:
            rows_by_group = index.search(criteria)
            groups = list(rows_by_group)[::-1]
            if by_spread:
                groups.sort(key=index.spread, reverse=True)
            shown = {
                group: set(rows_by_group[group])
                for group in groups[page * size : (page + 1) * size]
            }
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
        row, with_tokens = index.row(number), index.row(number, tokens=True)
        strip = strip_of(row | {"tokens": with_tokens.get("tokens")}, self._call_format())
        return _cell(row, number, longest=None) | {"tokens": strip, "group": index.group_of(number)}

    def _environment(self) -> dict[str, Any]:
        return read_row(read_inside(self.folder, ENVIRONMENT_FILE).encode())

    def _call_format(self) -> str:
        """Return the name of the format of the run's tool calls; "" for a response template, whose
        regular expressions somebody else may have written.
        """
        call_format = self._environment().get("call_format")
        return call_format if isinstance(call_format, str) else ""

    def config(self) -> dict[str, str]:
        """Return the config by dotted key, and the run's environment; if it cannot be read, why."""
        try:
            config = load_yaml(read_inside(self.folder, ".hydra/config.yaml")) or {}
            if not isinstance(config, dict):
                raise yaml.YAMLError("it is not a mapping")
        except yaml.YAMLError as error:
            config = {"config": f"not shown: {error}"}
        try:
            values = {
                key: value if isinstance(value, str) else json.dumps(value, default=str)
                for key, value in dotted(config | {"environment": self._environment()})
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


def curves(
    runs: Mapping[int, RunView],
    toggled: Collection[str] = (),
    first: int | None = None,
    last: int | None = None,
    *,
    over: str = "step",
    smoothing: float = SMOOTHING,
    max_points: int = MOST_POINTS,
) -> dict[str, Any]:
    """Return the panels that a page shows, with the curves of several runs.

    Args:
        runs: by number.
        toggled: titles of panels to show other than by default: the report's panels are shown by
            default, panels of a single metric, which have its name, are not.
        first: the first step to show; None for no bound.
        last: the last step to show; None for no bound.
        over: the horizontal axis: ``step``, ``tokens`` or ``time``.
        smoothing: share of the points over which a curve is averaged.
        max_points: points of a curve.

    Returns:
        ``choices``, all panels, each with its ``title``, its ``section`` and whether it is
        ``shown``; and ``panels``, those that are.
    """
    if over not in ("step", "tokens", "time"):
        raise ValueError(f"over={over!r} must be step, tokens or time: change it or leave it out.")
    low, high = -1 if first is None else first, float("inf") if last is None else last
    all_records = {run: list(view.metrics.records) for run, view in runs.items()}
    shown = {
        run: [one for one in records if low <= one["step"] <= high]
        for run, records in all_records.items()
    }
    names = {run: set[str]().union(*records) - {"step"} for run, records in shown.items()}
    usual = {panel.title for records in shown.values() for panel in panels_of(records)}
    offered = [("panels", panel) for panel in (LOSS, *PANELS)] + [
        (name.partition("/")[0], Panel(name, (escape(name),)))
        for name in sorted(set[str]().union(*names.values()))
    ]
    places = {run: _places(records, over) for run, records in all_records.items()}
    choices, drawn = [], []
    for section, panel in offered:
        if panel.metrics == TIMES and len(runs) > 1:
            panel = replace(panel, metrics=("time/step_s",))
        series_of = {
            run: series(panel, shown[run], names[run])
            for run in runs
            if panel != LOSS or REWARD not in names[run]
        }
        if not any(series_of.values()):
            continue
        is_shown = (panel.title in usual) != (panel.title in toggled)
        choices.append({"section": section, "title": panel.title, "shown": is_shown})
        if not is_shown:
            continue
        stacked = panel.metrics == TIMES
        lines = []
        for run, of in series_of.items():
            count = len(shown[run])
            named = {
                name: curve_of(points, count, smoothing, max_points) for name, points in of.items()
            }
            if stacked:
                parts = times(shown[run], smoothing, max_points).items()
                named = {
                    part: Curve(steps, seconds, None, False) for part, (steps, seconds) in parts
                }
            for name, curve in named.items():
                label = name if stacked else label_of(name)
                line = {"run": run, "metric": name, "label": label, **curve._asdict()}
                lines.append(line | {"places": places[run](curve.steps)})
        drawn.append(
            {
                **asdict(panel),
                "stacked": stacked,
                "heights": None if stacked else heights_of(panel, series_of.values()),
                "curves": lines,
            }
        )
    return {"choices": choices, "panels": drawn}


def _places(
    records: Sequence[Record], over: str
) -> Callable[[Sequence[float]], list[float] | None]:
    """Return where steps are on the horizontal axis: in tokens, or in seconds of steps and
    evaluations; None if it shows the steps.
    """
    if over == "step":
        return lambda steps: None
    recorded_steps = [record["step"] for record in records]
    sums = list(
        accumulate(
            record.get("rollout/tokens") or 0
            if over == "tokens"
            else sum(stage_seconds(record).values())
            for record in records
        )
    )
    return lambda steps: [sums[bisect_right(recorded_steps, step) - 1] for step in steps]


def _cell(
    row: dict[str, Any], number: int, longest: int | None = _MAX_TEXT_LENGTH
) -> dict[str, Any]:
    """Return the columns of a row for display; its texts have no unprintable characters."""
    texts = {"query": str(row.get("prompt") or row.get("query"))}
    texts["response"] = str(row.get("response"))
    facts = {name: row[name] for name in _FACTS if row.get(name) is not None}
    return {
        "row": number,
        "reward": reward_text(row) if "reward" in row else None,
        "good": bool(row.get("correct")),
        **{
            name: printable_lines(text if longest is None else clip(text, longest))
            for name, text in texts.items()
        },
        **facts,
    }
