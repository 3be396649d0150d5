"""``Actor``: one part of a distributed run (sampler, reference model or training rank) in its own
process.

Data goes from actor to actor as object references. All that the driver sees of a group is the
numbers in a ``RolloutReport``.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.host.processes import enable_stack_dump
from torchrl_grpo.host.startup import leave
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.models.sharding import init_mesh
from torchrl_grpo.runtime.cluster import interface_of
from torchrl_grpo.runtime.groups import PackedGroup
from torchrl_grpo.runtime.placement import own_device


class Actor:
    """Actor with a part that a factory makes in the actor's process.

    Args:
        factory: makes the part.
    """

    def __init__(self, factory: Callable[..., Any]) -> None:
        self._factory = factory
        # Ray's handler raises SystemExit, which a user's function may swallow.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def setup(self, *arguments: Any) -> int:
        """Make the part, with arguments for the factory. Return the process id."""
        enable_stack_dump()
        atexit.register(leave)  # if Ray ends before it has killed the actor
        self._part = self._factory(*arguments)
        return os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part, or return the value of an attribute."""
        attribute = getattr(self._part, method)
        with record_function(method):
            return attribute(*arguments) if callable(attribute) else attribute

    def call_for_groups(self, method: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a method that returns a result and a list of groups. Each group becomes a separate
        object in the object store.
        """
        first, groups = self.call(method, *arguments)
        return (first, *map(PackedGroup, groups))

    def call_and_keep(self, method: str, *arguments: Any) -> tuple[None, Any]:
        """Call a method whose result stays in the object store. The caller gets only None."""
        return None, self.call(method, *arguments)


def start_actor(role: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Start an actor with Ray's options. Its process is named after the role, for example
    ``ray::SamplerActor``.
    """
    import ray

    return ray.remote(type(role, (Actor,), {})).options(**options).remote(factory)


def make_seeded(
    factory: Callable[..., Sampler], seed: int, state: dict[str, Any] | None, **settings: Any
) -> Sampler:
    """Make a sampler, and seed its engine or restore the state that an earlier one reported.

    Args:
        factory: function that makes the sampler.
        seed: seed of the engine's sampling.
        state: state of an earlier sampler; None without one.
        **settings: settings for the factory.
    """
    sampler = factory(**settings)
    if state is None:
        sampler.engine.seed(seed)
    else:
        sampler.load_state_dict(state)
    return sampler


def make_rank(
    factory: Callable[[DeviceMesh | None], Learner],
    rank: int,
    timeout_s: float,
    address: tuple[str, int] | None,
    *,
    world_size: int,
    tensor_parallel_size: int,
    replicas: int,
) -> Learner:
    """Join the process group, if there is more than one rank, and make a rank's learner.

    Args:
        factory: function of the mesh of all ranks, or of None for one rank.
        rank: rank of this process.
        timeout_s: how long a rank waits for the others, here and in each collective call.
        address: address of the store through which the ranks find each other; None for one rank.

    Keyword Args:
        world_size: number of ranks.
        tensor_parallel_size: number of ranks that compute each layer together.
        replicas: number of sharded copies of the model.
    """
    if address is None:
        return factory(None)
    # By default gloo uses the address of the machine's hostname, which others often cannot reach.
    if (interface := interface_of(own_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    mesh = init_mesh(
        rank,
        world_size,
        TCPStore(*address, timeout=timedelta(seconds=timeout_s)),
        device=own_device(),
        timeout_s=timeout_s,
        tensor_parallel_size=tensor_parallel_size,
        replicas=replicas,
    )
    return factory(mesh)


def own_address() -> str:
    """Return the address at which other machines reach this one."""
    import ray

    return ray.util.get_node_ip_address()
