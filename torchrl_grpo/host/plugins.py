"""Names that installed packages add to those that are built in, by entry points.

Only metadata is read here; ``host.objects.load_object`` imports. That takes 35 ms, so it is
for names that are not built in.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

GROUPS = {
    "agent": "torchrl_grpo.agents",
    "backend": "torchrl_grpo.engines",
    "environment": "torchrl_grpo.environments",
    "reward": "torchrl_grpo.rewards",
    "task": "torchrl_grpo.tasks",
    "tools": "torchrl_grpo.tools",
    "trackers": "torchrl_grpo.trackers",
}
"""Groups of entry points, by the last word of the config keys that take their names."""


@cache
def plugins(key: str) -> dict[str, str]:
    """Return the names that installed packages add to those of a config key, with the object that
    each stands for, as ``package.module:name``.

    >>> plugins("env.sampling")
    {}
    """
    group = GROUPS.get(key.removesuffix("._target_").rpartition(".")[2].partition("[")[0], "")
    return {entry.name: entry.value for entry in entry_points(group=group)}
