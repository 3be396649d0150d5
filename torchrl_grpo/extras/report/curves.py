"""The curves of a run, drawn with matplotlib: one PNG with all panels, or one small SVG per panel
for a web page.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from torchrl_grpo.extras.report.panels import (
    ACTIVITY_COLORS,
    COLORS,
    SMOOTH_FROM,
    TIMES,
    Curve,
    Panel,
    Record,
    curve_of,
    heights_of,
    label_of,
    panels_of,
    series,
    smooth,
    thin,
    times,
)

# In an SVG these become CSS variables, so that one picture suits light and dark pages.
_INK, _LINE = "#333a45", "#c9ced6"
_NOTE_WIDTH = 54  # characters
_DASHES = ("-", "--", ":")
_MARKERS = ("o", "^", "s")
_COLUMNS = 4
_LEGEND_ROW = 0.16  # inches
_USUAL_ROWS = 3
"""Number of legend rows that fit into a plot of default size."""


def save_png(records: Sequence[Record], path: str | os.PathLike[str], title: str) -> None:
    """Write the run's panels into one picture.

    Args:
        records: one mapping per step (metric name to number or None, and ``step``), in order.
        path: the PNG file.
        title: names the run.
    """
    top, between, bottom = 1.0, 1.13, 0.46  # inches
    panels = panels_of(records)
    rows = math.ceil(len(panels) / _COLUMNS) or 1
    plot = 2.17 + max((_extra_height(panel, records) for panel in panels), default=0.0)
    height = top + rows * plot + (rows - 1) * between + bottom
    figure = Figure(figsize=(15, height))
    figure.suptitle(title, x=0.006, y=1 - 0.12 / height, ha="left", va="top", color=_INK)
    vertical = {"bottom": bottom / height, "top": 1 - top / height, "hspace": between / plot}
    figure.subplots_adjust(left=0.037, right=0.99, wspace=0.19, **vertical)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels, strict=False):
        axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=28)
        note = textwrap.fill(panel.note, _NOTE_WIDTH, break_on_hyphens=False)
        units = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(note, (0, 1), (0, 24), **units, va="top", fontsize=7.5, color=_INK)
        _draw(axes, panel, records)
    figure.savefig(path, dpi=130)


def panel_svg(panel: Panel, records: Sequence[Record]) -> str:
    """Return a panel as an ``<svg>`` element, with text and lines in the CSS colors ``--ink`` and
    ``--line``.
    """
    return _svg(panel_figure(panel, records), panel)


def panel_figure(panel: Panel, records: Sequence[Record]) -> Figure:
    """Return a panel without its title and note."""
    figure = _small_figure(_extra_height(panel, records))
    _draw(figure.subplots(), panel, records)
    return figure


def comparison_svg(panel: Panel, settings: Sequence[tuple[str, Sequence[Sequence[Record]]]]) -> str:
    """Return a panel with a curve for each setting, as an ``<svg>`` element like the one of
    ``panel_svg``.

    Args:
        panel: panel of one metric.
        settings: color and runs of each. Several runs are drawn as their mean, in a band from the
            lowest to the highest value. The first setting is drawn on top.
    """
    figure = _small_figure()
    axes = figure.subplots()
    axes.margins(y=0.12)
    for color, runs in reversed(settings):
        _draw_runs(axes, panel, runs, color)
    _style(axes, panel)
    return _svg(figure, panel)


def _draw_runs(axes: Axes, panel: Panel, runs: Sequence[Sequence[Record]], color: str) -> None:
    curves = [
        dict(zip(*points, strict=True)) for run in runs for points in series(panel, run).values()
    ]
    steps = sorted({step for curve in curves for step in curve})
    if not steps:
        return
    rows = [[curve[step] for curve in curves if step in curve] for step in steps]
    lowest, mean, highest = (
        thin(steps, [take(row) for row in rows])[1] for take in (min, fmean, max)
    )
    shown_steps = thin(steps, steps)[0]
    is_test = panel.metrics[0].startswith("eval/")
    if not is_test and len(shown_steps) >= SMOOTH_FROM:
        lowest, mean, highest = smooth(lowest), smooth(mean), smooth(highest)
    if len(curves) > 1:
        axes.fill_between(shown_steps, lowest, highest, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        shown_steps,
        mean,
        color=color,
        linewidth=1.8,
        marker=("o") if is_test else None,
        markersize=3.2,
    )


def _small_figure(extra_height: float = 0.0) -> Figure:
    height = 2.3 + extra_height
    figure = Figure(figsize=(3.5, height))
    figure.subplots_adjust(left=0.175, right=0.98, bottom=0.39 / height, top=1 - 0.05 / height)
    return figure


def _extra_height(panel: Panel, records: Sequence[Record]) -> float:
    """Return the additional height, in inches, for a long legend."""
    labels = [] if panel.metrics == TIMES else [label_of(name) for name in series(panel, records)]
    return _LEGEND_ROW * max(0, _legend_rows(labels) - _USUAL_ROWS)


def _svg(figure: Figure, panel: Panel) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "var(--ink)").replace(_LINE, "var(--line)")


def _draw(axes: Axes, panel: Panel, records: Sequence[Record]) -> None:
    curves = series(panel, records)
    if not curves:
        axes.text(
            0.5,
            0.5,
            "no data",
            ha="center",
            va="center",
            transform=axes.transAxes,
            color=_INK,
            fontsize=9,
        )
        axes.set_yticks([])
    elif panel.metrics == TIMES:
        _draw_times(axes, records)
    else:
        for place, (name, points) in enumerate(curves.items()):
            color, again = COLORS[place % len(COLORS)], place // len(COLORS) % len(_DASHES)
            _draw_curve(axes, label_of(name), curve_of(points, len(records)), color, again)
        axes.set_ylim(heights_of(panel, [curves]))
    _style(axes, panel)


def _draw_curve(axes: Axes, label: str, curve: Curve, color: str, again: int) -> None:
    """Draw a curve; ``again`` is how often the colors have been used before."""
    dash = _DASHES[again]
    if curve.smoothed is not None:
        look: Any = {"color": color, "linestyle": dash}
        axes.plot(curve.steps, curve.values, **look, linewidth=0.8, alpha=0.35)
        axes.plot(curve.steps, curve.smoothed, **look, linewidth=1.8, label=label)
        return
    axes.plot(
        curve.steps,
        curve.values,
        color=color,
        linestyle="none" if curve.sparse else dash,
        linewidth=1.8,
        marker=_MARKERS[again],
        markersize=4.5 if curve.sparse else 3.2,
        label=label,
    )


def _draw_times(axes: Axes, records: Sequence[Record]) -> None:
    stages = times(records)
    if not stages:
        return
    [steps, *_] = [steps for steps, _ in stages.values()]
    heights = [values for _, values in stages.values()]
    if len(steps) == 1:  # an area needs a width
        steps, heights = [steps[0] - 0.5, steps[0] + 0.5], [2 * values for values in heights]
    colors = [ACTIVITY_COLORS[part] for part in stages]
    axes.stackplot(steps, *heights, labels=stages, colors=colors, linewidth=0)
    axes.set_ylim(0, 1.05 * axes.dataLim.y1)


def _style(axes: Axes, panel: Panel) -> None:
    axes.set_facecolor("none")
    axes.grid(True, axis="y", color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINE)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    first, last = axes.get_xlim()
    middle = (first + last) / 2
    axes.set_xlim(min(first, middle - 1), max(last, middle + 1))  # whole steps, even for one
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step", fontsize=8, color=_INK)
    if axes.lines or axes.collections:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{100 * y:.3g}%" if panel.percent else _number(y))
    )
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        # Above the curves and the grid: the axis is extended without ticks to make room for the
        # legend.
        columns = _legend_columns(labels)
        share = _LEGEND_ROW * (_legend_rows(labels) + 0.4) * axes.figure.dpi / axes.bbox.height
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
        axes.set_ylim(low, low + (high - low) / (1 - share))
        spacing = {"borderaxespad": 0, "borderpad": 0.2, "labelspacing": 0.35}
        axes.legend(
            fontsize=8, frameon=False, labelcolor=_INK, ncols=columns, loc="upper left", **spacing
        )


def _legend_columns(labels: Sequence[str]) -> int:
    return 1 if max(map(len, labels)) > 16 else 2 if len(labels) < 5 else 3


def _legend_rows(labels: Sequence[str]) -> int:
    return math.ceil(len(labels) / _legend_columns(labels)) if len(labels) > 1 else 0


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"
