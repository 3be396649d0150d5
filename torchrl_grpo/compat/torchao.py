"""torchao's 8-bit AdamW for weights that may be sharded. Import this module in functions only,
because it imports torchao.

torchao itself would compile its update for DTensors with quantized local parts, which the supported
versions of torch cannot do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit as _AdamW8bit
from torchao.optim.adam import single_param_adam


class AdamW8bit(_AdamW8bit):
    """AdamW8bit whose state and step cover this rank's part of each weight; ranks do not wait for
    each other.

    The random numbers that round a weight depend only on its index and step, so a resumed run draws
    the same ones, regardless of what else used the global generators and how large a rank's part
    is.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """As in ``torch.optim.Optimizer``."""
        assert closure is None
        update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
        devices = {
            p.device
            for group in self.param_groups
            for p in group["params"]
            if p.device.type == "cuda"
        }
        indices = itertools.count()
        # Each shape is one entry of the cache.
        with torch._dynamo.utils.disable_cache_limit(), torch.random.fork_rng(devices):
            for group in self.param_groups:
                of_group = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
                for parameter in group["params"]:
                    index = next(indices)
                    if parameter.grad is None:
                        continue
                    weight = _local(parameter.detach())
                    gradient = _local(parameter.grad)
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"] = self._new_buffer(weight, True)
                        state["exp_avg_sq"] = self._new_buffer(weight, False)
                    state["step"] += 1
                    if weight.numel():
                        of_weight = state["step"], state["exp_avg"], state["exp_avg_sq"], None
                        rounds = self.bf16_stochastic_round and weight.dtype is torch.bfloat16
                        if rounds:
                            torch.manual_seed(int(state["step"]) << 20 | index)
                        update(weight, gradient, *of_weight, *of_group, self.is_adamw, rounds)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
