"""Play agents without an engine: a function stands in for the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchrl_grpo.integrations.agents import WithAgent
from torchrl_grpo.integrations.agents.programs import Function, Program
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Task, Turn
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards

PROBLEM = Problem("1+1=?", "2", {"level": 3})


def agent_task(program: Any, reward: str | None = None) -> WithAgent:
    """Return the arithmetic task, played by a function or a program."""
    task = (
        ArithmeticTask() if reward is None else WithRewards(ArithmeticTask(), make_rewards(reward))
    )
    return WithAgent(task, program if isinstance(program, Program) else Function(program))


def own_score(reward: float, *turns: float | None) -> Score:
    """Return the score of an agent that reports this reward, with credits of its turns."""
    return Score(reward, reward >= 1, {"agent": reward}, turns=turns)


def played(
    task: Task,
    say: Callable[[Turn], str | Dialog],
    *,
    problem: Problem = PROBLEM,
    turns: int = 10,
    timeout_s: float = 300,
    episode: str = "0",
) -> tuple[list[Turn], Turn | Exception]:
    """Return the turns that an agent requested, and how it ended.

    Args:
        task: task that plays the problem.
        say: policy, which returns its response to a request, or the dialog's new entries.
        problem: problem that is played.
        turns: maximum number of turns.
        timeout_s: time limit of each turn.
        episode: key of the episode.
    """
    dialog = Dialog(problem, [], last=False, episode=episode)
    turns_taken = list[Turn]()
    while True:
        turn = task.advance([dialog], timeout_s)[0]
        if isinstance(turn, Exception) or turn.score is not None:
            task.close(episode)
            return turns_taken, turn
        turns_taken.append(turn)
        reply = say(turn)
        new = (
            reply
            if isinstance(reply, Dialog)
            else Dialog(problem, [reply], tokens=list(range(len(reply))), raw=reply)
        )
        responses: Sequence[str] = [*dialog.responses, *new.responses]
        dialog = replace(new, responses=responses, last=len(responses) >= turns, episode=episode)
