"""Prints the results of a run in the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.extras.report.panels import NO_CURVES, has_matplotlib
from torchrl_grpo.extras.report.summary import summarize
from torchrl_grpo.host.text import duration, points
from torchrl_grpo.reporting.console import Console


def print_end(console: Console, directory: Path, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Print the results of a run that has ended, and return its summary."""
    summary = summarize(directory)
    print_summary(console, summary, {name: path for name, path in paths.items() if path.exists()})
    if not has_matplotlib():
        console.line(NO_CURVES)
    return summary


def print_summary(
    console: Console, summary: Mapping[str, Any], paths: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Close the bar and print results and the paths of the files.

    Args:
        console: terminal of the run.
        summary: result of ``summarize``.
        paths: files and folders by name.
    """
    console.close()
    before = summary.get("accuracy_before")
    after = summary.get("accuracy_after")
    console.line("")
    if summary.get("after_step") is not None:
        change = f"{summary['before_text']} -> {summary['after_text']}"
        better = False
        if before is not None and after is not None:
            change += f" ({points(before, after)})"
            better = after > before
        console.line(f"test accuracy (greedy) {change}", style="bold green" if better else "bold")
    elif summary.get("before_text") is not None and not summary["steps"]:
        console.line(f"test accuracy (greedy) {summary['before_text']}", style="bold")
    for line in summary.get("never_correct", ()):
        console.line(line, style="yellow")
    parts = [
        f"{summary[key]:,} {key}" for key in ("steps", "sequences", "tokens") if summary.get(key)
    ]
    if (first := summary.get("first_step", 1)) > 1:
        parts[0] = f"steps {first:,} to {summary['steps']:,}"
    if wall_s := summary.get("wall_s"):
        parts.append(f"{duration(wall_s)} wall time")
    if speed := summary.get("trained_tokens_per_s"):
        parts.append(f"{speed:,.0f} trained tokens/s excluding evaluation")
    if parts:
        console.line(", ".join(parts))
    if restarts := summary.get("restarts"):
        console.line(
            f"{restarts:,} actor restarts, {summary['groups_resampled']:,} groups resampled"
        )
    if invalid := summary.get("invalid"):
        causes = ", ".join(f"{count:,} {cause}" for cause, count in invalid.items())
        console.line(f"invalid rewards: {causes}", style="yellow")
    for alarm in summary.get("alarms", ()):
        is_active = alarm.last == summary.get("steps")
        when = f"steps {alarm.first} to {alarm.last}"
        if is_active:
            when = f"from step {alarm.first} to the end"
        elif alarm.last == alarm.first:
            when = f"step {alarm.first}"
        style = "bold yellow" if is_active else "yellow"
        console.line(f"alarm {alarm.name}, {when}: {alarm.text}", style=style)
    width = max((len(name) for name in paths), default=0)
    for name, path in paths.items():
        console.line(f"  {name:<{width}}  {os.fspath(path)}")
