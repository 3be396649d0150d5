"""The reward workers of a rollout actor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.math_pairs import FEW, verdicts
from tests.support.reward_runs import assert_killed_reward_workers_change_no_number
from torchrl_grpo.runtime.cluster import Cluster

ray = pytest.importorskip("ray")


@pytest.mark.nightly
def test_reward_workers_on_ray_change_no_number_even_when_killed(tmp_path: Path) -> None:
    assert_killed_reward_workers_change_no_number(tmp_path, asynchronous=True)


def test_a_ray_actor_gives_the_verdicts_of_this_process(ray_cluster: Cluster) -> None:
    pytest.importorskip("math_verify")

    class Judge:
        def verdicts(self) -> list[bool | None]:
            return verdicts()

    judge = ray.remote(Judge).remote()
    assert ray.get(judge.verdicts.remote(), timeout=300) == [verdict for *_, verdict in FEW]
