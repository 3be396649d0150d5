"""Compare the plan's simulation with the throughput of real `grpo-async.py` runs on this machine.

    python benchmarks/bench_plan.py                                  # about 6 minutes on 2 idle cores
    python benchmarks/bench_plan.py --steps 15 --only "1 sampler, fast reward"

Measured and simulated: the default arithmetic job with 1 and 2 samplers, with its own quick reward and with an
`async def` that takes half a second in 4 reward workers. The simulation's inputs come from other runs: of the same job
with `train.max_staleness=0`, in which the stages follow one another, with one sampler and an instant reward. Each
process's CPU seconds per step are read there; the rest of a step is latency. Two samplers have tasks of half the size,
which are measured with one sampler that plays two of them per batch. The slowdown of a core when others work too is
measured separately. Nothing is fitted to the compared runs.

Nothing else may run on the 2 cores: the measured steps and latencies would be too long.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import psutil
from machine import report, surroundings

from torchrl_grpo.extras.plan.simulation import Costs, Loop, Simulation
from torchrl_grpo.host.files import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torchrl", "transformers", "ray")
GROUPS, ROWS, LATENCY_S, WORKERS, STALENESS = 16, 128, 0.5, 4, 1
WARM_UP = 4  # steps
ROLES = {"ray::Sampler": "sampler", "ray::Reference": "reference", "ray::Learner": "learner"}
CASES = {
    f"{samplers} sampler{'s' * (samplers > 1)}, {kind} reward": (samplers, kind)
    for kind in ("fast", "slow")
    for samplers in (1, 2)
}


async def at_once(response: str, answer: str) -> float:
    """Return the reward at once, without the half second of bench_reward_latency.py."""
    return float(response.strip().endswith(f"#### {answer}"))


def with_workers(file: str, name: str) -> list[str]:
    """Return the override for a reward of this folder in reward workers."""
    return [f"env.reward={Path(__file__).parent / file}:{name}", f"env.reward_workers={WORKERS}"]


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds of a process's descendants by role; Ray's count as the driver's."""
    spent = dict.fromkeys((*ROLES.values(), "driver"), 0.0)

    def add(process: psutil.Process, role: str) -> None:
        try:
            title = " ".join(process.cmdline())
            role = next((role for start, role in ROLES.items() if title.startswith(start)), role)
            times = process.cpu_times()
            spent[role] += times.user + times.system
            for child in process.children():
                add(child, role)
        except psutil.NoSuchProcess:
            return

    add(root, "driver")
    return spent


def run(overrides: list[str], steps: int) -> dict[str, Any]:
    """Return a run's mean step and each role's CPU seconds in it, without the first steps."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"env.num_envs={ROWS}",
            f"train.dialog_turns_per_batch={ROWS}",
            f"train.total_dialog_turns={ROWS * (steps + WARM_UP)}",
            "train.checkpoint_frequency=0",
            "evaluation.num_prompts=0",
            "logging.tensorboard=false",
            f"hydra.run.dir={folder}",
        ]
        overridden = {text.partition("=")[0] for text in overrides}
        fixed = [text for text in fixed if text.partition("=")[0] not in overridden]
        command = [
            sys.executable,
            str(ROOT / "sota/grpo/grpo-async.py"),
            "--config-name",
            "grpo_arithmetic",
        ]
        metrics, spent = Path(folder) / "metrics.jsonl", {}
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, *fixed, *overrides],
                stdout=log,
                stderr=log,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            while process.poll() is None:
                step = len([row for row in read_jsonl(metrics) if "time/step_s" in row])
                if WARM_UP <= step < steps + WARM_UP and step not in spent:
                    spent[step] = cpu_seconds(psutil.Process(process.pid))
                time.sleep(0.2)
        if process.returncode:
            raise RuntimeError(
                f"{command} ended with {process.returncode}: {(Path(folder) / 'log').read_text()[-2000:]}"
            )
        rows = [row for row in read_jsonl(metrics) if "time/step_s" in row][WARM_UP:]
    first, last = min(spent), max(spent)
    seconds = [row["time/step_s"] for row in rows]
    return {
        "step_s": statistics.mean(seconds),
        "median_step_s": statistics.median(seconds),
        "cpu_s": {
            role: (spent[last][role] - spent[first][role]) / (last - first) for role in spent[first]
        },
        "staleness_max": max(row["staleness/max"] for row in rows),
    }


def work(barrier: Barrier, count: Any, seconds: float) -> None:
    """Count training steps of a model of the starter's shape in some seconds."""
    import bench_train_step as train_step  # here, because it sets what the runs would inherit
    import shapes
    import torch
    from bench_growth import LAYERS, make_batch

    torch.set_num_threads(1)
    shapes.MODELS["starter"] = LAYERS | {"vocab_size": 261}
    train_step.HEADS["starter"] = 4
    model = train_step.make_model("starter", "float32")
    batch = make_batch({"groups": 16, "group": 8, "prompt": 8, "response": 16, "vocabulary": 261})
    step = train_step.use_ours(model, batch, "")
    step()
    barrier.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()
        count.value += 1


