"""Rollout tasks of dynamic sampling: every problem that is drawn is played, in the order in which a sync run draws."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerFast

from torchrl_grpo.collectors.sampler import RolloutReport
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import Progress, TaskQueue
from torchrl_grpo.tasks.arithmetic import ArithmeticTask

GROUPS, ROUNDS = 2, 4


@pytest.fixture
def env(tokenizer: PreTrainedTokenizerFast) -> LLMEnv:
    return LLMEnv(ArithmeticTask(), tokenizer, num_envs=GROUPS * 2, repeats=2)


def queue_of(env: LLMEnv, max_staleness: int, version: int = 0) -> TaskQueue:
    buffer = GroupBuffer(GROUPS, max_staleness, version)
    return TaskQueue(env, buffer, task_groups=GROUPS, total_groups=1000, rounds=ROUNDS)


def next_task(queue: TaskQueue) -> Progress:
    progress = queue.next_unplayed()
    assert progress is not None
    return progress


def play(env: LLMEnv, queue: TaskQueue, progress: Progress, plays: int) -> list[tuple[int, int]]:
    """Plays a task as a sampler does that needs so many plays; gives each group and its problem."""
    drawn: list[tuple[int, int]] = []
    for number, state in enumerate([progress.task.state, *progress.task.further[: plays - 1]]):
        env.prompts.go_to(state) if number else env.load_state_dict(state)
        env.reset()
        drawn += [(group, problem) for problem, group in env._drawn[::2]]
    groups = tuple(group for group, _ in drawn[-GROUPS:])
    version = queue.buffer.version
    report = RolloutReport(groups, (version,) * GROUPS, 0.0, 0.0, None, dynamic={"played": GROUPS * plays})
    queue.played(progress, report)
    progress.refs = list(groups)
    queue.finish(progress)
    return drawn


def in_order(env: LLMEnv, count: int) -> list[tuple[int, int]]:
    """What a sync run draws: group after group."""
    env.prompts.seed(0)
    env.prompts._next_group = 0
    drawn = []
    for _ in range(count):
        env.prompts.start_group()
        problem, group = env.prompts.draw()
        drawn.append((group, problem))
    return drawn


PLAYS: Sequence[int] = (1, 2, 1, 4, 3)


def test_plays_that_were_not_needed_are_the_next_tasks(env: LLMEnv, tokenizer: PreTrainedTokenizerFast) -> None:
    """40 groups were drawn for 5 batches, and 22 played: the other 18 were lost."""
    sampler = LLMEnv(ArithmeticTask(), tokenizer, num_envs=GROUPS * 2, repeats=2)
    queue, drawn = queue_of(env, max_staleness=0), []
    for version, plays in enumerate(PLAYS):
        drawn += play(sampler, queue, next_task(queue), plays)
        assert queue.take() is not None
        queue.buffer.publish(version + 1)
    assert drawn == in_order(sampler, GROUPS * sum(PLAYS))
    assert env.prompts._next_group - len(drawn) <= GROUPS * (ROUNDS - 1)


def test_no_problem_is_left_out_when_tasks_overlap_and_a_run_goes_on(
    env: LLMEnv, tokenizer: PreTrainedTokenizerFast
) -> None:
    sampler = LLMEnv(ArithmeticTask(), tokenizer, num_envs=GROUPS * 2, repeats=2)
    queue = queue_of(env, max_staleness=2)
    tasks = [next_task(queue) for _ in range(3)]
    drawn = [
        pair for progress, plays in zip(tasks, (1, 3, 2), strict=True) for pair in play(sampler, queue, progress, plays)
    ]
    assert queue.take() is not None
    state = queue.state_dict()
    resumed = queue_of(LLMEnv(ArithmeticTask(), tokenizer, num_envs=GROUPS * 2, repeats=2), 2, version=1)
    resumed.load_state_dict(state)
    taken = {group for group, _ in drawn[:GROUPS]}
    again: list[tuple[int, int]] = []
    for _ in range(3):
        progress = next_task(resumed)
        assert len(progress.task.further) == ROUNDS - 1
        again += play(sampler, resumed, progress, ROUNDS)
    played = {group for group, _ in again} | taken
    assert played == set(range(len(played)))
    assert len(again) == len(set(again))


def test_groups_of_the_run_are_counted_without_those_played_in_place(env: LLMEnv) -> None:
    queue = TaskQueue(env, GroupBuffer(GROUPS, 9), task_groups=GROUPS, total_groups=6, rounds=ROUNDS)
    given = [queue.next_unplayed() for _ in range(5)]
    assert [progress is not None for progress in given] == [True] * 3 + [False] * 2
