"""Loading models, scoring tokens, and splitting batches."""

from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer, WrapperScorer

__all__ = ["AdapterOffScorer", "TokenScorer", "WrapperScorer"]
