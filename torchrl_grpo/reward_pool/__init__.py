"""Reward workers: processes that score dialogs, with a time limit each."""

from torchrl_grpo.reward_pool.pool import Failure, RewardPool, advance, serve

__all__ = ["Failure", "RewardPool", "advance", "serve"]
