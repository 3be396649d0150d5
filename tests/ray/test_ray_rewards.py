"""The reward workers of a rollout actor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reward_runs import assert_killed_reward_workers_change_no_number

pytest.importorskip("ray")


def test_reward_workers_on_ray_change_no_number_even_when_killed(tmp_path: Path) -> None:
    assert_killed_reward_workers_change_no_number(tmp_path, asynchronous=True)
