"""The report of a run: ``report.html``, a self-contained file, and ``curves.png``.

Everything is read from the run's folder, so that a report can be made of a run that crashed or is
still running. Missing parts are omitted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2

from torchrl_grpo.host.files import ENVIRONMENT_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl
from torchrl_grpo.host.folders import check_own_files
from torchrl_grpo.host.text import (
    accuracy,
    clip,
    duration,
    invalid_cause,
    number,
    percent,
    points,
    printable_lines,
)
from torchrl_grpo.reporting.alarms import MOSTLY_INVALID, alarms_of
from torchrl_grpo.reporting.curves import panel_svg, save_png
from torchrl_grpo.reporting.panels import ACTIVITY_COLORS, STAGES, panels_of, stage_seconds
from torchrl_grpo.reporting.records import (
    merge_steps,
    problem_of,
    reward_text,
    run_title,
    valid_reward,
)

ACCURACY = "eval/pass@1"
_MAX_SAMPLES = 12
_HALF_GROUP = 2
_INVALID = "rewards/invalid_"
_MAX_TEXT_LENGTH = 2000

Row = Mapping[str, Any]


def write_report(directory: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and ``curves.png`` into a run's folder.

    Args:
        directory: folder with ``metrics.jsonl`` and, if they exist, ``samples.jsonl``,
            ``environment.json`` and Hydra's ``.hydra`` folder.

    Returns:
        the path of ``report.html``.

    Raises:
        ConfigError: a link leads out of the folder.
    """
    directory = Path(directory)
    check_own_files(directory)
    records = merge_steps(read_jsonl(directory / METRICS_FILE))
    title = title_of(directory)
    name = "/".join(directory.resolve().parts[-2:])  # a date and a time in the usual layout
    save_png(records, directory / "curves.png", f"{title}: {name}")
    samples = read_jsonl(directory / SAMPLES_FILE)
    config = _read(directory / ".hydra" / "config.yaml")
    environment = _environment(directory)
    page = page_template("report.html.j2").render(
        title=title,
        name=name,
        logged=bool(records),
        summary=_summary(records),
        panels=[(panel, panel_svg(panel, records)) for panel in panels_of(records)],
        times=_times(records),
        tested=_tested(samples),
        trained=_trained(samples),
        environment=environment,
        config=config,
    )
    path = directory / "report.html"
    # A model can write lone surrogates, which have no UTF-8 encoding.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def title_of(directory: Path) -> str:
    """Return model, data and algorithm of a run from Hydra's files."""
    return run_title(
        _read(directory / ".hydra" / "config.yaml"), _read(directory / ".hydra" / "hydra.yaml")
    )


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
    return _summary(merge_steps(read_jsonl(Path(directory) / METRICS_FILE)))


def _summary(records: Sequence[Row]) -> dict[str, Any]:
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


def _times(records: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the stages of the run's wall time that are not 0, in seconds."""
    parts = [stage_seconds(record) for record in records]
    totals = {name: sum(part[name] for part in parts) for name in STAGES}
    return [
        {"name": name, "seconds": seconds, "color": ACTIVITY_COLORS[name]}
        for name, seconds in totals.items()
        if seconds
    ]


def _tested(samples: Sequence[Row]) -> dict[str, Any] | None:
    """Return the test problems sampled at the first and at the last evaluation, side by side."""
    by_step: dict[int, dict[Any, Row]] = {}
    for row in samples:
        if row.get("split") == "test":
            by_step.setdefault(row["step"], {}).setdefault(problem_of(row), row)
    if not by_step:
        return None
    steps = sorted({min(by_step), max(by_step)})
    queries = {
        problem: row.get("query") for step in steps for problem, row in by_step[step].items()
    }
    order = list(dict.fromkeys(problem for step in reversed(steps) for problem in by_step[step]))[
        :_MAX_SAMPLES
    ]
    problems = [
        (queries[problem], [by_step[step].get(problem) for step in steps]) for problem in order
    ]
    return {"steps": steps, "problems": problems}


def _trained(samples: Sequence[Row]) -> list[Row]:
    """Return the latest training samples, group by group: first those whose rewards differ most;
    of a large group those with the highest and the lowest rewards.
    """
    rows = [row for row in samples if row.get("split") != "test"]
    last = max((row["step"] for row in rows), default=None)
    groups: dict[Any, list[Row]] = {}
    for position, row in enumerate(rows):
        if row["step"] == last:
            groups.setdefault(row.get("group", f"row {position}"), []).append(row)
    by_spread = sorted(groups.values(), key=_spread, reverse=True)
    shown = list[Row]()
    for group in by_spread:
        ordered = sorted(group, key=lambda row: valid_reward(row) or 0.0, reverse=True)
        shown += ordered[:_HALF_GROUP] + ordered[_HALF_GROUP:][-_HALF_GROUP:]
    return shown[:_MAX_SAMPLES]


def _spread(rows: Sequence[Row]) -> float:
    valid = [reward for row in rows if (reward := valid_reward(row)) is not None]
    return max(valid) - min(valid) if valid else -1.0


def _environment(directory: Path) -> dict[str, Any]:
    """Return the contents of ``environment.json``; empty if it is malformed."""
    try:
        facts = dict(json.loads(_read(directory / ENVIRONMENT_FILE) or "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    packages = facts.get("packages")
    if isinstance(packages, dict):
        facts["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    return facts


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _text(value: Any, longest: int | None = _MAX_TEXT_LENGTH) -> str:
    """Return a text for display; Jinja escapes its HTML."""
    return printable_lines(str(value) if longest is None else clip(str(value), longest))


def page_template(name: str) -> jinja2.Template:
    """Load a page template of this folder, with its filters."""
    loader = jinja2.PackageLoader("torchrl_grpo.reporting", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"text": _text, "percent": percent, "number": number}
    environment.globals["points"] = points
    environment.filters |= {"duration": duration, "reward": reward_text}
    return environment.get_template(name)
