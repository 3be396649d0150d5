"""Measures that are nearly free in a training step: the size of an optimizer step and the noise of
its gradients, from a few numbers of each parameter, and the per-token scores of the logged
sequences, from the passes of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torchrl_grpo.compat.torch import copies, differences, first_place, norms
from torchrl_grpo.learner.optimizer import has_small_states
from torchrl_grpo.models.passes import Pass
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.sharding import local_part

_MOST = 1024
"""Largest number of elements to look at in each parameter, a small fraction of all."""


class StepMeasures:
    """Compares the first numbers of each parameter before and after an optimizer step.

    Args:
        parameters: trained parameters; of sharded ones, this rank's part.
        over_ranks: function that sums numbers, by name, over the ranks of a sharded model.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        over_ranks: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda sums: sums,
    ) -> None:
        self._parameters = list(parameters)
        self._parts = [_first_numbers(parameter) for parameter in parameters]
        self._over_ranks = over_ranks

    @torch.no_grad()
    def before(self) -> tuple[Tensor, ...]:
        """Return the numbers before a step, for ``after``."""
        return copies(self._few(self._parameters))

    @torch.no_grad()
    def after(
        self, before: Sequence[Tensor], optimizer: torch.optim.Optimizer, steps: int, sequences: int
    ) -> dict[str, Tensor]:
        """Return metrics of the step.

        Args:
            before: numbers from ``before``.
            optimizer: an Adam optimizer, or another one.
            steps: number of steps that the optimizer has made.
            sequences: number of sequences in an optimizer step.

        Returns:
            ``update_size``, the norm of the change over the norm of the weights, and, after some
            steps of an Adam optimizer, ``grad_noise_scale`` of arXiv 1812.06162, in sequences,
            which is infinite if the gradient is nothing but noise.
        """
        changes = differences(self._few(self._parameters), before)
        sums = {"changed": _squares(changes), "size": _squares(before)}
        states = [optimizer.state.get(parameter, {}) for parameter in self._parameters]
        states = [state for state in states if "exp_avg_sq" in state]
        if states and not has_small_states(optimizer):
            sums["of_mean"] = _squares(self._few([state["exp_avg"] for state in states]))
            # None is negative, so that the 1-norm is the sum.
            squares = self._few([state["exp_avg_sq"] for state in states])
            sums["of_square"] = norms(squares, 1.0).sum()
        sums = self._over_ranks(sums)
        metrics = {"update_size": (sums["changed"] / sums["size"].clamp(min=1e-30)).sqrt()}
        if "of_mean" not in sums:
            return metrics
        # Adam's moments are running means of the gradient and of its square. The square of the
        # first is less than the second by the variance, except for the share of the variance that
        # a mean over so few steps retains.
        beta1, beta2 = optimizer.param_groups[0]["betas"]
        first = 1 - beta1**steps
        noise_share = (1 - beta1) / (1 + beta1) * (1 + beta1**steps) / first
        if noise_share < 0.5:
            mean_square = sums["of_mean"] / first**2
            square_mean = sums["of_square"] / (1 - beta2**steps)
            variance = (square_mean - mean_square) / (1 - noise_share)
            signal = mean_square - noise_share * variance
            metrics["grad_noise_scale"] = torch.where(
                signal > 0, sequences * variance / signal, math.inf
            )
        return metrics

    def _few(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of the first numbers of each parameter, or of a moment of it."""
        return [
            local_part(tensor.detach())[part].reshape(-1)
            for tensor, part in zip(tensors, self._parts, strict=True)
        ]


def _first_numbers(parameter: Tensor) -> tuple[slice, ...]:
    """Return which part of this rank's part of a parameter belongs to the block of first numbers,
    which is the same for any number of ranks. Of several copies one counts.
    """
    block, limit = list[int](), _MOST
    for size in reversed(parameter.shape):
        block.insert(0, min(size, limit))
        limit = max(1, limit // max(1, size))
    begin = first_place(parameter)
    if begin is None:
        return tuple(slice(0) for _ in block)
    return tuple(slice(max(0, end - first)) for end, first in zip(block, begin, strict=True))


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers."""
    return norms(tensors).square().sum()


_NAMES = {"trainer": "log_prob", "entropy": "entropy"}


class PassScores:
    """Log-probs and entropies of a batch, from the first pass over each sequence."""

    def __init__(self) -> None:
        self.begin_batch(0)

    def begin_batch(self, size: int) -> None:
        """Forget the previous batch. Optimization batches must come in the new batch's order."""
        self._size = size
        self._first = self._next = 0
        self._places: dict[int, tuple[Rows, int, dict[str, Tensor]]] = {}

    def begin_step(self, size: int) -> None:
        """Begin the next optimization batch."""
        self._first = self._next
        self._next += size

    def note(self, each: Pass, scores: Mapping[str, Tensor]) -> None:
        """Record the scores of a pass over sequences of the optimization batch.

        Sequences after the batch's own are demonstrations, which are not samples.
        """
        if self._first >= self._size:
            return
        kept = {name: scores[key].detach() for name, key in _NAMES.items() if key in scores}
        for position, index in enumerate(each.index.tolist()):
            if index < self._next - self._first:
                self._places.setdefault(self._first + index, (each.rows, position, kept))

    def of(self, row: int) -> dict[str, Tensor]:
        """Return the scores of a row of the batch by name, [T] each; empty if another rank computed
        them.
        """
        if row not in self._places:
            return {}
        rows, position, scores = self._places[row]
        return {name: rows.split(values)[position] for name, values in scores.items()}
