"""Sums of three digits, which the included model never gets right: GRPO, self-distillation, and both.

    python benchmarks/bench_self_distillation.py
    python benchmarks/bench_self_distillation.py --conditions solution both --seeds 0 --steps 150
    python benchmarks/bench_self_distillation.py --plot-only

First 60 steps of ``sft`` make a model that copies a solution from its prompt: prompts begin with the worked solution of
sums that the runs do not have. Then each condition trains that model on prompts without a solution. The teacher is a
moving average of the policy whose prompt has the solution, or, in ``other``, the solution of another problem. Each run
is a process with the real command line. Nothing is timed, so other work on the machine does no harm. Test problems are
judged step by step, because a sum is right only if all three steps are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import surroundings
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = """\
def with_solution(messages, solution):
    return [{"role": "user", "content": f"{solution} {messages[-1]['content']}"}]


def with_other(messages, other):
    return [{"role": "user", "content": f"{other} {messages[-1]['content']}"}]
"""
TEACHER = (
    "teacher.model=policy",
    "teacher.weights=ema",
    "policy.teacher_divergence=forward",
    "policy.teacher_top_k=64",
    "optimizer.lr=1e-3",
)
CONDITIONS = {
    "grpo": ("algo=grpo", "optimizer.lr=1e-4"),
    "solution": ("algo=distill", *TEACHER, "teacher.prompt=my_prompts.py:with_solution"),
    "other": ("algo=distill", *TEACHER, "teacher.prompt=my_prompts.py:with_other"),
    "both": (
        "algo=grpo",
        "policy.teacher_coef=1",
        "policy.aggregation=token_mean",
        *TEACHER,
        "teacher.prompt=my_prompts.py:with_solution",
    ),
}
NAMES = {
    "grpo": "GRPO",
    "solution": "solution in the teacher's prompt",
    "other": "another problem's solution",
    "both": "GRPO and the solution",
}
COLORS = {"grpo": "#8a929e", "solution": "#0062b0", "other": "#c05a00", "both": "#2f7d32"}
MEASURES = ("step 1 right", "step 2 right", "step 3 right", "sum right")


def worked(a: int, b: int) -> list[str]:
    """Return the steps of a sum, from the last digit to the first."""
    steps, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' * carry}={total}")
        carry = total // 10
    return steps


def make_data(out: Path) -> None:
    """Write the sums to train on, and the rows that teach to copy a solution."""
    example = [sys.executable, str(ROOT / "examples/three_digit_sums.py")]
    lines = subprocess.run(example, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    others = [row["solution"] for row in rows]
    random.Random(1).shuffle(others)
    pairs = zip(rows, others, strict=True)
    write_rows(out / "sums.jsonl", [{**row, "other": other} for row, other in pairs])
    questions = {row["question"] for row in rows}
    draw = random.Random(7)
    copies: list[dict[str, str]] = []
    while len(copies) < 6000:
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        solution = f"{', '.join(worked(a, b))} #### {a + b}"
        question = f"{a}+{b}=? #### n"
        if question not in questions:
            prompt = f"{solution} {question}"
            copies.append({"question": prompt, "solution": solution, "answer": str(a + b)})
    write_rows(out / "copy.jsonl", copies)
    (out / "my_prompts.py").write_text(PROMPTS)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(out: Path, name: str, *overrides: str) -> None:
    command = [
        sys.executable,
        str(ROOT / "sota/grpo/grpo.py"),
        "--config-name",
        "grpo_arithmetic",
        "env.columns.answer=answer",
        "env.reward=gsm8k",
        "env.num_envs=128",
        "inference_model.max_new_tokens=40",
        "evaluation.k=0",
        "logging.tensorboard=false",
        f"hydra.run.dir={out / name}",
        *overrides,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with open(out / f"{name}.log", "w") as log:
        subprocess.run(command, check=True, cwd=out, env=environment, stdout=log, stderr=log)


def make_base(out: Path) -> None:
    train(
        out,
        "base",
        "env.dataset=copy.jsonl",
        "env.test_fraction=0.05",
        "algo=sft",
        "env.columns.completion=solution",
        "optimizer.lr=1e-3",
        "evaluation.num_prompts=200",
        "train.total_steps=60",
    )


def run(out: Path, name: str, condition: str, seed: int, steps: int) -> None:
    train(
        out,
        name,
        "env.dataset=sums.jsonl",
        "env.test_fraction=0.1",
        f"model.name={out / 'base/checkpoints/model'}",
        *CONDITIONS[condition],
        "policy.kl_coef=0",
        "optimizer.warmup_steps=5",
        f"evaluation.frequency={5 if steps <= 20 else 10}",
        "evaluation.num_prompts=100",
        "logging.sample_rows=100",
        f"train.total_steps={steps}",
        "train.checkpoint_frequency=0",
        f"seed={seed}",
    )


def judged(folder: Path) -> tuple[int, dict[int, list[float]]]:
    """Return the number of test problems, and by trained steps the share of them for each of
    ``MEASURES``.
    """
    counts: dict[int, list[int]] = defaultdict(lambda: [0] * 5)
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"] != "test":
            continue
        a, b = map(int, re.findall(r"\d+", row["query"])[:2])
        written = [step.strip() for step in row["response"].split("####")[0].split(",")]
        right = [x == y for x, y in zip(written, worked(a, b), strict=False)]
        right = [*right, *[False] * (3 - len(right)), bool(row["correct"])]
        tally = counts[row["step"]]
        for place, value in enumerate([*right, True]):
            tally[place] += value
    shares = {step: [n / tally[4] for n in tally[:4]] for step, tally in counts.items()}
    return max(tally[4] for tally in counts.values()), shares


def result_of(folder: Path, condition: str, seed: int, steps: int) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "train/divergence_to_teacher"
    divergences = [row[key] for row in rows if key in row]
    problems, shares = judged(folder)
    return {
        "condition": condition,
        "seed": seed,
        "steps": steps,
        "divergence": divergences[-1] if divergences else None,
        "problems": problems,
        "shares": shares,
    }


def draw_figure(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the shares of the longest runs, a panel per measure."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axes, place in zip(figure.subplots(1, 4, sharey=True), range(4), strict=True):
        for result in results:
            condition = result["condition"]
            shares = result["shares"]
            x = [int(step) for step in shares]
            y = [100 * values[place] for values in shares.values()]
            label = NAMES[condition] if place == 0 and result["seed"] == 0 else None
            axes.plot(x, y, color=COLORS[condition], alpha=0.8, lw=1.6, label=label)
        axes.set_title(MEASURES[place], fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test problems (%)")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print the last evaluation of each condition, a value per seed."""
    for steps in sorted({result["steps"] for result in results}):
        print(
            f"\n| {steps} steps | divergence | {' | '.join(MEASURES)} |\n|---|---|---|---|---|---|"
        )
        for condition in CONDITIONS:
            rows = [r for r in results if (r["condition"], r["steps"]) == (condition, steps)]
            if not rows:
                continue
            last = [list(row["shares"].values())[-1] for row in rows]
            columns = [", ".join(f"{100 * v[place]:.0f}" for v in last) + "%" for place in range(4)]
            divergences = [r["divergence"] for r in rows if r["divergence"] is not None]
            distance = ", ".join(f"{value:.2f}" for value in divergences)
            print(f"| {NAMES[condition]} | {distance} | {' | '.join(columns)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/out/self_distillation")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks/results/self_distillation.json"
    )
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/images/self_distillation.png")
    parser.add_argument("--plot-only", action="store_true", help="draw and print an earlier JSON")
    args = parser.parse_args()
    results = json.loads(args.json.read_text())["results"] if args.json.exists() else []
    if not args.plot_only:
        out = args.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        make_data(out)
        if not (out / "base/checkpoints/model").exists():
            make_base(out)
        for seed in args.seeds:
            for condition in args.conditions:
                name = f"{condition}_{seed}_{args.steps}"
                run(out, name, condition, seed, args.steps)
                results = [
                    result
                    for result in results
                    if (result["condition"], result["seed"], result["steps"])
                    != (condition, seed, args.steps)
                ]
                results.append(result_of(out / name, condition, seed, args.steps))
                surrounding = surroundings(("torch", "transformers", "torchrl"))
                args.json.write_text(
                    json.dumps({**surrounding, "results": results}, indent=1) + "\n"
                )
    print_table(results)
    longest = max(result["steps"] for result in results)
    draw_figure([result for result in results if result["steps"] == longest], args.figure)


if __name__ == "__main__":
    main()
