"""KLScoring and GroupAdvantage together in TorchRL's replay buffer."""

from __future__ import annotations

import pytest

from tests.support.buffers import fill_and_sample, make_buffer


@pytest.mark.parametrize("kind", ["advantage", "scored first", "scored last"])
def test_a_plain_buffer_holds_and_samples_whole_groups_with_their_scores(kind: str) -> None:
    fill_and_sample(make_buffer(kind), scored=kind != "advantage")
