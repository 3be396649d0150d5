"""Collectors, and the samplers and sources of batches that are made of them."""

from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import Sampler
from torchrl_grpo.collectors.source import LocalSource, RolloutSource

__all__ = ["LocalSource", "RolloutCollector", "RolloutSource", "Sampler"]
