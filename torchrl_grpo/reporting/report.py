"""The report of a run: ``report.html``, one file that needs nothing else, and ``curves.png``.

Everything is read back from the run's folder, so that a report can be made of a run that crashed, or of one that still
runs. What is not there is left out.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.reporting.console import clip, duration, percent, printable, reward_text
from torchrl_grpo.reporting.curves import COLORS, PANELS, TIME_PARTS, panel_svg, save_png, series, time_parts
from torchrl_grpo.reporting.metrics import ENVIRONMENT_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl

_MOST_SAMPLES = 12
_LONGEST_TEXT = 2000


def write_report(directory: str | os.PathLike[str]) -> Path:
    """Writes ``report.html`` and ``curves.png`` into a run's folder.

    Args:
        directory: holds ``metrics.jsonl`` and, where there are any, ``samples.jsonl``, ``environment.json`` and
            ``.hydra/config.yaml``.

    Returns:
        the path of ``report.html``.
    """
    directory = Path(directory)
    records = merge_steps(read_jsonl(directory / METRICS_FILE))
    save_png(records, directory / "curves.png")
    samples = read_jsonl(directory / SAMPLES_FILE)
    sections = [
        _headline(directory, records),
        _curves(records),
        _time_share(records),
        _test_samples(samples),
        _train_samples(samples),
        _environment(directory / ENVIRONMENT_FILE),
        _config(directory / ".hydra" / "config.yaml"),
    ]
    page = _PAGE.format(
        title=_text(f"GRPO run {_run_name(directory)}"), style=_STYLE, body="\n".join(filter(None, sections))
    )
    path = directory / "report.html"
    # A model can write half a surrogate pair, which has no UTF-8.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def merge_steps(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One mapping a step, in the order of the steps: a step's later lines add to its earlier ones."""
    records: dict[int, dict[str, Any]] = {}
    for row in rows:
        records.setdefault(row["step"], {}).update(row)
    return [records[step] for step in sorted(records)]


