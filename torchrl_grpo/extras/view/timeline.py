"""A run's ``timeline.jsonl``: the activity of each actor over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_grpo.extras.view.files import Tail
from torchrl_grpo.host.files import TIMELINE_FILE, is_number, is_step, read_row

_MAX_SPANS = 1500
"""Maximum number of spans to draw individually; more are summarized in columns by kind."""
_COLUMNS = 200
_ROUNDED_S = 2e-4
"""Rounding of logged spans, by which a span may seem to begin before the previous one ends."""
_MAX_TIME_S = 1e12
"""Latest date that a browser supports, in Unix seconds."""
_LONGEST_GAP_S = 1.0
"""Of a learner that runs."""


class Span(NamedTuple):
    """Work of an actor: its start in Unix seconds, and its length in seconds."""

    actor: str
    kind: str
    start: float
    seconds: float
    step: int | None

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Timeline:
    """The timeline of a run that may still be running.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder, TIMELINE_FILE)
        self._spans: list[Span] = []

    def __len__(self) -> int:
        return len(self._spans)

    def refresh(self) -> None:
        """Read new spans; in one thread at a time."""
        if self._tail.reopen():
            self._spans = []
        for _, line in self._tail.lines():
            span = _span_of(read_row(line))
            if span is not None:
                self._spans.append(span)

    def window(self, first: float | None = None, last: float | None = None) -> dict[str, Any]:
        """Return a window of the timeline for drawing.

        Args:
            first: start of the window in seconds after the first span's start; None for 0.
            last: end of the window; None for the end of the last span.

        Returns:
            ``begin`` in Unix seconds; ``end``, ``first`` and ``last`` in seconds after it; whether
            the spans are ``shares`` of columns, because there are too many to draw individually;
            and ``actors``, each with its ``name``, its ``seconds`` by kind, the times of its
            ``restarts``, and ``spans``: lists of kind, first and last second, step, and the bounds
            of its share of the lane.
        """
        spans = list(self._spans)
        if not spans:
            return {"actors": []}
        spans += _stops(spans)
        begin, end = min(span.start for span in spans), max(span.end for span in spans)
        first = 0.0 if first is None else max(0.0, first)
        last = end - begin if last is None else min(last, end - begin)
        visible = [
            span for span in spans if span.end >= begin + first and span.start <= begin + last
        ]
        actors: dict[str, list[Span]] = {
            span.actor: [] for span in sorted(spans, key=lambda span: span.actor)
        }
        for span in visible:
            actors[span.actor].append(span)
        one_by_one = len(visible) <= _MAX_SPANS
        drawn = []
        for name, actor_spans in actors.items():
            lasting = [span for span in actor_spans if span.kind != "restart" or span.seconds]
            parts = [_clip(span, begin, first, last) for span in lasting]
            drawn.append(
                {
                    "name": name,
                    "seconds": _seconds(parts),
                    "restarts": [
                        span.start - begin for span in actor_spans if span.kind == "restart"
                    ],
                    "spans": _one_by_one(parts) if one_by_one else _columns(parts, first, last),
                }
            )
        part = {"begin": begin, "end": end - begin, "first": first, "last": last}
        return part | {"shares": not one_by_one, "actors": drawn}


def _stops(spans: Iterable[Span]) -> list[Span]:
    """Return the times in which the run had ended, until it was resumed: the gaps of the learner,
    which always does something.
    """
    actor_spans = sorted(
        (span for span in spans if span.actor == "learner"), key=lambda span: span.start
    )
    return [
        Span("learner", "stopped", before.end, after.start - before.end, None)
        for before, after in pairwise(actor_spans)
        if after.start - before.end > _LONGEST_GAP_S
    ]


def _span_of(row: Mapping[str, Any]) -> Span | None:
    """Return the span of a row; None if it is invalid."""
    actor, kind = row.get("actor"), row.get("kind")
    if not isinstance(actor, str) or not isinstance(kind, str):
        return None
    start: Any = row.get("start")
    step = row.get("step")
    seconds = row.get("seconds") or 0.0
    has_times = is_number(start, _MAX_TIME_S) and is_number(seconds, _MAX_TIME_S) and seconds >= 0
    if not has_times or not (step is None or is_step(step)):
        return None
    return Span(actor, kind, start, seconds, step)


def _clip(span: Span, begin: float, first: float, last: float) -> Span:
    """Return the part of a span within the window, relative to the start of the run."""
    start = max(span.start - begin, first)
    end = min(span.end - begin, last)
    return span._replace(start=start, seconds=max(0.0, end - start))


def _seconds(spans: Iterable[Span]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.kind] = totals.get(span.kind, 0.0) + span.seconds
    return totals


def _one_by_one(spans: Iterable[Span]) -> list[list[Any]]:
    """Return individual spans; overlapping ones share the lane equally."""
    lanes: list[float] = []
    lane_of_spans = []
    for span in sorted(spans, key=lambda span: span.start):
        lane = next(
            (at for at, end in enumerate(lanes) if end <= span.start + _ROUNDED_S), len(lanes)
        )
        lanes[lane : lane + 1] = [span.end]
        lane_of_spans.append((span, lane))
    count = len(lanes) or 1
    return [
        [span.kind, span.start, span.end, span.step, lane / count, (lane + 1) / count]
        for span, lane in lane_of_spans
    ]


def _columns(spans: Iterable[Span], first: float, last: float) -> list[list[Any]]:
    """Return columns of equal width, each divided by the share of time of each kind."""
    width = (last - first) / _COLUMNS or 1.0
    columns: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    for span in spans:
        for column_index in range(
            int((span.start - first) / width),
            min(int((span.end - first) / width), _COLUMNS - 1) + 1,
        ):
            left = first + column_index * width
            part = min(span.end, left + width) - max(span.start, left)
            columns[column_index][span.kind] = columns[column_index].get(span.kind, 0.0) + max(
                part, 0.0
            )
    shares = []
    for column_index, kinds in enumerate(columns):
        total = max(width, sum(kinds.values()))
        share = 0.0
        for kind in sorted(kinds):
            top = share + kinds[kind] / total
            shares.append(
                [
                    kind,
                    first + column_index * width,
                    first + (column_index + 1) * width,
                    None,
                    share,
                    top,
                ]
            )
            share = top
    return shares
