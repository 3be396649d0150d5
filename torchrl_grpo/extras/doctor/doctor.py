"""``examine``: check a run before it starts (``dry_run=true``), for problems with their fixes and
for its cost.

It builds the run in a temporary folder and trains for a few seconds. The optimizer's steps are
real, so they take the time and memory of a run, but the learning rate is too small to change a
weight. No file is left behind.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import median
from typing import Any

from packaging.requirements import Requirement

from torchrl_grpo.assembly.context import Context, describe_model
from torchrl_grpo.assembly.estimates import image_memory
from torchrl_grpo.assembly.prepare import check_loggers
from torchrl_grpo.assembly.run import Run, build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.assembly.tasks import read_task
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.config.measuring import LoggingConfig
from torchrl_grpo.extras.doctor.forecast import Forecast, Measured, forecast, memory_now
from torchrl_grpo.extras.report.alarms import Alarms
from torchrl_grpo.host import startup
from torchrl_grpo.host.accelerators import accelerators_in_use
from torchrl_grpo.host.checkpoint_files import AUTO, newest, read_manifest
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.host.out_of_memory import in_words
from torchrl_grpo.host.text import accuracy, number, percent, printable, size
from torchrl_grpo.learner.checkpoint import room_at
from torchrl_grpo.loop import check_on_policy
from torchrl_grpo.models import loading
from torchrl_grpo.reporting.console import Console, one_of_each
from torchrl_grpo.reward_pool import Failure, RewardPool
from torchrl_grpo.tasks.base import Dialog, Problem, Task

OK, WARNING, FAILS, SKIPPED = "ok", "warning", "FAILED", "skipped"

_STEPS_S = 8.0
"""Seconds for which steps are timed."""
_MAX_STEPS = 12
"""Maximum number of timed steps."""
_EVALUATION_S = 15.0
"""Longest evaluation that is run; a longer one is estimated."""
_TINY_LR = 1e-30
"""Learning rate that changes no weight."""
_SAFE_KL = 2e-3
"""Nats per token above which docs/corrections.md recommends a correction."""
_PACKAGES = ("torch", "torchrl", "tensordict", "transformers")


@dataclass
class Check:
    """Result of one check.

    Attributes:
        name: name of the check.
        result: ok, warning (it works, but may not be intended), FAILED, or skipped.
        details: result in words; of a failure, the problem and its fix.
        seconds: duration.
        memory: bytes afterwards: the peak of the run's processes, or the memory in use on its
            accelerators.
    """

    name: str
    result: str = OK
    details: str = ""
    seconds: float = 0.0
    memory: int = 0

    def warn(self, message: str) -> None:
        """Add a warning about something that works, but may not be intended."""
        self.result = WARNING
        self.details = f"{self.details}; {message}" if self.details else message


class Checks:
    """Results of the checks in order. A failed check does not stop the others."""

    def __init__(self) -> None:
        self.done: list[Check] = []

    def run(self, name: str, body: Callable[[Check], None], *needs: str) -> bool:
        """Run a check; return whether it passed.

        Args:
            name: name of the check.
            body: fills in the check's details, or raises.
            needs: checks that must have passed.
        """
        check = Check(name)
        start = time.perf_counter()
        failures = [other for other in self.done if other.result in (FAILS, SKIPPED)]
        missing = [other.name for other in failures if other.name in needs]
        startup.say(f"checking: {name}")
        if missing:
            check.result = SKIPPED
            check.details = f"needs {', '.join(missing)}"
        else:
            try:
                body(check)
            except Exception as error:
                is_plain = isinstance(error, ValueError | RuntimeError) and str(error)
                check.result = FAILS
                check.details = str(error) if is_plain else f"{type(error).__name__}: {error}"
        for other in failures:
            if check.result == FAILS and other.details == check.details:
                check.result = SKIPPED
                check.details = f"see {other.name}"
        check.seconds = time.perf_counter() - start
        check.memory = sum(memory_now().values())
        self.done.append(check)
        return check.result in (OK, WARNING)


def examine(
    config: GRPOConfig, directory: str | os.PathLike[str], *, asynchronous: bool = False
) -> bool:
    """Check a run, and print the checks, each failure with its fix, and the run's forecast.

    Args:
        config: validated.
        directory: folder of the run. Nothing is written there, and it is removed if it is empty.
        asynchronous: see ``run.build``.

    Returns:
        whether all checks passed.
    """
    checks = Checks()
    console = Console()
    directory = Path(directory)
    measured = Measured(start_s=startup.elapsed())
    checks.run("versions", partial(_versions, config))
    checks.run("devices", _devices)
    checks.run("logging", lambda _: check_loggers(config))
    checks.run("model", partial(_model, config))
    tasks: list[Task] = []
    checks.run("data", partial(_data, config, tasks))
    checks.run("scoring", partial(_scoring, config, tasks), "data")
    prediction: Forecast | None = None
    computed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dry_run_") as folder:
        runs: list[Run] = []
        checks.run(
            "parts",
            partial(_parts, config, directory, Path(folder), asynchronous, tasks, runs, measured),
            "scoring",
        )
        for run in runs:
            with closing(run):
                computed = memory_rows(run.context)
                prediction = _Rehearsal(run, checks, console, measured).play()
    checks.run("disk", partial(_disk, directory, prediction))
    startup.end()
    _remove_empty(directory)
    console.table("Checks", [_row(check) for check in checks.done])
    if prediction is not None:
        console.table("Forecast for the whole run", [*prediction.rows(), *computed])
    failed = [f"{check.name}: {check.details}" for check in checks.done if check.result == FAILS]
    for text in failed:
        console.line(f"FAILED  {text}", style="bold red")
    console.line(
        f"{len(failed)} failed: this run would not work." if failed else "No check failed.",
        style="bold red" if failed else "bold green",
    )
    return not failed


def _row(check: Check) -> dict[str, Any]:
    return {
        "check": check.name,
        "result": check.result,
        "s": f"{check.seconds:.2f}",
        "peak": size(check.memory),
        "details": printable(check.details),
    }


def memory_rows(context: Context) -> list[dict[str, Any]]:
    """Return the peak memory of one device of each role that runs on this machine, as rows of the
    forecast.
    """
    rows = [
        {
            "resource": f"memory of {role}",
            "estimate": size(share.memory.peak),
            "details": f"computed, per device: {in_words(share.memory.parts())}",
        }
        for role, share in shares(context).items()
        if share.memory is not None and not share.addresses
    ]
    if context.images is not None:
        plan = context.plan
        images = image_memory(
            context.config, context.shape, context.images, len(plan.train), len(plan.inference)
        )
        row = {
            "resource": "memory of images",
            "estimate": size(sum(images.values())),
            "details": f"computed, on the hosts: up to {in_words(images)}",
        }
        rows.append(row)
    return rows


def _versions(config: GRPOConfig, check: Check) -> None:
    """Compare installed packages with the required versions."""
    check.details = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    mismatches = []
    with suppress(PackageNotFoundError):  # it may be imported from a folder without being installed
        for text in requires("torchrl_grpo") or []:
            package = Requirement(text)
            if package.marker is not None and not package.marker.evaluate({"extra": ""}):
                continue
            actual = version(package.name)
            if not package.specifier.contains(actual, prereleases=True):
                mismatches.append(f"{package.name} is {actual} but must be {package.specifier}")
    if mismatches:
        raise ValueError(f"{'; '.join(mismatches)}: pip install -r requirements.txt.")


def _devices(check: Check) -> None:
    """List accelerators with their free memory, cores and main memory."""
    accelerators = accelerators_in_use()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [
        f"{name}: {size(total - used)} of {size(total)} free"
        for name, (used, total) in accelerators.items()
    ]
    check.details = "; ".join([*parts, f"{os.cpu_count()} cores, {size(memory)} of RAM"])
    busy = [name for name, (used, total) in accelerators.items() if used > 0.2 * total]
    if busy:
        check.warn(
            f"other processes use {', '.join(busy)}: stop them (nvidia-smi lists them), or use "
            "other devices"
        )


def _model(config: GRPOConfig, check: Check) -> None:
    """Describe architecture, tokenizer and chat template, without weights."""
    model_config, tokenizer, stops = describe_model(config)
    model = config.model
    shape = loading.config_shape(
        model_config, model.attn_implementation, trust_remote_code=model.trust_remote_code
    )
    ends = " or ".join(map(repr, [*map(tokenizer.decode, stops), *config.inference_model.stop]))
    sizes = f"{shape.parameters:,} parameters, vocabulary of {len(tokenizer):,}"
    check.details = f"{model_config.model_type}, {sizes}, responses end at {ends}"
    if tokenizer.chat_template == loading.FALLBACK_CHAT_TEMPLATE:
        check.warn("no chat template: set model.chat_template, unless this is a base model")


def _data(config: GRPOConfig, tasks: list[Task], check: Check) -> None:
    """Check columns and rewards without a model, and look for problems that are in both splits."""
    task = read_task(config)
    tasks.append(task)
    train = task.problems("train")
    check.details = f"{len(train):,} training problems"
    if not config.evaluation.num_prompts:
        return
    test = task.problems("test")
    train_queries = {problem.query for problem in train}
    num_shared = sum(problem.query in train_queries for problem in test)
    num_used = min(len(test), config.evaluation.num_prompts)
    check.details += f", {len(test):,} test problems"
    if num_used < len(test):
        check.details += f", of which {num_used:,} are used"
    if num_shared:
        check.warn(
            f"{num_shared:,} of the test problems are also training problems, which inflates the "
            "test accuracy: remove them from one split, or hold out test problems with "
            "env.test_fraction=0.1"
        )


def _scoring(config: GRPOConfig, tasks: Sequence[Task], check: Check) -> None:
    """Score made-up responses to a problem of each data set, before a model loads."""
    [task] = tasks
    if task.is_stateful or not config.scores:
        check.details = "not tried: the run has no scorer, or has an environment or agent"
        return
    problems: dict[str, Problem] = {}
    train = task.problems("train")
    for problem in train if config.env.datasets else train[:1]:
        problems.setdefault(problem.dataset, problem)
    dialogs = [
        Dialog(
            problem,
            [response],
            [*task.messages(problem), {"role": "assistant", "content": response}],
            tokens=range(8),
            raw=response,
        )
        for problem in problems.values()
        for response in dict.fromkeys((f"{problem.answer}", "I do not know."))
    ]
    start = time.perf_counter()
    with RewardPool(task, 1, timeout_s=config.env.reward_timeout_s) as pool:
        turns = [future.result() for future in pool.submit_all(dialogs)]
    check.details = f"{len(dialogs)} made-up responses in {time.perf_counter() - start:.2f} s"
    without = 0
    for dialog, turn in zip(dialogs, turns, strict=True):
        if not isinstance(turn, Failure):
            continue
        what = f"for the response {dialog.responses[-1]!r:.40} to {dialog.problem.query!r:.80}"
        text = f"env.reward must return a reward, but {what} there was none: {turn.line}"
        without += 1
        if turn.cause != "none" or without == len(dialogs):
            raise ValueError(text)
        check.warn(text)


def _parts(
    config: GRPOConfig,
    directory: Path,
    folder: Path,
    asynchronous: bool,
    tasks: Sequence[Task],
    runs: list[Run],
    measured: Measured,
    check: Check,
) -> None:
    """Build the run (rules, devices, models, engine and processes), and inspect the prompts."""
    start = time.perf_counter()
    resume = config.train.resume
    if resume == AUTO:
        checkpoint = newest(AUTO, directory, read_manifest)
        resume = None if checkpoint is None else str(checkpoint[0])
    logging = LoggingConfig(
        tensorboard=False,
        sample_frequency=config.logging.sample_frequency,
        sample_rows=config.logging.sample_rows,
    )
    optimizer = replace(config.optimizer, lr=_TINY_LR)
    trial = replace(
        config, logging=logging, optimizer=optimizer, train=replace(config.train, resume=resume)
    )
    run = build(trial, folder, asynchronous=asynchronous, task=tasks[0])
    runs.append(run)
    measured.start_s += time.perf_counter() - start
    measured.steps_done = run.learner.version
    measured.checkpoint_bytes, measured.model_bytes = run.learner.sizes()
    prompts = run.context.train_env.prompts
    limit = run.context.prompt_tokens[0]
    lengths = [len(prompt) for prompt in prompts.first(500)]
    measured.prompt_tokens = median(lengths)
    shortest, longest = min(lengths), max(lengths)
    tokens = f"{longest} tokens"
    if shortest < longest:
        tokens = f"{shortest} to {longest} tokens, median {median(lengths):.0f}"
    new_tokens = config.inference_model.max_new_tokens
    check.details = f"prompts: {tokens} (limit {limit:,} with {new_tokens:,} new tokens)"
    if prompts.num_dropped:
        check.warn(
            f"{prompts.num_dropped:,} of {len(prompts.problems):,} prompts are longer and are left "
            "out: raise env.max_prompt_tokens or inference_model.max_model_len, or lower "
            "inference_model.max_new_tokens"
        )


class _Rehearsal:
    """A few steps of a run, from which the rest is forecast.

    Args:
        run: built with a learning rate that changes no weight.
        checks: collects the results.
        console: shows a few responses.
        measured: collects the times.
    """

    def __init__(self, run: Run, checks: Checks, console: Console, measured: Measured) -> None:
        self.run, self.checks, self.console, self.measured = run, checks, console, measured
        self.learner: Any = run.learner
        self.rollouts: Any = run.rollouts
        self.left = run.schedule.left(run.learner.version)
        self._batch: Any = None
        self._metrics: dict[str, float] = {}

    def play(self) -> Forecast | None:
        """Run the checks; return the forecast, unless a failed one prevents it."""
        run, checks = self.run, self.checks
        good = checks.run("sync", self._sync, "parts")
        if self.left > 0:
            checks.run("rollout", self._rollout, "sync")
            checks.run("train", self._train, "rollout")
            checks.run("reward", self._reward, "train")
            checks.run("mismatch", self._mismatch, "train")
            good = checks.run("steps", self._steps, "train", "mismatch")
        if run.context.tests is not None:
            good = checks.run("evaluation", self._evaluation, "sync") and good
        checks.run("report", self._report)
        self.measured.memory = memory_now()
        return forecast(run.context.config, self.measured) if good else None

    def _sync(self, check: Check) -> None:
        self.rollouts.publish(self.learner.weights(), self.learner.version)
        check.details = f"{size(self.measured.model_bytes)} of weights"
        if self.run.context.config.evaluates_served:
            check.details = "none: the model is served"

    def _rollout(self, check: Check) -> None:
        start = time.perf_counter()
        self._batch = self.rollouts.next_batch()
        self.measured.steps_s.append(time.perf_counter() - start)
        names = {"generate_s": "sampling", "reward_s": "rewards", "reference_s": "reference"}
        seconds = {key.partition("/")[2]: value for key, value in self.rollouts.metrics().items()}
        check.details = ", ".join(
            f"{name} {seconds[key]:.2f} s" for key, name in names.items() if key in seconds
        )

    def _train(self, check: Check) -> None:
        start = time.perf_counter()
        metrics = self._metrics = self.learner.train_groups(*self._batch)
        self.measured.steps_s[0] += time.perf_counter() - start
        self.measured.response_tokens = metrics["rollout/response_length"]
        num_passes = metrics["train/micro_batches"]
        passes = f"{num_passes:.0f} micro-batch{'es' if num_passes > 1 else ''}"
        check.details = (
            f"{metrics['rollout/sequences']:.0f} responses of "
            f"{metrics['rollout/response_length']:.0f} tokens, {passes}, gradient norm "
            f"{metrics['train/grad_norm']:.3g}"
        )
        has_rewards = metrics["rollout/invalid"] < metrics["rollout/sequences"]
        scales_loss = self.run.context.config.train.mixed_precision == "fp16"
        if has_rewards and metrics["train/skipped_steps"] and not scales_loss:
            raise ValueError(
                "the loss or its gradient is not finite: use train.mixed_precision=full, or "
                "another model."
            )

    def _reward(self, check: Check) -> None:
        """Check the batch's rewards: fail if all are invalid, warn if they have no signal."""
        metrics = {"step": 1, **self._metrics, **self.rollouts.metrics()}
        rows = self.learner.samples(2)
        self.measured.sample_bytes = sum(len(str(row)) for row in rows) / len(rows)
        self.console.samples(1, one_of_each(rows)[:2])
        if "rollout/reward_mean" in metrics:
            reward = number(metrics["rollout/reward_mean"])
            correct = percent(metrics["rollout/accuracy"])
            check.details = f"mean reward {reward}, {correct} correct"
        else:
            check.details = "none: the responses are demonstrations"
        alarms = Alarms()
        raised = alarms.take(metrics) + alarms.end()
        for alarm in raised:
            check.warn(alarm.text)
        if metrics["rollout/invalid"] == metrics["rollout/sequences"]:
            raise ValueError(raised[0].text)

    def _mismatch(self, check: Check) -> None:
        start = time.perf_counter()
        self.rollouts.publish(self.learner.weights(), self.learner.version)
        self.measured.steps_s[0] += time.perf_counter() - start
        metrics = self._metrics | self.rollouts.metrics()
        kl = metrics.get("train/kl_k3_to_inference")
        if kl is None:
            check.details = "nothing to compare: no response was sampled"
            return
        check_on_policy(metrics)
        check.details = f"the KL of the trainer's policy to the engine's is {kl:.2g} nats per token"
        if kl > _SAFE_KL:
            check.warn("that can ruin training: docs/corrections.md has causes and corrections")

    def _steps(self, check: Check) -> None:
        """Time a few more steps."""
        learner, rollouts, times = self.learner, self.rollouts, self.measured.steps_s
        first = start = time.perf_counter()
        while len(times) < min(_MAX_STEPS, self.left) and (
            len(times) < 2 or start - first < _STEPS_S
        ):
            learner.train_groups(*rollouts.next_batch())
            rollouts.publish(learner.weights(), learner.version)
            end = time.perf_counter()
            times.append(end - start)
            start = end
        check.details = (
            f"first step {times[0]:.2f} s, then {len(times) - 1} at {self.measured.step_s:.2f} s "
            "each"
        )

    def _evaluation(self, check: Check) -> None:
        """Time an evaluation, or estimate it if it would take too long."""
        context = self.run.context
        measured = self.measured
        envs = context.tests or ()
        greedy, sampled = (0 if env is None else env.batch_size[0] for env in envs)
        seconds = self.rollouts.metrics()
        sampling_s = seconds.get(
            "time/generate_s", seconds.get("workers/generate_s", measured.step_s)
        )
        response_s = sampling_s / context.config.dialog_turns_per_batch
        if (2 * greedy + sampled) * response_s > _EVALUATION_S:
            measured.greedy_s = greedy * response_s
            measured.sampled_s = (greedy + sampled) * response_s
            check.details = (
                f"skipped: would take about {measured.sampled_s:.0f} s with "
                f"pass@{context.config.evaluation.k}"
            )
            return
        for name in ("sampled_s", "greedy_s"):
            start = time.perf_counter()
            metrics, _ = self.rollouts.evaluate(sampled=name == "sampled_s")
            setattr(measured, name, time.perf_counter() - start)
        name = "eval/pass@1"
        check.details = (
            f"pass@1 {accuracy(metrics, name)}" if name in metrics else "other test sets only"
        )
        if metrics.get("eval/invalid_fraction"):
            check.warn(f"{percent(metrics['eval/invalid_fraction'])} of the rewards are invalid")

    def _report(self, check: Check) -> None:
        start = time.perf_counter()
        load_extra("report")(self.run.directory)
        self.measured.report_s = time.perf_counter() - start


def _disk(directory: Path, prediction: Forecast | None, check: Check) -> None:
    """Check the disk space for the run's files."""
    folder, free = room_at(directory)
    check.details = f"{size(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        raise ValueError(f"hydra.run.dir={directory} must be writable: use another folder.")
    if prediction is not None:
        prediction.writes.check_room(directory, prediction.other_bytes)


def _remove_empty(directory: Path) -> None:
    """Remove the empty folder that Hydra created, and empty parents below the current folder."""
    here = Path.cwd()
    directory = directory.absolute()
    started_at = time.time() - startup.elapsed() - 1
    with suppress(OSError):
        if directory.stat().st_ctime > started_at:
            directory.rmdir()
            for folder in directory.parents:
                if folder == here or not folder.is_relative_to(here):
                    return
                folder.rmdir()