def summarize(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The run in a few numbers, from ``metrics.jsonl``.

    Returns:
        ``steps``; ``sequences`` and ``tokens`` (sums of ``rollout/sequences`` and ``rollout/tokens``); ``wall_s`` (the
        steps and the evaluations); ``trained_tokens_per_s`` (as the metric of that name: without the evaluations);
        ``accuracy_before`` and ``accuracy_after`` (first and last
        ``eval/pass@1``) and the steps that they were measured after, ``before_step`` and ``after_step``; ``restarts``
        of actors and ``groups_resampled`` after them. What the run has no numbers for is None, or 0 where it is a
        count.
    """
    return _summary(merge_steps(read_jsonl(Path(directory) / METRICS_FILE)))


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    evaluations = [(r["step"], r["eval/pass@1"]) for r in records if r.get("eval/pass@1") is not None]
    tokens = sum(int(r.get("rollout/tokens") or 0) for r in records)
    wall_s = sum(sum(time_parts(r).values()) for r in records)
    steps_s = sum(float(r.get("time/step_s") or 0) for r in records)
    return {
        "steps": records[-1]["step"] if records else 0,
        "sequences": sum(int(r.get("rollout/sequences") or 0) for r in records),
        "tokens": tokens,
        "wall_s": wall_s or None,
        "trained_tokens_per_s": tokens / steps_s if tokens and steps_s else None,
        "accuracy_before": evaluations[0][1] if evaluations else None,
        "before_step": evaluations[0][0] if evaluations else None,
        # One evaluation is not yet a result of training.
        "accuracy_after": evaluations[-1][1] if len(evaluations) > 1 else None,
        "after_step": evaluations[-1][0] if len(evaluations) > 1 else None,
        "restarts": _latest_sum(records, "workers/restarts_"),
        "groups_resampled": _latest_sum(records, "workers/groups_resampled"),
    }


def _latest_sum(records: Sequence[Mapping[str, Any]], prefix: str) -> int:
    """Sum of the counters of this prefix, in the latest step that has them."""
    counts = [[int(value) for name, value in r.items() if name.startswith(prefix)] for r in records]
    return next((sum(found) for found in reversed(counts) if found), 0)


def _headline(directory: Path, records: Sequence[Mapping[str, Any]]) -> str:
    summary = _summary(records)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    cards = []
    if after is not None:
        note = f"{100 * (after - before):+.1f} points, step {summary['before_step']} to {summary['after_step']}"
        change = f"{percent(before)} <i>&rarr;</i> {percent(after)}"
        cards.append(_card("Test accuracy, greedy", change, note, wide=True))
    elif before is not None:
        cards.append(_card("Test accuracy, greedy", percent(before), f"after step {summary['before_step']}"))
    cards.append(_card("Steps", f"{summary['steps']:,}"))
    if summary["wall_s"]:
        cards.append(_card("Wall time", duration(summary["wall_s"])))
    if summary["sequences"]:
        cards.append(_card("Sequences", f"{summary['sequences']:,.0f}"))
    if summary["trained_tokens_per_s"]:
        note = f"{summary['tokens']:,.0f} tokens, without evaluation"
        cards.append(_card("Trained tokens/s", f"{summary['trained_tokens_per_s']:,.0f}", note))
    if summary["restarts"]:
        cards.append(_card("Restarts", f"{summary['restarts']:,}", f"{summary['groups_resampled']:,} groups again"))
    empty = "" if records else "<p>No metrics were logged.</p>"
    name = f'<h1>GRPO run</h1><p class="dim">{_text(_run_name(directory))}</p>'
    return f'{name}{empty}<div class="cards">{"".join(cards)}</div>'


def _card(title: str, value: str, note: str = "", *, wide: bool = False) -> str:
    return f'<div class="card{" wide" * wide}"><h3>{title}</h3><b>{value}</b><span class="dim">{note}</span></div>'


def _curves(records: Sequence[Mapping[str, Any]]) -> str:
    figures = []
    for panel in PANELS:
        if series(panel, records):
            note = f'<p class="dim">{panel.note}</p>' if panel.note else ""
            caption = f"<figcaption>{panel.title}</figcaption>{note}"
            figures.append(f"<figure>{caption}{panel_svg(panel, records)}</figure>")
    return f'<h2>Curves</h2><div class="curves">{"".join(figures)}</div>' if figures else ""


def _time_share(records: Sequence[Mapping[str, Any]]) -> str:
    parts = [time_parts(record) for record in records]
    totals = {part: sum(p[part] for p in parts) for part in TIME_PARTS}
    whole = sum(totals.values())
    if not whole:
        return ""
    bar, legend = [], []
    for (part, seconds), color in zip(totals.items(), COLORS, strict=True):
        if seconds:
            bar.append(f'<span style="flex:{seconds / whole:.4f};background:{color}" title="{part}"></span>')
            share = f"{part} <b>{percent(seconds / whole)}</b> <span class='dim'>{duration(seconds)}</span>"
            legend.append(f'<li><i style="background:{color}"></i>{share}</li>')
    return f'<h2>Where the time went</h2><div class="bar">{"".join(bar)}</div><ul class="legend">{"".join(legend)}</ul>'


def _test_samples(samples: Sequence[Mapping[str, Any]]) -> str:
    """The test problems that were sampled at the first and at the last evaluation, side by side."""
    by_step: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in samples:
        if row.get("split") == "test":
            by_step.setdefault(row["step"], {}).setdefault(str(row.get("query")), row)
    if not by_step:
        return ""
    first, last = min(by_step), max(by_step)
    columns = [first] if first == last else [first, last]
    queries = list(dict.fromkeys(query for step in reversed(columns) for query in by_step[step]))[:_MOST_SAMPLES]
    head = "".join(f"<th>{'before training' if step == 0 else f'after step {step}'}</th>" for step in columns)
    rows = [
        f"<tr><td>{_text(query)}</td>{''.join(_response(by_step[step].get(query)) for step in columns)}</tr>"
        for query in queries
    ]
    return (
        f'<h2>Test problems</h2><div class="scroll"><table><tr><th>prompt</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _train_samples(samples: Sequence[Mapping[str, Any]]) -> str:
    """The latest samples of training, with their advantages."""
    rows = [row for row in samples if row.get("split") != "test"]
    if not rows:
        return ""
    step = max(row["step"] for row in rows)
    cells = []
    for row in [row for row in rows if row["step"] == step][:_MOST_SAMPLES]:
        advantage = row.get("advantage")
        shown = "-" if advantage is None else f"{advantage:+.2f}"
        cells.append(f"<tr><td>{_text(row.get('query'))}</td>{_response(row)}<td class='number'>{shown}</td></tr>")
    head = "<tr><th>prompt</th><th>response</th><th>advantage</th></tr>"
    return f'<h2>Training samples, step {step}</h2><div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def _response(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return '<td class="dim">-</td>'
    kind = "good" if row.get("correct") else "bad"
    reward = f'<em class="{kind}">reward {reward_text(row)}</em>'
    return f'<td><div class="response">{_text(row.get("response"))}</div>{reward}</td>'


def _environment(path: Path) -> str:
    if not path.exists():
        return ""
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["packages"] = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return f'<h2>Environment</h2><div class="scroll"><table class="facts">{rows}</table></div>'


def _config(path: Path) -> str:
    if not path.exists():
        return ""
    text = _text(path.read_text(encoding="utf-8"), longest=None)
    return f"<h2>Config</h2><details><summary>{_text(path.name)}</summary><pre>{text}</pre></details>"


def _run_name(directory: Path) -> str:
    """The last two parts of the path: a date and a time in the usual layout."""
    return "/".join(directory.resolve().parts[-2:])


def _text(value: Any, longest: int | None = _LONGEST_TEXT) -> str:
    """Escaped text: nothing in it is read as HTML, newlines stay, other characters without a picture become escapes."""
    text = str(value) if longest is None else clip(str(value), longest)
    return html.escape("\n".join(printable(line) for line in text.split("\n")))


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1f2630; --dim: #667080; --line: #dfe3e8;
  --good: #0a7a4b; --bad: #b4232c; --accent: #2563eb; }
@media (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1b1f27; --ink: #e4e8ee; --dim: #949eac;
  --line: #343b47; --good: #4ade80; --bad: #f87171; --accent: #7aa8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 28px; margin: 0; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 13px; margin: 0; font-weight: 500; color: var(--dim); }
p { margin: 4px 0; }
.dim { color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.card, figure, table, pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 14px 16px; display: flex; flex-direction: column; }
.card.wide { grid-column: span 2; }
.card b { font-size: 25px; line-height: 1.35; font-weight: 650; }
.card.wide b { color: var(--accent); }
.card i { font-style: normal; color: var(--dim); font-weight: 400; }
.card span { font-size: 13px; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 12px; }
figure { margin: 0; padding: 12px 12px 6px; display: flex; flex-direction: column; }
figure p { margin: 0; font-size: 12.5px; line-height: 1.35; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; margin-top: auto; }
svg text { font-family: inherit !important; }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; gap: 1px; }
.legend { list-style: none; padding: 0; margin: 10px 0 0; display: flex; flex-wrap: wrap; gap: 6px 24px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 9px 14px; border-bottom: 1px solid var(--line);
  white-space: pre-wrap; overflow-wrap: anywhere; }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; color: var(--dim); white-space: nowrap; }
td { min-width: 130px; }
th:first-child { width: 30%; }
.facts th:first-child { width: 1%; }
.number { font-variant-numeric: tabular-nums; }
.response { max-height: 190px; overflow-y: auto; font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
em { font-style: normal; font-size: 12.5px; font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); }
summary { cursor: pointer; }
pre { padding: 14px; overflow-x: auto; font-size: 13px; margin: 10px 0 0; }
"""
