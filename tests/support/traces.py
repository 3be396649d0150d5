"""Events of a run's ``trace.json.gz``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

ROUNDED_US = 200
"""Rounding of the times of spans."""


def events_of(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def span_of(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return begin and end, in microseconds, of the spans of the timeline with this name."""
    spans = [event for event in events if event.get("cat") == "timeline" and event["name"] == name]
    begins, ends = ([each["ts"] for each in spans if each["ph"] == phase] for phase in "be")
    return [(begin - ROUNDED_US, end + ROUNDED_US) for begin, end in zip(begins, ends, strict=True)]
