"""Support for losses of users that override methods of ``GRPOLoss`` instead of writing parts.

``surrogate``, ``clipped`` and ``kl`` work for one more release.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchrl_grpo.objectives import GRPOLoss, Tokens

_REPLACEMENTS = {
    "surrogate": "a Surrogate",
    "clipped": "a Surrogate",
    "kl": "a Term",
    "ratio": "an OffPolicy",
    "behaviour": "a Surrogate",
    "token_roles": "a Select",
    "_objective": "a Surrogate",
}
"""Part to write instead of each method that a subclass could override."""


def adapt_former_methods(loss: GRPOLoss) -> None:
    """Let the parts of a loss call the methods that a subclass overrides, with a warning, and
    refuse methods that nothing calls anymore.
    """
    calls: dict[str, list[tuple[Any, str, tuple[str, ...]]]] = {
        "surrogate": [(loss.objective, "forward", ("ratio", "log_prob", "advantage"))],
        "clipped": [(loss.objective, "clipped", ("ratio", "advantage"))],
        "kl": [(term, "kl", ("log_prob", term.log_probs_key)) for term in loss.terms[:2]],
    }
    for method, part in _REPLACEMENTS.items():
        if not hasattr(type(loss), method):
            continue
        name, fix = f"{type(loss).__name__}.{method}", f"write {part} (docs/tutorials/own_loss.md)."
        if method not in calls:
            raise TypeError(f"{name} must not be overridden, since a loss is made of parts: {fix}")
        warnings.warn(f"{name} works for one more release: {fix}", FutureWarning, stacklevel=4)
        for caller, attribute, names in calls[method]:
            setattr(caller, attribute, partial(_by_rows, getattr(loss, method), names))


def _by_rows(method: Any, names: Sequence[str], t: Tokens) -> Any:
    """Call a method with the values of each sequence, [1, T]."""
    columns = [t[name][None].split(t.segments.sizes.tolist(), 1) for name in names]
    results = [method(*row) for row in zip(*columns, strict=True)]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(part, 1)[0] for part in zip(*results, strict=True))
    return torch.cat(results, 1)[0]
