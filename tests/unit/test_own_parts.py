"""Parts of a loss that users write: what they select and add, and their mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import lazy_stack

from tests.support.losses import Table, make_batch
from torchrl_grpo.functional import kl_k3
from torchrl_grpo.objectives import GRPOLoss, Select, Surrogate, Term, Tokens


def part(base: type, forward: Callable[..., Any], *args: Any, **attributes: Any) -> Any:
    """Return an instance of a class of a user, ``Mine``."""
    return type("Mine", (base,), {"forward": forward, **attributes})(*args)


def first_two(is_of_loss: bool) -> Select:
    return part(Select, lambda self, t: t.segments.number < 2, is_of_loss=is_of_loss)


@pytest.mark.parametrize("is_of_loss", [False, True])
def test_a_selection_by_position_by_hand(is_of_loss: bool) -> None:
    """Of the objective alone, other tokens stay in the KL and in the divisors of means."""
    logits, rows = make_batch(3)
    objective = part(Surrogate, lambda self, t: t["advantage"] * t["log_prob"])
    loss = GRPOLoss(
        Table(logits), objective=objective, select=[first_two(is_of_loss)], kl_to_ref_coeff=1.0
    )
    out = loss(lazy_stack(rows))
    values, kls = [], []
    for row, table in zip(rows, logits, strict=True):
        places = row["masks", "all_assistant_mask"].nonzero().flatten()
        kept = places[:2] if is_of_loss else places
        log_p = table.log_softmax(-1)[kept, row["tokens", "full"][kept]]
        values.append((row["advantage"] * log_p[:2]).sum() / len(kept))
        kls.append(kl_k3(log_p, row["next", "ref_log_probs", "full"][kept]).mean())
    assert out["loss_objective"].item() == pytest.approx(-torch.stack(values).mean().item())
    assert out["loss_kl_to_ref"].item() == pytest.approx(torch.stack(kls).mean().item())


def ratio_mean(self: object, t: Tokens) -> torch.Tensor:
    return t.segments.mean(t["ratio"])


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({"objective": part(Surrogate, ratio_mean)}, ValueError, r"Mine\.forward must return one"),
        (
            {"objective": part(Surrogate, lambda self, t: t["ratio"].mean())},
            ValueError,
            r"one value for each token, \[\d+\], not \[\] torch\.float64: use t\.segments\.spread",
        ),
        (
            {"objective": part(Surrogate, lambda self, t: t["other", "log_probs"])},
            KeyError,
            r"have no \('other', 'log_probs'\), only .*: if the batch has it, name it in in_keys",
        ),
        (
            {"objective": part(Surrogate, lambda self, t: t["next"], in_keys=("next",))},
            ValueError,
            r"entry 'next' must be a tensor, but has entries of its own: use the whole key",
        ),
        (
            {"select": [part(Select, lambda self, t: t["ratio"] > 1)]},
            KeyError,
            r"have no 'ratio', .* A Select has no scores",
        ),
        (
            {"select": [part(Select, lambda self, t: t["advantage"])]},
            ValueError,
            r"for each token, \[\d+\] torch\.bool, not \[\d+\] torch\.float64",
        ),
    ],
)
def test_a_part_that_cannot_be_meant_is_refused(
    parts: dict[str, Any], error: type[Exception], message: str
) -> None:
    logits, rows = make_batch(0)
    with pytest.raises(error, match=message):
        GRPOLoss(Table(logits), **parts)(lazy_stack(rows))


@pytest.mark.parametrize(
    ("name", "forward", "message"),
    [
        ("mine", lambda self, t: (ratio_mean(self, t), {}), r"Mine\.forward must return one"),
        (
            "objective",
            lambda self, t: (t["ratio"], {}),
            r"Mine adds loss_objective, but the name of",
        ),
        (
            "mine",
            lambda self, t: (t["ratio"], t.means(loss_ratio=t["ratio"])),
            r"Mine adds loss_ratio, .* the name of a metric must not begin with loss_: rename it",
        ),
    ],
)
def test_a_term_that_changes_other_losses_is_refused(
    name: str, forward: Callable[..., Any], message: str
) -> None:
    logits, rows = make_batch(0)
    loss = GRPOLoss(Table(logits))
    loss.terms.append(part(Term, forward, 0.1, name=name))
    with pytest.raises(ValueError, match=message):
        loss(lazy_stack(rows))
