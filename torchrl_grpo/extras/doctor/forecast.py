"""Forecast of a run's time, disk and memory, from a few measured steps."""

from __future__ import annotations

import os
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torchrl_grpo.assembly.schedule import schedule_of, writes_of
from torchrl_grpo.config import GRPOConfig
from torchrl_grpo.host.accelerators import accelerators_in_use
from torchrl_grpo.host.processes import descendants
from torchrl_grpo.host.text import duration, size
from torchrl_grpo.learner.checkpoint import Writes

_DISK_BYTES_PER_S = 2e8
"""Rate at which a checkpoint is hashed and written."""
_END_S = 2.0
"""Seconds from a run's last line of output until its process exits."""
_ROW_BYTES = 2_300
"""Bytes of a step in metrics.jsonl and timeline.jsonl."""
_TENSORBOARD_BYTES = 2_300
"""Bytes of a step in TensorBoard's files."""
_REPORT_BYTES = 450_000
"""Bytes of report.html and curves.png."""


@dataclass
class Measured:
    """Measurements of a run, in seconds and bytes.

    Attributes:
        start_s: time until the first rollout, including imports.
        steps_s: time of each step. greedy_s, sampled_s: time of an evaluation without and with
        pass@k.
        report_s: time of the report.
        checkpoint_bytes, model_bytes: size of a checkpoint, and of the exported model.
        sample_bytes: size of a row of samples.jsonl.
        memory: peak by device.
        steps_done: steps of the resumed run. prompt_tokens, response_tokens: median and mean
        length; 0 if nothing was sampled.
    """

    start_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    greedy_s: float = 0.0
    sampled_s: float = 0.0
    report_s: float = 0.0
    checkpoint_bytes: int = 0
    model_bytes: int = 0
    sample_bytes: float = 500.0
    memory: dict[str, int] = field(default_factory=dict)
    steps_done: int = 0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: the mean without the first one, if there are others."""
        return fmean(self.steps_s[1:] or self.steps_s or [0.0])


@dataclass
class Forecast:
    """Time, disk and memory that a run will take.

    Attributes:
        seconds: time of each kind of work.
        writes: checkpoints and models.
        other_bytes: size of everything else in the run's folder.
        memory: peak by device.
        lengths: measured and maximum number of tokens of a response.
        growth: ratio of the corresponding sequence lengths, maximum to measured.
    """

    seconds: dict[str, float]
    writes: Writes
    other_bytes: int
    memory: dict[str, int]
    lengths: tuple[float, int] = (0.0, 0)
    growth: float = 1.0

    @property
    def disk_bytes(self) -> int:
        """Return the maximum size of the run's folder."""
        return self.writes.bytes + self.other_bytes

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole run."""
        return sum(self.seconds.values())

    @property
    def longest_s(self) -> float:
        """Return the seconds if every response had the maximum length."""
        sampling_s = self.seconds["steps"] + self.seconds["evaluations"]
        return self.total_s + (self.growth - 1) * sampling_s

    def rows(self) -> list[dict[str, Any]]:
        """Return the forecast as rows of a table."""
        parts = ", ".join(
            f"{name} {duration(value)}" for name, value in self.seconds.items() if value >= 0.5
        )
        rows = [{"resource": "time", "estimate": duration(self.total_s), "details": parts}]
        if self.growth > 1:
            length, limit = self.lengths
            details = f"if responses grow from {length:.0f} to {limit:,} tokens, their limit"
            estimate = duration(self.longest_s)
            rows.append({"resource": "time at most", "estimate": estimate, "details": details})
        rows.append(
            {
                "resource": "disk",
                "estimate": size(self.disk_bytes),
                "details": "at most, in the run's folder",
            }
        )
        for device, peak in self.memory.items():
            details = "all processes of the run" if device == "cpu" else "all memory in use"
            name = f"memory ({device})"
            rows.append({"resource": name, "estimate": size(peak), "details": details})
        return rows


def forecast(config: GRPOConfig, measured: Measured) -> Forecast:
    """Forecast the rest of a run.

    Args:
        config: a config with a known number of steps.
        measured: measurements of a few steps.
    """
    evaluation = config.evaluation
    logging = config.logging
    schedule = schedule_of(config)
    done = measured.steps_done
    steps = schedule.left(done)
    between = schedule.num_due(schedule.evaluation_frequency, done)
    evaluations = (2 if steps else 1) if evaluation.num_prompts else 0
    writes = writes_of(config, schedule, done, measured.checkpoint_bytes, measured.model_bytes)
    written = writes.checkpoints * writes.checkpoint_bytes + writes.models * writes.model_bytes
    seconds = {
        "start": measured.start_s,
        "steps": steps * measured.step_s,
        "evaluations": evaluations * measured.sampled_s + between * measured.greedy_s,
        "checkpoints": written / _DISK_BYTES_PER_S,
        "report": measured.report_s,
        "end": _END_S,
    }
    batch = config.dialog_turns_per_batch
    group = config.env.repeats
    train_rows = min(batch, -(-(logging.train_rows or batch) // group) * group)
    rows = steps // logging.sample_frequency * train_rows
    rows += (between + evaluations) * evaluation.num_prompts
    other = rows * measured.sample_bytes
    other += steps * (_ROW_BYTES + logging.tensorboard * _TENSORBOARD_BYTES) + _REPORT_BYTES
    longest = config.max_response_tokens
    length = measured.response_tokens
    prompt = measured.prompt_tokens
    growth = max(1.0, (prompt + longest) / (prompt + length)) if length else 1.0
    return Forecast(seconds, writes, int(other), dict(measured.memory), (length, longest), growth)


def memory_now() -> dict[str, int]:
    """Return the memory in use on each NVIDIA device or, on a CPU, the peak of this process and its
    children.
    """
    peak = {name: peak for name, (peak, _) in accelerators_in_use().items()}
    return peak or {"cpu": _peak_of_processes()}


def _peak_of_processes() -> int:
    """Return the sum of the peak resident sizes of this process and its children."""
    if not sys.platform.startswith("linux"):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peak = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(OSError):  # it has ended
            match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            peak += int(match[1]) * 1024 if match else 0
    return peak
