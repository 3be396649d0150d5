"""Whole dialogs of several responses, compared with one forward pass of the model that sampled
them.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_grpo import keys
from torchrl_grpo.models.scoring import TokenScorer


def tokens_between_turns(batch: TensorDictBase) -> list[int]:
    """Return the number of tokens after the prompt that the policy did not sample, for each dialog."""
    return [
        int((~row[keys.ASSISTANT_MASK][row[keys.PROMPT].numel() :]).sum())
        for row in batch.unbind(0)
    ]


def log_prob_gap(batch: TensorDictBase, model: nn.Module) -> float:
    """Return the largest distance of the engine's and the scorer's log-probs from one plain forward
    pass.

    Tokens that were not sampled must have none.
    """
    gaps = []
    with torch.no_grad():
        scored = TokenScorer(model)(batch.clone())
        for row, own in zip(batch.unbind(0), scored.unbind(0), strict=True):
            full, sampled = row[keys.FULL], row[keys.ASSISTANT_MASK]
            assert row[keys.LOG_PROBS][~sampled].eq(0).all() and sampled.any()
            expected = (
                model(full[None])
                .logits[0]
                .float()
                .log_softmax(-1)[:-1]
                .gather(-1, full[1:, None])
                .squeeze(-1)
            )
            for log_probs in (row[keys.LOG_PROBS], own["cur_log_probs", "full"][: len(full)]):
                gaps.append((log_probs[1:] - expected)[sampled[1:]].abs().max().item())
    return max(gaps)
