"""Checks that weights fit a model, for every engine and the reference model, before any are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchrl_grpo.weights.named import expected_weights, from_checkpoint


def check_weights(
    layout: Iterable[tuple[str, Sequence[int]]],
    expected: Mapping[str, Sequence[int]],
    model: str,
    optional: Collection[str] = (),
) -> None:
    """Check that weights are a model's, each exactly once.

    Args:
        layout: name and shape of each weight.
        expected: name to shape of the model's weights.
        model: what the message calls the model.
        optional: names of ``expected`` that may be left out: a tied head is another weight's memory.

    Raises:
        RuntimeError: names are unknown, missing or come twice, or shapes differ; the message has all of it.
    """
    given = [(name, tuple(shape)) for name, shape in layout]
    counts = Counter(name for name, _ in given)
    problems = {
        "unknown": [name for name in counts if name not in expected],
        "missing": [name for name in expected if name not in counts and name not in optional],
        "sent twice": [name for name, count in counts.items() if count > 1],
        "of another shape": [
            f"{name} {shape} instead of {tuple(expected[name])}"
            for name, shape in given
            if name in expected and shape != tuple(expected[name])
        ],
    }
    found = [f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in problems.items() if names]
    if found:
        raise RuntimeError(
            f"the weights must be the {len(expected) - len(optional)} of {model}, under the names of its Hugging Face "
            f"checkpoint, got {'; '.join(found)}: send those of the same model. No weight was changed."
        )


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into a model, once all are present and fit.

    Raises:
        RuntimeError: see ``check_weights``; the model is then as it was.
    """
    given = list(weights)
    expected, tied = expected_weights(model)
    check_weights([(name, weight.shape) for name, weight in given], expected, type(model).__name__, tied)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in from_checkpoint(model, given):
        parameters[name].copy_(weight)
