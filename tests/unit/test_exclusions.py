"""Settings that work alone, but together would train nothing, or something other than requested."""

from __future__ import annotations

import pytest

from tests.support.configs import compose_config
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import ConfigError
from torchrl_grpo.config.command_line import compose
from torchrl_grpo.tasks.base import Problem, Score, Task


@pytest.mark.slow
def test_a_group_size_of_demonstrations_that_was_given_is_refused() -> None:
    data = ["algo=sft", "env.dataset=rows.jsonl", "env.columns.completion=solution"]
    assert compose("grpo_arithmetic", data).env.repeats == 1
    with pytest.raises(ConfigError, match=r"env\.repeats=4 .* policy\.demonstrations=true"):
        compose("grpo_arithmetic", [*data, "env.repeats=4", "env.num_envs=16"])


class Kept(Task):
    name, is_stateful = "kept", True

    def problems(self, split: str) -> list[Problem]:
        return [Problem("a", "b")]

    def score(self, problem: Problem, responses: list[str]) -> Score:
        return Score(0.0, False)


def test_a_task_that_sets_opens_is_pointed_to_is_stateful() -> None:
    with pytest.raises(ValueError, match=r"Old\.opens .*is_stateful"):
        type("Old", (Kept,), {"opens": True})
    with pytest.raises(ValueError, match=r"Kept\.opens .*is_stateful"):
        Kept().opens = True


def test_transforms_beside_a_task_that_keeps_dialogs() -> None:
    target = f"{__name__}.Kept"
    config = compose_config(
        f"env.task._target_={target}", "env.transforms=[{_target_: torchrl.envs.StepCounter}]"
    )
    with pytest.raises(ValueError, match=r"env\.transforms=.* task 'kept'"):
        make_task(config.env)
