"""Trajectories of several steps, in the layout of TorchRL's collectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict


def make_trajectory(
    group: int, rewards: Sequence[float], group_key: NestedKey = "group_id"
) -> TensorDict:
    """Return [T] steps, the last of which is done."""
    steps = len(rewards)
    out = TensorDict({}, [steps])
    out[group_key] = torch.full((steps, 1), group)
    out["next", "reward"] = torch.tensor(rewards).reshape(steps, 1)
    out["next", "done"] = (torch.arange(steps) == steps - 1).reshape(steps, 1)
    return out
