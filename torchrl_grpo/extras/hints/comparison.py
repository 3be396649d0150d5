"""Checks of settings that do not work with group reward functions."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

_OF_ONE_RESPONSE = (
    "evaluation.num_prompts",
    "env.retry_prompt",
    "env.difficulty_filter",
    "env.curriculum",
)
"""Settings that ask whether a single response is correct."""


def check_comparison(config: Any, group_rewards: str) -> None:
    """Refuse settings that do not work with a task's ``group_rewards``.

    Args:
        config: config of the run.
        group_rewards: see ``torchrl_grpo.tasks.Task``.

    Raises:
        ValueError: the config has such a setting.
    """
    if not group_rewards:
        return
    if config.env.repeats < 2 and not config.policy.demonstrations:
        raise ValueError(
            f"env.repeats={config.env.repeats} must be at least 2, because env.reward compares the "
            "responses to a problem: use 8."
        )
    if config.env.transforms and config.env.max_turns > 1:
        raise ValueError(
            f"env.transforms={list(config.env.transforms)} must be left out with "
            f"env.max_turns={config.env.max_turns} if env.reward compares the responses to a "
            "problem, because the transforms decide later whether a dialog is over."
        )
    for key in _OF_ONE_RESPONSE if group_rewards == "only" else ():
        if value := attrgetter(key)(config):
            unset = "0" if key == "evaluation.num_prompts" else "null"
            raise ValueError(
                f"{key}={value} needs to know whether a single response is correct, but all functions "
                f"of env.reward compare responses: use {key}={unset}, or add a function that scores "
                "one response, such as {fn: gsm8k, weight: 0}."
            )
