"""The progress of a run in a notebook: one output with a bar, curves and tables, which is replaced
as the run goes on and stays as the result.

The page has no script and loads nothing, so it also appears in saved notebooks. Text that a model
wrote is escaped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torchrl_grpo.extras.report.panels import (
    COLORS,
    Panel,
    curve_of,
    heights_of,
    label_of,
    panels_of,
    series,
)
from torchrl_grpo.host import startup
from torchrl_grpo.host.text import duration, number, percent, printable_lines, reward_text
from torchrl_grpo.reporting.console import Console, cell_text

_MIN_UPDATE_S = 0.5
"""Minimum seconds between two updates."""
_ROWS = 8
_PANELS = 4
_WIDTH, _HEIGHT = 228, 130
_COLUMNS = {
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "accuracy",
    "train/loss": "loss",
    "eval/pass@1": "test pass@1",
    "train/kl_k3_to_ref": "KL to reference",
    "train/entropy": "entropy",
    "rollout/response_length": "length",
    "time/step_s": "seconds",
}
_STYLE = """
.grpo{font:13px/1.45 system-ui,sans-serif;max-width:1000px;color:inherit}
.grpo .bar{height:6px;border-radius:3px;background:rgba(128,128,128,.25);margin:6px 0 10px}
.grpo .bar div{height:100%;border-radius:3px;background:#3b82f6}
.grpo .curves{display:flex;flex-wrap:wrap;gap:10px 16px;margin:10px 0}
.grpo figure{margin:0;width:228px}
.grpo figcaption{font-weight:600}
.grpo .legend{font-size:11px;opacity:.85}
.grpo .legend span{white-space:nowrap;margin-right:8px}
.grpo .legend i{font-style:normal}
.grpo svg text{font:10px system-ui,sans-serif;fill:currentColor;opacity:.7}
.grpo table{font:inherit;border-collapse:collapse;margin:6px 0;font-variant-numeric:tabular-nums}
.grpo th,.grpo td{padding:2px 14px 2px 0;text-align:right;vertical-align:top;border:0;background:none}
.grpo th{font-weight:600;border-bottom:1px solid rgba(128,128,128,.4)}
.grpo .text{text-align:left;white-space:pre-wrap;overflow-wrap:anywhere;max-width:420px}
.grpo details{margin:4px 0}
.grpo summary{cursor:pointer;font-weight:600}
.grpo .alarm{color:#b45309}
.grpo pre{white-space:pre-wrap;background:none;border:0;padding:0;margin:4px 0;color:inherit}
"""


def make_console() -> Console:
    """Return a run's console: an output cell in a notebook, else the terminal."""
    shell: Any = sys.modules.get("IPython")
    in_notebook = shell is not None and hasattr(shell.get_ipython(), "kernel")
    return NotebookConsole() if in_notebook else Console()


class NotebookConsole(Console):
    """Shows a run in the output of a notebook's cell."""

    def __init__(self) -> None:
        super().__init__()
        self._display: Any = None
        self._shown_at = 0.0
        self._records: dict[int, dict[str, Any]] = {}
        self._plan: list[str] = []
        self._lines: list[str] = []
        self._alarms: list[str] = []
        self._samples = ""
        self._address = ""
        self._activity = "starting"
        self._is_closed = False
        self._done, self._total = 0, 0
        self._started_at = time.monotonic()
        self._sequences_at_start = 0

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = [*dict.fromkeys(name for row in rows for name in row)]
        cells = ([_escaped(cell_text(name, row.get(name))) for name in columns] for row in rows)
        self._plan.append(f"<b>{escape(title)}</b>{_table(columns, cells, columns[:1])}")

    def problems(self, train: int, test: int, prompt: str, *, is_stateful: bool = False) -> None:
        self._num_tests = test
        about = f"{train:,} training problems, {test:,} test problems; the first prompt:"
        self._plan.append(f"{about}<pre>{_escaped(prompt)}</pre>")

    def page(self, address: str) -> None:
        self._address = address

    def line(self, text: str, style: str = "") -> None:
        if self._is_closed:
            print(text)  # the result of the run, below its progress
        elif text:
            self._lines.append(text)

    def start(self, sequences_done: int, sequences_total: int, *, evaluates: bool = True) -> None:
        startup.end()
        self._done, self._total = sequences_done, sequences_total
        self._started_at, self._sequences_at_start = time.monotonic(), sequences_done
        evaluates_first = evaluates and self._num_tests and not sequences_done
        self._activity = (
            f"evaluating {self._num_tests:,} problems" if evaluates_first else "first rollout"
        )
        self._show()

    def step(
        self, step: int, metrics: Mapping[str, float], sequences_done: int, sequences_total: int
    ) -> None:
        self._records.setdefault(step, {"step": step}).update(metrics)
        self._done, self._total = sequences_done, sequences_total
        self._activity = ""
        if time.monotonic() - self._shown_at > _MIN_UPDATE_S:
            self._show()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._records.setdefault(step, {"step": step}).update(metrics)
        self._activity = "" if step else "first rollout"
        self._show()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        has_reward = any("reward" in row for row in rows)
        cells = (
            [_escaped(row.get("query")), _escaped(row.get("response"))]
            + ([escape(reward_text(row))] if has_reward else [])
            for row in rows
        )
        columns = ["prompt", "response", "reward"][: 2 + has_reward]
        self._samples = (
            f"<details><summary>Samples after step {step:,}</summary>"
            f"{_table(columns, cells, ('prompt', 'response'))}</details>"
        )

    def alarm(self, step: int, name: str, text: str) -> None:
        self._alarms.append(f"alarm {name} at step {step}: {text}")

    def close(self) -> None:
        if self._display is not None and not self._is_closed:
            self._activity = "" if self._done >= self._total else "stopped"
            self._show()
        self._is_closed = True

    def _show(self) -> None:
        from IPython.display import HTML, display

        page = HTML(self._page())
        if self._display is None:
            self._display = display(page, display_id=True)
        else:
            self._display.update(page)
        self._shown_at = time.monotonic()

    def _page(self) -> str:
        records = [self._records[step] for step in sorted(self._records)]
        link = ""
        if self._address:
            link = f' &middot; <a href="{escape(self._address)}" target="_blank">run dashboard</a>'
        share = self._done / self._total if self._total else 0.0
        parts = [
            f"<style>{_STYLE}</style>",
            f"<div>{self._state(share)}{link}</div>",
            f'<div class="bar"><div style="width:{share:.1%}"></div></div>',
            *(f'<div class="alarm">{_escaped(text)}</div>' for text in self._alarms[-3:]),
        ]
        if len(records) > 1:
            figures = (_figure(panel, records) for panel in panels_of(records)[:_PANELS])
            parts.append(f'<div class="curves">{"".join(figures)}</div>')
        if records:
            parts.append(_steps(records))
        parts.append(self._samples)
        lines = "".join(f"<pre>{_escaped(line)}</pre>" for line in self._lines)
        plan = "".join(self._plan)
        parts.append(f"<details><summary>Plan</summary>{plan}{lines}</details>")
        return f'<div class="grpo">{"".join(parts)}</div>'

    def _state(self, share: float) -> str:
        """Return step and times in words."""
        step = max(self._records, default=0)
        seconds = time.monotonic() - self._started_at
        texts = [f"<b>step {step:,}</b>", f"{self._done:,} of {self._total:,} sequences"]
        if self._activity:
            texts.append(escape(self._activity))
        texts.append(duration(seconds))
        trained = self._done - self._sequences_at_start
        if trained and self._activity != "stopped" and share < 1:
            texts[-1] += f" ({duration(seconds * (self._total - self._done) / trained)} left)"
        return " &middot; ".join(texts)


def _steps(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the first step and the latest ones."""
    rows = [*records[:1], *records[1:][1 - _ROWS :]]
    logged = set[str]().union(*rows)
    columns = {name: label for name, label in _COLUMNS.items() if name in logged}
    if "rollout/reward_mean" in columns:
        columns.pop("train/loss", None)  # it does not show whether a policy improves
    cells = (
        [f"{record['step']:,}"]
        + [
            (percent if "acc" in label or "pass" in label else number)(record.get(name))
            if record.get(name) is not None
            else ""
            for name, label in columns.items()
        ]
        for record in rows
    )
    return _table(["step", *columns.values()], cells)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str] = ()) -> str:
    classes = [' class="text"' if column in texts else "" for column in columns]
    head = "".join(
        f"<th{kind}>{escape(column)}</th>" for column, kind in zip(columns, classes, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for cell, kind in zip(row, classes, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(value: Any) -> str:
    return escape(printable_lines(str(value)))


def _figure(panel: Panel, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a panel as a figure with its legend."""
    curves = series(panel, records)
    low, high = heights_of(panel, [curves])
    first, last = records[0]["step"], records[-1]["step"]
    left, right, top, bottom = 48, _WIDTH - 6, 8, _HEIGHT - 18

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / max(last - first, 1)
        up = (value - low) / ((high - low) or 1)
        return left + across * (right - left), bottom - up * (bottom - top)

    shapes = []
    highest = min(high, 1.0) if panel.percent else high
    for height in (low, (low + highest) / 2, highest):
        y = place(first, height)[1]
        text = f"{height:.0%}" if panel.percent else f"{height:.2g}"
        shapes.append(
            f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity=".18"/><text x="{left - 5}" y="{y + 3:.1f}" text-anchor="end">{text}'
            "</text>"
        )
    shapes += [
        f'<text x="{x}" y="{_HEIGHT - 4}" text-anchor="{anchor}">{step:,}</text>'
        for x, anchor, step in ((left, "start", first), (right, "end", last))
    ]
    legend = []
    for color, (name, points) in zip(COLORS, curves.items(), strict=False):
        curve = curve_of(points, len(records))
        for values, opacity in (
            (curve.values, 1.0 if curve.smoothed is None else 0.3),
            (curve.smoothed, 1.0),
        ):
            if values is None:
                continue
            pixels = [place(*point) for point in zip(curve.steps, values, strict=True)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
            shapes.append(
                f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6" '
                f'stroke-opacity="{opacity}"/>'
            )
            if curve.sparse:
                shapes += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{color}"/>' for x, y in pixels
                ]
        label = escape(label_of(name))
        legend.append(f'<span><i style="color:{color}">&#9632;</i> {label}</span>')
    return (
        f'<figure><figcaption>{escape(panel.title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(panel.title)}">'
        f'{"".join(shapes)}</svg><div class="legend">{" ".join(legend)}</div></figure>'
    )
