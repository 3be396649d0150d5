"""Collectors, and the samplers built from them."""

from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import Sampler

__all__ = ["RolloutCollector", "Sampler"]
