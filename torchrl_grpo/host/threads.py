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


def use_one_thread_if_small(model: nn.Module) -> None:
    """Use one thread if the model is small and on a CPU, unless ``OMP_NUM_THREADS`` is set.

    It applies to the whole process from then on, because the backward pass and the optimizer use as
    many threads as the forward pass. ``torch.set_num_threads`` undoes it.

    Args:
        model: a causal LM.
    """
    import torch

    parameters = list(model.parameters())
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    if (
        on_cpu
        and "OMP_NUM_THREADS" not in os.environ
        and sum(map(torch.numel, parameters)) < _SMALL
    ):
        torch.set_num_threads(1)
