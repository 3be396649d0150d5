"""Replace each part of TorchRL's GRPO script by ours, and each of ours by TorchRL's."""

from __future__ import annotations

import math

import pytest

from tests.support.configs import ROOT
from tests.support.swaps import TOGETHER, swapped, table, train_step

SETS = {
    frozenset(swapped(part, into_torchrl=side)) for part in TOGETHER for side in (True, False)
} | {frozenset[str]()}


@pytest.mark.parametrize("ours", sorted(SETS, key=sorted), ids=lambda ours: "-".join(sorted(ours)))
def test_a_step_with_some_parts_of_ours_has_a_gradient(ours: frozenset[str]) -> None:
    """The swaps are those of the docs' table; without parts of ours it is TorchRL's own script."""
    gradient = train_step(set(ours))
    assert math.isfinite(gradient) and gradient > 1e-4


def test_the_table_of_swaps_is_on_the_page() -> None:
    assert table() in (ROOT / "docs" / "torchrl.md").read_text(encoding="utf-8")
