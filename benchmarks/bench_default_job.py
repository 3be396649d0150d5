"""Time a step of the default job (`make train`) here and on TRL: same starter, problems, reward, hyperparameters.

    python benchmarks/bench_default_job.py                         # two runs of 40 steps on each side, in turn
    python benchmarks/bench_default_job.py --steps 10 --rounds 1

Prints JSON. A step includes sampling 16 groups of 8, rewards, reference log-probs, the optimizer step, and the weight
sync. Evaluation, checkpoints and TensorBoard are off on both sides. `reward_last` is the mean reward of the last 5
steps: both sides must learn the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from machine import report, surroundings

from torchrl_grpo.config import from_hydra, register
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem

ROOT = Path(__file__).resolve().parents[1]
OFF = ("evaluation.num_prompts=0", "train.checkpoint_frequency=0", "logging.tensorboard=false")
WARM_UP = 3


def run_ours(steps: int, seed: int, folder: str) -> tuple[list[float], list[float]]:
    """Seconds and mean reward of each step."""
    from torchrl_grpo.assembly.run import build
    from torchrl_grpo.host.files import read_jsonl

    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        turns = f"train.total_dialog_turns={128 * steps}"
        config = from_hydra(compose("grpo_arithmetic", overrides=[*OFF, turns, f"seed={seed}"]))
    run = build(config, folder)
    try:
        run.fit()
    finally:
        run.close()
    rows = [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if "time/step_s" in row]
    return [row["time/step_s"] for row in rows], [row["rollout/reward_mean"] for row in rows]


def run_trl(steps: int, seed: int, folder: str) -> tuple[list[float], list[float]]:
    """Seconds and mean reward of each step."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    task, times = ArithmeticTask(seed=seed), []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        texts = (messages[0]["content"] for messages in completions)
        return [
            task.score(Problem("", right), [text]).reward
            for text, right in zip(texts, answer, strict=True)
        ]

    rows = [{"prompt": task.messages(one), "answer": one.answer} for one in task.problems("train")]
    settings: dict[str, Any] = {
        "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": seed,
        "logging_steps": 1, "max_steps": steps, "gradient_checkpointing": False,
        "num_generations": 8, "per_device_train_batch_size": 128, "max_completion_length": 32,
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "beta": 0.01, "epsilon": 0.2, "loss_type": "grpo",
        "learning_rate": 5e-5, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        str(starter_path()),
        reward,
        trl.GRPOConfig(folder, **settings),
        Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    times.append(time.perf_counter())
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    return [after - before for before, after in pairwise(times)], rewards


SIDES = {"ours": run_ours, "trl": run_trl}


def main() -> None:
    """Run the sides in turn and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=40, help=f"of each run, the first {WARM_UP} are not counted"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    register()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    rewards: dict[str, list[float]] = {side: [] for side in SIDES}
    for seed in range(args.rounds):
        for side, run in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                taken, earned = run(args.steps, seed, folder)
            seconds[side] += taken[WARM_UP:]
            rewards[side].append(round(statistics.mean(earned[-5:]), 3))
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    deciles = {side: statistics.quantiles(times, n=10) for side, times in seconds.items()}
    result = surroundings(("torch", "torchrl", "transformers", "trl")) | {
        "setting": {"steps": args.steps, "rounds": args.rounds},
        "median_step_s": {side: round(median, 4) for side, median in medians.items()},
        "tenth_and_ninetieth_percent_s": {
            side: [cuts[0], cuts[-1]] for side, cuts in deciles.items()
        },
        "ratio": round(medians["trl"] / medians["ours"], 2),
        "reward_last": rewards,
        "step_s": {side: [round(second, 4) for second in times] for side, times in seconds.items()},
    }
    report(result, args.out)


if __name__ == "__main__":
    main()
