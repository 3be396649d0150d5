"""``logging.profile_steps``: the operators of a step and the timeline, on one clock."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import run, steps
from tests.support.traces import events_of, span_of

ROUNDED = 0.002
"""Rounding of times in a trace, in microseconds."""


@pytest.mark.slow
def test_the_training_span_encloses_the_operators_of_its_step(tmp_path: Path) -> None:
    run(tmp_path, steps(3), "logging.profile_steps=[2,3]")
    events = events_of(tmp_path)
    [[begin, end], [_, last]] = span_of(events, "learner: train")
    train = [event for event in events if event["name"] == "learner: train_batch"]
    backward = [event for event in events if "MmBackward" in event["name"] and event["ph"] == "X"]
    assert len(train) == 2 and begin <= train[0]["ts"]
    assert train[0]["ts"] + train[0]["dur"] <= end
    assert backward and all(begin <= event["ts"] <= last for event in backward)
    play, *_ = (event for event in events if event["name"] == "sampler 0: play")
    inside = [event for event in events if play["ts"] < event["ts"] < play["ts"] + play["dur"]]
    assert any(event["name"] == "aten::mm" for event in inside) and play["ts"] < begin
    for event in events:  # as Perfetto reads them
        if event["ph"] in "be":
            assert event["pid"] == "timeline" and set(event["id2"]) == {"local"}
    assert not overlaps(events)


def overlaps(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the names of two ranges of a thread where the second one begins in the first one and
    ends after it, or has a negative duration.
    """
    found, threads = [], defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for ranges in threads.values():
        open_: list[dict[str, Any]] = []
        for event in sorted(ranges, key=lambda each: (each["ts"], -each["dur"])):
            while open_ and event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"]:
                open_.pop()
            end = event["ts"] + event["dur"]
            if event["dur"] < 0 or (open_ and end > open_[-1]["ts"] + open_[-1]["dur"] + ROUNDED):
                found.append((open_[-1]["name"] if open_ else "", event["name"]))
            open_.append(event)
    return found
