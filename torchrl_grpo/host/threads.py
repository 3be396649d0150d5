"""Number of CPU threads of a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_SMALL = 1_000_000
"""Number of parameters below which a CPU uses one thread. More threads gain little, and wait for
one another by spinning, which makes a step ten times slower once something else needs a core.
"""


def limit_threads(model: nn.Module) -> None:
    """Use one CPU thread if the model is on an accelerator, where the CPU only prepares small
    tensors, or small and on a CPU, unless ``OMP_NUM_THREADS`` is set.

    It applies to the whole process from then on, because the backward pass and the optimizer use as
    many threads as the forward pass. ``torch.set_num_threads`` undoes it.

    Args:
        model: a causal LM.
    """
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return
    parameters = list(model.parameters())
    devices = {parameter.device.type for parameter in parameters}
    is_small = devices <= {"cpu"} and sum(map(torch.numel, parameters)) < _SMALL
    if is_small or not devices & {"cpu", "meta"}:  # offloaded weights are trained on the CPU
        torch.set_num_threads(1)
