"""Compare a training step with trees of prefixes with that of an older checkout, on recorded agents
and on plain groups.

    git worktree add /tmp/before 94cd5dab^
    OMP_NUM_THREADS=1 python benchmarks/bench_trees.py --before /tmp/before --models tiny
    OMP_NUM_THREADS=1 python benchmarks/bench_trees.py --before /tmp/before --models small \
        --batches langchain openai_agents plain --rounds 1

``recordings/agents.json`` has the lengths of what three programs, which compact their chats by
themselves, requested from the server of ``env.agent`` while a script answered: Codex 0.171 (a group
of 4 trajectories), an agent of LangChain 1.5 with its ``SummarizationMiddleware`` (2), and three agents
of OpenAI's Agents SDK 0.24 that hand over to each other (1). For each sample it has the earlier one with which it
shares most tokens, their number, and the lengths of what the program and the policy wrote in turn.
The tokens themselves are random here.

``plain`` are 2 groups of 8 responses of 32 to 128 tokens, with prompts of 64. The model is random, as
in ``bench_train_step.py``. Each side is a process, and the steps of both alternate; the loss of both
must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDING = HERE / "recordings" / "agents.json"
PACKAGES = ("torch", "transformers", "tensordict", "torchrl")
BATCHES = ("codex", "langchain", "openai_agents", "plain")

Rows = list[tuple[list[int], list[bool]]]
"""Tokens of each sample, and which of them the policy sampled."""


def plain(draw: random.Random, vocab: int) -> Rows:
    """Return two groups of 8 responses to one prompt each."""
    rows = Rows()
    for _ in range(2):
        prompt = [draw.randrange(2, vocab) for _ in range(64)]
        for _ in range(8):
            size = draw.randint(32, 128)
            response = [draw.randrange(2, vocab) for _ in range(size)]
            rows.append((prompt + response, [False] * 64 + [True] * size))
    return rows


def recorded(name: str, draw: random.Random, vocab: int, trajectories: int | None) -> Rows:
    """Return samples of random tokens that share their beginnings as the recorded ones do."""
    rows = Rows()
    for entry in json.loads(RECORDING.read_text())[name]:
        mask = [bool(at % 2) for at, size in enumerate(entry["lengths"]) for _ in range(size)]
        tokens = rows[entry["like"]][0][: entry["shared"]] if rows else []
        rows.append(
            (tokens + [draw.randrange(2, vocab) for _ in range(len(mask) - len(tokens))], mask)
        )
        if entry["ends"] and trajectories is not None:
            trajectories -= 1
            if not trajectories:
                break
    return rows


def distinct_tokens(rows: Rows) -> int:
    """Return how many tokens any method must compute: those before a sampled one, each beginning
    once.
    """
    nodes: dict[tuple[int, int], int] = {}
    for tokens, mask in rows:
        node = 0
        for token in tokens[: max(at for at, flag in enumerate(mask) if flag)]:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


def make_rows(name: str, vocab: int, trajectories: int | None) -> Rows:
    """Return a batch by its name."""
    draw = random.Random(0)
    return plain(draw, vocab) if name == "plain" else recorded(name, draw, vocab, trajectories)


def work(model_name: str, batch_name: str, trajectories: int | None, budget: int) -> None:
    """Make a step for each line of standard input; print its CPU time, tokens and loss."""
    import torch
    from bench_train_step import Trainer, make_model
    from tensordict import TensorDict, lazy_stack

    from torchrl_grpo import keys
    from torchrl_grpo.models.passes import make_passes
    from torchrl_grpo.models.rows import Rows as FlatRows
    from torchrl_grpo.models.scoring import TokenScorer
    from torchrl_grpo.objectives import GRPOLoss

    model = make_model(model_name, "float32")
    entries = []
    for tokens, mask in make_rows(batch_name, model.config.vocab_size, trajectories):
        size = len(tokens)
        entry = {
            keys.FULL: torch.tensor(tokens),
            keys.ASSISTANT_MASK: torch.tensor(mask),
            keys.LOG_PROBS: torch.zeros(size),
            keys.ADVANTAGE: torch.randn(1).expand(size, 1).clone(),
        }
        entries.append(TensorDict(entry))
    batch = lazy_stack(entries)
    scorer = TokenScorer(model)
    passes: Any = make_passes(scorer, FlatRows.read(batch), budget)
    computed = sum(each.layout.tokens.numel() for each in passes if len(each.index))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(
        GRPOLoss(scorer),
        model,
        optimizer,
        optim_batch_size=len(entries),
        micro_batch_tokens=budget,
    )
    for _ in sys.stdin:
        used, start = time.process_time(), time.perf_counter()
        loss = trainer.train_step(batch)["loss"]
        row = {
            "cpu_s": time.process_time() - used,
            "wall_s": time.perf_counter() - start,
            "computed": computed,
            "loss": float(loss),
        }
        print(json.dumps(row), flush=True)


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a side, with the library of a checkout."""
    path = os.pathsep.join([str(root), str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, __file__, "--work", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def step(side: subprocess.Popen[str]) -> dict[str, Any]:
    """Let a side make a step."""
    assert side.stdin and side.stdout
    side.stdin.write("\n")
    side.stdin.flush()
    return json.loads(side.stdout.readline())


def compare(model: str, batch: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens and CPU seconds of both sides."""
    trajectories = str(args.trajectories or 0)
    roots = {"trees": HERE.parent, "before": args.before}
    sides = {
        name: start(root, model, batch, trajectories, str(args.budget))
        for name, root in roots.items()
    }
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(args.warmup + args.rounds):
        for name, side in sorted(sides.items(), reverse=number % 2 == 1):
            row = step(side)
            if number >= args.warmup:
                rounds[name].append(row)
    for side in sides.values():
        side.communicate()
    losses = [rows[0]["loss"] for rows in rounds.values()]
    assert abs(losses[0] - losses[1]) <= 1e-4 * max(1.0, abs(losses[0])), losses
    rows = make_rows(batch, 128 if model == "tiny" else 32000, args.trajectories or None)
    ratios = [
        before["cpu_s"] / trees["cpu_s"]
        for trees, before in zip(rounds["trees"], rounds["before"], strict=True)
    ]
    return {
        "samples": len(rows),
        "tokens": sum(len(tokens) for tokens, _ in rows),
        "sampled": sum(sum(mask) for _, mask in rows),
        "least": distinct_tokens(rows),
        "computed": {name: of[0]["computed"] for name, of in rounds.items()},
        "cpu_s": {name: [round(row["cpu_s"], 3) for row in of] for name, of in rounds.items()},
        "before_over_trees": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "budget": args.budget,
    }


def main() -> None:
    """Measure and print JSON."""
    if sys.argv[1:2] == ["--work"]:
        model, batch, trajectories, budget = sys.argv[2:]
        work(model, batch, int(trajectories) or None, int(budget))
        return
    parser = argparse.ArgumentParser(description="Compare steps with and without trees.")
    parser.add_argument("--before", type=Path, required=True, help="checkout without trees")
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=["tiny", "small"])
    parser.add_argument("--batches", nargs="+", default=BATCHES, choices=BATCHES)
    parser.add_argument("--trajectories", type=int, help="only the first ones of a recording")
    parser.add_argument("--budget", type=int, default=16384, help="train.micro_batch_tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps before, which do not count")
    parser.add_argument("--out", type=Path, help="JSON file to which the figures are added")
    args = parser.parse_args()
    from machine import merge, report, surroundings

    for model in args.models:
        for batch in args.batches:
            name = f"{model} {batch} {args.trajectories or 'all'} {args.budget}"
            figures = {name: compare(model, batch, args)}
            if args.out is not None:
                merge(figures, PACKAGES, args.out)
            report(surroundings(PACKAGES) | figures, None)


if __name__ == "__main__":
    main()
