"""Per-token scores of the logged sequences, taken from the passes of the training step at no cost."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_grpo import keys

_NAMES = {"trainer": keys.CUR_LOG_PROBS, "entropy": keys.ENTROPY}


class PassScores:
    """Log-probs and entropies of a batch, of the first pass over each sequence.

    Args:
        scorer: the actor network of a loss, which writes them.
    """

    def __init__(self, scorer: nn.Module) -> None:
        self._size = self._first = self._next = 0
        self._latest: dict[str, Tensor] = {}
        self._passes: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._places: dict[int, tuple[int, int]] = {}
        scorer.register_forward_hook(self._keep)

    def _keep(self, scorer: nn.Module, inputs: Any, out: TensorDictBase) -> None:
        found = {name: out.get(key, None) for name, key in _NAMES.items()}
        self._latest = {name: value.detach() for name, value in found.items() if value is not None}

    def begin_batch(self, size: int) -> None:
        """Forgets the batch before; the optimization batches of the new one come in its order."""
        self._size, self._first, self._next, self._passes, self._places = size, 0, 0, [], {}

    def begin_step(self, size: int) -> None:
        """Begins the next optimization batch."""
        self._first, self._next = self._next, self._next + size

    def note(self, index: Tensor) -> None:
        """Notes that the latest pass was over these rows of the optimization batch, [n] int64.

        Rows after its sequences are demonstrations, which are no samples.
        """
        if self._first < self._size:
            sampled = index < self._next - self._first
            self._passes.append((torch.where(sampled, self._first + index, -1), self._latest))

    def of(self, row: int) -> dict[str, Tensor]:
        """Return scores of a row of the batch by name, [T] each; empty if another rank computed them."""
        if not self._places:
            for number, (rows, _) in enumerate(self._passes):
                for place, one in enumerate(rows.tolist()):
                    self._places.setdefault(one, (number, place))
        if row not in self._places:
            return {}
        number, place = self._places[row]
        return {name: value[place] for name, value in self._passes[number][1].items()}
