"""Number of threads that a model is computed on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_SMALL = 1_000_000
"""Parameters below which a CPU computes on one thread: more of them gain little, and wait for one
another by spinning, which makes a step ten times as long as soon as something else needs a core."""


def use_one_thread_if_small(model: nn.Module) -> None:
    """Compute on one thread if the model is small and on a CPU, unless ``OMP_NUM_THREADS`` is set.

    The backward pass and the optimizer use as many threads as the forward pass, so it holds for the
    whole process from here on; ``torch.set_num_threads`` undoes it.

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
