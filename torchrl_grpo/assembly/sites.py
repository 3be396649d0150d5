"""``ThisThread`` and ``OnCluster``: where the roles of a run are made. Both are asked for the same things, so that the
building of a run is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchrl_grpo.assembly.blueprint import Blueprint
from torchrl_grpo.host.startup import say
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.runtime.cluster import Cluster
from torchrl_grpo.runtime.in_thread import InThread
from torchrl_grpo.runtime.in_turn import InTurn
from torchrl_grpo.runtime.learner import RayLearner
from torchrl_grpo.runtime.places import Here, OnRay, Place
from torchrl_grpo.runtime.rollouts import Rollouts

_NAMES = {"inference": "sampler", "reference": "reference model"}
_PROCESSES = {"inference": "SamplerActor", "reference": "ReferenceActor"}


class ThisThread:
    """All roles in this thread: they are loaded one after another, and take turns.

    Attributes:
        overlaps: whether the roles work at the same time.
    """

    overlaps = InTurn.overlaps

    def __init__(self, blueprint: Blueprint) -> None:
        self._config, self._plan = blueprint.config, blueprint.plan

    def make_driver(self) -> InTurn:
        """Make what drives the rollouts."""
        return InTurn()

    def device(self, role: str, index: int) -> torch.device:
        """Return the (first) device of a role's part."""
        given = getattr(self._plan, role)[index]
        return given if isinstance(given, torch.device) else given[0]

    def make_learner(self, factory: Callable[..., Learner]) -> Learner:
        """Make the learner."""
        say(f"loading {self._config.model.name} to train")
        return factory()

    def place(self, role: str, index: int, factory: Callable[..., Any], threads: int = 1) -> Place:
        """Return the place of a part, which the factory makes."""
        engine = f"starting the engine: {self._config.inference_model.backend}"
        text = {"inference": engine, "reference": "loading the reference model"}[role]

        def make(*arguments: Any) -> Any:
            say(text)
            return factory(*arguments)

        return Here(f"{_NAMES[role]} {index}", make)

    def start(self, rollouts: Rollouts) -> None:
        """Make the parts of the places."""
        rollouts.start()


class OnCluster:
    """Each part of a role in a process of its own on Ray.

    Attributes:
        overlaps: whether the roles work at the same time.

    Raises:
        ValueError: Ray has no room for them.
    """

    overlaps = InThread.overlaps

    def __init__(self, blueprint: Blueprint, cluster: Cluster) -> None:
        self._config, self._plan, self._resume = blueprint.config, blueprint.plan, blueprint.resume
        self._cluster = cluster
        self._options = cluster.place(self._plan)
        self._timeout_s = self._config.ray.actor_timeout_s

    def make_driver(self) -> InThread:
        """Make what drives the rollouts; it has a thread, which its ``close`` ends."""
        return InThread(actor_timeout_s=self._timeout_s, recovery_timeout_s=self._config.ray.recovery_timeout_s)

    def device(self, role: str, index: int) -> None:
        """Return None: a part takes the first device that its own process sees."""

    def make_learner(self, factory: Callable[..., Learner]) -> RayLearner:
        """Return the training ranks' handle; ``start`` makes their learners."""
        self._learner = RayLearner(
            factory,
            options=self._options["train"],
            tensor_parallel_size=self._config.train_model.tensor_parallel_size,
            actor_timeout_s=self._timeout_s,
            resumed_from=None if self._resume is None else self._resume.path,
        )
        self._cluster.watch(self._learner.last_saved)
        return self._learner

    def place(self, role: str, index: int, factory: Callable[..., Any], threads: int = 1) -> Place:
        """Return the place of a part, which the factory makes and so many threads call at a time."""
        options = {**self._options[role][index], "max_concurrency": threads}
        return OnRay(f"{_NAMES[role]} {index}", factory, _PROCESSES[role], options, self._timeout_s)

    def start(self, rollouts: Rollouts) -> None:
        """Make the learner's ranks and the parts of the places."""
        say(f"starting {sum(map(len, self._options.values()))} processes, which load their models")
        # On one accelerator the engine must not start while others take memory; else all start at the same time.
        starts = [rollouts.start, self._learner.start]
        for start in reversed(starts) if self._plan.colocated else starts:
            start()
        rollouts.wait_until_ready()
