"""Collectors of sampled trajectories and of demonstrations, the samplers that use them, evaluations,
and summaries of batches.
"""

from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.sampler import Sampler

__all__ = ["RolloutCollector", "Sampler"]
