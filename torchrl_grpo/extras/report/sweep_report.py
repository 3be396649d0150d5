"""The report of a sweep: ``sweep.html`` in the folder of a multirun, one self-contained file.

Like the report of a run it is made from files, so that it can be made while a sweep is running, or
after it failed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from torchrl_grpo.extras.report.comparison import adjust, compare_tests, tests_of
from torchrl_grpo.extras.report.panels import COLORS, LOSS, PANELS, Panel, has_matplotlib, series
from torchrl_grpo.extras.report.records import OVERRIDES, overrides_of, read_samples, short_value
from torchrl_grpo.extras.report.report import page_template, title_of
from torchrl_grpo.extras.report.summary import merge_steps, objective, summarize
from torchrl_grpo.host.files import METRICS_FILE, SAMPLES_FILE, read_jsonl
from torchrl_grpo.host.folders import check_own_files

_ACCURACY_PANEL = Panel("Test accuracy, greedy", ("eval/pass@1",), percent=True)
_OTHER_PANELS = (
    Panel("KL to the reference (nats per token)", ("train/kl_k3_to_ref",)),
    Panel("Entropy (nats per token)", ("train/entropy",)),
    Panel("Response length (tokens)", ("rollout/response_length",)),
    Panel("Time per step (s)", ("time/step_s",), "Excluding evaluation."),
)
_GRAY = COLORS[6]
_BRIGHT = [color for color in COLORS if color != _GRAY]
_MAX_LEVELS = 5
"""Maximum number of numeric values of a key to show; more are grouped into three ranges."""


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        name: name of its folder.
        values: values of the keys on its command line.
        records: its metrics, one mapping per step.
        summary: result of ``summarize``.
    """

    name: str
    values: Mapping[str, str]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]

    @property
    def outcome(self) -> float | None:
        return objective(self.summary)

    @property
    def seconds(self) -> float:
        return self.summary["wall_s"] or 0.0


@dataclass(frozen=True)
class Influence:
    """Share of the variance among the jobs' outcomes that a key explains.

    Attributes:
        key: name of the key.
        share: variance of the means of the key's values, as a share of the variance of all
            outcomes; None if each value has one job.
        by_chance: expected share of a key without influence.
        levels: for each value, the number of its jobs and the mean of their outcomes.
    """

    key: str
    share: float | None
    by_chance: float
    levels: Sequence[tuple[str, int, float]]


def write_sweep(directory: str | os.PathLike[str]) -> Path:
    """Write ``sweep.html`` into the folder of a multirun.

    Returns:
        the path of ``sweep.html``.

    Raises:
        ValueError: no job in the folder has logged a step, or a link leads out of it.
    """
    directory = Path(directory)
    check_own_files(directory)
    jobs = read_jobs(directory)
    if not any(job.records for job in jobs):
        raise ValueError(
            f"{directory} must be the folder of a multirun in which a job has logged a step, but "
            "there is no such job: use a folder such as multirun/2026-01-31/12-00-00."
        )
    keys = varying_keys(jobs)
    best_first = sorted(jobs, key=lambda job: math.inf if job.outcome is None else -job.outcome)
    tested = any(job.summary["before_step"] is not None for job in jobs)
    settings = _settings(jobs, [key for key in keys if key != "seed"])
    colors = [*_BRIGHT, *[_GRAY] * len(settings)][: len(settings)]
    drawn = [
        (color, [job.records for job in setting.jobs])
        for color, setting in zip(colors, settings, strict=True)
    ]
    learned = PANELS[0] if any(series(PANELS[0], job.records) for job in jobs) else LOSS
    panels = None
    if has_matplotlib():
        from torchrl_grpo.extras.report.curves import comparison_svg

        panels = [
            (panel, comparison_svg(panel, drawn))
            for panel in (_ACCURACY_PANEL, learned, *_OTHER_PANELS)
            if any(series(panel, job.records) for job in jobs)
        ]
    titles = {title_of(directory / job.name) for job in jobs}
    page = page_template("sweep.html.j2").render(
        title=titles.pop() if len(titles) == 1 else "GRPO sweep",
        name="/".join(directory.resolve().parts[-2:]),
        jobs=best_first,
        comparisons=_against_best(directory, best_first),
        reports={job.name for job in jobs if (directory / job.name / "report.html").exists()},
        keys=keys,
        short_value=short_value,
        tested=tested,
        settings=settings,
        legend=list(zip(_BRIGHT, settings, strict=False)),
        influences=sorted(
            (influence(jobs, key) for key in keys), key=lambda i: i.by_chance - (i.share or 0.0)
        ),
        panels=panels,
    )
    path = directory / "sweep.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _against_best(directory: Path, best_first: Sequence[Job]) -> dict[str, str]:
    """Compare each job's last evaluation with that of the best job, over the same problems."""
    best, *others = [
        (job.name, tests_of(read_samples(directory / job.name / SAMPLES_FILE)))
        for job in best_first
    ]
    comparisons = adjust([compare_tests(best[1], tests) for _, tests in others])
    return {
        name: comparison.text
        for (name, _), comparison in zip(others, comparisons, strict=True)
        if comparison is not None
    }


