"""Agents' dialogs as training data: tokens, masks and log-probs are those of the engine, whatever
the agent does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import threading
from itertools import count
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.agents import agent_task
from tests.support.models import response_log_probs
from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector, Sampler
from torchrl_grpo.collectors.evaluation import Evaluator
from torchrl_grpo.collectors.sampler import RolloutTask
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.integrations.agents import WithAgent
from torchrl_grpo.integrations.agents.programs import Function
from torchrl_grpo.integrations.agents.task import TokenCounter
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Score, Task
from torchrl_grpo.tasks.seeds import SeedsTask
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tools import parse_tool_calls
from torchrl_grpo.transforms import GroupAdvantage

openai = pytest.importorskip("openai")
END = 1


@pytest.fixture(scope="module")
def starter():
    return AutoModelForCausalLM.from_pretrained(starter_path()), AutoTokenizer.from_pretrained(
        starter_path()
    )


def collector(
    starter: Any,
    task: Task,
    *,
    turns: int = 4,
    tokens: int = 12,
    pool: RewardPool | None = None,
    rows: int = 8,
):
    model, tokenizer = starter
    engine = TransformersEngine(model)
    engine.seed(3)
    policy = GenerationPolicy(engine, SamplingParams(tokens, stop_token_ids=(END,)))
    env = LLMEnv(task, tokenizer, num_envs=rows, repeats=4, max_turns=turns, reward_pool=pool)
    return RolloutCollector(env, policy)


def check_log_probs(starter: Any, batch: TensorDictBase) -> None:
    """Check that the recorded log-probs are those of one forward pass over each sample."""
    score = response_log_probs(starter[0])
    for row in batch.unbind(0):
        full, mask = row[keys.FULL], row[keys.ASSISTANT_MASK]
        start = int(mask.nonzero()[0])
        [expected] = score([full], [start])
        torch.testing.assert_close(
            row[keys.LOG_PROBS][mask], expected[mask[start:]], rtol=1e-4, atol=1e-4
        )
        assert not row[keys.LOG_PROBS][~mask].any()


@pytest.mark.slow
def test_a_compacting_agent_s_log_probs_are_those_of_a_forward_pass(starter):
    replies: list[str] = []

    async def play(client, problem):
        async def ask(messages, **wishes):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, **wishes
            )
            replies.append(answer.choices[0].message.content)
            return answer.choices[0].message

        chat = [{"role": "user", "content": problem["prompt"]}]
        chat += [await ask(chat), {"role": "user", "content": "again"}]
        chat += [await ask(chat, max_tokens=3), {"role": "user", "content": "and again"}]
        await ask([{"role": "user", "content": "a word of the dialog so far"}], stop="#")
        await ask(chat)
        return len(replies) % 2

    batch = collector(starter, agent_task(play)).rollout()
    assert len(batch) == 16
    check_log_probs(starter, batch)
    sampled = [row[keys.FULL][row[keys.ASSISTANT_MASK]] for row in batch.unbind(0)]
    texts = starter[1].batch_decode(sampled, skip_special_tokens=True)
    # The samples of a trajectory are in the order of their ends: the compacted one, then the one
    # that the agent returned to.
    assert [int(row[keys.DONE]) for row in batch.unbind(0)] == [0, 1] * 8
    assert sorted("".join(texts)) == sorted(
        "".join(replies) + "#" * sum(text.endswith("#") for text in texts[::2])
    )
    assert all(len(tokens) <= 12 + 3 + 12 for tokens in sampled[1::2])
    assert all("#" not in text[:-1] for text in texts[::2])
    trajectory = batch[keys.TRAJECTORY].reshape(-1).tolist()
    assert trajectory[::2] == trajectory[1::2]
    assert len(set(trajectory)) == 8


class Retry(ArithmeticTask):
    """The game of ``retrying`` as a task."""

    def next_turn(self, problem, responses):
        right = super().score(problem, responses).correct
        return None if right or len(responses) == 3 else "Wrong. Once more."

    def score(self, problem, responses):
        right = super().score(problem, responses).correct
        return Score(right / len(responses), right and len(responses) == 1)


def retrying(task: ArithmeticTask):
    async def play(client, problem):
        chat = list(problem["messages"])
        for turn in range(1, 4):
            answer = await client.chat.completions.create(model="policy", messages=chat)
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            right = task.score(
                next(
                    candidate
                    for candidate in task.problems("train")
                    if candidate.query == problem["prompt"]
                ),
                [message.content],
            ).correct
            if right or reason == "length":
                return right / turn
            chat += [message, {"role": "user", "content": "Wrong. Once more."}]
        return 0.0

    return play


class Number:
    """A game of guessing a number, as an environment."""

    def reset(self, seed):
        self.number = seed % 40 + 27
        return f"{self.number - 17}+17=?"

    def step(self, response):
        numbers = re.findall(r"\d+", response)
        guess = int(numbers[-1][:9]) if numbers else -1
        done = guess == self.number
        return (
            "higher" if guess < self.number else "lower",
            1.0 if done else -0.01 * len(response),
            done,
        )


async def guessing(client, problem):
    """Play the same game as an agent."""
    game = Number()
    total = 0.0
    chat = [{"role": "user", "content": game.reset(problem["seed"])}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=chat)
        reply, reward, done = game.step(answer.choices[0].message.content)
        total += reward
        if done:
            break
        chat += [answer.choices[0].message, {"role": "user", "content": reply}]
    return total


async def responding(client, problem):
    """Play the same game by the Responses API, whose server keeps the dialog."""
    game = Number()
    total = 0.0
    text, previous = game.reset(problem["seed"]), None
    for _ in range(3):
        answer = await client.responses.create(
            model="policy", input=text, previous_response_id=previous
        )
        text, reward, done = game.step(answer.output_text)
        total += reward
        if done:
            break
        previous = answer.id
    return total


def as_game():
    return WithEnvironment(
        SeedsTask(40), {"": Kind(Number, [], parse_tool_calls)}, rewards=None, at_a_time=16
    )


PAIRS = {
    "a task that answers": (
        Retry,
        lambda: WithAgent(ArithmeticTask(), Function(retrying(ArithmeticTask()))),
    ),
    "an environment": (as_game, lambda: WithAgent(SeedsTask(40), Function(guessing))),
    "an agent of another API": (
        lambda: WithAgent(SeedsTask(40), Function(guessing)),
        lambda: WithAgent(SeedsTask(40), Function(responding)),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_an_agent_gives_the_tokens_rewards_and_loss_of_the_same_game(starter, kind):
    def played(task: Task):
        batch = GroupAdvantage(4)(collector(starter, task, turns=3, tokens=14, rows=16).rollout())
        model = AutoModelForCausalLM.from_pretrained(starter_path()).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = PolicyTrainer(GRPOLoss(TokenScorer(model)), model, optimizer, optim_batch_size=16)
        metrics = trainer.train_batch(batch)
        return batch, metrics["train/loss"], metrics["train/grad_norm"]

    (one, *of_one), (two, *of_two) = (played(make()) for make in PAIRS[kind])
    tokens = (keys.FULL, keys.LOG_PROBS, keys.ASSISTANT_MASK, keys.POLICY_VERSIONS)
    for key in (*tokens, keys.REWARD, keys.CORRECT, keys.REWARD_VALID):
        for left, right in zip(one.unbind(0), two.unbind(0), strict=True):
            assert torch.equal(left[key], right[key]), key
    assert of_one == of_two
    assert of_one[1] > 0
    assert len({int(row[keys.ASSISTANT_MASK].sum()) for row in one.unbind(0)}) > 2


def test_counted_tokens_are_those_of_the_prompt_and_no_turn(starter):
    async def play(client, problem):
        wants = {"model": "policy", "max_tokens": 3, "messages": problem["messages"]}
        count, answer = [
            await client.post(path, body=wants, cast_to=object)
            for path in ("/messages/count_tokens", "/messages")
        ]
        return float(count["input_tokens"] == answer["usage"]["input_tokens"] > 0)

    task = agent_task(play)
    task.counter = TokenCounter({"name": "starter"})
    assert collector(starter, task, turns=1).rollout()[keys.REWARD].sum() == 8


def test_what_an_agent_does_wrong_costs_its_dialog_and_no_other(starter):
    started = count()

    async def play(client, problem):
        number = next(started)
        if number == 0:
            return 1.0  # never sends a request
        await client.chat.completions.create(model="policy", messages=problem["messages"])
        if number == 1:
            raise OSError("no such file")
        if number == 2:
            await client.chat.completions.create(model="policy", messages=problem["messages"], n=3)
        return 1.0

    played = collector(starter, agent_task(play))
    batch = played.rollout()
    errors = {
        str(row[keys.REWARD_ERROR]).partition(":")[0]
        for row in batch.unbind(0)
        if keys.REWARD_ERROR in row
    }
    assert errors == {"InvalidRewardError", "OSError", "BadRequestError"}
    assert batch[keys.REWARD_VALID].sum() == 5
    assert batch[keys.REWARD].sum() == 5
    assert played.take_counts()["rewards/invalid_exception"] == 3
    assert sorted(int(row[keys.ASSISTANT_MASK].any()) for row in batch.unbind(0)) == [0] + [1] * 7


@pytest.mark.slow
def test_samplers_and_evaluators_count_trajectories(starter):
    async def play(client, problem):
        for text in ("a", "b", "c"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": text}]
            )
        return 1.0 if "1" in problem["prompt"] else 0.0

    played = collector(starter, agent_task(play))
    sampler = Sampler(played.policy.engine, lambda groups: played, None, groups_at_a_time=2)
    drawn = [played.base_env.drawing.draw() for _ in range(2)]
    report, groups = sampler.play(RolloutTask(tuple(drawn)))
    assert [len(group) for group in groups] == [12, 12]
    assert [len(one.outcomes) for one in report.groups] == [4, 4]
    assert not any(one.varied for one in report.groups)
    assert played.dialog_turns == 8

    tests = [
        LLMEnv(agent_task(play), starter[1], num_envs=4 * k, repeats=k, split="test", max_turns=4)
        for k in (1, 2)
    ]
    evaluator = Evaluator(played.policy.engine, *tests, params=played.policy.params)
    metrics, rows = evaluator.evaluate(sampled=True)
    assert metrics["eval/pass@1"] == metrics["eval/pass@2"] == metrics["eval/reward_mean"]
    assert len(rows) == 12


@pytest.mark.slow
def test_an_agent_that_kills_its_worker_costs_that_worker_s_dialogs(starter, tmp_path):
    flag = str(tmp_path / "one agent alone makes this")

    async def play(client, problem):
        await client.chat.completions.create(model="policy", messages=problem["messages"])
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return 1.0
        os.kill(os.getpid(), signal.SIGKILL)

    task = WithAgent(ArithmeticTask(), Function(play))
    with RewardPool(task, 3, timeout_s=300) as pool:
        played = collector(starter, task, pool=pool, rows=12)
        rows = played.rollout().unbind(0)
        errors = [str(row[keys.REWARD_ERROR]) for row in rows if not row[keys.REWARD_VALID]]
        assert len(errors) == 4  # of twelve dialogs, each of the three workers keeps four
        assert all("process" in error for error in errors)
        assert sum(float(row[keys.REWARD]) for row in rows) == 8
        assert played.take_counts()["workers/restarts_reward"] == 1
        assert played.rollout()[keys.REWARD_VALID].all()  # by a worker that replaced the dead one


class Leaving:
    """Clients that disconnect, at once or while the policy samples their turn.

    Args:
        collector: collector of the policy.
        when: ``"queued"`` or ``"sampling"``.
    """

    def __init__(self, collector: RolloutCollector, when: str = "sampling") -> None:
        self._sampling, self._generate = when == "sampling", collector.policy.engine.generate
        self._left, self._leaving, self._round, self._lock = (
            threading.Semaphore(0),
            0,
            0,
            threading.Lock(),
        )
        collector.policy.engine.generate = self._wait

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            leaving, self._leaving = self._leaving, 0
            self._round += 1
        for _ in range(leaving):
            assert self._left.acquire(timeout=300)
        return self._generate(*args, **kwargs)

    async def ask(self, client: Any, messages: list[Any]) -> None:
        """Send a request and disconnect before the response."""
        with self._lock:
            self._leaving += self._sampling
            before = self._round
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        body = json.dumps({"messages": messages}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: agents\r\n"
            f"Authorization: Bearer {client.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        while self._sampling and self._round == before:
            await asyncio.sleep(0.001)
        writer.close()
        await writer.wait_closed()
        if self._sampling:
            self._left.release()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["queued", "sampling"])
def test_an_answer_whose_client_has_left_is_not_trained(starter, when):
    texts: dict[str, list[str]] = {}

    async def play(client, problem):
        async def ask(messages):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            texts.setdefault(client.api_key, []).append(answer.choices[0].message.content)
            return {"role": "assistant", "content": texts[client.api_key][-1]}

        chat = list(problem["messages"])
        await leaving.ask(client, chat)
        chat += [await ask(chat), {"role": "user", "content": "again"}]
        await leaving.ask(client, chat)
        await ask(chat)
        await leaving.ask(client, [{"role": "user", "content": "more"}])
        return 0.5

    played = collector(starter, agent_task(play), turns=8, tokens=6, rows=4)
    leaving = Leaving(played, when)
    batch = played.rollout()
    check_log_probs(starter, batch)
    assert [len(texts[key]) for key in texts] == [2] * 4
    sampled = [row[keys.FULL][row[keys.ASSISTANT_MASK]] for row in batch.unbind(0)]
    assert sorted(starter[1].batch_decode(sampled, skip_special_tokens=True)) == sorted(
        map("".join, texts.values())
    )
    assert batch[keys.REWARD].reshape(-1).tolist() == [0.5] * 4
    assert batch[keys.REWARD_VALID].all() and batch[keys.DONE].all()
    assert all("more" not in str(row[keys.RESPONSE_TEXT]) for row in batch.unbind(0))


@pytest.mark.parametrize("when", ["queued", "sampling"])
def test_an_agent_that_got_no_answer_is_invalid(starter, when):
    async def play(client, problem):
        for _ in range(2):
            await leaving.ask(client, problem["messages"])
        if problem["prompt"] == "never":
            await client.chat.completions.create(model="policy", messages=problem["messages"])
        return 1.0

    played = collector(starter, agent_task(play), tokens=6, rows=4)
    leaving = Leaving(played, when)
    batch = played.rollout()
    assert not batch[keys.REWARD_VALID].any() and not batch[keys.REWARD].any()
    assert len(batch) == 4
    assert all("ended without an answer" in str(row[keys.REWARD_ERROR]) for row in batch.unbind(0))


def test_answers_that_nobody_takes_count_as_turns(starter):
    """An agent that abandons each of its requests still ends."""

    async def play(client, problem):
        for _ in range(3):
            await leaving.ask(client, problem["messages"])
        with pytest.raises(openai.BadRequestError, match=r"env\.max_turns=3"):
            await client.chat.completions.create(model="policy", messages=problem["messages"])

    played = collector(starter, agent_task(play), turns=3, tokens=6, rows=4)
    leaving = Leaving(played)
    batch = played.rollout()
    assert played.last.turns == 12
    assert not batch[keys.REWARD_VALID].any()


def test_a_scorer_sees_the_answers_that_reached_the_agent(starter):
    responses: list[str] = []

    def reward(response: str, messages: list[Any]) -> float:
        responses.append(response)
        return 1.0

    async def play(client, problem):
        answer = await client.chat.completions.create(model="policy", messages=problem["messages"])
        answers.append(answer.choices[0].message.content)
        await leaving.ask(client, [{"role": "user", "content": "more"}])

    answers: list[str] = []
    played = collector(starter, agent_task(play, reward), tokens=6, rows=4)
    leaving = Leaving(played)
    batch = played.rollout()
    assert sorted(responses) == sorted(answers)
    assert len(batch) == 4 and batch[keys.REWARD_VALID].all()


def stop_strings() -> list[StopStrings]:
    """Return all that are referenced, also those of other tests."""
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is StopStrings]


@pytest.mark.slow
def test_stop_strings_of_an_agent_leave_nothing_behind(starter):
    async def play(client, problem):
        wants = {"model": "policy", "messages": problem["messages"]}
        answer = await client.chat.completions.create(**wants)
        text = answer.choices[0].message.content
        cut = await client.chat.completions.create(
            **wants, stop=[f"</{client.api_key}>", *"0123456789#"[-3:]]
        )
        return float(bool(text) and not set(cut.choices[0].message.content) & set("89#"))

    before = stop_strings()
    played = collector(starter, agent_task(play))
    assert played.rollout()[keys.REWARD].sum() == 8
    assert len(stop_strings()) <= len(before)


def test_a_chat_that_no_template_can_take_costs_its_own_dialog(starter):
    started = count()

    async def play(client, problem):
        content: Any = "a"
        for _ in range(700):
            content = [content]
        wrong = {"messages": [{"role": "user", "content": "a", "name": content}]}
        if next(started) == 0:
            await client.post("/chat/completions", body=wrong, cast_to=object)
        await client.chat.completions.create(model="policy", messages=problem["messages"])
        return 1.0

    batch = collector(starter, agent_task(play)).rollout()
    assert batch[keys.REWARD].sum() == 7
    assert [
        str(row[keys.REWARD_ERROR])[:15] for row in batch.unbind(0) if keys.REWARD_ERROR in row
    ] == ["BadRequestError"]


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
def test_a_message_that_the_template_drops_costs_only_its_agents_dialog(starter, turn):
    started = count()
    without = AutoTokenizer.from_pretrained(starter_path())
    without.chat_template = (
        "{% set kept = messages | rejectattr('role', 'equalto', 'system') | list %}"
        + without.chat_template.replace("messages", "kept")
    )

    async def play(client, problem):
        instructs = next(started) == 0
        for number in range(2):
            chat = [{"role": "user", "content": f"question {number}"}]
            if instructs and number == turn:
                chat.insert(0, {"role": "system", "content": "Be brief."})
            await client.chat.completions.create(model="policy", messages=chat)
        return 1.0

    batch = collector((starter[0], without), agent_task(play)).rollout()
    errors = [str(row[keys.REWARD_ERROR]) for row in batch.unbind(0) if keys.REWARD_ERROR in row]
    assert errors and all("model.chat_template=" in error for error in errors)
    assert batch[keys.REWARD].sum() == 7


@pytest.mark.parametrize("limit", [2, None])
def test_a_turn_that_an_agent_s_own_limit_cuts_is_truncated(starter, limit):
    reasons: list[str] = []

    async def play(client, problem):
        answer = await client.chat.completions.create(
            model="policy", messages=problem["messages"], max_tokens=limit
        )
        reasons.append(answer.choices[0].finish_reason)
        return float(answer.choices[0].finish_reason == "length")

    batch = collector(starter, agent_task(play), tokens=14).rollout()
    cut = batch[keys.TRUNCATED].reshape(-1).float()
    assert torch.equal(cut, batch[keys.REWARD].reshape(-1))
    metrics = rollout_metrics(batch.set(keys.ADVANTAGE, torch.zeros(8, 1)))
    rows = sample_rows(batch, "train")
    assert metrics["rollout/truncated"] == reasons.count("length") / 8
    assert sorted(row["finish_reason"] for row in rows) == sorted(reasons)
    assert limit is None or reasons == ["length"] * 8


def test_an_agent_s_number_is_a_part_of_the_reward(starter):
    async def play(client, problem):
        await client.chat.completions.create(model="policy", messages=problem["messages"])
        return 0.25 * next(numbers)

    numbers = count()
    batch = collector(starter, agent_task(play)).rollout()
    parts = [row[keys.REWARD_PARTS] for row in batch.unbind(0)]
    assert parts == [{"agent": reward} for reward in batch[keys.REWARD].reshape(-1).tolist()]
    advantage = GroupAdvantage(4, part_weights={"agent": 2.0})(batch)[keys.ADVANTAGE]
    assert (advantage != 0).any() and advantage.isfinite().all()


@pytest.mark.slow
def test_tools_that_the_template_leaves_out_are_refused(starter):
    model, tokenizer = starter
    plain = AutoTokenizer.from_pretrained(starter_path())
    plain.chat_template = plain.chat_template.replace("tools", "no_such_variable")
    add = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }

    async def play(client, problem):
        wants = {"model": "policy", "messages": problem["messages"]}
        try:
            await client.chat.completions.create(**wants, tools=[add])
        except openai.BadRequestError as error:
            assert error.param == "tools"
            await client.chat.completions.create(**wants)
            return 0.0
        return 1.0

    for one, reward in ((tokenizer, 8), (plain, 0)):
        batch = collector((model, one), agent_task(play)).rollout()
        assert batch[keys.REWARD_VALID].all()
        assert batch[keys.REWARD].sum() == reward
