"""Environments: classes as in TRL's guides, text games, the price of failures, and that each one is
closed.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support import games, trl_environments
from tests.support.envs import END, ScriptedEngine, column, respond
from tests.support.waiting import PATIENCE_S
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.config.env import EnvConfig
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.reward_pool import Failure, RewardPool, advance
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Turn
from torchrl_grpo.tasks.conversations import WithRetry
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.seeds import SeedsTask
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards
from torchrl_grpo.transforms import GroupAdvantage

pytestmark = pytest.mark.usefixtures("patient")
TRL = "tests/support/trl_environments.py"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(games, "PATH", str(tmp_path / "said"))
    monkeypatch.setenv("GAMES_PATH", str(tmp_path / "said"))
    return tmp_path / "said"


def noted(path: Path, **expected: int) -> Counter[str]:
    """Return the notes, waiting for the expected ones because environments are closed in their own
    threads.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        counts = Counter(path.read_text().split() if path.exists() else ())
        if counts == expected or time.monotonic() > end:
            return counts
        time.sleep(0.01)


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


class Play:
    """A dialog with a task, turn by turn."""

    def __init__(self, task: Any, problem: Problem, episode: str = "e") -> None:
        self.task, self.problem, self.episode = task, problem, episode
        self.said: list[str] = []
        self.chat = task.messages(problem)
        self.opened = self.turn(None)
        if isinstance(self.opened, Turn):
            self.chat = list(self.opened.messages or ())

    def turn(self, response: str | None, *, last: bool = False, cut: bool = False) -> Any:
        self.said += [] if response is None else [response]
        chat = [*self.chat, *({"role": "assistant", "content": text} for text in self.said)]
        dialog = Dialog(
            self.problem,
            list(self.said),
            chat,
            [],
            "length" if cut else "stop",
            response or "",
            last,
            self.episode,
        )
        [turn] = self.task.advance([dialog])
        return turn


def task_of(kind: type, **options: Any) -> WithEnvironment:
    return WithEnvironment(SeedsTask(8), {"": Kind(kind)}, **options)


def problem(task: Any, number: int = 0) -> Problem:
    result: Problem = task.problems("train")[number]
    return result


# TRL's contract


def test_trls_environment_that_makes_its_own_tasks_runs_as_it_is() -> None:
    task = make_task(EnvConfig(environment=f"{TRL}:IncrementEnv", max_turns=3))
    random.seed(5)
    target = random.randint(1, 6)
    random.seed(5)
    play = Play(task, problem(task))
    assert play.opened.messages == [
        {"role": "user", "content": f"Increment the counter by {target}."}
    ]
    [schema] = play.opened.tools
    assert schema["function"]["name"] == "increment"
    assert schema["function"]["parameters"]["properties"] == {
        "step": {"type": "integer", "description": "Value to add to the counter."}
    }
    turn = play.turn(call("increment", step=target - 1))
    assert [message["content"] for message in turn.messages] == [
        str(target - 1)
    ] and turn.score is None
    turn = play.turn(
        call("increment", step=1), last=True
    )  # constructed too: the reward is its result
    assert turn.score == Score(1.0, True) and turn.messages[0]["content"] == str(target)


@pytest.mark.slow
def test_trls_environment_with_a_data_set_gets_its_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"Increment the counter to {i}."}], "target": i}
        for i in range(1, 7)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = make_task(EnvConfig(dataset=str(data), environment=f"{TRL}:TargetEnv", max_turns=3))
    play = Play(task, problem(task, 2))
    assert play.opened.messages == rows[2]["prompt"]
    play.turn(call("increment", step=3))
    assert play.turn("Done.").score == Score(1.0, True)