def read_jobs(directory: Path) -> list[Job]:
    """Return the jobs of a multirun by number, including those that failed before their first step."""
    folders = sorted(
        (path.parents[1] for path in directory.rglob(OVERRIDES)),
        key=lambda path: [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts],
    )
    jobs = []
    for folder in folders:
        check_own_files(folder)
        values = overrides_of((folder / OVERRIDES).read_text(encoding="utf-8", errors="replace"))
        records = merge_steps(read_jsonl(folder / METRICS_FILE))
        jobs.append(
            Job(folder.relative_to(directory).as_posix(), values, records, summarize(folder))
        )
    return jobs


def varying_keys(jobs: Sequence[Job]) -> list[str]:
    """Return the keys that differ among jobs."""
    keys = dict.fromkeys(key for job in jobs for key in job.values)
    return [key for key in keys if len({job.values.get(key) for job in jobs}) > 1]


def influence(jobs: Sequence[Job], key: str) -> Influence:
    """Compute how much of the outcomes a key explains on its own (eta squared of a one-way analysis
    of variance).
    """
    pairs = [(job.values.get(key, "-"), job.outcome) for job in jobs]
    scored = [
        (value, outcome)
        for value, outcome in pairs
        if outcome is not None and math.isfinite(outcome)
    ]
    levels = _levels(scored)
    outcomes = [outcome for _, outcome in scored]
    count = len(outcomes)
    mean = fmean(outcomes) if outcomes else 0.0
    between = sum(len(of) * (fmean(of) - mean) ** 2 for _, of in levels)
    total = sum((outcome - mean) ** 2 for outcome in outcomes)
    is_defined = total > 0 and len(levels) < count
    return Influence(
        key,
        between / total if is_defined else None,
        (len(levels) - 1) / (count - 1) if count > 1 else 0.0,
        [(label, len(of), fmean(of)) for label, of in levels],
    )


@dataclass(frozen=True)
class _Setting:
    """Jobs that differ only in their seeds, with the lowest, mean and highest outcome."""

    values: Mapping[str, str]
    jobs: Sequence[Job]

    @property
    def label(self) -> str:
        return (
            " ".join(f"{key}={short_value(value)}" for key, value in self.values.items())
            or "all runs"
        )

    @property
    def outcomes(self) -> tuple[float, float, float] | None:
        outcomes = [job.outcome for job in self.jobs if job.outcome is not None]
        return (min(outcomes), fmean(outcomes), max(outcomes)) if outcomes else None


def _settings(jobs: Sequence[Job], keys: Sequence[str]) -> list[_Setting]:
    """Return the settings, best mean outcome first."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(json.dumps([job.values.get(key) for key in keys]), []).append(job)
    settings = [
        _Setting({key: members[0].values.get(key, ("-")) for key in keys}, members)
        for members in groups.values()
    ]
    return sorted(
        settings, key=lambda setting: -setting.outcomes[1] if setting.outcomes else math.inf
    )


def _levels(scored: Sequence[tuple[str, float]]) -> list[tuple[str, list[float]]]:
    """Return the values of a key with their outcomes; many numbers, as from Optuna, become three
    ranges.
    """
    values = sorted({value for value, _ in scored}, key=lambda value: (_number(value), value))
    if len(values) <= _MAX_LEVELS or not math.isfinite(_number(values[-1])):
        return [
            (short_value(value), [outcome for other, outcome in scored if other == value])
            for value in values
        ]
    ordered = sorted(scored, key=lambda pair: _number(pair[0]))
    parts = [
        ordered[low:high] for low, high in pairwise(len(ordered) * part // 3 for part in range(4))
    ]
    return [
        (
            f"{short_value(part[0][0])} to {short_value(part[-1][0])}",
            [outcome for _, outcome in part],
        )
        for part in parts
    ]


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.inf
