"""Measure the CPU seconds that samples.jsonl and timeline.jsonl cost the default job (`make train`),
in one process.

    python benchmarks/bench_recording.py
    python benchmarks/bench_recording.py --steps 100

Prints JSON. For the work of each step (the timeline, and keeping the numbers of the training
passes), steps with and without it alternate. The work of steps that log samples, and of
evaluations, is measured separately and counted as often as in the default job of 80 steps. `share`
is the total over the CPU time of that job.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from hydra import compose, initialize_config_dir
from machine import report, surroundings

from torchrl_grpo.assembly import run as assembly
from torchrl_grpo.collectors import evaluation
from torchrl_grpo.config import from_hydra, register
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.learner.measures import PassScores
from torchrl_grpo.loop import Observer, fit
from torchrl_grpo.reporting.metrics import MetricsLogger

ROOT = Path(__file__).resolve().parents[1]
STEPS, TABLES = 80, 3  # of the default job: steps, and those that log samples, or evaluate
WARM_UP = 5  # steps that are not counted
IN_EACH_STEP: tuple[tuple[Any, str], ...] = (
    (MetricsLogger, "log_spans"),
    (PassScores, "_keep"),
    (PassScores, "note"),
)
OF_SAMPLES: tuple[tuple[Any, str], ...] = (
    (Learner, "samples"),
    (MetricsLogger, "log_samples"),
    (evaluation, "sample_rows"),
)


def main() -> None:
    """Run the job with the parts switched and timed, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="file for the JSON, besides standard output")
    args = parser.parse_args()
    register()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    spent: dict[str, list[float]] = {name: [] for _, name in OF_SAMPLES}
    off = False

    def switched(function: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(function)(lambda *given, **named: None if off else function(*given, **named))

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            result = function(*given, **named)
            spent[name].append(time.process_time() - start)
            return result

        return call

    class Turns(Observer):
        """Times the steps, and disables the parts in every other one."""

        def stage(self, kind: str, step: int, what: str) -> None:
            nonlocal off
            if kind == "wait":
                off = not off
                self._start = time.process_time()

        def checked(self, step: int) -> None:
            seconds["without" if off else "with"].append(time.process_time() - self._start)

    def fit_in_turns(
        learner: Any, rollouts: Any, schedule: Any, observers: Any, **named: Any
    ) -> None:
        fit(learner, rollouts, schedule, [*observers, Turns()], **named)

    turns, rare = (
        f"train.total_dialog_turns={128 * args.steps}",
        f"logging.sample_frequency={10 * args.steps}",
    )
    overrides = [turns, rare, "evaluation.frequency=0", "logging.tensorboard=false"]
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        config = from_hydra(compose("grpo_arithmetic", overrides=overrides))
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(assembly, "fit", fit_in_turns):
        for owner, name in IN_EACH_STEP:
            mock.patch.object(owner, name, switched(getattr(owner, name))).start()
        for owner, name in OF_SAMPLES:
            mock.patch.object(owner, name, timed(name, getattr(owner, name))).start()
        run = assembly.build(config, folder)
        try:
            run.fit()
        finally:
            run.close()
            mock.patch.stopall()
    medians = {side: statistics.median(times[WARM_UP:-1]) for side, times in seconds.items()}
    writes = spent[
        "log_samples"
    ]  # before the run, of its first step, after the run, of its last step
    of_table = statistics.mean(spent["samples"]) + statistics.mean(writes[1::2])
    of_evaluation = statistics.mean(spent["sample_rows"]) + statistics.mean(writes[0::2])
    each = max(0.0, medians["with"] - medians["without"])
    total = STEPS * each + TABLES * (of_table + of_evaluation)
    result = surroundings(("torch", "torchrl", "transformers")) | {
        "setting": {"steps": args.steps},
        "median_step_cpu_s": medians,
        "table_of_samples_cpu_s": of_table,
        "samples_of_an_evaluation_cpu_s": of_evaluation,
        "share": total / (STEPS * medians["without"]),
        "step_cpu_s": seconds,
    }
    report(result, args.out)


if __name__ == "__main__":
    main()
