"""Model families whose checkpoints name or lay out weights differently, updated in the real vLLM.

``tools/family_table.py`` writes the table of all families in docs/families.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.families import engine_distance, in_vllm, make_family


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
def test_log_probs_after_an_update_are_the_trainer_s(name: str) -> None:
    """Mixtral has one tensor for each expert, which vLLM packs on a CPU; GPT-NeoX has a head with
    another name.
    """
    assert in_vllm(name) < 1e-4


@pytest.mark.nightly
def test_longrope_has_the_factors_of_the_trainer(tmp_path: Path) -> None:
    """By default, as with longer sequences than are ever scored, vLLM would take the long ones."""
    from torchrl_grpo.generation.vllm import VLLMEngine

    limit = 80
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4}
    model = make_family(
        "phi3",
        max_position_embeddings=4 * limit,
        original_max_position_embeddings=limit,
        rope_parameters=rope
        | {"original_max_position_embeddings": limit}
        | {"short_factor": [1.1] * 16, "long_factor": [2.5] * 16},
    )
    model.save_pretrained(tmp_path)
    with VLLMEngine(str(tmp_path), enforce_eager=True, kv_cache_gib=0.25) as engine:
        assert engine.max_model_len == limit
        assert engine_distance(engine, model) < 1e-4
