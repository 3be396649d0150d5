"""Shapes of random Qwen2 models, from 0.3M parameters to Qwen2.5-7B."""

from __future__ import annotations

MODELS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
    },
    "small": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    },
    "qwen05": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
    },
    "qwen15": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
    },
    "qwen7": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
    },
}
