"""Models whose weights have other names, or lie otherwise, in their checkpoint, through an update of the real vLLM.

All families are in the table of docs/models.md, which ``tools/family_table.py`` writes.
"""

from __future__ import annotations

import pytest

from tests.support.families import in_vllm


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_neox", marks=pytest.mark.nightly)])
def test_log_probs_after_an_update_are_the_trainer_s(name: str) -> None:
    """Mixtral: one tensor for each expert, which vLLM packs on a CPU. GPT-NeoX: a head of another name."""
    assert in_vllm(name) < 1e-4
