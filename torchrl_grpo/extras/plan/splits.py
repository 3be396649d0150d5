"""Splits of the devices among the roles: candidates, their simulated speed, and their bottlenecks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchrl_grpo.engines import ENGINES
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.extras.plan.hardware import HOP_S, Gpu, Workload
from torchrl_grpo.extras.plan.simulation import Costs, Loop, Result, Simulation
from torchrl_grpo.host.text import size
from torchrl_grpo.models.memory import MEMORY_SHARE

_MOST_ROWS = 6
_NUM_SIMULATED = 10
_NUM_SIZES = 251  # sizes of tasks, used in turn
_MAX_GROUPS = 8_000  # maximum number of groups in one simulation, but at least a few batches
FREE = 0.5
"""Share of a stage's time that remains in the test whether it is the bottleneck."""


@dataclass(frozen=True)
class Split:
    """Devices of each role. Without reference devices there is no such model, or it shares the
    learner's.
    """

    train: int
    reference: int
    inference: int

    @property
    def devices(self) -> int:
        """Return the number of all devices."""
        return self.train + self.reference + self.inference


@dataclass(frozen=True)
class Settings:
    """Settings shared by all splits.

    Attributes:
        gpu: the kind of device.
        work: the work of the run.
        max_staleness: bound on the staleness.
        engine_size: ``inference_model.tensor_parallel_size``.
        waits: whether engines take weights only between tasks.
        rows: ``env.num_envs``.
    """

    gpu: Gpu
    work: Workload
    max_staleness: int
    engine_size: int
    waits: bool
    rows: int

    def num_envs(self, split: Split) -> int:
        """Return ``env.num_envs`` if the split's samplers can divide it into whole groups, else the
        sequences of a batch.
        """
        samplers = split.inference // self.engine_size
        group = self.work.group_size
        return self.rows if self.rows % (samplers * group) == 0 else self.work.groups * group

    @property
    def has_reference(self) -> bool:
        """Return whether there is a separate reference model."""
        return self.work.score_s(self.gpu, 1) > 0

    @property
    def room(self) -> float:
        """Return the bytes of a device that a role may use."""
        return self.gpu.memory * MEMORY_SHARE

    def memory(self, split: Split) -> tuple[float, float, float]:
        """Return the bytes on one device of each role, with the KV cache of a sampler's concurrent
        groups.
        """
        groups = max(1, self.places(split))
        reference = self.work.reference_memory(split.train)
        train = self.work.train_memory(split.train).peak + (0 if split.reference else reference)
        engine = (self.work.engine_bytes + groups * self.work.group_memory()) / self.engine_size
        return train, reference, engine

    def places(self, split: Split) -> int:
        """Return the number of a sampler's groups that fit into its memory."""
        samplers = split.inference // self.engine_size
        room = self.engine_size * self.room - self.work.engine_bytes
        requested = self.num_envs(split) // self.work.group_size // samplers
        return min(requested, int(max(0.0, room) // self.work.group_memory()))

    def fits(self, split: Split) -> bool:
        """Return whether each role's devices have room."""
        train, reference, _ = self.memory(split)
        return max(train, reference) <= self.room and self.places(split) > 0

    def memory_in_turns(self, devices: int) -> float:
        """Return the bytes on each of a number of devices on which ranks train and engines sample
        in turn.

        That is the reference model, plus a training step, or an engine and what remains between two
        steps.
        """
        train = self.work.train_memory(devices)
        engine = (self.work.engine_bytes + self.work.group_memory()) / self.engine_size
        return self.work.reference_memory(devices) + max(train.peak, train.resting + engine)

    def in_turns(self, devices: int) -> Result | None:
        """Return the result of roles that take turns on a number of devices; None if they have no
        room, or cannot divide a batch.
        """
        samplers, unused = divmod(devices, self.engine_size)
        if devices > 1 and self.work.step.quantized:  # weights in 4 bits cannot be sharded
            return None
        if unused or not samplers or self.work.groups % samplers:
            return None
        if self.memory_in_turns(devices) > self.room:
            return None
        split = Split(devices, 0, devices)
        loop = self.loop(split)
        return simulate(replace(loop, max_staleness=0), self.costs(split, loop))

    def loop(self, split: Split) -> Loop:
        """Return the actors of a split for the simulation."""
        work = self.work
        serial = not ENGINES[work.backend].concurrent
        samplers = split.inference // self.engine_size
        task_groups = self.num_envs(split) // work.group_size // samplers if serial else 1
        places = 1 if serial else self.places(split)
        speeds = [1 / work.step_s(self.gpu, jobs, self.engine_size) for jobs in range(places + 1)]
        return Loop(
            groups_per_batch=work.groups,
            max_staleness=self.max_staleness,
            samplers=samplers,
            references=split.reference,
            task_groups=task_groups,
            concurrent_tasks=places,
            serial=serial,
            waits=self.waits,
            engine_speed=speeds.__getitem__,
        )

    def costs(self, split: Split, loop: Loop) -> Costs:
        """Return the costs of the split's stages."""
        work, gpu = self.work, self.gpu
        draw = random.Random(0)
        rows = loop.task_groups * work.group_size
        limit = min(work.longest, 2 * work.response)
        # The longest of n uniform lengths is distributed as the n-th root of one.
        tokens = [limit * draw.random() ** (1 / rows) for _ in range(_NUM_SIZES)]
        step = work.step_s(gpu, loop.task_groups, self.engine_size) if loop.serial else 1.0
        return Costs(
            sample=[count * step for count in tokens],
            train=work.train_s(gpu, split.train),
            score=work.score_s(gpu, loop.task_groups),
            publish=work.sync_s(gpu),
            update=work.sync_s(gpu),
            reward_s=work.reward_s,
            hop_s=HOP_S,
        )

    def bound_s(self, split: Split) -> float:
        """Return a lower bound of the seconds per batch: its longest stage, if nothing waited."""
        loop, work = self.loop(split), self.work
        costs = self.costs(split, loop)
        tasks = work.groups / loop.task_groups
        jobs = loop.concurrent_tasks
        speed = 1.0 if loop.serial else jobs * loop.engine_speed(jobs)
        sampling = tasks * sum(costs.sample) / len(costs.sample) / speed / loop.samplers
        learner = costs.train + costs.publish
        if loop.references:
            return max(sampling, learner, tasks * costs.score / loop.references)
        return max(sampling, learner + tasks * costs.score)


@dataclass(frozen=True)
class Row:
    """A split with its simulated result.

    Attributes:
        split: the devices.
        result: result of the simulation.
        gains: speedup of the loop by the stage that was made cheaper; 0.1 is 10%.
    """

    split: Split
    result: Result
    gains: dict[str, float]

    @property
    def binds(self) -> str:
        """Return the bottleneck: the stage to make faster first."""
        name, gain = max(self.gains.items(), key=lambda item: item[1])
        return name if gain > 0.02 else "no single change"


def simulate(loop: Loop, costs: Costs) -> Result:
    """Simulate a loop for as many batches as is quick."""
    return Simulation(loop, costs).run(
        max(4, min(24, _MAX_GROUPS // loop.groups_per_batch)), loop.max_staleness + 2
    )


def candidates(settings: Settings, devices: int) -> Iterator[Split]:
    """Yield the splits whose roles fit, and whose samplers divide a batch into whole groups."""
    work = settings.work
    score, train = work.groups * work.score_s(settings.gpu, 1), work.train_s(settings.gpu, 1)
    for samplers in (n for n in range(1, devices) if work.groups % n == 0):
        remaining = devices - samplers * settings.engine_size
        max_ranks = work.groups * work.group_size  # more ranks would have nothing to do
        trains_vision = work.shape.vision is not None and work.step.trains_vision
        if trains_vision or work.step.quantized:
            max_ranks = 1
        for total in (
            {remaining, *(2**power for power in range(12) if 2**power < remaining)}
            if remaining > 0
            else ()
        ):
            if not settings.has_reference:
                shares = {0}
            elif total <= 8:
                shares = set(range(total))
            else:  # near the number where scoring keeps up with training
                even = total * score / (score + train)
                shares = {
                    max(1, min(total - 1, round(even * factor))) for factor in (1.0, 1.4, 2.0)
                }
            for reference in shares:
                split = Split(
                    min(max_ranks, total - reference), reference, samplers * settings.engine_size
                )
                if settings.fits(split):
                    yield split


def best_splits(settings: Settings, devices: int) -> list[Row]:
    """Return the most promising splits, fastest first and, among equally fast ones, those with
    fewer devices first.

    Raises:
        ConfigError: the run does not fit on this number of devices.
    """
    if devices < 2:
        raise ConfigError(
            f"--devices={devices} must be at least 2, because on one device all roles take turns: "
            "use 2 or more."
        )
    splits = sorted(
        candidates(settings, devices),
        key=lambda split: (_nearly(settings.bound_s(split)), split.devices),
    )
    if not splits:
        needs = settings.memory(Split(devices, int(settings.has_reference), settings.engine_size))
        raise ConfigError(
            f"--devices={devices} must have room for the run, but no split has: of the "
            f"{size(settings.room)} of a device that may be used, train needs {size(needs[0])}, "
            f"ref {size(needs[1])}, inference {size(needs[2])}. Use "
            "train_model.gradient_checkpointing=true, a smaller train.micro_batch_tokens, "
            "inference_model.tensor_parallel_size, a smaller env.num_envs, or "
            "train_model.lora.enabled=true."
        )
    rows = []
    for split in splits[:_NUM_SIMULATED]:
        loop = settings.loop(split)
        rows.append(Row(split, simulate(loop, settings.costs(split, loop)), {}))
    rows.sort(key=lambda row: (_nearly(row.result.step_s), row.split.devices))
    return [replace(row, gains=gains(settings, row)) for row in rows[:_MOST_ROWS]]


def _nearly(seconds: float) -> int:
    """Return a number that is mostly equal for times less than 3% apart, among which fewer devices
    are better.
    """
    return round(math.log(seconds) / 0.03)


def gains(settings: Settings, row: Row) -> dict[str, float]:
    """Return the speedup of the loop from each single change."""
    loop = settings.loop(row.split)
    costs = settings.costs(row.split, loop)
    changes = {
        "sampling": (loop, replace(costs, sample=[FREE * work for work in costs.sample])),
        "training": (loop, replace(costs, train=FREE * costs.train)),
        "weight sync": (
            loop,
            replace(costs, publish=FREE * costs.publish, update=FREE * costs.update),
        ),
        "staleness": (replace(loop, max_staleness=loop.max_staleness + 1), costs),
    }
    if loop.waits and not loop.serial:
        changes["in_flight"] = (replace(loop, waits=False), costs)
    if costs.score:
        changes["scoring"] = (loop, replace(costs, score=FREE * costs.score))
    if costs.reward_s:
        changes["reward"] = (loop, replace(costs, reward_s=FREE * costs.reward_s))
    return {
        name: row.result.step_s / simulate(*change).step_s - 1 for name, change in changes.items()
    }
