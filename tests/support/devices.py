"""Plans with simulated devices."""

from __future__ import annotations

import torch

from torchrl_grpo.runtime.placement import DevicePlan

CPU = torch.device("cpu")
TWO = DevicePlan((CPU,), ((CPU,),), (), colocated=False)
SPREAD = DevicePlan((CPU, CPU), ((CPU,), (CPU,)), (CPU, CPU), colocated=False)


def gpus(*indices: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", index) for index in indices)
