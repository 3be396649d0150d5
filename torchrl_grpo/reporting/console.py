"""Terminal output of a run: the plan, a progress bar, samples, evaluations and the paths of its
files.

A terminal shows a live progress bar, with tables scrolling above it; a pipe or a file gets plain
text, one line every few steps, without control characters. Text that a model wrote is never
trusted: it is not interpreted as markup, and unprintable characters (escape sequences, direction
marks; outside samples also newlines) are escaped.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, cast

from rich import box
from rich.console import Console as RichConsole
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text
from torchrl import torchrl_logger

from torchrl_grpo.host import startup
from torchrl_grpo.host.text import (
    MISSING,
    accuracy,
    clip,
    decoding,
    duration,
    number,
    percent,
    printable,
    printable_lines,
    reward_text,
    size,
)

_MAX_SAMPLE_LENGTH = 160
_BLANK_LINES = re.compile(r"\n\s*\n")
_WIDE = 80  # columns for the wide bar
_DIMENSIONLESS = ("", "k", "M", "B", "T")


class Console(AbstractContextManager["Console"]):
    """Prints the progress of a run.

    Lifecycle: ``table`` (and ``resume``), then ``start``, then ``step``, ``samples`` and
    ``evaluation`` in any order; and ``close`` at the end, even after a failure: it removes the bar,
    so that a traceback stays readable.

    Args:
        every: number of steps per printed line if there is no terminal.
        file: where to print; standard output by default.
        width: number of columns; by default the terminal's.

    Examples:
        >>> import sys
        >>> with Console(file=sys.stdout) as console:
        ...     console.evaluation(0, {"eval/pass@1": 0.25, "eval/pass@8": 0.5})
        test after step 0: pass@1 25.0% greedy, pass@8 50.0% sampled
    """

    def __init__(
        self, *, every: int = 10, file: IO[str] | None = None, width: int | None = None
    ) -> None:
        self._rich = RichConsole(file=file, width=width, highlight=False)
        self._every = every
        self._live = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._progress: Progress | None = None
        self._handlers: list[tuple[logging.StreamHandler[IO[str]], IO[str]]] = []
        self._started_at = time.monotonic()
        self._silent = True  # no step has been printed yet
        self._num_tests = 0
        for handler in torchrl_logger.handlers:
            # TorchRL's lines have colors.
            if type(handler) is logging.StreamHandler and not handler.stream.isatty():
                handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a table.

        Args:
            title: title above the table.
            rows: rows, whose keys are the columns; a value may be None. ``parameters`` is a count,
                and ``memory`` is in bytes.
        """
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for name in columns:
            numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
            table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(self._text(cell_text(name, row.get(name))) for name in columns))
        self._rich.print(table)

    def problems(self, train: int, test: int, prompt: str, *, is_stateful: bool = False) -> None:
        """Print the number of problems, and the first one as the model sees it.

        Args:
            train: problems to train on.
            test: problems to evaluate on.
            prompt: the first prompt, including the chat template.
            is_stateful: whether an environment or an agent adds to the prompt before the first
                turn.
        """
        self._num_tests = test
        first = "before its environment or agent speaks" if is_stateful else "as the model sees it"
        self.line(f"{train:,} training problems, {test:,} test problems; the first prompt {first}:")
        self.line(clip(prompt, 4 * _MAX_SAMPLE_LENGTH), "dim")

    def resume(self, step: int, path: str | os.PathLike[str], *, finished: bool = False) -> None:
        """Print the step and the checkpoint that a run resumes from, and whether there is nothing
        left to train.
        """
        note = ", the last step: raise train.total_dialog_turns to train longer" if finished else ""
        self.line(f"Resuming after step {step:,} from {os.fspath(path)}{note}")

    def page(self, address: str) -> None:
        """Print the address of the run dashboard."""
        self.line(f"Run dashboard: {address}", "bold")

    def start(self, sequences_done: int, sequences_total: int, *, evaluates: bool = True) -> None:
        """Open the progress bar.

        Args:
            sequences_done: number of trained sequences, above 0 in a resumed run.
            sequences_total: number of sequences to train on; 0 for only an evaluation.
            evaluates: whether the run begins with an evaluation.
        """
        self._started_at = time.monotonic()
        if not sequences_total or (evaluates and not sequences_done and self._num_tests):
            before = " before the first step" if sequences_total else ""
            activity = f"evaluating {self._num_tests:,} problems{before}"
        else:
            activity = f"running the {'next' if sequences_done else 'first'} rollout"
        if not self._live or self._progress is not None:
            startup.say(activity)
            return
        startup.end()
        wide = self._rich.width >= _WIDE
        line = Column(no_wrap=True)
        done = TextColumn("{task.completed:,.0f}/{task.total:,.0f}", table_column=line)
        share = TextColumn("({task.percentage:.0f}%)", table_column=line)
        columns = (
            TextColumn("step {task.fields[step]}", table_column=line),
            *((BarColumn(bar_width=None), done) if wide else (share,)),
            TextColumn("{task.fields[numbers]}", style="bold", markup=False, table_column=line),
            _Clock(table_column=line),
        )
        self._progress = Progress(*columns, console=self._rich, refresh_per_second=4, expand=wide)
        self._progress.add_task(
            "train", completed=sequences_done, total=sequences_total, step=MISSING, numbers=activity
        )
        self._progress.start()
        self._reroute_logger()

    def step(
        self, step: int, metrics: Mapping[str, float], sequences_done: int, sequences_total: int
    ) -> None:
        """Show a step: move the bar or, without a terminal, print a line every few steps.

        Args:
            step: steps done.
            metrics: metrics as they are logged.
            sequences_done: sequences (dialog turns) trained on so far.
            sequences_total: sequences that the run will train on.
        """
        startup.end()
        first = _REWARD if "rollout/accuracy" in metrics else _LOSS
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0],
                completed=sequences_done,
                total=sequences_total,
                step=step,
                numbers=_join(metrics, first, " "),
            )
        elif not self._live and (
            self._silent or step % self._every == 0 or sequences_done >= sequences_total
        ):
            self._silent = False
            elapsed = duration(time.monotonic() - self._started_at)
            numbers = _join(metrics, first | _FURTHER, ", ")
            self.line(
                f"step {step}: {sequences_done:,}/{sequences_total:,} sequences, {numbers}, "
                f"{elapsed} elapsed"
            )

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a few prompts and responses.

        Args:
            step: steps done.
            rows: rows with ``query``, ``response``, ``reward``, ``correct`` and ``valid``, as they
                are logged; other keys are ignored.
        """
        table = Table(
            box=box.SIMPLE_HEAD,
            title=f"Samples after step {step}",
            title_justify="left",
            expand=self._live,
        )
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("response", ratio=3, overflow="fold")
        scored = any("reward" in row for row in rows)  # demonstrations are not
        if scored:
            table.add_column("reward", justify="right", no_wrap=True)
        for row in rows:
            reward = Text(reward_text(row), style="green" if row.get("correct") else "red")
            texts = (
                clip(_BLANK_LINES.sub("\n", str(row.get(key))), _MAX_SAMPLE_LENGTH)
                for key in ("query", "response")
            )
            table.add_row(
                *(Text(printable_lines(text, self._rich.encoding)) for text in texts),
                *([reward] if scored else []),
            )
        self._rich.print(table)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Print one line for an alarm that a step raised; ``docs/troubleshooting.md`` lists the
        names.
        """
        self.line(f"alarm {name} at step {step}: {text}", style="bold yellow")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the ``eval/*`` metrics of the test split in one line; step 0 is before training."""
        accuracies = [name for name in metrics if name.startswith(("eval/pass@", "eval/avg@"))]
        parts = [
            f"{name.removeprefix('eval/')} {accuracy(metrics, name, decoding(name))}"
            for name in accuracies
        ]
        if (length := metrics.get("eval/response_length")) is not None:
            parts.append(f"{number(length)} tokens")
        if (truncated := metrics.get("eval/truncated")) is not None:
            parts.append(f"{percent(truncated)} truncated")
        self.line(f"test after step {step}: {', '.join(parts)}", style="bold cyan")

    def close(self) -> None:
        """Remove the bar. Can be called more than once."""
        if self._progress is not None:
            while self._handlers:
                handler, stream = self._handlers.pop()
                handler.setStream(stream)
            self._progress.stop()
            self._progress = None

    def __exit__(self, *exc: object) -> None:
        self.close()

    def line(self, text: str, style: str = "") -> None:
        """Print text in one piece, so that a path can be copied."""
        self._rich.print(self._text(text, style), soft_wrap=True)

    def _text(self, text: str, style: str = "") -> Text:
        """Return the text without control characters, in the terminal's encoding, so that no
        character can end a run.
        """
        encoding = self._rich.encoding
        return Text(printable(text, encoding), style=style)

    def _reroute_logger(self) -> None:
        """Let TorchRL's log lines scroll above the bar, because its handler writes to the bar's
        stream.
        """
        for handler in torchrl_logger.handlers:
            if type(handler) is logging.StreamHandler and handler.stream.isatty():
                proxy = cast(IO[str], FileProxy(self._rich, handler.stream))
                self._handlers.append((handler, handler.stream))
                handler.setStream(proxy)


class _Clock(ProgressColumn):
    """Elapsed time and, once it can be estimated, remaining time."""

    def render(self, task: Task) -> Text:
        remaining = ""
        if not task.finished and task.time_remaining is not None:
            remaining = f" ({duration(task.time_remaining)} left)"
        return Text(f"{duration(task.elapsed or 0)}{remaining}", style="dim")


_REWARD = {"reward": "rollout/reward_mean", "accuracy": "rollout/accuracy"}
_LOSS = {"loss": "train/loss"}  # for demonstrations, which have no reward
_FURTHER = {
    "KL to reference": "train/kl_k3_to_ref",
    "KL to teacher": "train/kl_k1_to_teacher",
    "divergence to teacher": "train/divergence_to_teacher",
    "entropy": "train/entropy",
    "response length": "rollout/response_length",
    "trained tokens/s": "throughput/trained_tokens_per_s",
}


def _join(metrics: Mapping[str, float], names: Mapping[str, str], separator: str) -> str:
    values = {
        label: (percent if name.endswith("accuracy") else number)(metrics[name])
        for label, name in names.items()
        if name in metrics
    }
    if invalid := metrics.get("rollout/invalid"):
        values["accuracy"] += f" ({percent(invalid / metrics['rollout/sequences'])} invalid)"
    return separator.join(f"{label} {value}" for label, value in values.items())


def cell_text(name: str, value: Any) -> str:
    """Return a cell of a ``Console.table``."""
    if value is None:
        return MISSING
    if name == "parameters":
        return _scaled(value)
    if name.startswith("memory"):
        return size(value)
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number(value) if is_number else str(value)


def _scaled(value: float) -> str:
    """Format a number with three digits and its unit: 1234567 as 1.23 M."""
    power = min(int(math.log(value, 1000)), len(_DIMENSIONLESS) - 1) if value >= 1 else 0
    return f"{value / 1000**power:.3g} {_DIMENSIONLESS[power]}".rstrip()


def one_of_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows of ``samples.jsonl``, reordered: the first of each group, then the second ones,
    and so on.

    >>> [row["n"] for row in one_of_each([{"group": 4, "n": 1}, {"group": 4, "n": 2}, {"group": 5, "n": 3}])]
    [1, 3, 2]
    """
    counts = Counter[Any]()

    def occurrence(row: Mapping[str, Any]) -> int:
        group = row.get("group", id(row))
        counts[group] += 1
        return counts[group]

    return sorted(rows, key=occurrence)
