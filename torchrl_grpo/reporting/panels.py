"""Curves of a run for the report and the dashboard: panels, their numbers and colors. Imports
nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torchrl_grpo.host.text import NOISE, decoding

Record = Mapping[str, Any]

# Readable on white and near-black backgrounds.
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6", "#14b8a6", "#94a3b8", "#eab308")
STAGES = ("generate", "reward", "reference", "train", "sync", "eval", "other", "wait")
_MAX_POINTS = 400
SMOOTH_FROM = 20
REWARD = "rollout/reward_mean"


@dataclass(frozen=True)
class Panel:
    """A plot: its title, its metrics (which may be patterns), and a note for the reader."""

    title: str
    metrics: tuple[str, ...]
    note: str = ""
    percent: bool = False


PANELS = (
    Panel("Reward", (REWARD,)),
    Panel(
        "Accuracy",
        ("eval/pass@*", "rollout/accuracy"),
        "Sampled (training) responses are wrong more often than greedy ones.",
        percent=True,
    ),
    Panel("KL (nats per token)", ("train/kl_k3*",), "KL to the sampling policy: 0 when on-policy."),
    Panel("Entropy (nats per token)", ("train/entropy",)),
    Panel("Response length (tokens)", ("rollout/response_length",)),
    Panel(
        "Clip fraction",
        ("train/clip_fraction*",),
        "Share of clipped tokens: 0 with one on-policy optimizer step per batch.",
        percent=True,
    ),
    Panel(
        "Throughput (trained tokens/s)",
        ("throughput/trained_tokens_per_s",),
        "Response tokens of a batch, divided by the time of its step excluding evaluation.",
    ),
    Panel("Time per step (s)", ("time/*_s",), "Excluding evaluation."),
)


_LOSS = Panel("Loss", ("train/loss",), "Minus the log-likelihood of the demonstrations, per token.")


def panels_of(records: Sequence[Record]) -> tuple[Panel, ...]:
    """Return the panels of a run. For demonstrations, which have no reward, the loss replaces the
    reward.
    """
    supervised = any("train/loss" in record for record in records) and not any(
        REWARD in record for record in records
    )
    return (_LOSS, *PANELS[1:]) if supervised else PANELS


_LABELS = {
    REWARD: "mean reward",
    "rollout/response_length": "mean response length",
    "train/kl_k3_to_inference": "KL to the sampling policy",
    "train/kl_k3_to_ref": "KL to the reference",
    "train/clip_fraction_high": "clipped at the upper bound",
    "train/clip_fraction_low": "clipped at the lower bound",
    "throughput/trained_tokens_per_s": "trained tokens/s",
    "time/step_s": "full step",
}
"""Labels of metrics whose names do not explain themselves."""


def series(panel: Panel, records: Sequence[Record]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the curves of a panel: steps and values by metric name. Steps without a value are
    omitted, and rounding noise becomes 0.
    """
    names = sorted(set().union(*records))
    curves = {}
    for name in [name for pattern in panel.metrics for name in names if fnmatchcase(name, pattern)]:
        logged = [record for record in records if record.get(name) is not None]
        points = [
            (record["step"], float(record[name]) if abs(record[name]) >= NOISE else 0.0)
            for record in logged
        ]
        if points:
            curves[name] = ([step for step, _ in points], [value for _, value in points])
    return curves


def curve_of(
    name: str, points: tuple[Sequence[float], Sequence[float]]
) -> tuple[list[float], list[float], list[float] | None]:
    """Return a metric of ``series`` for plotting: steps, values and, if there are many, smoothed
    values.
    """
    steps, values = thin(*points)
    many = len(values) >= SMOOTH_FROM and not name.startswith("eval/")
    return steps, values, smooth(values) if many else None


def label_of(name: str) -> str:
    """Return the label of a metric in a legend, including the decoding of evaluations.

    >>> label_of("eval/pass@8"), label_of("eval/pass@1/gsm8k"), label_of("train/kl_k3_to_ref")
    ('test pass@8 (sampled)', 'test pass@1 gsm8k (greedy)', 'KL to the reference')
    """
    if name in _LABELS:
        return _LABELS[name]
    section, _, label = name.partition("/")
    if section == "eval":
        return f"test {label.replace('/', ' ', 1)} ({decoding(name)})"
    return "train accuracy (sampled)" if name == "rollout/accuracy" else label


def stage_seconds(record: Record) -> dict[str, float]:
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


def times(records: Sequence[Record]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the stages of the steps' wall time that are not 0, smoothed, for a stacked plot: steps
    and seconds by name.

    Evaluations are omitted: they are rare, and their peaks would hide the rest.
    """
    rows = [
        (record["step"], stage_seconds(record))
        for record in records
        if record.get("time/train_s") is not None
    ]
    stages = [
        part for part in STAGES if part != "eval" and any(parts[part] > 0 for _, parts in rows)
    ]
    thinned = {
        part: thin([step for step, _ in rows], [parts[part] for _, parts in rows])
        for part in stages
    }
    return {part: (steps, smooth(values)) for part, (steps, values) in thinned.items()}


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving mean over a tenth of the values, centered so that the curve does not lag,
    and narrower at both ends.
    """
    half = len(values) // 20
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most 400 points, means over neighbors, so that the report of a long run stays
    small.
    """
    size = math.ceil(len(steps) / _MAX_POINTS) or 1
    chunks = [slice(start, start + size) for start in range(0, len(steps), size)]
    mean_steps = [sum(steps[chunk]) / len(steps[chunk]) for chunk in chunks]
    mean_values = [sum(values[chunk]) / len(values[chunk]) for chunk in chunks]
    return mean_steps, mean_values
