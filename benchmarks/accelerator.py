"""Helpers for a CUDA device; on a CPU the same functions do nothing or return None."""

from __future__ import annotations

from typing import Any

import torch

PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12}
"""Dense bfloat16 operations per second, by a part of the card's name (NVIDIA's data sheets)."""


def card(device: str) -> dict[str, Any]:
    """Return the name and properties of the device; an empty dict for a CPU."""
    if device == "cpu":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "card_memory_gib": round(properties.total_memory / 2**30, 1),
        "card_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "peak_flops": peak_flops(device),
    }


def peak_flops(device: str) -> float | None:
    """Return the card's peak in bfloat16, or None if it is not in the table."""
    if device == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def matrix_flops(shape: dict[str, int], kv_share: float, tokens: int, scored: int) -> float:
    """Return the floating-point operations of a Qwen2 model's matrix products in a training step,
    without attention's.

    Args:
        shape: from ``shapes.MODELS``.
        kv_share: key and value heads over query heads.
        tokens: number of tokens in the layers.
        scored: number of tokens in the LM head.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    layer = 2 * hidden**2 * (1 + kv_share) + 3 * hidden * inner
    head = hidden * shape["vocab_size"]
    return 6.0 * (tokens * shape["num_hidden_layers"] * layer + scored * head)


def attention_flops(shape: dict[str, int], keys: int) -> float:
    """Return the floating-point operations of attention in a training step.

    Args:
        shape: from ``shapes.MODELS``.
        keys: number of keys, summed over all queries.
    """
    return 12.0 * shape["num_hidden_layers"] * shape["hidden_size"] * keys
