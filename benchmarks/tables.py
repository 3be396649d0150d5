"""Print the results of ``make bench`` as the Markdown tables of benchmarks/README.md.

    python benchmarks/tables.py benchmarks/out

A ratio is the median over the rounds, in which the sides took turns, with the lowest and the
highest in parentheses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from operator import truediv
from pathlib import Path
from typing import Any

SIZES = {"tiny": "0.3M", "small": "30M", "qwen05": "Qwen2.5-0.5B's shape"}


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Return the ratio of two lists of seconds, with its range over the rounds."""
    rounds = sorted(map(truediv, theirs, ours))
    return f"{statistics.median(rounds):.2f} ({rounds[0]:.2f}–{rounds[-1]:.2f})"


def row(*cells: object) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def training(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of the training step: peers' time and memory divided by ours."""
    lines = [
        row(
            "model, dtype, prompt",
            "ours, s / MiB",
            "TRL",
            "TorchRL",
            "plain PyTorch",
            "padded",
            "products",
        )
    ]
    for result in results:
        setting, seconds, memory = result["setting"], result["seconds"], result["memory_over_ours"]
        cells = [
            f"{ratio(seconds[side], seconds['ours'])} / {memory[side]:.1f}"
            if side in seconds
            else "-"
            for side in ("trl", "torchrl", "plain", "padded")
        ]
        ours = f"{result['median_seconds']['ours']:.3f} / {result['peak_growth_mib']['ours']:.0f}"
        loss = "" if setting.get("loss", "grpo") == "grpo" else f"{setting['loss']}: "
        name = f"{loss}{SIZES[setting['model']]} {setting['dtype']}, {setting['prompt']}"
        products = result["seconds_over_ours"].get("products")
        lines.append(row(name, ours, *cells, "-" if products is None else f"{products:.0%}"))
    return lines


def rollout(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of sampling: the engines' tokens per second, and ours over the others'."""
    lines = [
        row(
            "model, dtype, responses",
            "ours, tokens/s",
            "`generate`",
            "vLLM",
            "over `generate`",
            "over vLLM",
        )
    ]
    for result in results:
        setting, rates, seconds = (
            result["setting"],
            result["median_tokens_per_second"],
            result["seconds"],
        )
        ours = "transformers engine"
        times = {
            side: list(map(truediv, seconds[side], result["tokens"][side])) for side in seconds
        }
        others = [
            ratio(times[side], times[ours]) if side in times else "-"
            for side in ("generate", "vllm")
        ]
        count = setting["prompts"] * setting["responses"]
        name = f"{SIZES[setting['model']]} {setting['dtype']}, {count}" + (
            " of 1 to 512" if setting["lengths"] else ""
        )
        cells = [
            f"{rates[side]:,.0f}" if side in rates else "-" for side in (ours, "generate", "vllm")
        ]
        lines.append(row(name, *cells, *others))
    return lines


def main() -> None:
    """Print the tables for the results in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where `make bench` left its JSON")
    folder = parser.parse_args().folder
    for pattern, table in {"train_step_*.json": training, "rollout_*.json": rollout}.items():
        results = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob(pattern), reverse=True)
        ]
        if results:
            head, *lines = table(results)
            sys.stdout.write(
                "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines, "", ""])
            )


if __name__ == "__main__":
    main()
