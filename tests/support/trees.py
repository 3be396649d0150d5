"""Sequences that share beginnings of any depth, and their log-probs from one forward each."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo import keys
from torchrl_grpo.models import layout as layouts
from torchrl_grpo.models.rows import Rows

Tree = list[tuple[list[int], list[bool]]]


def random_tree(seed: int, count: int = 9, sizes: tuple[int, ...] = (0, 1, 5, 20, 40)) -> Tree:
    """Return sequences, each of which begins with a part of an earlier one, and their masks."""
    draw, tree = random.Random(seed), Tree()
    for _ in range(count):
        tokens = list[int]()
        if tree and draw.random() < 0.85:
            tokens, _ = draw.choice(tree)
            tokens = tokens[: draw.randint(1, len(tokens))]
        tokens = tokens + [draw.randrange(3, 128) for _ in range(draw.choice(sizes))]
        tokens = tokens if len(tokens) > 1 else [5, 6]
        tree.append((tokens, [at > 0 and draw.random() < 0.5 for at in range(len(tokens))]))
    return tree


def rows_of(tree: Tree) -> Rows:
    entries = [
        {keys.FULL: torch.tensor(tokens), keys.ASSISTANT_MASK: torch.tensor(mask)}
        for tokens, mask in tree
    ]
    return Rows.read(lazy_stack([TensorDict(entry) for entry in entries]))


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prefixes from two tokens on."""
    monkeypatch.setattr(layouts, "MIN_SHARED", 2)
    monkeypatch.setattr(layouts, "MAX_READERS", 10**9)


def one_by_one(model: PreTrainedModel, tree: Tree) -> Tensor:
    """Return the log-probs of the scored tokens, [S]."""
    out = []
    for tokens, mask in tree:
        row = torch.tensor(tokens, device=model.device)
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        out.append(
            logits.gather(-1, row[1:, None]).squeeze(-1)[torch.tensor(mask[1:], device=row.device)]
        )
    return torch.cat(out)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name, and reset them."""
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out
