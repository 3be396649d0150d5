"""The report of a run: ``report.html``, a self-contained file, and, with matplotlib, ``curves.png``.

Everything is read from the run's folder, so that a report can be made of a run that crashed or is
still running. Missing parts are omitted.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from torchrl_grpo.extras.report.comparison import Problem, compare_tests, tests_of
from torchrl_grpo.extras.report.panels import ACTIVITY_COLORS, NO_CURVES, has_matplotlib, panels_of
from torchrl_grpo.extras.report.records import (
    read_samples,
    run_names,
    run_title,
    valid_reward,
)
from torchrl_grpo.extras.report.summary import STAGES, merge_steps, stage_seconds, summary_of
from torchrl_grpo.extras.run_files import read_thumbnail
from torchrl_grpo.host.files import ENVIRONMENT_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl
from torchrl_grpo.host.folders import check_own_files
from torchrl_grpo.host.text import (
    clip,
    duration,
    number,
    percent,
    points,
    printable_lines,
    reward_text,
)

_MAX_SAMPLES = 12
_HALF_GROUP = 2
_MAX_TEXT_LENGTH = 2000

Row = Mapping[str, Any]
Tests = Mapping[int, Mapping[Problem, Row]]
"""Rows of test problems, by step."""


def write_report(directory: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and, if matplotlib is installed, ``curves.png`` into a run's folder.

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
    [name] = run_names([directory])
    panels = None
    if has_matplotlib():
        from torchrl_grpo.extras.report.curves import panel_svg, save_png

        save_png(records, directory / "curves.png", f"{title}: {name}")
        panels = [(panel, panel_svg(panel, records)) for panel in panels_of(records)]
    tests, trained = _read_samples(directory / SAMPLES_FILE)
    config = _read(directory / ".hydra" / "config.yaml")
    environment = _environment(directory)
    page = page_template("report.html.j2").render(
        title=title,
        name=name,
        logged=bool(records),
        summary=summary_of(records),
        panels=panels,
        times=_times(records),
        changes=_changes(tests),
        tested=_tested(tests),
        trained=_trained(trained),
        pictures=partial(_pictures, directory),
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


def _read_samples(path: Path) -> tuple[Tests, list[Row]]:
    """Return the test problems of each evaluation, in order, and the rows of the last step that
    trained.
    """
    tested: dict[int, list[Row]] = {}
    trained = list[Row]()
    for row in read_samples(path):
        step = row["step"]
        if row.get("split") == "test":
            tested.setdefault(step, []).append(row)
            continue
        if trained and step > trained[0]["step"]:
            trained.clear()
        if not trained or step == trained[0]["step"]:
            trained.append(row)
    return {step: tests_of(tested[step], step) for step in sorted(tested)}, trained


def _times(records: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the stages of the run's wall time that are not 0, in seconds."""
    parts = [stage_seconds(record) for record in records]
    totals = {name: sum(part[name] for part in parts) for name in STAGES}
    return [
        {"name": name, "seconds": seconds, "color": ACTIVITY_COLORS[name]}
        for name, seconds in totals.items()
        if seconds
    ]


def _changes(tests: Tests) -> list[tuple[int, str, float, str]]:
    """Return step, decoding, accuracy and comparison of each evaluation with the first one."""
    changes = []
    for decoding in ("greedy", "sampled"):
        for step in [*tests][1:]:
            comparison = compare_tests(
                tests[min(tests)], tests[step], sampled=decoding == "sampled"
            )
            if comparison is not None:
                changes.append((step, decoding, comparison.after, comparison.text))
    return changes


def _tested(tests: Tests) -> dict[str, Any] | None:
    """Return the test problems sampled at the first and at the last evaluation, side by side."""
    if not tests:
        return None
    steps = sorted({min(tests), max(tests)})
    order = dict.fromkeys(problem for step in reversed(steps) for problem in tests[step])
    problems = [
        (problem[1], [tests[step].get(problem) for step in steps])
        for problem in [*order][:_MAX_SAMPLES]
    ]
    return {"steps": steps, "problems": problems}


def _trained(rows: Sequence[Row]) -> list[Row]:
    """Return training samples, group by group: first those whose rewards differ most;
    of a large group those with the highest and the lowest rewards.
    """
    groups: dict[Any, list[Row]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(row.get("group", f"row {position}"), []).append(row)
    by_spread = sorted(groups.values(), key=_spread, reverse=True)
    shown = list[Row]()
    for group in by_spread:
        ordered = sorted(group, key=lambda row: valid_reward(row) or 0.0, reverse=True)
        shown += ordered[:_HALF_GROUP] + ordered[_HALF_GROUP:][-_HALF_GROUP:]
    return shown[:_MAX_SAMPLES]


def _pictures(directory: Path, row: Row) -> list[tuple[str, str]]:
    """Return a row's thumbnails as data URIs, each with its alternative text."""
    images = row.get("images") or []
    files = [read_thumbnail(directory, image) for image in images]
    return [
        (f"data:image/png;base64,{b64encode(file).decode()}", f"image {number} of {len(images)}")
        for number, file in enumerate(files, start=1)
        if file
    ]


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
    loader = jinja2.PackageLoader("torchrl_grpo.extras.report", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"text": _text, "percent": percent, "number": number}
    environment.globals |= {"points": points, "no_curves": NO_CURVES}
    environment.filters |= {"duration": duration, "reward": reward_text}
    return environment.get_template(name)
