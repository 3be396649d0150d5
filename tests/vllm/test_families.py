"""Model families whose checkpoints name or lay out weights differently, updated in the real vLLM.

``tools/family_table.py`` writes the table of all families in docs/models.md.
"""

from __future__ import annotations

import pytest

from tests.support.families import in_vllm


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_neox", marks=pytest.mark.nightly)])
def test_log_probs_after_an_update_are_the_trainer_s(name: str) -> None:
    """Mixtral has one tensor for each expert, which vLLM packs on a CPU; GPT-NeoX has a head with
    another name.
    """
    assert in_vllm(name) < 1e-4
