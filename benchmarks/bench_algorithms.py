"""Compare how the algorithm presets learn the arithmetic task: a run per preset and seed, and one figure for all.

    python benchmarks/bench_algorithms.py
    python benchmarks/bench_algorithms.py --presets grpo cispo --seeds 0 --override train.total_dialog_turns=1280
    python benchmarks/bench_algorithms.py --plot-only

Every file in ``config/algo`` is a preset. The runs follow one another, each in its own process; all of them take
about 20 minutes on 2 cores. The JSON is updated after each run, so that ``--resume`` continues an interrupted
comparison. At the end the figure is drawn and the table of ``docs/algorithms.md`` is printed.

Accuracy is that of greedy responses to the test problems. "Sampled" counts all sampled responses; with dynamic
sampling these are more than a run trains on. Nothing is timed, so other work on the machine does no harm.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import surroundings
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "config" / "algo").glob("*.yaml"))
PACKAGES = ("torch", "transformers", "tensordict", "torchrl")
SOURCES = ("torchrl_grpo", "config", "sota")
REFERENCE = "grpo"
REWARD_STEPS = 10
"""The training reward after the run is the mean over the last steps, this many."""
TIMEOUT = 1800
"""Seconds after which a run is abandoned; it takes about 35."""
COLUMNS = 4
# Blue and gray differ in lightness too, and in every form of color blindness.
INK, GREY, GRID, BLUE = "#333a45", "#8a929e", "#dfe3e8", "#0062b0"

Run = dict[str, Any]


def run(preset: str, seed: int, overrides: list[str]) -> Run:
    """Train once and return the figures of the run.

    Raises:
        RuntimeError: the process failed; the message has the end of its output.
        subprocess.TimeoutExpired: it took longer than ``TIMEOUT``.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "sota/grpo/grpo.py",
            "--config-name",
            "grpo_arithmetic",
            *overrides,
        ]
        command += [
            f"algo={preset}",
            f"seed={seed}",
            f"hydra.run.dir={folder}",
            "logging.tensorboard=false",
        ]
        process = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        if process.returncode:
            output = (process.stdout + process.stderr)[-3000:]
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
        lines = Path(folder, "metrics.jsonl").read_text("utf-8").splitlines()
    return summary([json.loads(line) for line in lines])


def summary(records: list[dict[str, Any]]) -> Run:
    """Return the comparison's figures from the metrics of a run."""
    evaluations = [record for record in records if record.get("eval/pass@1") is not None]
    steps = [record for record in records if record.get("rollout/reward_mean") is not None]
    accuracy = [record["eval/pass@1"] for record in evaluations]
    reward = [record["rollout/reward_mean"] for record in steps]
    return {
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "accuracy_mean": statistics.fmean(accuracy),
        "reward_after": statistics.fmean(reward[-REWARD_STEPS:]),
        "responses_trained": sum(record["rollout/sequences"] for record in steps),
        "responses_sampled": sum(sampled(record) for record in steps),
        "evaluations": {str(record["step"]): record["eval/pass@1"] for record in evaluations},
    }


def sampled(record: dict[str, Any]) -> float:
    """Return the number of responses sampled for a step, including those of groups that dynamic
    sampling dropped.
    """
    played = record.get("rollout/groups_played")
    dropped = sum(
        record.get(f"rollout/groups_{reason}") or 0.0 for reason in ("zero_variance", "surplus")
    )
    return record["rollout/sequences"] * (played / (played - dropped) if played else 1.0)


def commit() -> str:
    """Return the commit of the checkout, marked if the files that a run reads differ from it."""
    git = ["git", "-C", str(ROOT)]
    head, changed = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
        for command in (
            ["rev-parse", "--short=12", "HEAD"],
            ["diff", "--stat", "HEAD", "--", *SOURCES],
        )
    )
    return head + ("-dirty" if changed else "")


def over_seeds(runs: dict[str, Run], name: str) -> tuple[float, float, float]:
    """Return the mean, minimum and maximum of a figure over the seeds."""
    values = [figures[name] for figures in runs.values()]
    return statistics.fmean(values), min(values), max(values)


