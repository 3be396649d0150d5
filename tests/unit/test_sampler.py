"""``Sampler``: any sampler plays tasks that carry their problems, in rounds of the engine's
capacity.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.support.echo import EchoTask
from tests.support.envs import END, ScriptedEngine
from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import RolloutTask, Sampler, has_variance
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.tasks.base import Problem, Score

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.9, stop_token_ids=(END,))
REPEATS = 2


def make_env(tokenizer: PreTrainedTokenizerFast, groups: int, seed: int = 0) -> LLMEnv:
    return LLMEnv(EchoTask(26), tokenizer, num_envs=groups * REPEATS, repeats=REPEATS, seed=seed)


def make_sampler(
    engine: Engine, env: LLMEnv, groups_at_a_time: int, seed: int | None = None
) -> Sampler:
    def make_collector(groups: int) -> RolloutCollector:
        return RolloutCollector(env.with_rows(groups * REPEATS), GenerationPolicy(engine, PARAMS))

    return Sampler(engine, make_collector, None, groups_at_a_time=groups_at_a_time, seed=seed)


def test_a_pickled_task_gives_the_tokens_that_its_own_env_gives(
    tokenizer: PreTrainedTokenizerFast, tiny_model: nn.Module
) -> None:
    engine = TransformersEngine(tiny_model)
    engine.seed(7)
    expected = RolloutCollector(make_env(tokenizer, 3), GenerationPolicy(engine, PARAMS)).rollout()
    drawing = make_env(tokenizer, 3).drawing
    task = RolloutTask(tuple(drawing.draw() for _ in range(3)))
    other = make_env(tokenizer, 1, seed=99)
    before = other.state_dict()
    engine = TransformersEngine(tiny_model)
    engine.seed(7)
    report, groups = make_sampler(engine, other, 3).play(pickle.loads(pickle.dumps(task)))
    rows = [row for group in groups for row in group.unbind(0)]
    assert len({tuple(row[keys.FULL].tolist()) for row in rows}) > 1
    for key in (keys.FULL, keys.LOG_PROBS, keys.GROUP_ID, keys.REWARD):
        assert [row[key].tolist() for row in rows] == [
            row[key].tolist() for row in expected.unbind(0)
        ], key
    assert [row[keys.QUERY] for row in rows] == [row[keys.QUERY] for row in expected.unbind(0)]
    assert [group.group for group in report.groups] == [0, 1, 2]
    assert other.state_dict() == before  # nothing was drawn


@pytest.mark.slow
def test_with_a_seed_it_does_not_matter_which_sampler_plays_a_task(
    tokenizer: PreTrainedTokenizerFast, tiny_model: nn.Module
) -> None:
    drawing = make_env(tokenizer, 2).drawing
    tasks = [RolloutTask((drawing.draw(), drawing.draw())) for _ in range(4)]

    def played(order: Sequence[Sequence[int]], seed: int = 3) -> dict[int, list[list[int]]]:
        tokens = {}
        for number, own in enumerate(order):
            engine = TransformersEngine(tiny_model)
            engine.seed(number)
            sampler = make_sampler(engine, make_env(tokenizer, 1), 2, seed)
            for task in own:
                rows = [row for group in sampler.play(tasks[task])[1] for row in group.unbind(0)]
                tokens[task] = [row[keys.FULL].tolist() for row in rows]
        return dict(sorted(tokens.items()))

    alone = played([[0, 1, 2, 3]])
    assert played([[0, 2], [1, 3]]) == played([[3], [2, 1, 0]]) == alone
    responses = [row[-8:] for rows in alone.values() for row in rows]
    assert len({tuple(row) for row in responses}) == len(responses)  # each has its own random draws
    assert played([[0, 1, 2, 3]], seed=4) != alone


@pytest.mark.parametrize(("groups", "rounds"), [(5, [2, 2, 1]), (2, [2]), (1, [1])])
def test_a_task_of_any_size_is_played_in_rounds(
    tokenizer: PreTrainedTokenizerFast, groups: int, rounds: list[int]
) -> None:
    engine = ScriptedEngine(lambda prompt, copy: ([10 + copy, END], "stop"))
    engine.policy_version = 4
    env = make_env(tokenizer, 1)
    task = RolloutTask(tuple(env.drawing.draw() for _ in range(groups)))
    sampler = make_sampler(engine, env, 2)
    for _ in range(2):  # the second time with the same collectors
        engine.calls.clear()
        report, played = sampler.play(task)
        assert [(len(prompts), n) for prompts, n in engine.calls] == [
            (size, REPEATS) for size in rounds
        ]
        assert [(group.group, group.version) for group in report.groups] == [
            (i, 4) for i in range(groups)
        ]
        assert [group[keys.GROUP_ID].reshape(-1).tolist() for group in played] == [
            [i] * REPEATS for i in range(groups)
        ]
        assert [group[0][keys.QUERY] for group in played] == [
            one.problem.query for one in task.drawn
        ]
        assert report.generate_s > 0 and report.env_s > 0
    assert len(sampler._idle) == len(set(rounds))
    sampler.close()
    assert engine.num_closed >= 1


class RuleTask(EchoTask):
    """A task in which the response ``a`` is right, ``b`` is wrong, and others have no valid reward."""

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score({"a": 1.0, "b": 0.5}[responses[-1]], responses[-1] == "a")


@pytest.mark.parametrize(
    ("answers", "varied", "outcomes"),
    [
        ("ab", True, (True, False)),
        ("aa", False, (True, True)),
        ("ac", False, (True,)),
        ("cc", False, ()),
    ],
)
def test_a_report_says_what_the_valid_rewards_of_a_group_say(
    tokenizer: PreTrainedTokenizerFast, answers: str, varied: bool, outcomes: tuple[bool, ...]
) -> None:
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in answers]
    engine = ScriptedEngine(lambda prompt, copy: ([*letters[copy], END], "stop"))
    env = LLMEnv(RuleTask(), tokenizer, num_envs=2, repeats=2)
    drawn = env.drawing.draw()
    report, _ = make_sampler(engine, env, 1).play(RolloutTask((drawn,)))
    [group] = report.groups
    assert all(index == drawn.index for index, _ in group.outcomes)
    assert (group.varied, [correct for _, correct in group.outcomes]) == (varied, [*outcomes])


@pytest.mark.parametrize(
    ("rewards", "valid", "varied"),
    [
        ([0.0, 1.0, 0.0], [True] * 3, True),
        ([0.1, 0.1, 0.1], [True] * 3, False),
        ([0.0, 1.0, 0.0], [True, False, True], False),
        ([0.0, float("nan"), 1.0], [True, False, True], True),
        ([0.0, 1.0], [False, False], False),
    ],
)
def test_one_group_can_be_asked_whether_it_has_variance(
    rewards: list[float], valid: list[bool], varied: bool
) -> None:
    rows = [
        TensorDict(
            {"reward_valid": torch.tensor([known]), "next": {"reward": torch.tensor([reward])}}
        )
        for reward, known in zip(rewards, valid, strict=True)
    ]
    assert has_variance(rows) is varied
    assert has_variance(lazy_stack(rows)) is varied
    if all(valid):
        assert has_variance([row.exclude("reward_valid") for row in rows]) is varied
