"""Distance between the log-probs of an engine and of the trainer, to check a weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class _Generates(Protocol):
    def generate(self, prompts: Sequence[Tensor], n: int, params: Any) -> list[list[Any]]: ...


Probe = list[tuple[Tensor, Tensor, Tensor]]
"""A few responses: prompt [P], sampled tokens [R] and their log-probs [R] of each."""


def sample_probe(engine: _Generates, prompts: Sequence[Tensor], params: Any) -> Probe:
    """Samples one response to each prompt."""
    completions = [group[0] for group in engine.generate(prompts, 1, params)]
    return [
        (prompt, done.tokens, done.log_probs)
        for prompt, done in zip(prompts, completions, strict=True)
    ]


def log_prob_mismatch(probe: Probe, scored: Sequence[Tensor]) -> tuple[float, float]:
    """Return the distance between the log-probs of an engine and of the trainer.

    Args:
        probe: as ``sample_probe`` gives it, at least one response.
        scored: for each response the trainer's log-probs [R] of the sampled tokens, at the sampling
            temperature.

    Returns:
        mean and largest absolute difference over all sampled tokens, in nats.

    Raises:
        RuntimeError: there is another number of log-probs than of sampled tokens.
    """
    given, lengths = [len(row) for row in scored], [len(tokens) for _, tokens, _ in probe]
    if given != lengths:
        raise RuntimeError(f"the trainer gave {given} log-probs for {lengths} sampled tokens.")
    sampled = torch.cat([log_probs for _, _, log_probs in probe])
    difference = (sampled - torch.cat([row.detach().float().cpu() for row in scored])).abs()
    return difference.mean().item(), difference.max().item()