def table(results: dict[str, dict[str, Run]]) -> str:
    """Return the comparison as a Markdown table, best first."""
    lines = [
        "| preset | test accuracy before | after: mean (range) | mean over the run | reward, end | sampled |",
        "|---|---|---|---|---|---|",
    ]
    for preset in sorted(results, key=lambda name: -over_seeds(results[name], "accuracy_after")[0]):
        runs = results[preset]
        after, low, high = over_seeds(runs, "accuracy_after")
        before, during = (
            over_seeds(runs, "accuracy_before")[0],
            over_seeds(runs, "accuracy_mean")[0],
        )
        cells = [
            f"`{preset}`",
            f"{before:.1%}",
            f"{after:.1%} ({low:.1%} to {high:.1%})",
            f"{during:.1%}",
        ]
        cells += [
            f"{over_seeds(runs, 'reward_after')[0]:.3f}",
            f"{over_seeds(runs, 'responses_sampled')[0]:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Run]], path: Path) -> None:
    """Write the figure: for each preset a panel with its mean over the seeds, each seed, and the
    reference in gray.
    """
    names = sorted(results, key=lambda name: (name != REFERENCE, name))
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    spacing = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1)
    figure = Figure(
        figsize=(2.75 * columns + 0.4, 2.15 * rows + 0.7), layout=spacing, facecolor="white"
    )
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, axes in enumerate(panels.flat):
        if index >= len(names):
            axes.remove()
            continue
        draw_panel(axes, names[index], results)
        # The lowest panel of each column has the numbers of the steps.
        axes.tick_params(labelbottom=index + columns >= len(names))
    seeds = max(len(runs) for runs in results.values())
    figure.supxlabel(
        "step (one batch of sampled responses, one weight update of the sampler)",
        fontsize=10,
        color=INK,
    )
    figure.supylabel("test accuracy, greedy (%)", fontsize=10, color=INK)
    figure.suptitle(
        f"Bold: mean over {seeds} seed{'s' if seeds > 1 else ''}. Thin: each seed. Gray, dashed: mean of {REFERENCE}.",
        fontsize=10, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def draw_panel(axes: Axes, preset: str, results: dict[str, dict[str, Run]]) -> None:
    """Draw the panel of a preset."""
    if preset != REFERENCE and REFERENCE in results:
        axes.plot(
            *mean_curve(results[REFERENCE]), color=GREY, linewidth=1.6, linestyle=(0, (3, 1.5))
        )
    for figures in results[preset].values():
        points = [int(step) for step in figures["evaluations"]]
        percent = [100 * accuracy for accuracy in figures["evaluations"].values()]
        axes.plot(points, percent, color=BLUE, linewidth=0.7, alpha=0.55)
    steps, mean = mean_curve(results[preset])
    axes.plot(steps, mean, color=BLUE, linewidth=2.2)
    axes.set_title(preset, loc="left", fontsize=11, fontweight="bold", color=INK)
    responses = {
        name: over_seeds(results[preset], f"responses_{name}")[0] for name in ("sampled", "trained")
    }
    more = responses["sampled"] / responses["trained"]
    if more > 1.05:
        note = f"samples {more:.1f}x the responses"
        axes.text(0.97, 0.18, note, transform=axes.transAxes, ha="right", fontsize=9, color=INK)
    axes.text(
        0.97,
        0.06,
        f"ends at {mean[-1]:.1f}%",
        transform=axes.transAxes,
        ha="right",
        fontsize=10,
        color=BLUE,
    )
    axes.set_ylim(0, 103)
    axes.set_yticks(range(0, 101, 25))
    axes.set_xlim(steps[0], steps[-1])
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)


def mean_curve(runs: dict[str, Run]) -> tuple[list[int], list[float]]:
    """Return the steps of the evaluations and the mean accuracy over the seeds in percent."""
    curves = [figures["evaluations"] for figures in runs.values()]
    steps = sorted(set(curves[0]).intersection(*curves), key=int)
    means = [100 * statistics.fmean(curve[step] for curve in curves) for step in steps]
    return [int(step) for step in steps], means


def main() -> None:
    """Run the selected presets, draw the figure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--override", action="append", default=[], help="config override of every run; repeatable"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that the JSON already has"
    )
    parser.add_argument("--plot-only", action="store_true", help="draw and print what the JSON has")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "algorithms.json"
    )
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "images" / "algorithms.png")
    args = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    setting = {"config": "grpo_arithmetic", "overrides": args.override, "commit": commit()}
    result: dict[str, Any] = surroundings(PACKAGES) | {"setting": setting, "runs": {}}
    if args.plot_only or (args.resume and args.output.exists()):
        result = json.loads(args.output.read_text("utf-8"))
        if args.resume and result["setting"] != setting:
            parser.error(
                f"--resume needs the setting of {args.output}, {result['setting']}, not {setting}: leave --resume out."
            )
    for preset in [] if args.plot_only else args.presets:
        for seed in args.seeds:
            runs = result["runs"].setdefault(preset, {})
            if str(seed) not in runs:
                figures = runs[str(seed)] = run(preset, seed, args.override)
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                sys.stdout.write(f"{preset} seed {seed}: {figures['accuracy_after']:.1%}\n")
                sys.stdout.flush()
    draw(result["runs"], args.figure)
    sys.stdout.write(f"{args.output}\n{args.figure}\n\n{table(result['runs'])}\n")


if __name__ == "__main__":
    main()
