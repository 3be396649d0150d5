"""Rewards that compare the responses to a problem."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDictBase
from transformers import AutoTokenizer

from tests.support.comparisons import (
    Counting,
    longer,
    longer_later,
    own,
    play_twice,
    said,
    said_to_group,
)
from tests.support.configs import compose_config
from tests.support.envs import END, ScriptedEngine
from tests.support.runs import run
from torchrl_grpo import keys
from torchrl_grpo.assembly.tasks import read_task
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.collectors.summary import sample_rows
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.integrations.agents import WithAgent
from torchrl_grpo.integrations.agents.programs import Function
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Task
from torchrl_grpo.tasks.conversations import WithRetry
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards

TOKENIZER = AutoTokenizer.from_pretrained(starter_path())


def play(
    task: Task,
    texts: list[Any],
    *,
    groups: int = 1,
    turns: int = 1,
    pool: bool = False,
) -> TensorDictBase:
    """Play groups in which member i writes ``texts[i]``, or its entries in turn."""
    engine: Any = ScriptedEngine(lambda prompt, copy: ([], "stop"))
    written = [[text] if isinstance(text, str) else list(text) for text in texts * groups]

    def generate(prompts: Any, n: int, params: Any, on_finished: Any = None) -> Any:
        waiting = [entry for entry in written if entry]
        texts = iter([entry.pop(0) for entry in waiting])
        engine.rule = lambda prompt, copy: (
            [*TOKENIZER(next(texts), add_special_tokens=False)["input_ids"], END],
            "stop",
        )
        return ScriptedEngine.generate(engine, prompts, n, params, on_finished)

    engine.generate = generate
    repeats = len(texts)
    workers = RewardPool(task, 2, timeout_s=300) if pool else None
    env = LLMEnv(
        task, TOKENIZER, num_envs=groups * repeats, repeats=repeats, max_turns=turns,
        reward_pool=workers,
    )  # fmt: skip
    try:
        return RolloutCollector(env, GenerationPolicy(engine, SamplingParams(16))).rollout()
    finally:
        if workers is not None:
            workers.close()


def with_rewards(spec: Any) -> WithRewards:
    return WithRewards(ArithmeticTask(), make_rewards(spec))


def outcomes(batch: TensorDictBase) -> list[tuple[float, bool, Any]]:
    rows = sample_rows(batch, "train")
    return [(row["reward"], row["valid"], row.get("parts")) for row in rows]


@pytest.mark.parametrize("pool", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", [longer, longer_later])
def test_invalid_members_do_not_shift_the_others_rewards(
    fn: Callable[..., Any], pool: bool
) -> None:
    task = with_rewards([{"fn": fn, "name": "rank", "weight": 0.5}, own])
    batch = play(task, ["1", "x9999", "1222", "n", "22"], groups=2, pool=pool)
    seen = {"rank/seen": 4.0} if fn is longer_later else {}
    one = [
        (1.0, True, {"own": 1.0, "rank": 0.0, **seen}),
        (0.0, False, None),
        (2.5, True, {"own": 1.0, "rank": 3.0, **seen}),
        (0.0, True, {"own": None, "rank": 0.0, **seen}),
        (1.0, True, {"own": 0.0, "rank": 2.0, **seen}),
    ]
    assert outcomes(batch) == one * 2
    assert (
        batch["correct" if "correct" in batch else ("next", "correct")].squeeze(-1).tolist()
        == [True, False, True, False, False] * 2
    )


def said_by_trl(completions: Sequence[str]) -> list[Any]:
    return [{"": 1.0, "feedback": f"TRL {text}"} for text in completions]


@pytest.mark.parametrize("pool", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_feedback_of_a_group_function_follows_that_of_each_response(pool: bool) -> None:
    task = with_rewards([said, said_to_group])
    batch = play(task, ["1", "n", "22", "333", "4444"], groups=2, pool=pool)
    feedback = [row[keys.FEEDBACK] for row in batch.unbind(0)]
    assert feedback == 2 * [
        "own 1\n1\nof group",
        "own n\nn\nof group",
        "22\nof group",
        "own 333\n333\nof group",
        "own 4444",
    ]
    parts = {"said": 1.0, "said_to_group": 3.0}
    assert outcomes(batch)[3] == (4.0, True, parts)


def test_feedback_of_a_group_function_in_trls_form_is_kept() -> None:
    batch = play(with_rewards({"fn": said_by_trl, "per": "group"}), ["1", "22"])
    assert [row[keys.FEEDBACK] for row in batch.unbind(0)] == ["TRL 1", "TRL 22"]


def test_other_tasks_of_a_mixture_keep_their_rewards() -> None:
    mixed = MixedTask([ArithmeticTask(1), with_rewards(longer)], [1, 1], ["plain", "compared"])
    rows = sample_rows(play(WithRetry(mixed, "Again."), ["1", "22"], groups=4), "train")
    assert {row["dataset"] for row in rows} == {"plain", "compared"}
    assert all(row["valid"] for row in rows)


def test_a_member_without_any_reward_is_invalid() -> None:
    def first_only(responses: Sequence[str]) -> list[float | None]:
        return [1.0, *[None] * (len(responses) - 1)]

    assert outcomes(play(with_rewards(first_only), ["1", "2"])) == [
        (1.0, True, {"first_only": 1.0}),
        (0.0, False, None),
    ]


def test_a_reward_of_weight_0_does_not_replace_one_that_is_missing() -> None:
    def but_first(responses: Sequence[str]) -> list[float | None]:
        return [None, *map(float, range(1, len(responses)))]

    task = with_rewards([but_first, {"fn": own, "weight": 0}])
    ranked = [(0.0, False, None), (1.0, True, {"own": 0.0, "but_first": 1.0})]
    assert outcomes(play(task, ["1", "2", "x"])) == [*ranked, (0.0, False, None)]
    assert outcomes(play(task, ["1", "x"])) == [(0.0, False, None)] * 2
    mixed = MixedTask([ArithmeticTask(1), task], [1, 1], ["plain", "compared"])
    rows = sample_rows(play(WithRetry(mixed, "Again."), ["1", "2"], groups=4), "train")
    assert {(row["dataset"], row["response"], row["valid"]) for row in rows} == {
        ("plain", "1", True), ("plain", "2", True), ("compared", "1", False), ("compared", "2", True)
    }  # fmt: skip


def test_an_evaluations_only_response_is_judged_by_a_reward_of_weight_0() -> None:
    task = with_rewards([longer, {"fn": own, "weight": 0}])
    assert outcomes(play(task, ["1"], groups=2)) == [(0.0, True, {"own": 1.0})] * 2
    assert outcomes(play(task, ["x"])) == [(0.0, False, None)]


def test_one_valid_response_is_not_compared() -> None:
    calls: list[Any] = []

    def count(responses: Sequence[str]) -> list[float]:
        calls.append(responses)
        return [7.0] * len(responses)

    assert outcomes(play(with_rewards([count, own]), ["1", "x"])) == [
        (1.0, True, {"own": 1.0}),
        (0.0, False, None),
    ]
    assert outcomes(play(with_rewards(count), ["1"])) == [(0.0, False, None)] and not calls


@pytest.mark.parametrize(
    "result",
    [
        [1.0],
        1.0,
        None,
        {"a": 1, "b": 2},
        "12",
        [1.0, float("nan")],
        [1.0, "2"],
        {1.0, 2.0},
        {2: 1.0, 1: 2.0}.keys(),
        b"12",
        bytearray(b"12"),
    ],
)
def test_a_malformed_result_makes_the_group_invalid(result: Any) -> None:
    def broken(responses: Sequence[str]) -> Any:
        return result

    batch = play(with_rewards([broken, own]), ["1", "1"])
    assert outcomes(batch) == [(0.0, False, None)] * 2
    assert "broken" in sample_rows(batch, "train")[0]["error"]


def by_sort(responses: list[str]) -> list[float]:
    order = responses
    order.sort()
    return [float(order.index(text)) for text in responses]


def by_reverse(completions: list[str]) -> list[float]:
    completions.reverse()
    return [float(len(text)) for text in completions]


def by_shuffle(responses: list[str]) -> list[float]:
    random.Random(1).shuffle(responses)
    return [float(len(text)) for text in responses]


async def by_slice(messages: list[Any], responses: list[str]) -> list[float]:
    messages[:] = messages[::-1]
    return [float(len(chat[-1]["content"])) for chat in messages]


@pytest.mark.parametrize("reorder", [by_sort, by_reverse, by_shuffle, by_slice])
def test_a_function_that_reorders_its_lists_gives_no_reward(reorder: Callable[..., Any]) -> None:
    task = with_rewards({"fn": reorder, "per": "group", "name": "f"})
    batch = play(task, ["333", "1", "22"])
    assert outcomes(batch) == [(0.0, False, None)] * 3
    assert "must keep their order" in sample_rows(batch, "train")[0]["error"]


def test_entries_may_be_changed_and_copies_reordered() -> None:
    def edit(responses: list[str]) -> list[float]:
        responses[:] = [text.strip("3") for text in responses]
        responses[0] += "xxx"
        return [float(len(text)) for text in responses]

    def copy_first(responses: list[str]) -> list[float]:
        for order in (copy.copy(responses), copy.deepcopy(responses), responses[:]):
            order.sort(key=len)
            order[0], order[1] = order[1], order[0]
        responses[0], responses[1] = responses[1], responses[0]  # equal texts
        return [float(order.index(text)) for text in responses]

    batch = play(with_rewards([edit, copy_first, longer]), ["22", "22", "1"])
    assert [parts["edit"] for *_, parts in outcomes(batch)] == [5, 2, 1]
    assert [parts["copy_first"] for *_, parts in outcomes(batch)] == [0, 0, 1]
    assert [parts["longer"] for *_, parts in outcomes(batch)] == [1, 1, 0]


def test_arguments_are_lists_of_the_group_or_shared() -> None:
    calls: dict[str, Any] = {}

    def take(
        responses: Any, messages: Any, tokens: Any, finish_reason: Any, prompt: Any, **columns: Any
    ) -> Any:
        calls.update(locals())
        return [0.0, 0.0]

    play(with_rewards(take), ["1", "22"])
    assert calls["responses"] == ["1", "22"] and calls["finish_reason"] == ["stop"] * 2
    assert [chat[-1]["content"] for chat in calls["messages"]] == ["1", "22"]
    assert [len(tokens) for tokens in calls["tokens"]] == [2, 3]
    assert calls["prompt"] in calls["messages"][1][0]["content"]


def test_trl_functions_see_the_group_if_asked_to() -> None:
    def share(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        assert len(set(prompts)) == 1 and len(prompts) == len(completion_ids)
        return [completions.count(text) / len(completions) for text in completions]

    grouped = play(with_rewards({"fn": share, "per": "group"}), ["1", "1", "1", "2"])
    assert [reward for reward, *_ in outcomes(grouped)] == [0.75, 0.75, 0.75, 0.25]
    assert [reward for reward, *_ in outcomes(play(with_rewards(share), ["1", "2"]))] == [1.0, 1.0]


def test_a_group_function_that_needs_the_environments_is_refused() -> None:
    def ranked(completions: Any, environments: Any) -> list[float]:
        return [0.0 for _ in environments]

    problem = ArithmeticTask().problems("train")[0]
    make_rewards({"fn": ranked, "name": "ranked"}).check(problem, has_environment=True)
    with pytest.raises(ValueError, match="reward ranked needs environments"):
        make_rewards({"fn": ranked, "name": "ranked", "per": "group"}).check(
            problem, has_environment=True
        )


def test_a_parameter_or_per_makes_a_group_reward_function() -> None:
    def column(response: str, responses: Any = None) -> float:
        return float(responses is None)

    assert not make_rewards({"fn": column, "per": "response"}).group_functions
    assert make_rewards(column).group_functions
    with pytest.raises(ValueError, match=r"env\.reward\.per='all'"):
        make_rewards({"fn": own, "per": "all"})
    with pytest.raises(ValueError, match="per=group"):
        make_rewards({"fn": lambda solution_str: 1.0, "name": "verl", "per": "group"})


@pytest.mark.slow
@pytest.mark.parametrize("pool", [False, True])
def test_dialogs_of_an_environment_are_compared_when_all_are_over(pool: bool) -> None:
    rewards = make_rewards({"fn": longer_later, "name": "rank"})
    task = WithEnvironment(ArithmeticTask(), {"": Kind(Counting)}, rewards=rewards)
    batch = play(task, [["1 and 1"], ["3", "3", "3"], ["2", "22"]], turns=4, pool=pool)
    rows = sample_rows(batch, "train")
    assert [row["reward"] for row in rows] == [0.25 + 2, 0.75 + 0, 0.5 + 1]
    assert [row.get("turn_rewards") for row in rows] == [None, [0.25, 0.25, 0.25], [0.25, 1.25]]
    assert [row["parts"]["Counting"] for row in rows] == [0.25, 0.75, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("pool", [False, True])
def test_final_responses_of_agents_are_compared(pool: bool) -> None:
    pytest.importorskip("openai")

    task = WithAgent(with_rewards({"fn": longer_later, "name": "rank"}), Function(play_twice))
    batch = play(task, ["1", ["2", "333"], ["3", "22"]], turns=3, pool=pool)
    assert [reward for reward, *_ in outcomes(batch)] == [0.0, 2.0, 1.0]


@pytest.mark.slow
def test_turns_of_agents_are_credited_with_what_comparing_adds() -> None:
    pytest.importorskip("openai")

    async def play_and_reward(client: Any, problem: Any) -> None:
        chat = [{"role": "user", "content": "p"}]
        for _ in range(2):  # two samples
            await client.chat.completions.create(model="policy", messages=chat)
            client.reward(0.25)

    task = WithAgent(with_rewards({"fn": longer, "name": "rank"}), Function(play_and_reward))
    batch = play(task, [["1", "1"], ["2", "333"], ["3", "22"]], turns=3)
    assert [reward for reward, *_ in outcomes(batch)][::2] == [0.5, 2.5, 1.5]
    credits = [float(row[keys.TURN_REWARDS].sum()) for row in batch.unbind(0)]
    # Each sample's own reward and what followed, then the rank.
    assert credits == [0.25, 0.25, 2.25, 2.25, 1.25, 1.25]


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("evaluation.num_prompts=400", []),
        ("env.repeats=1", ["env.repeats=1", "policy.advantage_mean=batch", "policy.advantage_std=batch"]),
        ("env.difficulty_filter", ["evaluation.num_prompts=0", "env.difficulty_filter=[0.1,0.9]"]),
        ("env.retry_prompt", ["evaluation.num_prompts=0", "env.retry_prompt=again", "env.max_turns=2"]),
        (
            "env.transforms",
            ["evaluation.num_prompts=0", "env.max_turns=2", "env.transforms=[{_target_: torchrl.envs.StepCounter}]"],
        ),
    ],
)  # fmt: skip
def test_settings_that_need_a_single_response_s_score_are_refused(
    tmp_path: Path, key: str, settings: list[str]
) -> None:
    (tmp_path / "my.py").write_text("def rank(responses): return [0.0] * len(responses)")
    config = compose_config(f"env.reward={tmp_path}/my.py:rank", *settings)
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        read_task(config)
    if "num_prompts=400" in key:
        both = f"env.reward=[{tmp_path}/my.py:rank,{{fn:gsm8k,weight:0}}]"
        assert read_task(compose_config(both)).group_rewards == "also"


@pytest.mark.slow
def test_a_run_logs_and_trains_on_compared_rewards(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "def rank(responses):\n"
        "    order = sorted(set(responses))\n"
        "    return [order.index(each) / 10 for each in responses]\n"
        "def own(response):\n"
        "    if response.endswith('1'):\n"
        "        raise ValueError('no')\n"
        "    return float(len(response) > 5)\n"
    )
    rows = run(
        tmp_path / "run",
        f"env.reward=[{tmp_path}/my.py:rank,{{fn: {tmp_path}/my.py:own, weight: 0.25}}]",
        "env.num_envs=16", "env.repeats=4", "env.reward_workers=1", "evaluation.num_prompts=4",
        "train.total_dialog_turns=32", "logging.sample_rows=all", "logging.sample_frequency=1",
    )  # fmt: skip
    samples = [row for row in read_jsonl(tmp_path / "run/samples.jsonl") if row["split"] == "train"]
    for metrics in rows:
        if "rollout/reward_mean" not in metrics:
            continue
        batch = [row for row in samples if row["step"] == metrics["step"]]
        valid = [row for row in batch if row["valid"]]
        assert metrics["rollout/invalid"] == len(batch) - len(valid)
        mean = sum(row["reward"] for row in valid) / len(valid)
        assert metrics["rollout/reward_mean"] == pytest.approx(mean)
        for group in {row["group"] for row in batch}:
            members = [row for row in valid if row["group"] == group]
            order = sorted({row["response"] for row in members})
            for row in members:
                rank = order.index(row["response"]) / 10 if len(members) > 1 else 0
                assert row["reward"] == pytest.approx(rank + 0.25 * (len(row["response"]) > 5))
            rewards = [row["reward"] for row in members]
            for row in members if len(set(rewards)) > 1 else ():
                sign = row["reward"] - sum(rewards) / len(rewards)
                assert row["advantage"] * sign >= 0 and row["advantage"]
    assert {row["valid"] for row in samples} == {True, False}
    assert any("eval/pass@1" in row for row in rows)
