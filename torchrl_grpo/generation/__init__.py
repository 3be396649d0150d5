"""Generation engines, which turn token ids into token ids and log-probs; and the policy that a
collector calls.

``VLLMEngine`` is in :mod:`torchrl_grpo.generation.vllm`: it is not imported here, so that vllm
stays optional.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
    from torchrl_grpo.generation.policy import GenerationPolicy
    from torchrl_grpo.generation.transformers import TransformersEngine

__all__ = ["Completion", "Engine", "GenerationPolicy", "SamplingParams", "TransformersEngine"]

_MODULES = {"GenerationPolicy": "policy", "TransformersEngine": "transformers"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # These import torch and transformers, and each of vLLM's processes imports ``vllm_stops``.
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'base')}"), name)
