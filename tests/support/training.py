"""A trainer of a tiny model, and a batch for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss


def make_batch(
    lengths: tuple[int, ...] = (9, 14, 6, 11, 8, 12, 7, 10),
    *,
    spread: float = 0.1,
    repeats: int = 1,
) -> TensorDictBase:
    """Return sequences whose behavior and reference log-probs are near those of
    ``make_tiny_model()``.

    ``repeats`` consecutive sequences share a prompt of three tokens. Torch's random state is
    afterwards that of ``make_tiny_model()``.
    """
    batch, state = _scored_batch(lengths, spread, repeats)
    torch.set_rng_state(state)
    return batch.clone()


@cache
def _scored_batch(
    lengths: tuple[int, ...], spread: float, repeats: int
) -> tuple[TensorDictBase, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scorer = TokenScorer(make_tiny_model())
    rows = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(5, 261, (length,), generator=generator)
        if index % repeats:
            tokens[:3] = rows[-1][keys.FULL][:3]
        mask = torch.zeros(length, dtype=torch.bool)
        mask[3:] = True
        log_probs = scorer.score(tokens[None], mask[None])[0][0].detach()
        noise = torch.randn(2, length, generator=generator) * spread * mask
        rows.append(
            TensorDict(
                {
                    keys.FULL: tokens,
                    keys.ATTENTION_MASK: torch.ones(length, dtype=torch.bool),
                    keys.ASSISTANT_MASK: mask,
                    keys.LOG_PROBS: log_probs + noise[0],
                    keys.REF_LOG_PROBS: log_probs + noise[1],
                    keys.ADVANTAGE: torch.tensor([(-1.0) ** index]),
                    keys.REWARD_VALID: torch.tensor([True]),
                }
            )
        )
    return lazy_stack(rows), torch.get_rng_state()


def make_trainer(
    model: torch.nn.Module | None = None, *, optimizer: Any = None, **settings: Any
) -> PolicyTrainer:
    model = make_tiny_model() if model is None else model
    loss = GRPOLoss(TokenScorer(model), kl_to_ref_coeff=0.1, entropy_coeff=0.01)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    return PolicyTrainer(loss, model, optimizer, **({"optim_batch_size": 8} | settings))


def peak_of(function: Any) -> int:
    """Return the peak number of bytes that a function allocates beyond those that existed before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    total = peak = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        total += size
        peak = max(peak, total)
    return peak