def speed_together(most: int, seconds: float = 6.0) -> list[float]:
    """Return a process's relative speed when 1, 2, ... processes do the same work at once."""
    context, speeds = multiprocessing.get_context("spawn"), []
    for processes in range(1, most + 1):
        barrier, counts = (
            context.Barrier(processes),
            list[Any](context.Value("d") for _ in range(processes)),
        )
        workers = [context.Process(target=work, args=(barrier, count, seconds)) for count in counts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        speeds.append(sum(count.value for count in counts) / processes)
    return [min(1.0, speed / speeds[0]) for speed in speeds]


def simulate(
    samplers: int, kind: str, seeds: dict[str, Any], speeds: list[float]
) -> dict[str, float]:
    """Return the simulation of a case, based on the runs with staleness 0."""
    whole, task = seeds[f"{kind}, 16 groups"], seeds[f"{kind}, {GROUPS // samplers} groups"]
    cpu = whole["cpu_s"]
    latency = max(0.0, whole["step_s"] - sum(cpu.values()))
    loop = Loop(
        groups_per_batch=GROUPS,
        max_staleness=STALENESS,
        samplers=samplers,
        task_groups=GROUPS // samplers,
        concurrent_tasks=1 if kind == "fast" else STALENESS + 1,
        serial=True,
        waits=kind == "fast",
        cores=lambda jobs: (
            speeds[jobs - 1] if jobs <= len(speeds) else speeds[-1] * len(speeds) / jobs
        ),
    )
    # The driver works between the others.
    costs = Costs(
        sample=[task["cpu_s"]["sampler"] / samplers],
        score=(task["cpu_s"]["reference"] + cpu["driver"] / 2) / samplers,
        train=cpu["learner"] + cpu["driver"] / 2,
        reward_s=LATENCY_S if kind == "slow" else 0.0,
        hop_s=latency / 3,
    )
    result = Simulation(loop, costs).run(batches=200, warm_up=20)
    return {"step_s": result.step_s, "staleness_max": result.staleness_max, "hop_s": costs.hop_s}


def main() -> None:
    """Measure, simulate and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=40, help=f"measured steps of each run, after {WARM_UP} others"
    )
    parser.add_argument("--only", default="", help="cases with a name that contains this")
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"The machine is not idle, its load is {load:.1f}: the comparison will say little.",
            file=sys.stderr,
        )
    cases = {name: case for name, case in CASES.items() if args.only in name}
    speeds = speed_together(os.cpu_count() or 1)
    seeds: dict[str, Any] = {}
    for samplers, kind in cases.values():
        for groups in (GROUPS, GROUPS // samplers):
            name = f"{kind}, {groups} groups"
            if name not in seeds:
                reward = with_workers("bench_plan.py", "at_once") if kind == "slow" else []
                rows = f"env.num_envs={groups * ROWS // GROUPS}"
                seeds[name] = run([*reward, rows, "train.max_staleness=0"], args.steps)
                print(
                    f"staleness 0, {name}: {json.dumps(seeds[name])}", file=sys.stderr, flush=True
                )
    results = {}
    for name, (samplers, kind) in cases.items():
        reward = with_workers("bench_reward_latency.py", "asleep") if kind == "slow" else []
        real = run(
            [
                *reward,
                f"inference_model.num_devices={samplers}",
                f"train.max_staleness={STALENESS}",
            ],
            args.steps,
        )
        simulated = simulate(samplers, kind, seeds, speeds)
        ratio = simulated["step_s"] / real["step_s"]
        results[name] = {"measured": real, "simulated": simulated, "ratio": ratio}
        line = (
            f"{name:25} measured {real['step_s']:.3f} s a step, simulated "
            f"{simulated['step_s']:.3f}: {ratio - 1:+.0%}"
        )
        print(line, file=sys.stderr, flush=True)
    setting = {"steps": args.steps, "reward_latency_s": LATENCY_S, "load_before": load}
    report(
        surroundings(PACKAGES)
        | {"setting": setting, "speeds": speeds, "seeds": seeds, "cases": results},
        args.out,
    )


if __name__ == "__main__":
    main()
