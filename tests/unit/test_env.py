"""LLMEnv: drawing, prompts, outcomes, turns, resume; checked with TorchRL's own checker."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.support.echo import EchoTask, TwoTurnTask
from tests.support.envs import END, ScriptedEngine, column, respond
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.base import Dialog, Problem, Score, attempt
from torchrl_grpo.transforms import GroupAdvantage


def prompts(data: TensorDict) -> list[list[int]]:
    return [row.get("prompt").tolist() for row in data.get("tokens").unbind(0)]


@pytest.mark.parametrize("task", [EchoTask(), TwoTurnTask()])
def test_torchrl_finds_the_specs_right(tokenizer, task):
    check_env_specs(
        LLMEnv(task, tokenizer, num_envs=6, repeats=3, max_turns=2), break_when_any_done="both"
    )


class AllLengths(EchoTask):
    def problems(self, split):
        return [Problem("abcdef"[: 1 + length], "a") for length in range(6)]


@pytest.mark.parametrize("task", [AllLengths(), TwoTurnTask()])
def test_specs_are_right_inside_a_transformed_env(tokenizer, task):
    env = LLMEnv(task, tokenizer, num_envs=6, repeats=3, max_turns=2)
    check_env_specs(TransformedEnv(env, Compose(RewardSum(), StepCounter(), GroupAdvantage(3))))


def test_reset_repeats_each_prompt_in_adjacent_rows(tokenizer, encode):
    env = LLMEnv(EchoTask(), tokenizer, num_envs=6, repeats=3)
    data = env.reset()
    queries = data["query"]
    assert queries == [queries[0]] * 3 + [queries[3]] * 3 and queries[0] != queries[3]
    assert data["group_id"].squeeze(-1).tolist() == [0, 0, 0, 1, 1, 1]
    assert prompts(data) == [encode(f"<|user|>{query}<|end|><|assistant|>") for query in queries]
    assert env.reset()["group_id"].squeeze(-1).tolist() == [2, 2, 2, 3, 3, 3]


def test_each_epoch_has_every_problem_once_in_another_order(tokenizer):
    env = LLMEnv(EchoTask(10), tokenizer, num_envs=5, repeats=1, seed=3)
    epochs = [[*env.reset()["query"], *env.reset()["query"]] for _ in range(3)]
    everything = sorted(problem.query for problem in EchoTask(10).problems("train"))
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides_the_order(tokenizer):
    def first(seed: int) -> list[str]:
        return LLMEnv(EchoTask(), tokenizer, num_envs=8, repeats=1, seed=seed).reset()["query"]

    assert first(0) == first(0) != first(1)
    env = LLMEnv(EchoTask(), tokenizer, num_envs=8, repeats=1, seed=0)
    env.set_seed(1)
    assert env.reset()["query"] == first(1)


def test_state_resumes_in_the_middle_of_an_epoch(tokenizer):
    env = LLMEnv(EchoTask(), tokenizer, num_envs=6, repeats=2, seed=5)
    for _ in range(2):
        env.reset()
    state = env.state_dict()
    expected = [env.reset() for _ in range(4)]
    resumed = LLMEnv(EchoTask(), tokenizer, num_envs=6, repeats=2, seed=0)
    resumed.load_state_dict(state)
    for data in expected:
        again = resumed.reset()
        assert again["query"] == data["query"]
        assert torch.equal(again["group_id"], data["group_id"])


def test_groups_drawn_elsewhere_are_those_that_a_reset_would_draw(tokenizer):
    env, other = (LLMEnv(EchoTask(5), tokenizer, num_envs=6, repeats=2, seed=3) for _ in range(2))
    for _ in range(9):  # into the second epoch
        other.drawing.draw()
    for _ in range(3):
        env.reset()
    assert other.state_dict() == env.state_dict()
    expected = env.reset()
    player = LLMEnv(EchoTask(5), tokenizer, num_envs=2, repeats=2, seed=8).with_rows(6)
    drawn = [other.drawing.draw() for _ in range(3)]
    for _ in range(2):  # groups that were played may be played again
        again = player.reset(drawn=drawn)
        assert again["query"] == expected["query"]
        for key in ("group_id", "done", "correct"):
            assert torch.equal(again[key], expected[key]), key
        for row, other_row in zip(
            again.get("tokens").unbind(0), expected.get("tokens").unbind(0), strict=True
        ):
            assert torch.equal(row["prompt"], other_row["prompt"])
    assert expected["group_id"].squeeze(-1).tolist() == [9, 9, 10, 10, 11, 11]
    with pytest.raises(ValueError, match=r"reset\(drawn=\) needs 3 groups, .* 2"):
        player.reset(drawn=drawn[:2])


def test_an_env_of_other_rows_shares_problems_and_has_dialogs_of_its_own(tokenizer):
    env = LLMEnv(EchoTask(5), tokenizer, num_envs=2, repeats=2)
    before = env.reset()["query"]
    small, large = env.with_rows(2), env.with_rows(4)
    assert large.batch_size == (4,) and large.prompts is small.prompts is env.prompts
    data = large.reset(drawn=[env.drawing.draw() for _ in range(2)])
    respond(large, data, [[END]] * 4)
    assert large.specs.shape == data.shape == (4,)
    assert [dialog.problem.query for dialog in env.dialogs] == before
    assert [dialog.responses for dialog in env.dialogs] == [[], []]
    assert env.state_dict()["next_group"] == 3
    with pytest.raises(ValueError, match="num_envs=3 must be a multiple of repeats=2"):
        env.with_rows(3)


def test_state_of_another_dataset_is_refused(tokenizer):
    state = LLMEnv(EchoTask(10), tokenizer, num_envs=2, repeats=2).state_dict()
    with pytest.raises(ValueError, match="num_problems=10, but this one has 9"):
        LLMEnv(EchoTask(9), tokenizer, num_envs=2, repeats=2).load_state_dict(state)


def test_state_of_as_many_other_problems_is_refused(tokenizer, monkeypatch):
    state = LLMEnv(EchoTask(10), tokenizer, num_envs=2, repeats=2).state_dict()
    env = LLMEnv(EchoTask(10), tokenizer, num_envs=2, repeats=2)
    env.load_state_dict(state)
    monkeypatch.setattr(EchoTask, "problems", lambda self, split: [Problem("z", "z")] * 10)
    with pytest.raises(ValueError, match=r"problems.* num_problems=10"):
        LLMEnv(EchoTask(10), tokenizer, num_envs=2, repeats=2).load_state_dict(state)


def test_step_scores_and_records_why_the_dialog_ended(tokenizer, encode):
    env = LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2)
    data = env.reset()
    answer = data["query"][0]
    right, wrong = [*encode(answer), END], [*encode("nonsense"), END]
    # The longest response of the batch is not the one that was cut off.
    after = respond(
        env, data, [right, wrong, [*wrong, *wrong], encode("cut")], cut=[False, False, False, True]
    )
    assert column(after, "reward") == [1.0, 0.25, 0.25, 0.25]
    assert column(after, "correct") == [True, False, False, False]
    assert column(after, "done") == [True, True, True, True]
    assert column(after, "terminated") == [True, True, True, False]
    assert column(after, "truncated") == [False, False, False, True]
    assert column(after, "reward_valid") == [True] * 4
    assert after["next", "text", "response"] == [answer, "nonsense", "nonsensenonsense", "cut"]
    assert after["next", "reward"].dtype == torch.float32


def test_a_failing_score_is_invalid_and_logged_once_per_kind(tokenizer, encode, monkeypatch):
    class Fragile(EchoTask):
        def score(self, problem, responses):
            if responses[0] == "nan":
                return Score(float("nan"), True)
            if responses[0] == "boom":
                raise KeyError("boom")
            return super().score(problem, responses)

    logged = []
    monkeypatch.setattr(torchrl_logger, "error", logged.append)
    env = LLMEnv(Fragile(), tokenizer, num_envs=4, repeats=4)
    for _ in range(2):
        data = env.reset()
        responses = [[*encode(text), END] for text in ("boom", "boom", "nan", data["query"][3])]
        after = respond(env, data, responses)
        assert column(after, "reward_valid") == [False, False, False, True]
        assert column(after, "reward") == [0.0, 0.0, 0.0, 1.0]
        assert column(after, "correct") == [False, False, False, True]
        assert column(after, "done") == [True] * 4
    assert len(logged) == 2


def test_a_failing_next_turn_ends_the_dialog_as_invalid(tokenizer, encode):
    class Broken(TwoTurnTask):
        def next_turn(self, problem, responses):
            raise RuntimeError("no next turn")

    env = LLMEnv(Broken(), tokenizer, num_envs=1, repeats=1, max_turns=2)
    after = respond(env, env.reset(), [[*encode("x"), END]])
    outcome = {
        key: column(after, key)[0] for key in ("reward", "reward_valid", "terminated", "truncated")
    }
    assert outcome == {"reward": 0.0, "reward_valid": False, "terminated": True, "truncated": False}


def test_reward_workers_run_next_turn():
    class SaysWhere(TwoTurnTask):
        def next_turn(self, problem, responses):
            return str(os.getpid())

    with RewardPool(SaysWhere(), 1, timeout_s=300) as pool:
        turn = pool.submit(Dialog(Problem("a", "a"), ["x"], last=False)).result()
    [message] = turn.messages
    assert message["content"].isdecimal() and message["content"] != str(os.getpid())


def test_a_template_without_assistant_turns_is_refused_when_one_is_needed(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    with pytest.raises(ValueError, match=r"model\.chat_template=.*content"):
        LLMEnv(TwoTurnTask(), tokenizer, num_envs=1, repeats=1, max_turns=2)


def test_the_second_turn_keeps_all_tokens_and_adds_the_template(tokenizer, encode):
    env = LLMEnv(TwoTurnTask(), tokenizer, num_envs=4, repeats=4, max_turns=2)
    data = env.reset()
    first = prompts(data)
    # 0 ends with the template's own token, 1 with another, 2 is over after one turn, 3 is cut off.
    responses = [[*encode("x"), END], [*encode("y"), 0], [*encode("stop"), END], encode("z")]
    after = respond(env, data, responses, cut=[False, False, False, True])
    assert column(after, "done") == [False, False, True, True]
    assert column(after, "truncated") == [False, False, False, True]
    assert column(after, "reward") == [0.0, 0.0, 1.0, 1.0]
    turn = encode("<|user|>again?<|end|><|assistant|>")
    assert prompts(after["next"]) == [
        [*first[0], *responses[0], *turn],
        [*first[1], *responses[1], END, *turn],
        [*first[2], *responses[2]],
        [*first[3], *responses[3]],
    ]

    second = env.step_mdp(after)
    second.set("_step", ~second["done"])
    last = respond(env, second, [[*encode("p"), END], [*encode("q"), END], [], []])
    assert column(last, "reward") == [2.0, 2.0, 1.0, 1.0]
    assert column(last, "correct") == [True, True, False, False]
    assert column(last, "terminated") == [True, True, True, False]
    assert column(last, "truncated") == [False, False, False, True]
    assert last["next", "text", "response"] == ["p", "q", "stop", "z"]


def test_a_row_that_takes_no_part_in_a_step_waits_for_its_turn(tokenizer, encode):
    env = LLMEnv(EchoTask(), tokenizer, num_envs=2, repeats=2)
    data = env.reset().set("_step", torch.tensor([[True], [False]]))
    respond(env, data, [[*encode("a"), END], [*encode("b"), END]])
    assert env.stepping.tolist() == [False, True]
    assert [state.responses for state in env.states] == [["a"], []]


def test_a_dialog_that_could_go_on_is_truncated_by_turns_and_by_tokens(tokenizer, encode):
    env = LLMEnv(TwoTurnTask(), tokenizer, num_envs=2, repeats=2, max_turns=1)
    after = respond(env, env.reset(), [[*encode("x"), END], [*encode("stop"), END]])
    assert column(after, "truncated") == [True, False]
    assert column(after, "terminated") == [False, True]

    # The first prompts have 4 to 6 tokens, the second ones 10 more than prompt and response.
    env = LLMEnv(TwoTurnTask(), tokenizer, num_envs=2, repeats=2, max_turns=2, max_prompt_tokens=19)
    data = env.reset()
    room = 19 - 9 - len(prompts(data)[0])
    after = respond(env, data, [[5] * (room - 1) + [END], [5] * room + [END]])
    assert column(after, "truncated") == [False, True]
    assert [len(prompt) for prompt in prompts(after["next"])] == [19, 10 + 1]


def test_the_user_turn_of_a_template_that_ends_turns_with_a_newline(tokenizer, encode):
    template = (
        "{% if messages[0]['role'] != 'system' %}<|system|>Be nice.<|end|>\n{% endif %}"
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    original = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        env = LLMEnv(TwoTurnTask(), tokenizer, num_envs=1, repeats=1, max_turns=2)
        data = env.reset()
        first = prompts(data)[0]
        response = [*encode("x"), END]
        after = respond(env, data, [response])
    finally:
        tokenizer.chat_template = original
    assert prompts(after["next"])[0] == [
        *first,
        *response,
        *encode("\n<|user|>again?<|end|>\n<|assistant|>"),
    ]


def test_long_prompts_are_dropped_and_counted(tokenizer, monkeypatch):
    logged = []
    monkeypatch.setattr(torchrl_logger, "info", logged.append)
    env = LLMEnv(EchoTask(10), tokenizer, num_envs=4, repeats=1, max_prompt_tokens=5)
    assert env.num_dropped == 3  # the queries of 3 letters: c, f, i
    assert len(logged) == 1 and "Dropped 3 of 10" in logged[0]
    drawn = {query for _ in range(7) for query in env.reset()["query"]}
    assert drawn == {
        problem.query for problem in EchoTask(10).problems("train") if len(problem.query) < 3
    }


@pytest.mark.parametrize(("reward", "valid"), [(1e300, False), (-1e39, False), (3e38, True)])
def test_a_reward_beyond_float32_is_invalid(tokenizer, encode, reward, valid):
    class Large(EchoTask):
        def score(self, problem, responses):
            return Score(reward, True)

    env = LLMEnv(Large(), tokenizer, num_envs=1, repeats=1)
    after = respond(env, env.reset(), [[*encode("x"), END]])
    assert column(after, "reward_valid") == [valid]
    assert env.take_counts() == ({} if valid else {"rewards/invalid_not_finite": 1})


def test_a_step_of_rows_that_are_all_done_repeats_their_outcome(tokenizer, encode):
    env = LLMEnv(EchoTask(), tokenizer, num_envs=2, repeats=2)
    data = env.reset()
    after = respond(env, data, [[*encode(data["query"][0]), END], [*encode("x"), END]])
    again = respond(env, env.step_mdp(after), [[], []])
    assert column(again, "reward") == column(after, "reward") == [1.0, 0.25]
    assert column(again, "done") == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_envs": 30, "repeats": 16},
            "num_envs=30 must be a multiple of repeats=16, at least 1: use 16 or",
        ),
        ({"num_envs": 4, "repeats": 0}, "num_envs=4 must be a multiple of repeats=0"),
        ({"num_envs": 4, "repeats": 4, "max_turns": 0}, "max_turns=0 must be at least 1"),
        (
            {"num_envs": 4, "repeats": 4, "max_prompt_tokens": 2},
            "max_prompt_tokens=2 tokens, .*: use",
        ),
    ],
)
def test_bad_arguments_say_what_to_use(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        LLMEnv(EchoTask(10), tokenizer, **arguments)


def test_a_tokenizer_without_chat_template_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="must have a chat template"):
        LLMEnv(EchoTask(), tokenizer, num_envs=1, repeats=1)


def test_rollout_resets_finished_rows_and_stops_when_all_are_done(tokenizer, encode):
    engine = ScriptedEngine(
        lambda prompt, copy: ([*encode("stop"), END], "stop") if copy == 0 else ([7, END], "stop")
    )
    policy = GenerationPolicy(engine, SamplingParams(max_new_tokens=8))
    env = LLMEnv(TwoTurnTask(), tokenizer, num_envs=4, repeats=2, max_turns=2)

    data = env.rollout(5, policy, break_when_any_done=False, break_when_all_done=True)
    assert data.shape == (4, 2)
    assert data["next", "reward"].squeeze(-1)[:, -1].tolist() == [1.0, 2.0, 1.0, 2.0]

    engine.calls.clear()
    data = env.rollout(3, policy, break_when_any_done=False)
    assert data.shape == (4, 3)
    # Rows 0 and 2 are new dialogs each time; rows 1 and 3 start their second one at the third step.
    groups = data["group_id"].squeeze(-1)
    assert groups[0].unique().numel() == 3
    assert groups[1, 0] == groups[1, 1] != groups[1, 2]


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_a_scorer_that_would_end_the_run_costs_its_own_sample(kind) -> None:
    def fail(argument: int) -> int:
        raise kind("enough") if argument else ValueError("mine")

    raised = attempt(fail, 1)
    assert isinstance(raised, RuntimeError)
    assert kind.__name__ in str(raised) and "enough" in str(raised)
    assert isinstance(attempt(fail, 0), ValueError)
