"""``logging.profile_steps``: the operators of a step and the timeline, on one clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.runs import run, steps
from tests.support.traces import events_of, span_of
from torchrl_grpo.config import validate
from torchrl_grpo.errors import ConfigError


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


def test_steps_that_no_run_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"logging\.profile_steps=\[3,0\].*\[3,4\]"):
        validate(compose_config("logging.profile_steps=[3,0]"))
