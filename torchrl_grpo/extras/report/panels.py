"""Curves of a run for the report and the dashboard: panels, their numbers and colors. Imports
nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, NamedTuple

from torchrl_grpo.extras.report.summary import STAGES, stage_seconds
from torchrl_grpo.host.text import NOISE, decoding

Record = Mapping[str, Any]

# Readable on white and near-black backgrounds.
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6", "#14b8a6", "#94a3b8", "#eab308")
_STAGE_COLORS = {
    "generate": "#3b82f6",
    "reward": "#f59e0b",
    "reference": "#e879f9",
    "values": "#a3e635",
    "train": "#10b981",
    "sync": "#8b5cf6",
    "eval": "#ec4899",
    "other": "#64748b",
    "wait": "#94a3b8",
}
ACTIVITY_COLORS = _STAGE_COLORS | {
    "sample": _STAGE_COLORS["generate"],
    "score": _STAGE_COLORS["reward"],
    "publish": _STAGE_COLORS["sync"],
    "evaluate": _STAGE_COLORS["eval"],
    "update": "#06b6d4",
    "save": "#854d0e",
    "start": "#84cc16",
    "restart": "#dc2626",
    "stopped": "#475569",
}
"""The color of each activity, as a stage of a step or as a span of the timeline."""
MOST_POINTS = 400
SMOOTHING = 0.1
SMOOTH_FROM = 20
REWARD = "rollout/reward_mean"
TIMES = ("time/*_s",)
_ROUNDING = 1e-6
"""Magnitude below which a metric computed in float32 is rounding noise."""
_TINY = ("train/lr", "train/update_size")
"""Metrics that are meaningful below it."""
NO_CURVES = "There are no curves, because matplotlib is not installed: `pip install 'torchrl_grpo[report]'`."


def has_matplotlib() -> bool:
    """Return whether curves can be drawn for a report."""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Panel:
    """A plot: its title, its metrics (patterns allowed), and a note on what may surprise the
    reader; a ``quiet`` one is shown only of runs in which a value differs from 0.
    """

    title: str
    metrics: tuple[str, ...]
    note: str = ""
    percent: bool = False
    quiet: bool = False


LOSS = Panel("Loss", ("train/loss",), "Minus the log-likelihood of the demonstrations, per token.")
PANELS = (
    Panel("Reward", (REWARD,)),
    Panel(
        "Accuracy",
        ("eval/pass@*", "eval/avg@*", "rollout/accuracy"),
        "Sampled (training) responses are wrong more often than greedy ones.",
        percent=True,
    ),
    Panel(
        "KL (nats per token)",
        ("train/kl_k3*",),
        "KL to the sampling policy: 0 when on-policy.",
        quiet=True,
    ),
    Panel("Entropy (nats per token)", ("train/entropy",)),
    Panel("Response length (tokens)", ("rollout/response_length",)),
    Panel("Truncated responses", ("rollout/truncated",), percent=True, quiet=True),
    Panel("Tool calls", ("tools/calls", "tools/errors"), "Since the start of the run.", quiet=True),
    Panel(
        "Clip fraction",
        ("train/clip_fraction*",),
        "Share of clipped tokens: 0 with one on-policy optimizer step per batch.",
        percent=True,
        quiet=True,
    ),
    Panel(
        "Explained variance",
        ("train/explained_variance",),
        "Of the value targets, by the critic's values: 1 is all of it, 0 what a constant explains.",
    ),
    Panel("Staleness (steps)", ("staleness/*",), quiet=True),
    Panel(
        "Throughput (trained tokens/s)",
        ("throughput/trained_tokens_per_s",),
        "Response tokens of a batch, divided by the time of its step excluding evaluation.",
    ),
    Panel("Time per step (s)", TIMES, "Excluding evaluation."),
)


def panels_of(records: Sequence[Record]) -> tuple[Panel, ...]:
    """Return the panels that tell something about a run; of a run on demonstrations, which have
    no reward, the first one is the loss.
    """
    names = set[str]().union(*records)
    learned = () if REWARD in names else (LOSS,)
    return tuple(panel for panel in (*learned, *PANELS) if _tells(panel, records, names))


def _tells(panel: Panel, records: Sequence[Record], names: Collection[str]) -> bool:
    curves = series(panel, records, names).values()
    return bool(curves) and not (
        panel.quiet and all(abs(value) < _ROUNDING for _, values in curves for value in values)
    )


_LABELS = {
    REWARD: "mean reward",
    "rollout/response_length": "mean response length",
    "train/kl_k3_to_inference": "KL to the sampling policy",
    "train/kl_k3_to_ref": "KL to the reference",
    "train/clip_fraction_high": "clipped at the upper bound",
    "train/clip_fraction_low": "clipped at the lower bound",
    "train/explained_variance": "explained variance",
    "rollout/truncated": "truncated",
    "staleness/mean": "mean staleness",
    "staleness/max": "max staleness",
    "throughput/trained_tokens_per_s": "trained tokens/s",
    "time/step_s": "full step",
}
"""Labels of metrics whose names do not explain themselves."""


def series(
    panel: Panel, records: Sequence[Record], names: Collection[str] = ()
) -> dict[str, tuple[list[int], list[float]]]:
    """Curves of a panel: metric name to steps and values. Steps without a value are left out, and
    noise is 0.

    Args:
        panel: which ones.
        records: one per step.
        names: names of all metrics, if the caller has them already.
    """
    names = sorted(names or set().union(*records))
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


class Curve(NamedTuple):
    """A metric for plotting: its ``smoothed`` values if there are many, and whether it is
    ``sparse``, with values at fewer than half of the steps: then it is drawn as markers.
    """

    steps: list[float]
    values: list[float]
    smoothed: list[float] | None
    sparse: bool


def curve_of(
    points: tuple[Sequence[float], Sequence[float]],
    steps: int,
    smoothing: float = SMOOTHING,
    max_points: int = MOST_POINTS,
) -> Curve:
    """Return a metric of ``series`` for plotting.

    Args:
        points: its steps and values.
        steps: of the run.
        smoothing: share of the points over which the curve is averaged, 0 for none.
        max_points: points of the curve.
    """
    sparse = 2 * len(points[0]) < steps
    shown, values = thin(*points, max_points)
    many = len(values) >= SMOOTH_FROM and not sparse and smoothing > 0
    return Curve(shown, values, smooth(values, smoothing) if many else None, sparse)


def heights_of(
    panel: Panel, runs: Iterable[Mapping[str, tuple[Sequence[float], Sequence[float]]]]
) -> tuple[float, float]:
    """Return the range of a panel's vertical axis, for its ``series`` of each run: wide enough that
    rounding noise is flat.
    """
    curves = [(name, values) for run in runs for name, (_, values) in run.items()]
    values = [value for _, of in curves for value in of]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if panel.percent:
        return (0.0, 1.02 if panel.title == "Accuracy" else max(1.1 * high, 0.01))
    finest = NOISE if {name for name, _ in curves} <= {*_TINY} else _ROUNDING
    largest = max(abs(low), abs(high))
    if largest < finest:
        return (-0.1 if low < 0 else 0.0, 0.1)
    room = 0.08 * (high - low) if high - low > 1e-5 * largest else 0.1 * largest
    return (0.0 if 0 <= low < room else low - room, high + room)


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


def times(
    records: Sequence[Record], smoothing: float = SMOOTHING, max_points: int = MOST_POINTS
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the stages of the steps' wall time that are not 0, smoothed: name to steps and seconds, to be
    stacked.

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
        part: thin([step for step, _ in rows], [parts[part] for _, parts in rows], max_points)
        for part in stages
    }
    return {part: (steps, smooth(values, smoothing)) for part, (steps, values) in thinned.items()}


def smooth(values: Sequence[float], share: float = SMOOTHING) -> list[float]:
    """Return the moving mean over a share of the values, centered so that the curve does not lag, narrower at
    both ends.
    """
    half = int(len(values) * share / 2)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def thin(
    steps: Sequence[float], values: Sequence[float], max_points: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """Return at most ``max_points`` points, as means over neighbors, so that a long run's report stays small."""
    size = math.ceil(len(steps) / max_points) or 1
    chunks = [slice(start, start + size) for start in range(0, len(steps), size)]
    mean_steps = [sum(steps[chunk]) / len(steps[chunk]) for chunk in chunks]
    mean_values = [sum(values[chunk]) / len(values[chunk]) for chunk in chunks]
    return mean_steps, mean_values
