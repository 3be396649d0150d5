"""Generation engines: token ids in, token ids and log-probs out; and the policy that a collector asks.

``VLLMEngine`` is in :mod:`torchrl_grpo.generation.vllm`: it is not imported here, so that vllm stays optional.
"""

from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine

__all__ = ["Completion", "Engine", "GenerationPolicy", "SamplingParams", "TransformersEngine"]
