"""Reward workers: processes that score dialogs, each within a time limit."""

from torchrl_grpo.reward_pool.pool import RewardPool
from torchrl_grpo.reward_pool.protocol import Failure, advance, serve
from torchrl_grpo.reward_pool.slot import RESTARTS, TIMED_OUT

__all__ = ["RESTARTS", "TIMED_OUT", "Failure", "RewardPool", "advance", "serve"]
