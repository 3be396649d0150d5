"""``env.difficulty_filter``: problems that were solved too often or too rarely are left out of later epochs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.configs import compose_config
from tests.support.documentation import undocumented
from tests.support.envs import END, ScriptedEngine, respond
from tests.support.runs import SMALL, at, differences, run, state_of
from tests.support.tasks import next_task
from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.config import ConfigError
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.runtime.staleness import GroupBuffer
from torchrl_grpo.runtime.tasks import TaskQueue
from torchrl_grpo.tasks.base import Problem, Score, Split, Task

EASY, MIXED, HARD, BROKEN = range(4)


class Graded(Task):
    """Problem 0 is always solved, 1 by empty responses, 2 never; the scorer of 3 raises."""

    name = "graded"

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(f"q{kind}", kind) for kind in range(4)]

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        correct = {EASY: True, MIXED: not responses[-1], HARD: False}[problem.answer]
        return Score(0.5, correct)


def make_env(
    tokenizer: PreTrainedTokenizerFast, groups: int, bounds: Sequence[float] | None = (0.05, 0.95)
) -> LLMEnv:
    env = LLMEnv(Graded(), tokenizer, num_envs=2 * groups, repeats=2)
    env.drawing.difficulty_filter = bounds
    return env


def play(env: LLMEnv) -> list[int]:
    """Play a rollout in which each group's first member has an empty response; return the problem
    of each group.
    """
    data = env.reset()
    respond(env, data, [[END], [5, END]] * (env.batch_size[0] // 2))
    return [int(query[1:]) for query in data["query"][::2]]


def test_a_later_epoch_leaves_out_what_was_always_or_never_solved(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    env = make_env(tokenizer, 4)
    assert sorted(play(env)) == [EASY, MIXED, HARD, BROKEN]
    assert env.drawing.metrics() == {"rollout/problems_skipped": 0.0}
    assert sorted(play(env)) == [
        MIXED,
        MIXED,
        BROKEN,
        BROKEN,
    ]  # an invalid reward says nothing about the problem
    assert env.drawing.skipped == {EASY, HARD}
    assert env.drawing.metrics() == {"rollout/problems_skipped": 2.0}


@pytest.mark.parametrize(
    ("bounds", "left"),
    [(None, [0, 1, 2, 3]), ((0.0, 0.5), [1, 2, 3]), ((0.5, 1.0), [0, 1, 3]), ((0.6, 0.9), [3])],
)
def test_bounds_belong_to_the_range(
    tokenizer: PreTrainedTokenizerFast, bounds: Sequence[float], left: list
) -> None:
    env = make_env(tokenizer, 4, bounds)
    play(env)
    assert sorted(set(play(env))) == left


def test_where_nothing_would_be_left_all_are_drawn_again(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    env = make_env(tokenizer, 4)
    env.drawing.record((index, False) for index in range(4))
    for _ in range(4):
        env.drawing.draw()
    assert sorted(play(env)) == [EASY, MIXED, HARD, BROKEN]


def test_a_state_goes_on_with_the_same_problems(tokenizer: PreTrainedTokenizerFast) -> None:
    """The state is saved inside an epoch, whose outcomes must not change the problems that it
    leaves out.
    """
    one, other = make_env(tokenizer, 1), make_env(tokenizer, 1)
    for _ in range(5):
        play(one)
    state = one.state_dict()
    json.dumps(state)
    other.load_state_dict(state)
    assert [play(one) for _ in range(7)] == [play(other) for _ in range(7)]
    assert one.state_dict() == other.state_dict() and one.state_dict()["skipped"] == [EASY, HARD]
    plain = make_env(tokenizer, 1, None)
    play(plain)
    assert plain.state_dict().keys() == state.keys() - {"outcomes", "skipped"}


def step(queue: TaskQueue, sampler: Sampler, version: int) -> list[tuple[int, int]]:
    """Play tasks until there is a batch, like samplers; return the groups and their problems."""
    played: list[tuple[int, int]] = []
    sampler.engine.policy_version = version
    while (batch := queue.take()) is None:
        progress = next_task(queue)
        report, data = sampler.play(progress.task)
        played += [(one.group, one.index) for one in progress.task.drawn]
        assert [group[0]["query"] for group in data] == [
            f"q{one.index}" for one in progress.task.drawn
        ]
        queue.played(progress, report, data)
        queue.finish(progress)
    assert "rollout/problems_skipped" in batch[1]
    queue.buffer.publish(version + 1)
    return played


def make_queue(env: LLMEnv, version: int = 0) -> TaskQueue:
    return TaskQueue(
        env.drawing, GroupBuffer(2, 1, version), task_groups=2, total_groups=24, group_size=2
    )


def test_samplers_play_what_the_driver_drew_and_outcomes_count_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    engine = ScriptedEngine(lambda prompt, copy: ([5, END] if copy else [END], "stop"))
    params = SamplingParams(4, stop_token_ids=(END,))
    player = make_env(tokenizer, 2)  # of the sampler, which records nothing
    policy = GenerationPolicy(engine, params)
    sampler = Sampler(
        engine,
        lambda groups: RolloutCollector(player.with_rows(2 * groups), policy),
        None,
        groups_at_a_time=2,
    )
    queue = make_queue(make_env(tokenizer, 1))
    first = [pair for version in range(4) for pair in step(queue, sampler, version)]
    assert [group for group, _ in first] == list(range(8))
    assert Counter(problem for _, problem in first[:4]) == {kind: 1 for kind in range(4)}
    assert {problem for _, problem in first[4:]} == {MIXED, BROKEN}
    queue.next_unplayed()  # drawn ahead: a resumed run plays it again, and its responses count once
    state = queue.state_dict()
    queue = make_queue(make_env(tokenizer, 1), 4)
    queue.load_state_dict(state)
    again = step(queue, sampler, 4)
    assert [group for group, _ in again] == [8, 9]
    counts = {
        (index, correct): count
        for index, correct, count in queue.state_dict()["drawing"]["outcomes"]
    }
    drawn = Counter(problem for _, problem in first + again)
    assert counts == {
        (EASY, 1): 2, (HARD, 0): 2, (MIXED, 0): drawn[MIXED], (MIXED, 1): drawn[MIXED],
    }  # fmt: skip
    assert "outcomes" not in player.state_dict()


@pytest.mark.slow
def test_a_resumed_run_leaves_out_the_same_problems(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(1, 7)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    reward = "def even(response, answer):\n    return {'reward': len(response), 'correct': int(answer) % 4 == 0}\n"
    (tmp_path / "rewards.py").write_text(reward)
    options = (
        f"env.dataset={tmp_path / 'data.jsonl'}", f"env.reward={tmp_path / 'rewards.py'}:even",
        "env.difficulty_filter=[0.5,1]", "inference_model.max_new_tokens=4", "train.total_dialog_turns=80",
    )  # fmt: skip
    whole = run(tmp_path / "whole", *options, "train.checkpoint_frequency=3")
    assert [row["rollout/problems_skipped"] for row in whole[1:]][-1] == 3
    assert undocumented(whole) == set()
    run(tmp_path / "rest", *options, f"train.resume={at(tmp_path / 'whole', 3)}")
    assert (
        differences(state_of(at(tmp_path / "rest", 5)), state_of(at(tmp_path / "whole", 5))) == []
    )


@pytest.mark.parametrize("bounds", ["[0.9,0.1]", "[0.1]", "[-0.1,1]", "[0,1.5]", "[]"])
def test_bounds_that_are_no_range_are_refused(bounds: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"env\.difficulty_filter=\[.*\] must be .*: for example, \[0\.05,0\.95\]",
    ):
        compose_config(*SMALL, f"env.difficulty_filter={bounds}")