@pytest.mark.slow
def test_trls_several_environments_go_by_the_column(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": "Play. ", "environment": name, "target": 1} for name in ("counter", "game")]
    data.write_text("\n".join(map(json.dumps, rows)))
    kinds = {"counter": f"{TRL}:TargetEnv", "game": f"{TRL}:GameEnv"}
    task = make_task(
        EnvConfig(dataset=str(data), environment=kinds, max_turns=2, reward=f"{TRL}:steady")
    )
    counter, game = (Play(task, problem(task, number), str(number)) for number in (0, 1))
    assert [
        [tool["function"]["name"] for tool in play.opened.tools] for play in (counter, game)
    ] == [
        ["increment"],
        ["move"],
    ]
    assert game.opened.messages[-1]["content"] == "Play. Reach the goal tile."
    assert game.turn(call("move", action="up")).messages[0]["content"] == "moved up"
    assert (
        "there is no tool 'move'" in counter.turn(call("move", action="up")).messages[0]["content"]
    )
    rows[1]["environment"] = "gmae"
    data.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError,
        match=r"env\.environment, \['counter', 'game'\], .*'gmae'",
    ):
        make_task(EnvConfig(dataset=str(data), environment=kinds, reward=f"{TRL}:steady"))


@pytest.mark.slow
def test_trls_reward_functions_read_the_environment() -> None:
    task = make_task(
        EnvConfig(environment=f"{TRL}:WordleEnv", reward=f"{TRL}:reward_func", max_turns=4)
    )
    play = Play(task, problem(task))
    assert play.turn(call("guess", guess="[house]")).messages[0]["content"] == "GGGGG"
    assert (
        play.turn(call("guess", guess="[mouse]")).messages[0]["content"]
        == "error: ValueError: Game over."
    )
    assert play.turn("I won.").score == Score(1.0, True, {"reward_func": 1.0})


@pytest.mark.slow
def test_the_reward_of_functions_and_the_environments_own_add_up() -> None:
    spec = {"fn": f"{TRL}:format_reward", "weight": 2.0}
    task = make_task(EnvConfig(environment=f"{TRL}:IncrementEnv", reward=spec, max_turns=4))
    play = Play(task, problem(task))
    target = int(play.opened.messages[0]["content"].split()[-1].rstrip("."))
    play.turn(call("increment", step=target))
    score = play.turn("Done: tool_call").score
    assert score == Score(1.5, True, {"format_reward": 0.25, "IncrementEnv": 1.0})


def test_tools_are_beside_the_methods_of_an_environment() -> None:
    tools = ["tests.support.echo:add"]
    task = make_task(EnvConfig(environment=f"{TRL}:IncrementEnv", tools=tools, max_turns=2))
    play = Play(task, problem(task))
    assert [tool["function"]["name"] for tool in play.opened.tools] == ["add", "increment"]
    turn = play.turn(call("add", a=2, b=3) + call("increment", step=1))
    assert [message["content"] for message in turn.messages] == ["5", "1"]
    assert turn.counts["tools/calls"] == 2 and turn.counts["tools/errors"] == 0


def test_a_call_drafted_in_a_thought_changes_no_state() -> None:
    task = make_task(EnvConfig(environment=f"{TRL}:IncrementEnv", max_turns=3))
    play = Play(task, problem(task))
    draft = f"<think>{call('increment', step=1)}</think>"
    for result in ("1", "2"):
        turn = play.turn(f"{draft}{call('increment', step=1)}")
        assert [message["content"] for message in turn.messages] == [result]
    assert play.turn(draft).messages is None  # the turn calls nothing, so the dialog is over


# Text games


@pytest.mark.parametrize("kind", [games.Game, games.AsyncGame])
def test_a_text_game_answers_and_rewards_each_response(path: Path, kind: type) -> None:
    task = task_of(kind)
    play = Play(task, problem(task, 3))
    assert play.opened.messages == [{"role": "user", "content": "game 3"}] and not play.opened.tools
    first = play.turn("0.25")
    assert (first.messages, first.reward, first.score) == (
        [{"role": "user", "content": "0.25"}],
        0.25,
        None,
    )
    second = play.turn("0.5")
    assert (second.messages[0]["content"], second.reward) == ("0.25 0.5", 0.5)
    end = play.turn("stop")
    assert (end.messages, end.reward, end.score) == (None, 0.0, Score(0.75, False))
    task.close("e")
    assert noted(path, made=1, closed=1) == {"made": 1, "closed": 1}


