"""Splits of the devices among the roles: candidates, their simulated speed, and their bottlenecks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.extras.plan.hardware import HOP_S, Gpu, Workload
from torchrl_grpo.extras.plan.simulation import Costs, Loop, Result, Simulation
from torchrl_grpo.generation.engines import ENGINES
from torchrl_grpo.host.text import size
from torchrl_grpo.models.memory import MEMORY_SHARE

_SIMULATED = 10
_SIZES = 251  # of tasks, taken in turns
_GROUPS = 8_000  # most groups of one simulation, but for a few batches
FREE = 0.5
"""Share of a stage's time that is removed to see whether it is the bottleneck."""


@dataclass(frozen=True)
class Split:
    """Devices of each role; without a reference device there is none, or it shares the learner's."""

    train: int
    reference: int
    inference: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.train + self.reference + self.inference


@dataclass(frozen=True)
class Settings:
    """Settings that all splits share.

    Attributes:
        gpu: the devices.
        work: what is computed.
        max_staleness: the bound.
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
        """``env.num_envs`` if the split's samplers can share it out in whole groups, else the
        sequences of a batch.
        """
        samplers, group = split.inference // self.engine_size, self.work.group_size
        return self.rows if self.rows % (samplers * group) == 0 else self.work.groups * group

    @property
    def has_reference(self) -> bool:
        """Whether the reference is a model of its own."""
        return self.work.score_s(self.gpu, 1) > 0

    @property
    def room(self) -> float:
        """Bytes that a role may fill of a device."""
        return self.gpu.memory * MEMORY_SHARE

    def memory(self, split: Split) -> tuple[float, float, float]:
        """Bytes on one device of each role, with the KV cache of the groups that a sampler has at a
        time.
        """
        groups = max(1, self.places(split))
        reference = self.work.reference_memory(split.train)
        train = self.work.train_memory(split.train).peak + (0 if split.reference else reference)
        engine = (self.work.weight_bytes + groups * self.work.group_memory()) / self.engine_size
        return train, reference, engine

    def places(self, split: Split) -> int:
        """Groups that fit into the memory of a sampler, of those that it may have."""
        samplers = split.inference // self.engine_size
        room = self.engine_size * self.room - self.work.weight_bytes
        asked = self.num_envs(split) // self.work.group_size // samplers
        return min(asked, int(max(0.0, room) // self.work.group_memory()))

    def fits(self, split: Split) -> bool:
        """Whether each role's device has room."""
        train, reference, _ = self.memory(split)
        return max(train, reference) <= self.room and self.places(split) > 0

    def memory_in_turns(self, devices: int) -> float:
        """Bytes on each of so many devices on which all ranks train, and then engines sample a
        group or more.

        That is a training step, or an engine beside what rests between two steps, and the reference
        model.
        """
        train = self.work.train_memory(devices)
        engine = (self.work.weight_bytes + self.work.group_memory()) / self.engine_size
        return self.work.reference_memory(devices) + max(train.peak, train.resting + engine)

    def in_turns(self, devices: int) -> Result | None:
        """The loop whose roles take turns on so many devices; None where they have no room, or
        cannot share a batch.
        """
        samplers, left = divmod(devices, self.engine_size)
        if (
            left
            or not samplers
            or self.work.groups % samplers
            or self.memory_in_turns(devices) > self.room
        ):
            return None
        split = Split(devices, 0, devices)
        loop = self.loop(split)
        return simulate(replace(loop, max_staleness=0), self.costs(split, loop))

    def loop(self, split: Split) -> Loop:
        """Return the actors of a split, as the simulation needs them."""
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
        """Costs of the split's stages."""
        work, gpu = self.work, self.gpu
        draw = random.Random(0)
        rows = loop.task_groups * work.group_size
        most = min(work.longest, 2 * work.response)
        # The longest of n uniform lengths is distributed as the n-th root of one.
        tokens = [most * draw.random() ** (1 / rows) for _ in range(_SIZES)]
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
        """Lower bound of the seconds per batch: its longest stage, if nothing ever waited."""
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
        result: of the simulation.
        gains: by what was made cheaper, how much faster the loop was; 0.1 is a tenth.
    """

    split: Split
    result: Result
    gains: dict[str, float]

    @property
    def binds(self) -> str:
        """The bottleneck: the stage to make faster first."""
        name, gain = max(self.gains.items(), key=lambda item: item[1])
        return name if gain > 0.02 else "nothing alone"


def simulate(loop: Loop, costs: Costs) -> Result:
    """Simulate as many batches as take a moment."""
    return Simulation(loop, costs).run(
        max(4, min(24, _GROUPS // loop.groups_per_batch)), loop.max_staleness + 2
    )


def candidates(settings: Settings, devices: int) -> Iterator[Split]:
    """Return the splits whose roles fit, and whose samplers share a batch in whole groups."""
    work = settings.work
    score, train = work.groups * work.score_s(settings.gpu, 1), work.train_s(settings.gpu, 1)
    for samplers in (n for n in range(1, devices) if work.groups % n == 0):
        left = devices - samplers * settings.engine_size
        sequences = work.groups * work.group_size  # more ranks than these have nothing to do
        for total in (
            {left, *(2**power for power in range(12) if 2**power < left)} if left > 0 else ()
        ):
            if not settings.has_reference:
                shares = {0}
            elif total <= 8:
                shares = set(range(total))
            else:  # near the number at which scoring keeps up with training
                even = total * score / (score + train)
                shares = {
                    max(1, min(total - 1, round(even * factor))) for factor in (1.0, 1.4, 2.0)
                }
            for reference in shares:
                split = Split(
                    min(sequences, total - reference), reference, samplers * settings.engine_size
                )
                if settings.fits(split):
                    yield split


def best_splits(settings: Settings, devices: int, shown: int = 6) -> list[Row]:
    """Return the most promising splits, the fastest first; among equally fast ones, the one with
    the fewest devices.

    Raises:
        ConfigError: the run has no room on so many devices.
    """
    if devices < 2:
        raise ConfigError(
            f"--devices={devices} must be at least 2, because on one all roles take turns: use 2 "
            "or more."
        )
    found = sorted(
        candidates(settings, devices),
        key=lambda split: (_nearly(settings.bound_s(split)), split.devices),
    )
    if not found:
        needs = settings.memory(Split(devices, int(settings.has_reference), settings.engine_size))
        raise ConfigError(
            f"--devices={devices} must hold the run, and no split of them does: of the "
            f"{size(settings.room)} that may be filled of a device, train needs {size(needs[0])}, "
            f"ref {size(needs[1])}, inference {size(needs[2])}. Use "
            "train_model.gradient_checkpointing=true, a smaller train.micro_batch_tokens, "
            "inference_model.tensor_parallel_size, a smaller env.num_envs, or "
            "train_model.lora.enabled=true."
        )
    rows = []
    for split in found[:_SIMULATED]:
        loop = settings.loop(split)
        rows.append(Row(split, simulate(loop, settings.costs(split, loop)), {}))
    rows.sort(key=lambda row: (_nearly(row.result.step_s), row.split.devices))
    return [replace(row, gains=gains(settings, row)) for row in rows[:shown]]


def _nearly(seconds: float) -> int:
    """Seconds that are less than 3% apart mostly give the same number: then fewer devices are
    better.
    """
    return round(math.log(seconds) / 0.03)


def gains(settings: Settings, row: Row) -> dict[str, float]:
    """Return the speedup of the loop from each single change."""
    loop = settings.loop(row.split)
    costs = settings.costs(row.split, loop)
    changed = {
        "sampling": (loop, replace(costs, sample=[FREE * work for work in costs.sample])),
        "training": (loop, replace(costs, train=FREE * costs.train)),
        "weight sync": (
            loop,
            replace(costs, publish=FREE * costs.publish, update=FREE * costs.update),
        ),
        "staleness": (replace(loop, max_staleness=loop.max_staleness + 1), costs),
    }
    if loop.waits and not loop.serial:
        changed["in_flight"] = (replace(loop, waits=False), costs)
    if costs.score:
        changed["scoring"] = (loop, replace(costs, score=FREE * costs.score))
    if costs.reward_s:
        changed["reward"] = (loop, replace(costs, reward_s=FREE * costs.reward_s))
    return {name: row.result.step_s / simulate(*what).step_s - 1 for name, what in changed.items()}
