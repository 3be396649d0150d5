"""Private names of transformers."""

from __future__ import annotations

from transformers import PretrainedConfig


def attention_of(config: PretrainedConfig) -> str:
    """Return the name of the attention implementation that a model was loaded with, such as
    ``sdpa``.
    """
    return str(config._attn_implementation)
