"""The reward workers of a rollout actor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.classifiers import SCORER, make_classifier
from tests.support.comparisons import longer
from tests.support.judges import Judge, by_length
from tests.support.math_pairs import FEW, verdicts
from tests.support.processes import alive, command_line
from tests.support.reward_runs import assert_killed_reward_workers_change_no_number
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.runtime.cluster import Cluster
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards

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


@pytest.mark.slow
def test_actors_rank_groups_and_share_one_reward_model(
    ray_cluster: Cluster, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    pytest.importorskip("httpx2")
    make_classifier(tmp_path, tokenizer)
    judge = Judge(by_length)
    rewards = [
        {"fn": "judge_ranking", "judge": judge.options, "weight": 0.5},
        {"fn": longer, "name": "rank", "weight": 2},
        {"fn": "reward_model", "model": str(tmp_path)},
    ]
    texts = ["1", "22", "333", "22"]

    class Sampler:
        def __init__(self, task: WithRewards) -> None:
            task.load_models()
            self.pool = RewardPool(task, 1, timeout_s=120)

        def play(self) -> tuple[int, dict[str, Any], list[float]]:
            dialogs = [Dialog(Problem("6*7=?", "42"), [text]) for text in texts]
            group = Dialog(Problem("6*7=?", "42"), ["-"], group=dialogs)
            compared, *own = (future.result() for future in self.pool.submit_all([group, *dialogs]))
            return os.getpid(), dict(compared.score.parts), [turn.score.reward for turn in own]

        def close(self) -> None:
            self.pool.close()

    task = WithRewards(ArithmeticTask(), make_rewards(rewards))
    samplers = [ray.remote(Sampler).remote(task) for _ in range(2)]
    results = ray.get([sampler.play.remote() for sampler in samplers], timeout=300)
    for _, parts, own in results:
        assert [parts[f"{i}/judge_ranking"] for i in range(4)] == [0.0, 0.5, 1.0, 0.5]
        assert [parts[f"{i}/rank"] for i in range(4)] == [0.0, 1.0, 3.0, 1.0]
        assert [parts[f"{i}/"] for i in range(4)] == [0.0, 2.25, 6.5, 2.25]
        assert own == results[0][2] and own[1] == own[3] != own[0]
    assert len(judge.questions) == 2  # one for each process
    lines = {process: command_line(process) for process in psutil.process_iter()}
    [scorer] = [one for one, line in lines.items() if SCORER in line and str(tmp_path) in line]
    ray.get([sampler.close.remote() for sampler in samplers])
    for sampler in samplers:
        ray.kill(sampler)
    assert not alive([scorer, *(pid for pid, *_ in results)])
    judge.server.shutdown()
    judge.server.server_close()