def test_a_response_that_was_cut_off_is_a_step_and_a_last_turn_is_scored(path: Path) -> None:
    task = task_of(games.Game)
    play = Play(task, problem(task))
    play.turn("1")
    cut = play.turn("-5", cut=True)
    assert (cut.messages[0]["content"], cut.reward, cut.score) == ("1 -5", -5.0, None)
    last = play.turn("2", last=True)
    assert (last.messages[0]["content"], last.reward, last.score) == (
        "1 -5 2",
        2.0,
        Score(-2.0, False),
    )


def test_a_step_whose_answer_finds_no_room_is_taken_once(path: Path) -> None:
    task = task_of(games.Game)
    play = Play(task, problem(task))
    play.turn("1")
    play.said.pop()
    assert play.turn("1", cut=True) == Turn(None, Score(1.0, True))  # the environment asks again


@pytest.mark.parametrize("room", [200, 12])
def test_a_game_goes_on_after_a_cut_off_response_if_there_is_room(
    room: int, tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], list[int]]
) -> None:
    env = LLMEnv(
        task_of(games.Game), tokenizer, num_envs=1, repeats=1, max_turns=3, max_dialog_tokens=room
    )
    data = env.reset()
    prompt = data["tokens"][0]["prompt"].tolist()
    data = respond(env, data, [encode("-1")], [True])
    answer = encode("<|end|><|user|>-1<|end|><|assistant|>") if room == 200 else []
    assert data["next", "tokens"][0]["prompt"].tolist() == [*prompt, *encode("-1"), *answer]
    if room == 200:
        assert column(data, "done") == [False]
        data = respond(env, env.step_mdp(data), [[*encode("stop"), END]])
    assert [column(data, key) for key in ("reward", "reward_valid", "done", "truncated")] == [
        [-1.0], [True], [True], [room == 12]
    ]  # fmt: skip


def test_members_that_start_differently_are_compared(
    tokenizer: PreTrainedTokenizerFast, encode: Callable[[str], list[int]]
) -> None:
    class DrawsItsOwn:  # as TRL's examples do
        starts = iter(range(100))

        def reset(self) -> str:
            self.start = next(self.starts)
            return f"Say {self.start}."

        def step(self, response: str) -> tuple[str, float, bool]:
            return "", float(self.start), True

    engine = ScriptedEngine(lambda prompt, copy: ([*encode("1"), END], "stop"))
    batch = RolloutCollector(
        LLMEnv(task_of(DrawsItsOwn), tokenizer, num_envs=4, repeats=4),
        GenerationPolicy(engine, SamplingParams(max_new_tokens=8)),
    ).rollout()
    assert len({row["query"] for row in batch.unbind(0)}) == 4
    advantage = GroupAdvantage(4, std="none")(batch)["advantage"].squeeze(-1)
    assert sorted(advantage.tolist()) == [-1.5, -0.5, 0.5, 1.5]


def test_a_step_that_takes_truncated_decides_about_a_cut_off_response() -> None:
    class Told(games.Game):
        def step(self, response: str, truncated: bool = False) -> tuple[str, float, bool]:
            return "cut" if truncated else "whole", -1.0 if truncated else 0.5, truncated

    task = task_of(Told)
    play = Play(task, problem(task))
    whole, cut = play.turn("a"), play.turn("b", cut=True)
    assert (whole.messages[0]["content"], whole.reward) == ("whole", 0.5)
    assert (cut.messages, cut.reward, cut.score) == (None, -1.0, Score(-0.5, False))


@pytest.mark.parametrize("value", ["1", None, float("nan"), [1.0]])
def test_a_reward_that_is_no_number_is_invalid(value: Any) -> None:
    class Steps(games.Game):
        def step(self, response: str) -> Any:
            return "", value, True

    class Tools(games.Game):
        step = None  # type: ignore[assignment]

        def play(self) -> str:
            """Play."""
            return ""

        def get_reward(self) -> Any:
            return value

    for kind in (Steps, Tools):
        [turn] = advance(task := task_of(kind), [dialog("e")])
        [turn] = advance(task, [dialog("e", "x")])
        assert (
            isinstance(turn, Failure) and turn.cause == "not_finite" and kind.__name__ in turn.text
        )


