"""Settings that work alone, but together would train nothing, or something other than requested."""

from __future__ import annotations

import pytest

from tests.support.configs import compose_config
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import ConfigError
from torchrl_grpo.config.command_line import compose
from torchrl_grpo.tasks.base import Problem, Score, Task

DISTILL = ("algo=distill", "teacher.model=some/teacher")
TOGETHER = [
    (
        (*DISTILL, "policy.dynamic_sampling=true"),
        "dynamic_sampling=true must be left out with policy.teacher_coef=1",
    ),
    (
        ("policy.turn_credit=per_turn", "policy.dynamic_sampling=true"),
        "dynamic_sampling=true must be left out with policy.turn_credit=per_turn",
    ),
    (
        ("algo=sft", "policy.advantage_whiten=true"),
        "advantage_whiten=true must be left out with policy.demonstrations",
    ),
    (
        ("algo=sft", "env.environment=a.py:Game"),
        "environment=a.py:Game must be left out with policy.demonstrations",
    ),
    (
        ("algo=sft", "env.agent=a.py:play"),
        "agent=a.py:play must be left out with policy.demonstrations",
    ),
    (
        ("policy.demonstrations=true",),
        "needs policy.loss._target_=torchrl_grpo.objectives.DemonstrationLoss, but it is torchrl_grpo",
    ),
    (
        ("policy.sft_coef=0.1", "policy.dynamic_sampling=true"),
        "dynamic_sampling=true must be left out with policy.sft_coef=0.1",
    ),
    (
        (*DISTILL, "policy.sft_coef=0.1", "policy.teacher_divergence=reverse"),
        "sft_coef=0.1 must be left out with policy.teacher_divergence=reverse",
    ),
    (
        ("policy.sft_coef=0.1", "env.agent=a.py:play"),
        "sft_coef=0.1 must be left out with env.agent=a.py:play, whose",
    ),
    (
        ("algo=sft", "policy.sft_coef=0.1", "env.dataset=a.jsonl", "env.columns.completion=c"),
        "sft_coef=0.1 must be left out with policy.demonstrations=true",
    ),
    (
        ("env.agent=a.py:play", "policy.turn_credit=per_turn"),
        "per_turn must be left out with env.agent=a.py",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), TOGETHER)
def test_they_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config(*overrides)
    assert message in str(error.value)


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
