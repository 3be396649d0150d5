"""``fit``: the only training loop.

It consumes batches from a ``RolloutSource`` and produces weights: next_batch -> train_batch -> publish, ``num_batches``
times. A synchronous source collects inside ``next_batch``, an asynchronous one has been collecting all along; nothing
here knows which, and nothing here looks inside a batch: it may be references to data that is elsewhere. What unblocks
the loop is the source: a batch is ready, or a deadline has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torchrl._utils import logger as torchrl_logger

from torchrl_grpo.collectors.source import RolloutSource
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.reporting.console import Console
from torchrl_grpo.reporting.metrics import MetricsLogger

_SAMPLES = 4


class Trainer(Protocol):
    """What ``fit`` asks of a trainer, in this process or in others. ``GRPOTrainer`` says what each member means."""

    @property
    def version(self) -> int: ...

    @property
    def optim_steps(self) -> int: ...

    def train_batch(self, batch: Any) -> dict[str, float]: ...

    def weights(self) -> Any: ...

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path: ...


class EvaluatorLike(Protocol):
    """What ``fit`` asks of an ``Evaluator``."""

    def evaluate(self, *, sampled: bool) -> tuple[dict[str, float], list[dict[str, Any]]]: ...


def fit(
    trainer: Trainer,
    source: RolloutSource,
    evaluator: EvaluatorLike | None,
    checkpointer: Checkpointer,
    logger: MetricsLogger,
    console: Console,
    *,
    num_batches: int,
    sequences_per_batch: int,
    evaluation_frequency: int = 0,
    checkpoint_frequency: int = 0,
    sample_frequency: int = 50,
    before_publish: Callable[[], None] | None = None,
    after_publish: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Trains until ``trainer.version`` is ``num_batches``.

    The weights are published once before the first batch, so that engine and trainer start equal. The test split is
    evaluated before, every ``evaluation_frequency`` steps, and after; a checkpoint is written every
    ``checkpoint_frequency`` steps and at the end, and also when training fails or is interrupted after a step.

    Args:
        trainer: makes the steps.
        source: gives the batches and takes the weights.
        evaluator: or None.
        checkpointer: writes the checkpoints.
        logger: gets the metrics and samples.
        console: shows them.
        num_batches: steps of the run; one step trains one batch.
        sequences_per_batch: for the progress bar.
        evaluation_frequency: steps between evaluations, 0 for none in between.
        checkpoint_frequency: steps between checkpoints, 0 for none in between.
        sample_frequency: steps between tables of samples.
        before_publish: called before each weight sync: what must be so before anything is sampled with the new weights
            (the reference model's refresh).
        after_publish: called after each weight sync; returns metrics (the check of the sync).
    """
    total = num_batches * sequences_per_batch

    def evaluate(step: int, sampled: bool) -> dict[str, float]:
        if evaluator is None:
            return {}
        start = time.perf_counter()
        metrics, rows = evaluator.evaluate(sampled=sampled)
        metrics["time/eval_s"] = time.perf_counter() - start
        logger.log_samples(step, rows[:20])
        console.evaluation(step, metrics)
        return metrics

    def publish() -> dict[str, float]:
        if before_publish is not None:
            before_publish()
        start = time.perf_counter()
        source.publish(trainer.weights(), trainer.version)
        metrics = {"time/sync_s": time.perf_counter() - start}
        return metrics | (after_publish() if after_publish is not None else {})

    start_version = saved = trainer.version
    optim_steps = trainer.optim_steps
    source_states = {trainer.version: source.state_dict()}  # by the version of the trainer that it goes with

    def save() -> None:
        """Saves the state between two steps; one that was left in the middle of a step is not a state to go on from."""
        nonlocal saved
        version = trainer.version
        inside = version + 1 in source_states and trainer.optim_steps != optim_steps
        if inside or trainer.optim_steps < 0:
            last = f"the last checkpoint is of step {saved}" if saved != start_version else "no checkpoint was written"
            torchrl_logger.warning(f"stopped inside step {version + 1}: {last}.")
        elif saved != version:
            trainer.save(checkpointer, source_states[version])
            saved = version

    metrics = publish()
    console.start(trainer.version * sequences_per_batch, total)
    logger.log(trainer.version, metrics | evaluate(trainer.version, sampled=True))
    first = trainer.version
    try:
        while trainer.version < num_batches:
            start = time.perf_counter()
            batch = source.next_batch()
            source_states[trainer.version + 1] = source.state_dict()
            train_start = time.perf_counter()
            metrics = {"time/wait_s": train_start - start} | trainer.train_batch(batch)
            optim_steps, source_states = trainer.optim_steps, {trainer.version: source_states[trainer.version]}
            metrics["time/train_s"] = time.perf_counter() - train_start
            metrics |= source.metrics()
            step = trainer.version
            metrics |= publish()
            last = step == num_batches
            metrics["time/step_s"] = time.perf_counter() - start
            metrics["throughput/trained_tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/step_s"]
            if last or (evaluation_frequency and step % evaluation_frequency == 0):
                metrics |= evaluate(step, sampled=last)
            logger.log(step, metrics)
            console.step(step, metrics, step * sequences_per_batch, total)
            if last or step == first + 1 or step % sample_frequency == 0:
                rows = source.samples(_SAMPLES)
                logger.log_samples(step, rows)
                console.samples(step, rows)
            if checkpoint_frequency and step % checkpoint_frequency == 0:
                save()
    finally:
        save()