@pytest.mark.slow
def test_a_coroutine_that_blocks_its_loop_costs_its_own_dialog_alone() -> None:
    blocked = threading.Event()

    class Blocks(games.AsyncGame):
        async def step(self, response: str) -> tuple[str, float, bool]:  # type: ignore[override]
            if response == "block":
                blocked.wait()
            return await super().step(response)

    task = task_of(Blocks)
    advance(task, [dialog(query) for query in "abc"])
    turns = advance(task, [dialog("a", "block"), dialog("b", "1"), dialog("c", "2")], 5.0)
    blocked.set()
    assert isinstance(turns[0], Failure) and turns[0].cause == "timeout"
    assert [turn.reward for turn in turns[1:] if isinstance(turn, Turn)] == [1.0, 2.0]


def test_environments_start_side_by_side_and_fail_alone(path: Path) -> None:
    task = task_of(games.StartsWithOthers)
    dialogs = [
        Dialog(question, [], task.messages(question), last=False, episode=str(i))
        for i, question in enumerate(task.problems("train"))
    ]
    turns = task.advance(dialogs)
    assert [isinstance(turn, OSError) for turn in turns] == [
        bool(number % 2) for number in range(8)
    ]
    for item in dialogs:
        task.close(item.episode)
    assert noted(path, made=8, closed=8) == {"made": 8, "closed": 8}


# In reward workers


def play(pool: RewardPool, *dialogs: Dialog) -> list[Turn | Failure]:
    return [future.result(timeout=300) for future in pool.submit_all(dialogs)]


def dialog(episode: str, *responses: str) -> Dialog:
    chat = [{"role": "user", "content": ""}]
    return Dialog(Problem("", None, {"seed": 1}), responses, chat, last=False, episode=episode)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [games.Game, games.AsyncGame])
def test_an_environment_that_hangs_costs_its_own_dialog_alone(path: Path, kind: type) -> None:
    with RewardPool(task_of(kind), 1, timeout_s=3.0) as pool:
        assert all(isinstance(turn, Turn) for turn in play(pool, *map(dialog, "abc")))
        hung, *others = play(pool, dialog("a", "hang"), dialog("b", "1"), dialog("c", "2"))
        assert (
            isinstance(hung, Failure)
            and hung.cause == "timeout"
            and "env.reward_timeout_s=3" in hung.text
        )
        assert [turn.reward for turn in others if isinstance(turn, Turn)] == [1.0, 2.0]
        [alone] = play(pool, dialog("b", "1", "hang"))
        assert isinstance(alone, Failure) and alone.cause == "timeout"
        [after] = play(pool, dialog("c", "2", "4"))
        assert isinstance(after, Turn) and after.reward == 4.0
        assert set(pool.take_counts().values()) == {0}


@pytest.mark.slow
def test_a_process_with_many_that_hang_is_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RewardPool(task_of(games.Game), 1, timeout_s=3.0) as pool:
        episodes = [f"e{number}" for number in range(16)]
        play(pool, *map(dialog, episodes), dialog("other"))
        hung = play(pool, *[dialog(episode, "hang") for episode in episodes])
        assert {turn.cause for turn in hung if isinstance(turn, Failure)} <= {
            "timeout",
            "crash",
            "lost",
        }
        [next_one] = play(pool, dialog("next"))
        assert isinstance(next_one, Turn) and pool.take_counts()["workers/restarts_reward"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "boom", "exit", "pool", "end"])
def test_an_environment_is_closed_once_in_each_way_a_dialog_ends(path: Path, end: str) -> None:
    with RewardPool(task_of(games.Game), 1, timeout_s=300) as pool:
        play(pool, dialog("a"))
        if end not in ("pool", "end"):
            play(pool, dialog("a", end))
        if end != "pool":
            pool.end("a")
            pool.end("a")
        play(pool, dialog("b"))
        pool.end("b")
    closed = 1 if end == "exit" else 2  # the contents of a process that dies are lost with it
    assert noted(path, made=2, closed=closed) == {"made": 2, "closed": closed}


# Refusals


class NoReset:
    def step(self, response: str) -> tuple[str, float, bool]:
        raise NotImplementedError


class NoTools:
    def reset(self) -> None: ...
    def get_reward(self) -> float:
        return 0.0


