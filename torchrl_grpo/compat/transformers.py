"""Private names of transformers."""

from __future__ import annotations

from transformers import PretrainedConfig


def attention_of(config: PretrainedConfig) -> str:
    """Return the name of a model's attention implementation, such as ``sdpa``."""
    return str(config._attn_implementation)
