"""A game whose only reward comes at its end, with and without luck on the way: GRPO and PPO.

    python benchmarks/bench_late_reward.py
    python benchmarks/bench_late_reward.py --conditions late_luck/ppo --seeds 0 --steps 20 --lrs 3e-4

A game has four turns. In each the policy bids a digit, and its skill is the mean bid, 9 being 1 and what is no digit 0.
Each game draws a bonus of -3 to 3 by chance, whatever is bid, and the policy reads it (as 1 to 7): with `luck` from the
start, as where an environment draws its own start; with `late_luck` only after the first bid. The reward, at the end of
the game, is the skill and the bonus. The members of a group differ in their bonus, so that the mean of the group cannot
take it off; a critic can read it. With `no_luck` the policy reads what it does with `late_luck`, and the reward is the
skill.

All conditions play the same number of games. Each tries the same learning rates with the first seed, and that with the
largest mean skill over the run is run with the other seeds, the conditions in turns. All runs are in this process, from
the included model, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from machine import surroundings

import torchrl_grpo

ROOT = Path(__file__).resolve().parents[1]
GAME = """\
import random
from pathlib import Path

chance = random.Random({seed})
skills = Path({skills!r})


class Game:
    def reset(self, seed):
        self.bids, self.bonus = [], chance.randint(1, 7) if {known} else 0
        return f"{{seed % 10}}{{self.bonus}}"

    def step(self, response):
        self.bids.append(int(response[0]) / 9 if response[:1] in set("0123456789") else 0)
        self.bonus = self.bonus or chance.randint(1, 7)
        done = len(self.bids) == {turns}
        skill = sum(self.bids) / {turns}
        if done:
            with skills.open("a") as file:
                file.write(f"{{skill}}\\n")
        return f"{{self.bonus}}", (skill + {luck} * (self.bonus - 4)) * done, done
"""
GAMES_OF = {
    "luck": {"luck": 1, "known": True},
    "late_luck": {"luck": 1, "known": False},
    "no_luck": {"luck": 0, "known": False},
}
"""The weight of the bonus, and whether it is known before the first bid."""
CONDITIONS = [f"{game}/{algorithm}" for game in GAMES_OF for algorithm in ("grpo", "ppo")]
LRS = (1e-4, 3e-4, 1e-3)
GAMES = 64


def train(
    out: Path, condition: str, lr: float, seed: int, steps: int, turns: int
) -> dict[str, Any]:
    """Return the mean skill in each step of a run, and with PPO the share of the returns' variance
    that its critic explains.
    """
    kind, algorithm = condition.split("/")
    name = f"{kind}_{algorithm}_{lr:g}_{seed}".replace("-", "_").replace(".", "_")
    folder = out / name
    game, skills = out / f"game_{name}.py", out / f"{name}.txt"
    text = GAME.format(seed=seed, skills=str(skills), turns=turns, **GAMES_OF[kind])
    game.write_text(text)
    overrides = {
        "algo": algorithm,
        "env.dataset": None,
        "env.environment": f"{game}:Game",
        "env.max_turns": turns,
        "env.num_envs": GAMES,
        "env.repeats": 8,
        "inference_model.max_new_tokens": 1,
        "policy.kl_coef": 0.0,
        "train.total_steps": steps,
        "optimizer.lr": lr,
        "evaluation.num_prompts": 0,
        "logging.tensorboard": False,
        "seed": seed,
    }
    start = time.process_time()
    torchrl_grpo.train("grpo_arithmetic", overrides=overrides, folder=folder)
    played = [float(line) for line in skills.read_text().split()]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "train/explained_variance"
    return {
        "condition": condition,
        "lr": lr,
        "seed": seed,
        "skill": [fmean(played[at : at + GAMES]) for at in range(0, steps * GAMES, GAMES)],
        "explained_variance": [row[key] for row in rows if key in row],
        "cpu_s_per_step": (time.process_time() - start) / steps,
    }


def describe(run: dict[str, Any]) -> str:
    explained = run["explained_variance"]
    share = f", {fmean(explained[-10:]):.2f} of the variance explained" if explained else ""
    return (
        f"{run['condition']} lr {run['lr']:g} seed {run['seed']}: skill {fmean(run['skill']):.3f} "
        f"over the run, {fmean(run['skill'][-10:]):.3f} in the last 10 steps{share}, "
        f"{run['cpu_s_per_step']:.2f} CPU s a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conditions", nargs="+", default=CONDITIONS, choices=CONDITIONS)
    parser.add_argument("--lrs", nargs="+", type=float, default=LRS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/late_reward.json")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "surroundings": surroundings(("torch", "transformers", "torchrl")),
        "runs": [],
    }

    def add(condition: str, lr: float, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            run = train(Path(folder), condition, lr, seed, options.steps, options.turns)
        print(describe(run), file=sys.stderr, flush=True)
        record["runs"].append(run)
        options.out.write_text(json.dumps(record) + "\n")
        return run

    rates = {}
    for condition in options.conditions:
        tried = [add(condition, lr, options.seeds[0]) for lr in options.lrs]
        rates[condition] = max(tried, key=lambda run: fmean(run["skill"]))["lr"]
    for seed in options.seeds[1:]:
        for condition, lr in rates.items():
            add(condition, lr, seed)


if __name__ == "__main__":
    main()
