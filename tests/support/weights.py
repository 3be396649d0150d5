"""A source of weights, and a check that an engine received them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.generation.base import Engine, SamplingParams
from torchrl_grpo.weights import LoraDelta, named_adapters, named_weights

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
    (``response_log_probs``), in nats, over one response to each prompt.
    """
    completions = [group[0] for group in engine.generate(prompts, 1, params)]
    full = [
        prompt.new_tensor([*prompt, *completion.tokens])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    scored = torch.cat([*score_fn(full, [len(prompt) for prompt in prompts])])
    sampled = torch.cat([completion.log_probs for completion in completions])
    assert scored.shape == sampled.shape
    difference = (sampled - scored.detach().float().cpu()).abs()
    return difference.mean().item(), difference.max().item()
