"""How far an engine's log-probs are from the trainer's: the check of a weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class _Generates(Protocol):
    def generate(self, prompts: Sequence[Tensor], n: int, params: Any) -> list[list[Any]]: ...


ScoreFn = Callable[[list[Tensor], list[int]], list[Tensor]]


Probe = list[tuple[Tensor, Tensor, Tensor]]


def sample_probe(engine: _Generates, prompts: Sequence[Tensor], params: Any) -> Probe:
    """Samples one response to each prompt: (prompt [P], sampled tokens [R], their log-probs [R]) for each."""
    completions = [group[0] for group in engine.generate(prompts, 1, params)]
    return [(prompt, done.tokens, done.log_probs) for prompt, done in zip(prompts, completions, strict=True)]


def log_prob_mismatch(probe: Probe, score_fn: ScoreFn) -> tuple[float, float]:
    """How far an engine's log-probs are from the trainer's.

    Args:
        probe: as ``sample_probe`` gives it, at least one response.
        score_fn: takes the full sequences ([T] int64 each) and their prompt lengths, returns for each the trainer's
            log-probs of the response's tokens, at the temperature that they were sampled with.

    Returns:
        mean and largest absolute difference over all sampled tokens, in nats.

    Raises:
        RuntimeError: ``score_fn`` gave another number of log-probs than there are sampled tokens.
    """
    full = [torch.cat([prompt, tokens]) for prompt, tokens, _ in probe]
    scored = score_fn(full, [len(prompt) for prompt, _, _ in probe])
    lengths = [len(tokens) for _, tokens, _ in probe]
    if [len(row) for row in scored] != lengths:
        raise RuntimeError(f"score_fn gave {[len(row) for row in scored]} log-probs for {lengths} sampled tokens.")
    sampled = torch.cat([log_probs for _, _, log_probs in probe])
    gap = (sampled - torch.cat([row.detach().float().cpu() for row in scored])).abs()
    return gap.mean().item(), gap.max().item()


def sync_mismatch(engine: _Generates, score_fn: ScoreFn, prompts: Sequence[Tensor], params: Any) -> tuple[float, float]:
    """``log_prob_mismatch`` of freshly sampled tokens.

    Args:
        engine: samples one response to each prompt.
        score_fn: see ``log_prob_mismatch``.
        prompts: one [T] int64 tensor a prompt, at least one.
        params: the engine's ``SamplingParams``.
    """
    return log_prob_mismatch(sample_probe(engine, prompts, params), score_fn)
