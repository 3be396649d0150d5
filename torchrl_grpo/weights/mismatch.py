"""Distance between the engine's and the trainer's log-probs, to check a weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrl_grpo.images import Prompt


class _Generates(Protocol):
    def generate(
        self, prompts: Sequence[Tensor | Prompt], n: int, params: Any
    ) -> list[list[Any]]: ...


Probe = list[tuple[Tensor | Prompt, Tensor, Tensor]]
"""A few responses: prompt [P], sampled tokens [R] and their log-probs [R]."""


def sample_probe(engine: _Generates, prompts: Sequence[Tensor | Prompt], params: Any) -> Probe:
    """Sample one response to each prompt."""
    completions = [group[0] for group in engine.generate(prompts, 1, params)]
    return [
        (prompt, completion.tokens, completion.log_probs)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def log_prob_mismatch(probe: Probe, scored: Sequence[Tensor]) -> tuple[float, float]:
    """Return the distance between the log-probs of an engine and of the trainer.

    Args:
        probe: at least one response, from ``sample_probe``.
        scored: the trainer's log-probs [R] of each response's sampled tokens, at the sampling
            temperature.

    Returns:
        mean and largest absolute difference over all sampled tokens, in nats.

    Raises:
        RuntimeError: the numbers of log-probs and of sampled tokens differ.
    """
    scored_lengths = [len(row) for row in scored]
    lengths = [len(tokens) for _, tokens, _ in probe]
    if scored_lengths != lengths:
        raise RuntimeError(
            f"the trainer gave {scored_lengths} log-probs for {lengths} sampled tokens."
        )
    sampled = torch.cat([log_probs for _, _, log_probs in probe])
    difference = (sampled - torch.cat([row.detach().float().cpu() for row in scored])).abs()
    return difference.mean().item(), difference.max().item()
