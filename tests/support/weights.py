"""A source of weights, and a check that an engine received them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.generation.base import Engine, SamplingParams
from torchrl_grpo.weights import LoraDelta, named_adapters, named_weights
from torchrl_grpo.weights.mismatch import log_prob_mismatch, sample_probe

ScoreFn = Callable[[list[Tensor], list[int]], Sequence[Tensor]]


class Trained:
    """Stand-in for a trainer with this model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model, dtype)

    def adapters(self) -> Iterator[tuple[str, LoraDelta]]:
        return named_adapters(self.model)


def mismatch(
    engine: Engine, score_fn: ScoreFn, prompts: Sequence[Tensor], params: SamplingParams
) -> Any:
    """Return mean and largest difference between an engine's log-probs and those of ``score_fn``
    (``response_log_probs``).
    """
    probe = sample_probe(engine, prompts, params)
    full = [
        prompt.new_tensor([*prompt, *tokens])
        for prompt, (_, tokens, _) in zip(prompts, probe, strict=True)
    ]
    return log_prob_mismatch(probe, score_fn(full, [len(prompt) for prompt in prompts]))
