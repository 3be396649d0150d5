"""Parts of a reward: GDPO, which normalizes each on its own (arXiv 2601.05242), and their metrics."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from transformers import PreTrainedTokenizerFast

from tests.support.configs import compose_config
from tests.support.documentation import undocumented
from tests.support.echo import EchoTask
from tests.support.envs import END, column, respond
from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import batch_transforms
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.collectors.summary import rollout_metrics, sample_rows
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.spec import parse_rewards, reward_weights
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards
from torchrl_grpo.transforms import GroupAdvantage

Parts = Mapping[str, float | None]
EPS = 1e-6


def batch_of(
    parts: Sequence[Parts], groups: Sequence[int], valid: Sequence[bool] = ()
) -> TensorDictBase:
    """Return a ragged batch in which sequence i has i + 1 tokens. The reward is the sum of the
    parts.
    """
    rows = []
    for i, (row, group) in enumerate(zip(parts, groups, strict=True)):
        reward = torch.tensor([sum(value or 0.0 for value in row.values())])
        data = TensorDict(
            {
                keys.FULL: torch.arange(i + 1),
                keys.REWARD: reward,
                keys.GROUP_ID: torch.tensor([group]),
            }
        )
        data.set(keys.REWARD_PARTS, NonTensorData(dict(row)))
        data[keys.REWARD_VALID] = torch.tensor([valid[i] if valid else True])
        rows.append(data)
    return lazy_stack(rows)


def advantages(batch: TensorDictBase, repeats: int, weights: Mapping[str, float]) -> list[float]:
    return GroupAdvantage(repeats, part_weights=weights)(batch)["advantage"].flatten().tolist()  # type: ignore[no-any-return]


def by_hand(
    parts: Sequence[Parts],
    groups: Sequence[int],
    weights: Mapping[str, float],
    valid: Sequence[bool],
) -> list[float]:
    """Return GDPO in plain Python: each part standardized by its group, summed, then standardized
    by the batch.
    """
    sums = [0.0] * len(parts)
    for name, weight in weights.items():
        for group in set(groups):
            of_group = [
                i
                for i, g in enumerate(groups)
                if g == group and valid[i] and parts[i].get(name) is not None
            ]
            values = [parts[i][name] for i in of_group]
            if len(set(values)) > 1:
                mean, std = statistics.mean(values), statistics.stdev(values)  # type: ignore[type-var]
                for i, value in zip(of_group, values, strict=True):
                    sums[i] += weight * (value - mean) / (std + EPS)  # type: ignore[operator]
    counted = [total for total, good in zip(sums, valid, strict=True) if good]
    mean = statistics.mean(counted)
    std = statistics.stdev(counted)
    return [
        (total - mean) / (std + EPS) if good else 0.0
        for total, good in zip(sums, valid, strict=True)
    ]


# GDPO


def test_rewards_with_one_sum_and_other_parts_keep_different_advantages() -> None:
    """The paper's example: GRPO gives (0, 1) and (0, 2) of two responses the same advantage, GDPO
    does not.
    """
    one, two = (
        [{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 1.0}],
        [{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}],
    )
    batch = batch_of(one + two, [0, 0, 1, 1])
    assert GroupAdvantage(2)(batch.clone())["advantage"].flatten().tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5] * 2, abs=1e-5
    )
    # Each part of two differing responses is -1/sqrt(2) and 1/sqrt(2): sums s, and 2 s in the second group. The
    # deviation of (-s, s, -2s, 2s) with s**2 = 1/2 is sqrt(5 / 3).
    scale = 0.5**0.5 / (5 / 3) ** 0.5
    assert advantages(batch, 2, {}) == pytest.approx(
        [-scale, scale, -2 * scale, 2 * scale], abs=1e-5
    )


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_is_what_plain_python_computes(seed: int) -> None:
    rng = random.Random(seed)
    weights = {"right": 1.0, "short/words": 0.5, "tone": -2.0}
    groups = [i // 4 for i in range(24)]
    rng.shuffle(groups)
    parts = [
        {name: rng.choice([None, 0.0, 1.0, rng.random()]) for name in weights}
        | {"logged": rng.random()}
        for _ in groups
    ]
    valid = [rng.random() > 0.15 for _ in groups]
    got = advantages(batch_of(parts, groups, valid), 4, {**weights, "logged": 0.0})
    expected = by_hand(parts, groups, weights, valid)
    # A response to which every part gives nothing gets exactly 0; by hand, the mean of the batch
    # leaves a remainder.
    assert got == pytest.approx(expected, abs=2e-6)


def test_a_part_that_does_not_apply_or_not_vary_gives_nothing() -> None:
    parts = [{"a": 1.0, "b": None}, {"a": 1.0, "b": 5.0}, {"a": 1.0}, {"a": 1.0, "b": 3.0}]
    got = advantages(batch_of(parts, [0] * 4), 4, {})
    # Only b distinguishes them, and only two of them: 1/sqrt(2) and -1/sqrt(2) beside two zeros,
    # deviation 1/sqrt(3).
    assert got == pytest.approx([0, (3 / 2) ** 0.5, 0, -((3 / 2) ** 0.5)], abs=1e-5)
    assert got[0] == got[2] == 0.0
    transform = GroupAdvantage(2, part_weights={})
    same = transform(batch_of([{"a": 1.0}] * 2 + [{"a": 1.0}, {"a": 2.0}], [0, 0, 1, 1]))[
        "advantage"
    ].flatten()
    assert same[:2].tolist() == [0.0, 0.0] and same[2] < 0 < same[3]
    assert (transform.num_groups, transform.num_zero_variance_groups) == (2, 1)


def test_a_part_counts_by_its_weight_or_its_functions() -> None:
    spec = ["math", {"fn": "m.py:style", "weight": {"tone": 0.5}}, {"fn": "m.py:verl", "weight": 3}]
    weights = reward_weights(parse_rewards(spec))
    assert weights == {"math": 1.0, "style": 0.0, "style/tone": 0.5, "verl": 3.0}

    def row(**parts: float) -> dict[str, float]:
        return {name.replace("__", "/"): value for name, value in parts.items()}

    logged = [row(math=1, math__correct=k, style__length=k, verl=2, verl__acc=k) for k in range(4)]
    assert advantages(batch_of(logged, [0] * 4), 4, weights) == [0.0] * 4
    counted = [row(math=k, style__tone=-2 * k) for k in range(4)]
    # Both parts are the same standardized numbers z with opposite signs: 1 z - 0.5 z = 0.5 z,
    # standardized z again.
    z = [(k - 1.5) / (5 / 3) ** 0.5 for k in range(4)]
    assert advantages(batch_of(counted, [0] * 4), 4, weights) == pytest.approx(z, abs=1e-5)


def test_gdpo_in_a_replay_buffer_is_that_of_the_batch() -> None:
    parts = [{"a": float(i % 3), "b": float(i % 2)} for i in range(6)]
    batch = batch_of(parts, [0, 0, 0, 1, 1, 1])
    buffer = ReplayBuffer(
        storage=LazyStackStorage(6), transform=GroupAdvantage(3, part_weights={"b": 0.1})
    )
    buffer.extend(batch.clone())
    assert buffer[:]["advantage"].flatten().tolist() == advantages(batch, 3, {"b": 0.1})


def length(response: str) -> float:
    return float(len(response))


def digit(response: str) -> bool:
    return response[0].isdigit()


def test_gdpo_in_an_environment_is_that_of_the_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    task = WithRewards(EchoTask(), make_rewards([length, digit]))
    env = TransformedEnv(
        LLMEnv(task, tokenizer, num_envs=4, repeats=2), GroupAdvantage(2, part_weights={})
    )
    responses = ["1", "abc", "abcde", "12"]
    out = respond(env, env.reset(), [[*tokenizer(text)["input_ids"], END] for text in responses])
    parts = out[keys.REWARD_PARTS]
    assert list(parts) == [
        {"length": length(text), "digit": float(digit(text))} for text in responses
    ]
    # Length and digit disagree in both groups: with equal weights they cancel, to exactly 0.
    assert column(out, "advantage") == advantages(batch_of(parts, [0, 0, 1, 1]), 2, {}) == [0.0] * 4
    one = (
        3 / 4
    ) ** 0.5  # of four numbers of equal size, two of them negative, divided by their deviation
    weighted = advantages(batch_of(parts, [0, 0, 1, 1]), 2, {"digit": 2.0})
    assert weighted == pytest.approx([one, -one, -one, one], abs=1e-5)


def test_the_parts_of_a_trajectory_are_those_of_its_last_step() -> None:
    batch = batch_of([{}, {"a": 1.0}, {}, {"a": 3.0}], [0] * 4)
    for row, done in zip(batch.unbind(0), (False, True, False, True), strict=True):
        row[keys.DONE] = torch.tensor([done])
    half = 0.5**0.5
    assert advantages(batch, 2, {}) == pytest.approx([-half, -half, half, half], abs=1e-5)


def test_gdpo_needs_parts_and_groups() -> None:
    with pytest.raises(ValueError, match=r"parts of each reward, .*1 of 2"):
        advantages(batch_of([{"a": 1.0}, {}], [0, 0]), 2, {})
    batch = batch_of([{"a": 1.0}, {"a": 2.0}], [0, 0])
    for row in batch.unbind(0):
        row.del_(keys.REWARD_PARTS)
    with pytest.raises(KeyError, match=r"next\.reward_parts, .*: name reward functions"):
        advantages(batch, 2, {})
    for options in ({"mean": "batch"}, {"mean": "none"}, {"level": "token"}):
        with pytest.raises(ValueError, match=r"reward_combination=gdpo .*sequence"):
            GroupAdvantage(2, part_weights={}, **options)


def test_each_data_set_has_its_own_weights_of_parts() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 2.0}] * 2
    batch = batch_of(parts, [0, 0, 1, 1])
    for row, name in zip(batch.unbind(0), ("one", "one", "other", "other"), strict=True):
        row.set(keys.DATASET, name)
    got = advantages(batch, 2, {"one": {"a": 1.0, "b": 0.0}, "other": {"a": 0.0, "b": 0.5}})  # type: ignore[dict-item]
    # The first set's sums are 1 times (h, -h) with h**2 = 1/2, the second one's 0.5 times (-h, h).
    scale = (((1 + 1 + 0.25 + 0.25) / 2) / 3) ** 0.5
    half = 0.5**0.5
    assert got == pytest.approx(
        [half / scale, -half / scale, -half / 2 / scale, half / 2 / scale], abs=1e-5
    )


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.slow
def test_the_config_gives_gdpo_the_weights_of_each_data_set(two_files: Path) -> None:
    columns = "columns: {answer: answer}, test_fraction: 0.5"
    own = "[{fn: gsm8k, weight: 0.9}, {fn: number, weight: 0.1}]"
    overrides = ["env.dataset=arithmetic", "env.reward_combination=gdpo"]

    def transform_of(*more: str) -> Any:
        config = compose_config(*overrides, *more)
        task = make_task(config.env, tests=config.evaluation.datasets or ())
        return dict(batch_transforms(config, task.part_weights))["advantage"].part_weights

    single = {"gsm8k": 0.9, "number": 0.1}
    assert transform_of(f"env.reward={own}") == single
    assert (
        transform_of(
            f"env.reward={own}",
            "evaluation.datasets=[{dataset: arithmetic, name: t, reward: number}]",
        )
        == single
    )
    sets = (
        f"env.datasets=[{{dataset: {two_files}/one.jsonl, {columns}, reward: {own}}}, "
        f"{{dataset: {two_files}/two.jsonl, {columns}, reward: {{fn: gsm8k, weight: 0.3}}}}]"
    )
    assert transform_of("env.dataset=null", sets) == {"one": single, "two": {"gsm8k": 0.3}}
    config = compose_config(f"env.reward={own}")
    assert dict(batch_transforms(config))["advantage"].part_weights is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.dataset=arithmetic"],
        ["env.dataset=null", "env.environment=GAMES:Guess"],
        ["env.task._target_=tests.support.echo.EchoTask"],
        [
            "env.datasets=[{dataset: arithmetic, name: a}, {dataset: arithmetic, name: b, reward: gsm8k}]"
        ],
    ],
)
def test_gdpo_without_parts_is_refused_before_anything_loads(
    overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "games.py").write_text(
        "class Guess:\n"
        "    def reset(self, seed):\n        return 'Guess.'\n"
        "    def step(self, response):\n        return 'no', 0.0, False\n"
    )
    overrides = [text.replace("GAMES", f"{tmp_path}/games.py") for text in overrides]
    config = compose_config(*overrides, "env.max_turns=1", "env.reward_combination=gdpo")
    with pytest.raises(
        ValueError, match=r"env\.reward_combination=gdpo .*env\.reward.*reward_combination=sum"
    ):
        make_task(config.env)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "policy.advantage_mean=batch",
            "env.reward_combination=gdpo needs one advantage per sequence",
        ),
        ("policy.advantage_level=token", "but level=token and mean=group: use level=sequence"),
        (
            "policy.reward_scale=2",
            "env.reward_combination=gdpo excludes policy.dynamic_sampling",
        ),
        ("policy.dynamic_sampling=true", "or use env.reward_combination=sum"),
    ],
)
def test_gdpo_refuses_what_works_on_the_sum(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config("env.reward=math", "env.reward_combination=gdpo", override)


# Metrics


def logged_batch() -> TensorDictBase:
    parts = [
        {"right": 1.0, "tone/polite": 0.5},
        {"right": 0.0, "tone/polite": None},
        {"right": 1.0},
        {"right": 9.0},
    ]
    batch = batch_of(parts, [0, 0, 1, 1], [True, True, True, False])
    for i, row in enumerate(batch.unbind(0)):
        row.update({
            keys.RESPONSE: torch.arange(2), keys.ASSISTANT_MASK: torch.ones(2, dtype=torch.bool),
            keys.ADVANTAGE: torch.zeros(1), keys.TRUNCATED: torch.tensor([False]), keys.RESPONSE_TEXT: "r",
            keys.CORRECT: torch.tensor([i != 1]), keys.QUERY: "q", keys.DATASET: "easy" if i < 2 else "hard",
        })  # fmt: skip
    return batch


def test_each_part_and_each_data_set_is_logged_by_name() -> None:
    metrics = rollout_metrics(logged_batch())
    assert {name: value for name, value in metrics.items() if name.startswith("reward/") or name.count("/") > 1} == {
        "reward/right/mean": pytest.approx(2 / 3), "reward/right/std": pytest.approx((2 / 9) ** 0.5),
        "reward/right/none": 0.0, "reward/tone/polite/mean": 0.5, "reward/tone/polite/std": 0.0,
        "reward/tone/polite/none": pytest.approx(2 / 3),
        "rollout/accuracy/easy": 0.5, "rollout/accuracy/hard": 1.0,
        "rollout/reward_mean/easy": 0.75, "rollout/reward_mean/hard": 1.0,
    }  # fmt: skip
    assert undocumented([metrics]) == set()


def test_a_part_that_never_applies_has_no_mean() -> None:
    batch = logged_batch()
    for row in batch.unbind(0):
        row.set(keys.REWARD_PARTS, NonTensorData({"f": None}))
    metrics = rollout_metrics(batch)
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/f/none": 1.0
    }


def test_samples_have_the_parts_and_the_data_set() -> None:
    rows = sample_rows(logged_batch(), "train")
    assert [row["parts"] for row in rows[:2]] == [
        {"right": 1.0, "tone/polite": 0.5},
        {"right": 0.0, "tone/polite": None},
    ]
    assert [row["dataset"] for row in rows] == ["easy", "easy", "hard", "hard"]


def test_a_batch_without_parts_logs_what_it_did() -> None:
    batch = logged_batch().exclude(keys.REWARD_PARTS, keys.DATASET)
    assert not [name for name in rollout_metrics(batch) if name.count("/") > 1]
    assert {"parts", "dataset"} & set(sample_rows(batch, "train")[0]) == set()
    one_set = logged_batch()
    one_set.set(keys.DATASET, NonTensorStack(*[""] * 4))
    one_set.set(keys.REWARD_PARTS, NonTensorStack(*[NonTensorData({})] * 4))
    assert set(rollout_metrics(one_set)) == set(rollout_metrics(batch))
    assert set(sample_rows(one_set, "train")[0]) == set(sample_rows(batch, "train")[0])
