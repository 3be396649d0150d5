"""Prompts longer than several KV blocks, so that the prefix cache is hit unless it was dropped."""

from __future__ import annotations

import torch

LONG_PROMPTS = [torch.arange(10, 180), torch.arange(10, 180).flip(0)]
PROMPTS = [
    torch.randint(20, 90, (100,), generator=torch.Generator().manual_seed(i)) for i in range(4)
]
