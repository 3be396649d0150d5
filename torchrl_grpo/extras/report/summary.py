"""The result of a run, from the metrics that it logged. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torchrl_grpo.extras.report.alarms import MOSTLY_INVALID, alarms_of, invalid_cause
from torchrl_grpo.host.files import METRICS_FILE, read_jsonl
from torchrl_grpo.host.text import accuracy, number

STAGES = ("generate", "reward", "reference", "values", "train", "sync", "eval", "other", "wait")
"""The stages of a step, whose seconds are logged as ``time/<stage>_s``."""
ACCURACY = "eval/pass@1"
_INVALID = "rewards/invalid_"

Row = Mapping[str, Any]


def summarize(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Summarize a run from ``metrics.jsonl``.

    Returns:
        ``steps``; ``first_step``, 1 except in a resumed run's new folder; ``sequences`` and
        ``tokens`` (sums of ``rollout/sequences`` and ``rollout/tokens``); ``wall_s`` (the steps and
        the evaluations); ``trained_tokens_per_s`` (as the metric of that name: without the
        evaluations); ``accuracy_before`` and ``accuracy_after`` (first and last ``eval/pass@1``),
        as texts with the share of invalid rewards ``before_text`` and ``after_text``, and the steps
        after which they were measured, ``before_step`` and ``after_step``; ``invalid_fraction`` of
        the last evaluation; ``never_correct``, a line for each test set with rewards but without a
        correct response; ``reward``, its mean over the last tenth of the steps; ``restarts`` of
        actors and ``groups_resampled`` after them; ``invalid`` rewards by cause; and all
        ``alarms``. Values that the run did not log are None, or 0 for counts.
    """
    return summary_of(merge_steps(read_jsonl(Path(directory) / METRICS_FILE)))


def summary_of(records: Sequence[Row]) -> dict[str, Any]:
    """Return what ``summarize`` does, from one row of metrics per step."""
    evaluations = [record for record in records if ACCURACY in record]
    before = evaluations[0] if evaluations else {}
    after = evaluations[-1] if len(evaluations) > 1 else {}  # a single one precedes training
    tokens = int(_sum(records, "rollout/tokens"))
    wall_s = sum(sum(stage_seconds(r).values()) for r in records)
    steps_s = _sum(records, "time/step_s")
    return {
        "steps": records[-1]["step"] if records else 0,
        "first_step": next((r["step"] for r in records if "rollout/sequences" in r), 1),
        "sequences": int(_sum(records, "rollout/sequences")),
        "tokens": tokens,
        "wall_s": wall_s or None,
        "trained_tokens_per_s": tokens / steps_s if tokens and steps_s else None,
        "accuracy_before": before.get(ACCURACY),
        "before_text": accuracy(before, ACCURACY) if before else None,
        "before_step": before.get("step"),
        "accuracy_after": after.get(ACCURACY),
        "after_text": accuracy(after, ACCURACY) if after else None,
        "after_step": after.get("step"),
        "invalid_fraction": (after or before).get("eval/invalid_fraction"),
        "never_correct": _never_correct(records),
        "reward": _last_reward(records),
        "restarts": sum(
            _latest_sum(records, f"workers/restarts_{role}") for role in ("rollout", "reference")
        ),
        "groups_resampled": _latest_sum(records, "workers/groups_resampled"),
        "invalid": _invalid(records),
        "alarms": alarms_of(records),
    }


def objective(summary: Mapping[str, Any]) -> float | None:
    """Return the objective of a sweep: the last greedy test accuracy or, if nothing was evaluated,
    ``reward``.

    None if most rewards of the last evaluation were invalid.
    """
    if summary["before_step"] is None:
        return summary["reward"]
    if (summary["invalid_fraction"] or 0.0) > MOSTLY_INVALID:
        return None
    return summary["accuracy_before" if summary["after_step"] is None else "accuracy_after"]


def merge_steps(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one mapping per step, in order; later lines of a step are merged into earlier ones."""
    records: dict[int, dict[str, Any]] = {}
    for row in rows:
        records.setdefault(row["step"], {}).update(row)
    return [records[step] for step in sorted(records)]


def stage_seconds(record: Row) -> dict[str, float]:
    """Split the wall time of a step into stages, in seconds.

    Args:
        record: row with ``time/<stage>_s`` for timed stages, and ``time/step_s`` for the step
            without its evaluation.

    Returns:
        the seconds of each stage in ``STAGES``. ``other`` is the time outside the timed stages.
        ``wait`` is 0 if the stages that made the batch are timed, because it is their sum.
    """
    seconds = {stage: float(record.get(f"time/{stage}_s") or 0) for stage in STAGES}
    if record.get("time/generate_s") is not None:
        seconds["wait"] = 0.0
    timed = sum(seconds.values()) - seconds["eval"]
    seconds["other"] += max(0.0, float(record.get("time/step_s") or 0) - timed)
    return seconds


def _never_correct(records: Sequence[Row]) -> list[str]:
    """Return a line for each test set with rewards but no correct response, because its reward may
    never reach 1.
    """
    lines = []
    for name in sorted(
        {name for record in records for name in record if name.startswith(ACCURACY)}
    ):
        dataset = name.removeprefix(ACCURACY)
        accuracies = [
            r[key]
            for r in records
            for key in (name, f"rollout/accuracy{dataset}")
            if r.get(key) is not None
        ]
        rewards = [r[key] for r in records if (key := f"eval/reward_mean{dataset}") in r]
        if accuracies and not any(accuracies) and rewards and rewards[-1]:
            which = f" to {dataset[1:]}" if dataset else ""
            lines.append(
                f"no response{which} was correct, although the mean reward is "
                f"{number(rewards[-1])}: a response is correct if its reward is at least 1 or the "
                "reward function returns `correct`"
            )
    return lines


def _last_reward(records: Sequence[Row]) -> float | None:
    rewards = [
        r["rollout/reward_mean"] for r in records if r.get("rollout/reward_mean") is not None
    ]
    return fmean(rewards[len(rewards) * 9 // 10 :]) if rewards else None


def _sum(records: Sequence[Row], name: str) -> float:
    return sum(record.get(name) or 0 for record in records)


def _latest_sum(records: Sequence[Row], prefix: str) -> int:
    """Return the sum of the counters with a prefix, in the latest step that has them."""
    counts = [[int(value) for name, value in r.items() if name.startswith(prefix)] for r in records]
    return next((sum(values) for values in reversed(counts) if values), 0)


def _invalid(records: Sequence[Row]) -> dict[str, int]:
    """Return the number of invalid rewards since the start, by cause."""
    latest = {
        name: int(value)
        for record in records
        for name, value in record.items()
        if name.startswith(_INVALID)
    }
    return {
        invalid_cause(name.removeprefix(_INVALID)): count for name, count in latest.items() if count
    }
