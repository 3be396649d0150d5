"""Recompute the numbers in a run's files: counts, rewards, advantages, staleness, losses, and
resuming.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.runs import differences, state_of
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.host.checkpoint_files import checkpoints_in
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.rewards.spec import parse_rewards, part_weight, reward_weights

Row = Mapping[str, Any]
_EPS = 1e-6
_OF_TIME = (
    "time/",
    "sync/receipt_s",
    "throughput",
    "workers/",
    "buffer/",
    "rewards/",
    "tools/seconds",
    "eval/",
    "train/grad_noise",
)


def problems_of(
    folder: Path, config: GRPOConfig, steps: int, first: int, bound: int
) -> Iterator[str]:
    """Yield the errors in the files of a run that went from step ``first`` to ``steps``."""
    rows, samples = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")
    numbers = [row["step"] for row in rows]
    if numbers != list(range(first, steps + 1)):
        yield f"rows of steps {numbers}"
    trainer = state_of(checkpoints_in(folder / "checkpoints")[0])["trainer"]
    step_count = trainer["optim_steps"] + trainer["skipped_steps"]
    if step_count != config.optim_steps_per_batch * steps:
        yield f"{step_count} optimizer steps"
    groups = set[int]()
    for row in rows:
        own = [sample for sample in samples if sample["step"] == row["step"]]
        yield from (
            f"step {row['step']}: {text}" for text in _of_step(row, own, config, bound, groups)
        )
    reads_images = config.model.name == "vision_starter"
    auto_class = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    exported = auto_class.from_pretrained(folder / "checkpoints" / "model")
    if not all(parameter.isfinite().all() for parameter in exported.parameters()):
        yield "the exported model is not finite"


def problems_of_resumed(whole: Path, resumed: Path, first: int) -> Iterator[str]:
    """Yield the differences between a resumed run and the uninterrupted one."""
    expected, got = (
        {row["step"]: row for row in read_jsonl(one / "metrics.jsonl")} for one in (whole, resumed)
    )
    for step in (step for step in expected if step > first):
        names = [name for name in expected[step] if not name.startswith(_OF_TIME)]
        if other := [name for name in names if expected[step][name] != got.get(step, {}).get(name)]:
            yield f"resumed: step {step} differs in {other[:5]}"
    states = [state_of(checkpoints_in(folder / "checkpoints")[0]) for folder in (whole, resumed)]
    if (
        len(states[0]["source"]["engines"]) > 1
    ):  # which of several samplers finishes last depends on timing
        for state in states:
            del state["source"]["engines"]
    if places := differences(*states):
        yield f"resumed: the state differs in {places[:5]}"


def _of_step(
    row: Row, samples: Sequence[Row], config: GRPOConfig, bound: int, seen: set[int]
) -> Iterator[str]:
    may_be_null = ("train/grad_noise_scale", "eval/")
    nulls = [
        name for name, value in row.items() if value is None and not name.startswith(may_be_null)
    ]
    skipped = (row.get("train/skipped_steps") or 0) > 0
    if nulls and not skipped:
        yield f"{nulls} are null"
    yield from _of_tests(row, [sample for sample in samples if sample["split"] == "test"], config)
    if "rollout/sequences" not in row:
        return
    train = [sample for sample in samples if sample["split"] == "train"]
    if row["rollout/sequences"] != config.dialog_turns_per_batch:
        yield f"{row['rollout/sequences']} sequences"
    if len(train) != row.get("rollout/samples", row["rollout/sequences"]):
        yield f"{len(train)} rows of samples"
    if sum(sample["length"] for sample in train) != row["rollout/tokens"]:
        yield "the tokens of the samples are not those of the batch"
    by_group = defaultdict(list)
    for sample in train:
        by_group[sample["group"]].append(sample)
    if again := seen & by_group.keys():
        yield f"groups {sorted(again)} were trained before"
    seen |= by_group.keys()
    for sample in train:
        if (
            sample["staleness"] > bound
            or sample["version"] + sample["staleness"] != row["step"] - 1
        ):
            yield f"staleness {sample['staleness']} of version {sample['version']}"
            break
    parts = [value for name, value in row.items() if name.startswith("train/loss_")]
    if not skipped and not _close(sum(parts), row["train/loss"]):
        yield f"the loss {row['train/loss']} is not the sum of its parts {parts}"
    if config.policy.demonstrations or any("sample" in sample for sample in train):
        return
    if sizes := {len(group) for group in by_group.values()} - {config.env.repeats}:
        yield f"groups of {sizes}"
    yield from _of_rewards(row, train)
    yield from _of_advantages(by_group, config)
    full = config.train.mixed_precision == "full" and config.inference_model.dtype == "float32"
    fresh = row["staleness/max"] == 0 and config.optim_steps_per_batch == 1 and not skipped
    if (
        fresh
        and config.inference_model.temperature == 1
        and config.policy.proximal != "interpolated"
    ):
        if abs(row["train/ratio_mean"] - 1) > (1e-4 if full else 0.05):
            yield f"the ratio on policy is {row['train/ratio_mean']}"
        if abs(row["train/kl_k3_to_inference"]) > (1e-6 if full else 1e-2):
            yield f"the KL to the engine on policy is {row['train/kl_k3_to_inference']}"
        if full and row.get("train/rejected_tokens"):
            yield f"{row['train/rejected_tokens']} of the tokens were rejected on policy"
    first = row["step"] == 1 and config.optim_steps_per_batch == 1
    if first and row.get("train/entropy_coef"):
        yield f"the first entropy_coef is {row['train/entropy_coef']}, with no entropy yet"


def _of_tests(row: Row, samples: Sequence[Row], config: GRPOConfig) -> Iterator[str]:
    further = [entry.name for entry in config.evaluation.datasets or []]
    for suffix, names in (("", None), *((f"/{name}", name) for name in further)):
        own = [
            sample
            for sample in samples
            if (sample.get("dataset") == names if names else sample.get("dataset") not in further)
        ]
        valid = [sample["correct"] for sample in own if sample["valid"]]
        measured = row.get(f"eval/pass@1{suffix}")
        counted = valid and not any("sample" in sample for sample in own)
        if counted and not _close(measured, fmean(valid)):
            yield f"eval/pass@1{suffix} is {measured}, of the samples {fmean(valid)}"


def _of_rewards(row: Row, train: Sequence[Row]) -> Iterator[str]:
    valid = [sample for sample in train if sample["valid"]]
    expected = {
        "invalid": len(train) - len(valid),
        "truncated": fmean(sample["finish_reason"] == "length" for sample in train),
    }
    if valid:
        expected |= {"reward_mean": fmean(sample["reward"] for sample in valid)}
        expected |= {"accuracy": fmean(sample["correct"] for sample in valid)}
    for name, value in expected.items():
        if not _close(row[f"rollout/{name}"], value):
            yield f"rollout/{name} is {row[f'rollout/{name}']}, of the samples {value}"


def _of_advantages(by_group: Mapping[int, Sequence[Row]], config: GRPOConfig) -> Iterator[str]:
    policy = config.policy
    sampled_teacher = policy.teacher_coef > 0 and policy.teacher_divergence == "sampled"
    statistics = (policy.advantage_mean, policy.advantage_std)
    over_batch = policy.advantage_whiten or "batch" in statistics or "nonzero" in statistics
    if (
        config.advantage_level != "sequence"
        or config.shapes_reward
        or sampled_teacher
        or over_batch
    ):
        return
    rows = [row for group in by_group.values() for row in group]
    if config.env.reward_combination == "gdpo":
        expected = _gdpo(list(by_group.values()), config)
    else:
        expected = [
            a
            for group in by_group.values()
            for a in _normalized(
                [_reward(row) for row in group], config, [row["length"] for row in group]
            )
        ]
    coef = policy.reward_coef if config.needs_teacher else 1.0
    wrong = [(coef * a, row["advantage"]) for a, row in zip(expected, rows, strict=True)]
    wrong = [pair for pair in wrong if not _close(pair[1], pair[0], 1e-3)]
    if wrong:
        yield f"{len(wrong)} of {len(rows)} advantages differ, (expected, logged) {wrong[0]}"


def _reward(row: Row) -> float | None:
    return row["reward"] if row["valid"] else None


def _normalized(
    values: Sequence[float | None], config: GRPOConfig, lengths: Sequence[int] = ()
) -> list[float]:
    """Return the normalized advantages of one group; a None is left out and gets 0."""
    known = [value for value in values if value is not None]
    if config.policy.advantage_mean == "none":
        return [value or 0.0 for value in values]
    if len(known) < 2 or max(known) - min(known) < 1e-9:
        return [0.0] * len(values)
    scale = stdev(known) + _EPS if config.policy.advantage_std == "group" else 1.0
    if config.policy.advantage_mean == "second_best":
        best, second = sorted(known, reverse=True)[:2]
        return [(best - second) / scale if value == best else 0.0 for value in values]
    if config.policy.advantage_mean == "length_weighted":
        pairs = [pair for pair in zip(values, lengths, strict=True) if pair[0] is not None]
        mean = sum(value * length for value, length in pairs) / sum(length for _, length in pairs)
        return [0.0 if value is None else (value - mean) / scale for value in values]
    more = len(known) / (len(known) - 1) if config.policy.advantage_mean == "leave_one_out" else 1.0
    return [0.0 if value is None else more * (value - fmean(known)) / scale for value in values]


def _gdpo(groups: Sequence[Sequence[Row]], config: GRPOConfig) -> list[float]:
    sets = {
        entry.name or Path(entry.dataset or "").stem: entry for entry in config.env.datasets or []
    }
    sums, valid = [], []
    for group in groups:
        spec = sets[group[0]["dataset"]].reward if sets else config.env.reward
        weights = reward_weights(parse_rewards(spec))
        total = [0.0] * len(group)
        for name in {name for row in group for name in row["parts"]}:
            values = [row["parts"].get(name) if row["valid"] else None for row in group]
            weight = part_weight(name, group[0]["parts"], weights)
            total = [
                a + weight * b for a, b in zip(total, _normalized(values, config), strict=True)
            ]
        sums += total
        valid += [row["valid"] for row in group]
    known = [total for total, counts in zip(sums, valid, strict=True) if counts]
    if len(known) < 2 or max(known) - min(known) < 1e-9:
        return [0.0] * len(sums)
    return [
        (total - fmean(known)) / (stdev(known) + _EPS) if counts and abs(total) > 1e-4 else 0.0
        for total, counts in zip(sums, valid, strict=True)
    ]


def _close(a: float | None, b: float | None, within: float = 2e-4) -> bool:
    if a is None or b is None or not math.isfinite(a):
        return a is None and b is None
    return abs(a - b) <= within * (1 + abs(b))
