"""Credit of an agent's turns and branches: rewards of answers, abandoned branches, advantages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import agent_task, own_score, played
from tests.support.envs import END, ScriptedEngine
from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.integrations.agents import WithAgent, load_program
from torchrl_grpo.integrations.agents.programs import Function
from torchrl_grpo.reward_pool.protocol import decode, encode
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Score, Turn
from torchrl_grpo.transforms import GroupAdvantage, RewardShaping

openai = pytest.importorskip("openai")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: Any, *messages: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=list(messages))


def said(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer.choices[0].message.content}


async def three_branches(client, problem):
    """Ask three times, go on with the second answer, then ask in another context."""
    first = await ask(client, user("p"))
    client.reward(1)
    second = await ask(client, user("p"))
    chat = [user("p"), said(second), user("u")]
    chat += [said(await ask(client, *chat)), user("v")]
    client.reward(0.25)
    client.reward(0.5, second)
    await ask(client, user("p"))
    await ask(client, *chat)
    await ask(client, user("sub"))
    client.reward(2)
    client.reward(1, first.id)  # again
    return 3


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        # The end of a branch has what followed: 2 of the other context, and 3 of the trajectory.
        (False, own_score(6.75, 1 + 5, 0.5, 0.25, 5, 5, 2 + 3)),
        (True, own_score(5.75, None, 0.5, 0.25, None, 5, 2 + 3)),
    ],
)
def test_rewards_of_answers_are_credited_to_their_branches(drops, expected):
    task = agent_task(three_branches)
    task.drops_abandoned = drops
    answers = iter("abcdef")
    turns, end = played(task, lambda turn: next(answers))
    assert [turn.sample for turn in turns] == [0, 1, 1, 2, 1, 3]
    assert end.score == expected


@pytest.mark.parametrize(
    ("later", "is_dropped"),
    [
        ([user("p"), {"role": "assistant", "content": "edited"}, user("u")], False),
        ([user("a summary")], False),
        ([user("p")], True),
        ([user("p"), {"role": "assistant", "content": "x"}, user("another")], True),
        # An old message is shortened, and both answers are kept.
        ([user("p"), {"role": "assistant", "content": "x"}, user("-"),
          {"role": "assistant", "content": "y"}, user("w")], False),
    ],
)  # fmt: skip
def test_an_answer_is_abandoned_only_if_the_agent_goes_back(later, is_dropped):
    async def play(client, problem):
        chat = [user("p"), said(await ask(client, user("p"))), user("u")]
        await ask(client, *chat)
        await ask(client, *later)
        return 1

    task = agent_task(play)
    task.drops_abandoned = True
    answers = iter("xyz")
    _, end = played(task, lambda turn: next(answers))
    credits = end.score.turns
    assert len(credits) == 3 and (credits[1] is None) == is_dropped and credits[2] == 1


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        # Returns 2, 3, 8 and 5, and 1, 1, 9 and 3: their mean is 4.
        (False, [[-2.0], [-1.0], [4.0, 1.0], [-3.0], [-3.0], [5.0, -1.0]]),
        # First turns 8 and 9, second ones 5 and 3.
        (True, [[-0.5, 1.0], [0.5, -1.0]]),
    ],
)
def test_advantages_of_three_branches_by_hand(tokenizer, encode, drops, expected):
    async def play(client, problem):
        for _ in range(3):
            answer = await ask(client, user("p"))
            client.reward(answer.choices[0].message.content)
        answer = await ask(client, user("p"), said(answer), user("go"))
        client.reward(answer.choices[0].message.content)
        return 1

    task = agent_task(play)
    task.drops_abandoned = drops
    digits = iter("10203642")  # of two trajectories in turn
    engine = ScriptedEngine(lambda prompt, copy: ([*encode(next(digits)), END], "stop"))
    env = LLMEnv(task, tokenizer, num_envs=2, repeats=2, max_turns=4)
    policy = GenerationPolicy(engine, SamplingParams(max_new_tokens=4))
    batch = RolloutCollector(env, policy).rollout()
    rewards = [row[keys.REWARD].item() for row in batch.unbind(0) if row[keys.DONE]]
    assert rewards == ([8, 9] if drops else [11, 9])
    shaped = RewardShaping(scale=2)(batch.clone())
    for rows, key, factor in ((batch, keys.TURN_REWARDS, 1), (shaped, keys.TOKEN_REWARD, 2)):
        GroupAdvantage(2, level="turn", std="none", reward_key=key)(rows)
        got = []
        for row in rows.unbind(0):
            ends = (row[keys.FULL] == END) & row[keys.ASSISTANT_MASK]
            got.append((row[keys.ADVANTAGE][ends] / factor).tolist())
        assert got == expected


def test_a_command_rewards_answers_with_headers_of_the_openai_client(tmp_path: Path) -> None:
    (tmp_path / "solve.py").write_text(
        """
from openai import BadRequestError, OpenAI
client = OpenAI()
def ask(**headers):
    create, chat = client.chat.completions.create, [{"role": "user", "content": "p"}]
    return create(model="policy", messages=chat, extra_headers=headers)
def refused(**headers):
    try:
        ask(**headers)
    except BadRequestError as error:
        return error.param
assert refused(**{"X-Reward": "1"}) == "X-Reward-Id"  # there is no answer yet
first = ask()
assert refused(**{"X-Reward": "nan"}) == refused(**{"X-Reward": "a"}) == "X-Reward"
assert refused(**{"X-Reward": "1", "X-Reward-Id": "chatcmpl-7"}) == "X-Reward-Id"
ask(**{"X-Reward": "0.5"})
client.models.list(extra_headers={"X-Reward": "2"})
client.models.list(extra_headers={"X-Reward": "-1", "X-Reward-Id": first.id})
"""
    )
    program = load_program(f"{sys.executable} {tmp_path}/solve.py")
    turns, end = played(agent_task(program), lambda turn: "x")
    assert len(turns) == 2
    assert end.score == Score(1.0, False, {"agent": 1.0}, turns=(-1.0, 2.0))


def test_rewards_of_answers_are_added_to_the_scorer_s():
    async def play(client, problem):
        await ask(client, user("p"))
        client.reward(0.5)

    _, end = played(agent_task(play, "gsm8k"), lambda turn: "#### 2")
    parts = {"gsm8k": 1.0, "agent": 0.5}
    assert end.score == Score(1.5, True, parts, turns=(1.5,))


class Unscored(ArithmeticTask):
    def judge(self, dialog):
        raise NotImplementedError


def test_rewards_of_answers_suffice_without_a_scorer():
    async def play(client, problem):
        await ask(client, user("p"))
        client.reward(1)

    _, end = played(WithAgent(Unscored(), Function(play)), lambda turn: "x")
    assert end.score == own_score(1.0, 1.0)


def test_credits_travel_between_processes() -> None:
    turn = Turn(None, Score(1.0, True, turns=(0.5, None)))
    assert decode(encode([turn], 3), 3, 1)[0] == turn
