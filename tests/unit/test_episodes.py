"""Stateful tasks: which process gets which request, where the state lives, and that it is closed
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import lazy_stack

from tests.support.echo import EchoTask, add
from tests.support.envs import END, ScriptedEngine, respond
from tests.support.kept import KeepingTask
from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.collectors.summary import sample_rows
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.host.text import reward_text
from torchrl_grpo.reward_pool import RESTARTS, TIMED_OUT, Failure, RewardPool
from torchrl_grpo.tasks.base import Dialog, Message, Problem, Score, Task, Turn, WrappedTask
from torchrl_grpo.tasks.conversations import WithRetry, WithTools
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards
from torchrl_grpo.tasks.with_tests import WithTests
from torchrl_grpo.tools import Toolbox

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "said"


def noted(path: Path, what: str) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{what} ")]


def dialog(episode: str, *responses: str, query: str = "a", last: bool = False) -> Dialog:
    return Dialog(
        Problem(query, query),
        responses,
        [{"role": "user", "content": query}],
        last=last,
        episode=episode,
    )


def play(pool: RewardPool, *dialogs: Dialog) -> list[Turn | Failure]:
    return [future.result(timeout=300) for future in pool.submit_all(dialogs)]


def pids(turns: Sequence[Turn | Failure]) -> list[str]:
    return [
        turn.messages[0]["content"] for turn in turns if isinstance(turn, Turn) and turn.messages
    ]


# Reward workers


@pytest.mark.slow
def test_turns_of_a_dialog_stay_with_the_worker_that_opened_it(path: Path) -> None:
    episodes = [f"e{number}" for number in range(6)]
    with RewardPool(KeepingTask(path), 2, timeout_s=300) as pool:
        opened = play(pool, *[dialog(episode) for episode in episodes])
        assert [turn.messages[-1]["content"] for turn in opened if isinstance(turn, Turn)] == [
            "begin"
        ] * 6
        for responses in (["1"], ["1", "2"]):
            turns = play(pool, *[dialog(episode, *responses) for episode in reversed(episodes)])
            assert sorted(Counter(pids(turns)).values()) == [3, 3]
        scored = play(pool, *[dialog(episode, "1", "2", "4", last=True) for episode in episodes])
        assert [turn.score for turn in scored if isinstance(turn, Turn)] == [Score(7.0, True)] * 6
        assert [turn.reward for turn in scored if isinstance(turn, Turn)] == [4.0] * 6


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_own_dialogs_and_no_others(path: Path) -> None:
    episodes = [f"e{number}" for number in range(4)]
    with RewardPool(KeepingTask(path), 2, timeout_s=300) as pool:
        play(pool, *map(dialog, episodes))
        turns = play(pool, *[dialog(episode, "1") for episode in episodes])
        mates = [
            episode
            for episode, pid in zip(episodes, pids(turns), strict=True)
            if pid == pids(turns)[0]
        ]
        assert len(mates) == 2 and mates[0] == "e0"
        [died] = play(pool, dialog("e0", "1", "exit"))
        assert isinstance(died, Failure) and (died.cause, died.policy_message) == ("crash", "")
        assert "its process ended (status 3)" in died.text
        after = dict(
            zip(
                episodes,
                play(pool, *[dialog(e, "1", "2", last=True) for e in episodes]),
                strict=True,
            )
        )
        lost = [
            one
            for one in mates
            if isinstance(failure := after.pop(one), Failure) and failure.cause == "lost"
        ]
        assert lost == mates
        assert [turn.score for turn in after.values() if isinstance(turn, Turn)] == [
            Score(3.0, True)
        ] * 2
        assert pool.take_counts() == {RESTARTS: 1, TIMED_OUT: 0}
        [again] = play(pool, dialog("new"))
        assert isinstance(again, Turn)
        for episode in episodes:
            pool.end(episode)
    # A process's state ends with it, and its successor is not asked to close a state that it never
    # had.
    assert sorted(noted(path, "close")) == sorted([*after, "new"])


@pytest.mark.slow
def test_a_dialog_that_takes_too_long_costs_its_worker_alone(path: Path) -> None:
    with RewardPool(KeepingTask(path), 2, timeout_s=3.0) as pool:
        play(pool, dialog("a"), dialog("b"))
        hung, fine = play(pool, dialog("a", "hang"), dialog("b", "1"))
        assert (
            isinstance(hung, Failure)
            and hung.cause == "timeout"
            and "env.reward_timeout_s=3" in hung.text
        )
        assert isinstance(fine, Turn)
        assert pool.take_counts() == {RESTARTS: 0, TIMED_OUT: 1}


def test_dialogs_of_one_worker_are_played_many_at_a_time(path: Path) -> None:
    episodes = [f"e{number}" for number in range(64)]
    with RewardPool(KeepingTask(path, at_a_time=64), 1, timeout_s=300) as pool:
        play(pool, *map(dialog, episodes))
        play(pool, *[dialog(episode, "1") for episode in episodes])
        assert sum(map(int, noted(path, "advance"))) == 128
        assert max(map(int, noted(path, "advance"))) > 32 and len(noted(path, "advance")) <= 6


def test_a_dialog_is_closed_once_after_its_turns_and_when_the_pool_ends(path: Path) -> None:
    with RewardPool(KeepingTask(path), 1, timeout_s=300) as pool:
        play(pool, *map(dialog, "abc"))
        turn = pool.submit(dialog("a", "1"))
        for _ in range(2):
            pool.end("a")
        assert isinstance(turn.result(), Turn)
        [failed] = play(pool, dialog("bad", query="bad"))
        assert isinstance(failed, Failure) and failed.text.endswith("ValueError: no such game")
        assert noted(path, "close") == ["a"]
        [late] = play(pool, dialog("a", "1", "1"))
        assert isinstance(late, Failure) and late.cause == "lost"
        play(pool, dialog("b"))  # opened once more: the abandoned one is closed
        assert noted(path, "close") == ["a", "b"]
        pool.end("a")
    assert noted(path, "close") == ["a", "b", "b", "bad", "c"]
    pool.end("c")


@pytest.mark.slow
def test_a_worker_that_dies_while_it_opens_gives_failures(path: Path) -> None:
    with RewardPool(KeepingTask(path), 1, timeout_s=300) as pool:
        dead, alive = play(pool, dialog("a", query="die"), dialog("b"))
        assert isinstance(dead, Failure) and dead.cause == "crash"
        assert isinstance(alive, Turn)


def test_tools_and_rewards_of_a_turn_travel_infinite_ones_do_not(path: Path) -> None:
    class Telling(KeepingTask):
        def turn(self, dialog: Dialog) -> Turn:
            turn = super().turn(dialog)
            return (
                turn
                if dialog.responses
                else Turn(turn.messages, None, {}, 0.5, [{"type": "function"}])
            )

    with RewardPool(Telling(path), 1, timeout_s=300) as pool:
        [opened] = play(pool, dialog("a"))
        assert (
            isinstance(opened, Turn)
            and opened.tools == [{"type": "function"}]
            and opened.reward == 0.5
        )
        [endless] = play(pool, dialog("a", "inf"))
        assert isinstance(endless, Failure) and endless.cause == "not_finite"


# The environment


def engine(encode, *orders: str) -> ScriptedEngine:
    """Return an engine that replies with the orders of a row, one per turn; ``cut`` is cut off."""
    turns: Counter[str] = Counter()

    def rule(prompt: torch.Tensor, copy: int) -> tuple[list[int], str]:
        order = orders[min(turns["all"], len(orders) - 1)]
        turns["all"] += 1
        return (encode("9"), "length") if order == "cut" else ([*encode(order), END], "stop")

    return ScriptedEngine(rule)


def collect(env: LLMEnv, engine: ScriptedEngine) -> torch.Tensor:
    return RolloutCollector(
        env, GenerationPolicy(engine, SamplingParams(max_new_tokens=4))
    ).rollout()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("orders", "turns", "closed"),
    [
        (["1", "stop"], 4, 1),  # scored
        (["cut"], 4, 1),  # cut off by the token limit
        (["1", "1"], 2, 1),  # no turn left
        (["1", "boom"], 4, 1),  # failed
    ],
)
def test_a_dialog_is_closed_once_however_it_ends(
    tokenizer, encode, path, workers, orders, turns, closed
):
    pool = RewardPool(KeepingTask(path), 1, timeout_s=300) if workers else None
    env = LLMEnv(
        KeepingTask(path), tokenizer, num_envs=1, repeats=1, max_turns=turns, reward_pool=pool
    )
    collect(env, engine(encode, *orders))
    env.close()
    if pool is not None:
        pool.close()
    assert noted(path, "open") == noted(path, "close") == ["train-1/0/0"]


def test_what_has_no_room_is_scored_and_then_closed(tokenizer, encode, path):
    env = LLMEnv(
        KeepingTask(path), tokenizer, num_envs=1, repeats=1, max_turns=9, max_dialog_tokens=20
    )
    batch = collect(env, engine(encode, "1"))
    assert (
        batch["next", "truncated"].item()
        and batch["next", "reward"].item() == len(noted(path, "advance")) - 2
    )
    assert noted(path, "close") == ["train-1/0/0"]


@pytest.mark.parametrize("end", ["reset", "close", "error"])
def test_a_dialog_that_is_given_up_is_closed(tokenizer, encode, path, end):
    env = LLMEnv(KeepingTask(path), tokenizer, num_envs=2, repeats=2, max_turns=3)
    respond(env, env.reset(), [[*encode("1"), END]] * 2)
    if end == "error":
        broken = ScriptedEngine(lambda prompt, copy: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            collect(env, broken)
        assert noted(path, "close") == ["train-2/0/0", "train-2/0/1"]
    env.reset() if end != "close" else env.close()
    assert noted(path, "close")[:2] == ["train-2/0/0", "train-2/0/1"]
    env.close()
    assert Counter(noted(path, "close")) == Counter(noted(path, "open"))


def test_a_prompt_is_what_the_opening_says_and_equal_ones_share_a_request(tokenizer, encode, path):
    task = KeepingTask(path)
    env = LLMEnv(task, tokenizer, num_envs=4, repeats=4, max_turns=2)
    scripted = engine(encode, "stop")
    batch = collect(env, scripted)
    [query] = set(batch["query"])
    prompt = encode(f"<|user|>{query}<|end|><|user|>begin<|end|><|assistant|>")
    assert scripted.calls == [([prompt], 4)]
    assert [row.get(keys.PROMPT).tolist() for row in batch.unbind(0)] == [prompt] * 4


def test_tools_of_an_opening_are_in_its_prompt_and_calls_are_in_raw(path):
    from transformers import AutoTokenizer

    from torchrl_grpo.starter import starter_path

    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    raws = []

    class Telling(KeepingTask):
        def turn(self, dialog: Dialog) -> Turn:
            raws.append(dialog.raw)
            turn = super().turn(dialog)
            return (
                turn
                if dialog.responses
                else Turn(turn.messages, None, {}, None, [{"function": {"name": "press"}}])
            )

    env = LLMEnv(Telling(path), tokenizer, num_envs=1, repeats=1, max_turns=2)
    [row] = env.reset().get("tokens").unbind(0)
    assert tokenizer.decode(row["prompt"]).startswith("<|system|>tools: press<|end|>")
    end = tokenizer.eos_token_id
    respond(env, env.reset(), [[*tokenizer("stop", add_special_tokens=False)["input_ids"], end]])
    assert raws[-1] == f"stop{tokenizer.decode([end])}"


@pytest.mark.parametrize("queries", [["bad"], ["bad", "good"]])
def test_a_dialog_that_does_not_open_is_invalid_and_not_sampled(tokenizer, encode, path, queries):
    env = LLMEnv(
        KeepingTask(path, queries), tokenizer, num_envs=2 * len(queries), repeats=2, max_turns=3
    )
    scripted = engine(encode, "1", "1", "stop")
    batch = collect(env, scripted)
    bad = torch.tensor([query == "bad" for query in batch["query"]])
    assert torch.equal(batch["reward_valid"].squeeze(-1), ~bad)
    assert batch["next", "reward"].squeeze(-1)[bad].tolist() == [0.0, 0.0]
    lengths = [row.get(keys.RESPONSE).numel() for row in batch.unbind(0)]
    assert [length == 0 for length in lengths] == bad.tolist()
    assert all(
        "bad" not in tokenizer.decode(prompt) for prompts, _ in scripted.calls for prompt in prompts
    )
    assert batch.unbind(0)[int(bad.nonzero()[0])]["reward_error"].startswith(
        "ValueError: no such game"
    )
    assert env.take_counts()["rewards/invalid_exception"] == 2
    assert Counter(noted(path, "close")) == Counter(noted(path, "open"))


def test_a_first_prompt_without_room_is_invalid(tokenizer, path):
    env = LLMEnv(KeepingTask(path, ["a"]), tokenizer, num_envs=1, repeats=1, max_prompt_tokens=4)
    env.reset()
    assert [state.outcome.error for state in env.states] == [
        "ValueError: the first prompt of a dialog must have 1 to 4 tokens, but has 11."
    ]


def test_keys_of_dialogs_are_the_same_in_the_next_run_and_differ_in_one(tokenizer, path):
    def opened() -> list[str]:
        path.unlink(missing_ok=True)
        task = KeepingTask(path)
        envs = [
            LLMEnv(task, tokenizer, num_envs=4, repeats=2),
            LLMEnv(task, tokenizer, num_envs=2, repeats=1, split="test"),
            LLMEnv(task, tokenizer, num_envs=4, repeats=2, split="test"),
        ]
        for env in envs * 2:
            env.reset()
        return noted(path, "open")

    episodes = opened()
    assert len(set(episodes)) == len(episodes) == 20
    assert opened() == episodes


def test_rewards_of_turns_stand_at_their_tokens_and_sum_to_the_reward(tokenizer, encode, path):
    env = LLMEnv(KeepingTask(path), tokenizer, num_envs=1, repeats=1, max_turns=4)
    [row] = collect(env, engine(encode, "1", "0", "2", "stop")).unbind(0)
    assert row[keys.REWARD].item() == 3.0
    at = row[keys.TURN_REWARDS]
    ends = (row[keys.FULL] == END) & row[keys.ASSISTANT_MASK]
    assert at[ends].tolist() == [1.0, 0.0, 2.0, 0.0] and at[~ends].abs().sum() == 0
    [sample] = sample_rows(lazy_stack([row]), "test")
    assert sample["turn_rewards"] == [1.0, 0.0, 2.0, 0.0]
    assert reward_text(sample) == "3 (turns: 1, 0, 2, 0)"


def test_rewards_of_turns_are_exact_where_their_sum_is_rounded(tokenizer, encode, path):
    """-0.1 and 100.8 make 100.7, which float32 can only represent to 1e-6."""
    env = LLMEnv(KeepingTask(path), tokenizer, num_envs=1, repeats=1, max_turns=2)
    [row] = collect(env, engine(encode, "-0.1", "100.8")).unbind(0)
    assert row[keys.TURN_REWARDS][row[keys.TURN_REWARDS] != 0].tolist() == [-0.1, 100.8]


# Wrappers of a task


def kinds(path: Path) -> list[Task]:
    task = KeepingTask(path)
    return [
        WrappedTask(task),
        WithRetry(task, "again"),
        WithRewards(task, make_rewards({"fn": "gsm8k"})),
        WithTools(task, Toolbox([add])),
        MixedTask([EchoTask(), task], [1, 1], ["echo", "kept"]),
        WithTests(EchoTask(), {"kept": task}),
    ]


@pytest.mark.parametrize("number", range(6))
def test_what_wraps_a_task_hands_opening_turns_and_closing_on(path: Path, number: int) -> None:
    task = kinds(path)[number]
    assert task.is_stateful
    problem = Problem("a", "a", dataset="kept")
    chat: list[Message] = [{"role": "user", "content": "a"}]
    [opened] = task.advance([Dialog(problem, [], chat, last=False, episode="e")])
    assert isinstance(opened, Turn) and opened.messages == [
        *chat,
        {"role": "user", "content": "begin"},
    ]
    [turn] = task.advance([Dialog(problem, ["2"], chat, last=False, episode="e")])
    assert isinstance(turn, Turn) and turn.reward == 2.0 and turn.messages
    task.close("e")
    assert noted(path, "close") == ["e"]


def test_a_task_that_keeps_nothing_opens_with_its_own_messages(path: Path) -> None:
    mixed = kinds(path)[4]
    problem = Problem("abc", "abc", dataset="echo")
    [opened] = mixed.advance(
        [Dialog(problem, [], mixed.messages(problem), last=False, episode="e")]
    )
    assert opened == Turn([{"role": "user", "content": "abc"}], None)


def test_reward_functions_score_a_dialog_that_its_task_plays(path: Path) -> None:
    task = WithRewards(KeepingTask(path), make_rewards({"fn": "gsm8k"}))
    task.advance([dialog("e")])
    [turn] = task.advance([dialog("e", "stop", query="7")])
    assert isinstance(turn, Turn) and turn.score == Score(0.0, False, {"gsm8k": 0.0})


def test_tools_are_added_to_those_of_an_opening_and_their_calls_are_run(path: Path) -> None:
    class Telling(KeepingTask):
        def turn(self, dialog: Dialog) -> Turn:
            turn = super().turn(dialog)
            return (
                turn if dialog.responses else Turn(turn.messages, None, {}, None, [{"name": "own"}])
            )

    task = WithTools(Telling(path), Toolbox([add]))
    [opened] = task.advance([dialog("e")])
    assert isinstance(opened, Turn) and opened.tools == [{"name": "own"}, *task.toolbox.schemas]
    call = '<tool_call>{"name": "%s", "arguments": {"a": 1, "b": 2}}</tool_call>'
    said = dialog("e", "3")
    ours, theirs = (replace(said, raw=call % name) for name in ("add", "own"))
    [run, handed] = task.advance([ours, theirs])
    assert isinstance(run, Turn) and run.messages and run.messages[0]["content"] == "3"
    assert isinstance(handed, Turn) and handed.reward == 3.0