class NoReward:
    def reset(self) -> str:
        return "Press."

    def press(self) -> str:
        """Presses the button."""
        return "pressed"


class Undescribed(NoTools):
    def press(self, hard):
        return hard


class Wants(NoReward):
    def reset(self, level: int) -> str:  # type: ignore[override]
        return str(level)

    def get_reward(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoReset, r"env.environment=NoReset must have reset\(self"),
        (NoTools, r"env.environment=NoTools must have step\(self, response\) or public methods"),
        (NoReward, r"env.environment=NoReward needs env.reward"),
        (Undescribed, r"env.tools: press must have type hints and a docstring"),
        (Wants, r"reset of the environment Wants needs level, but the columns are \['seed'\]"),
    ],
)
def test_a_class_that_cannot_play_is_refused_before_a_dialog(kind: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task = task_of(kind)
        task.check(task.problems("train"))


def hinted(response: str, hint: str) -> float:
    return float(response == hint)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda scored, rewards: scored,
        lambda scored, rewards: WithRetry(scored, "Again."),
        lambda scored, rewards: MixedTask([scored, SeedsTask()], [1, 1], ["a", "b"]),
        lambda scored, rewards: WithEnvironment(scored, {"": Kind(NoReward)}, judged=True),
        lambda scored, rewards: WithEnvironment(SeedsTask(), {"": Kind(NoReward)}, rewards=rewards),
    ],
    ids=["rewards", "wrapped", "mixed", "judged", "environment"],
)
def test_a_problem_without_a_column_of_its_reward_is_refused(wrap: Any) -> None:
    rewards = make_rewards({"fn": hinted, "name": "hinted"})
    task = wrap(WithRewards(SeedsTask(), rewards), rewards)
    task.check_problem(Problem("?", None, {"hint": "7"}, dataset="a"))
    with pytest.raises(ValueError, match="reward hinted needs hint"):
        task.check_problem(Problem("?", None, {"solution": "7"}, dataset="a"))


def test_what_reset_and_step_return_is_checked() -> None:
    class Silent(games.Game):
        def reset(self, seed: int) -> None:  # type: ignore[override]
            self.said = []

        def step(self, response: str) -> Any:
            return (None, 0.0, False) if response == "silent" else response

    task = task_of(Silent)
    assert "must return the first prompt if there is no data set" in str(
        Play(task, problem(task)).opened
    )
    prompted = WithEnvironment(SeedsTask(4, "Number {seed}."), {"": Kind(Silent)})
    started = Play(prompted, problem(prompted, 3))
    assert started.opened.messages == [{"role": "user", "content": "Number 3."}]
    assert "must return (observation, reward, done), but it returned 'no'" in str(
        started.turn("no")
    )
    assert "must return an observation unless the game is over" in str(started.turn("silent"))


@pytest.mark.slow
def test_an_environment_on_the_command_line_replaces_the_data_set() -> None:
    from torchrl_grpo.config.command_line import compose

    config = compose(
        "grpo_arithmetic", [f"env.environment={TRL}:IncrementEnv", "env.reward_timeout_s=5"]
    )
    assert config.env.dataset is None
    unchanged = compose(
        "grpo_arithmetic", [f"env.environment={TRL}:IncrementEnv", "env.dataset=arithmetic"]
    )
    assert unchanged.env.dataset == "arithmetic"


def test_functions_of_environments_are_told_by_their_arguments() -> None:
    def own(response: str, environments: list[Any]) -> float:
        return float(len(environments) == 1 and environments[0].reward and response == "Done.")

    rewards = make_rewards({"fn": own, "name": "own"})
    rewards.check(Problem("", "", {"seed": 1}), has_environment=True)
    with pytest.raises(ValueError, match="reward own needs environments"):
        rewards.check(Problem("", "", {"seed": 1}))
    task = WithEnvironment(SeedsTask(4), {"": Kind(trl_environments.WordleEnv)}, rewards=rewards)
    started = Play(task, problem(task))
    started.turn(call("guess", guess="[house]"))
    assert started.turn("Done.").score == Score(1.0, True, {"own": 1.0})
