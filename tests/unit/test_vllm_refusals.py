"""Model configs and platforms that vLLM refuses are refused before anything starts."""

from __future__ import annotations

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.configs import SMALL, compose_config
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation.vllm import (
    CPU_HEAD_SIZES,
    NOT_IN_FLOAT16,
    check_vllm_model,
    require_vllm,
)
from torchrl_grpo.starter import starter_path

MODEL = {
    "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
}  # fmt: skip
"""Qwen2.5-0.5B: heads of 64, and 24,576 bytes of keys and values a token in float32."""


def check(on_cpu: bool = True, model: dict[str, Any] | None = None, **settings: Any) -> None:
    config = Qwen2Config(**MODEL | (model or {}))
    check_vllm_model(config, {"enforce_eager": True, **settings}, on_cpu=on_cpu)  # type: ignore[typeddict-item]


def test_vllms_processes_are_spawned_and_never_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own default is ``fork`` if CUDA's driver is initialized and torch's is not."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with vllm_module.starting_vllm(None):
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


def test_a_head_size_that_a_cpu_cannot_compute_is_refused_there_alone() -> None:
    odd = {"hidden_size": 14 * 48}
    with pytest.raises(
        ValueError,
        match=r"head size.*\[32, .*, 512\].* 48",
    ):
        check(model=odd)
    check(on_cpu=False, model=odd)
    check(model={"hidden_size": 14 * 48, "head_dim": 64})


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, {}, r"model\.name: .*\(gptq\)"),
        ({}, {"tensor_parallel_size": 4}, r"tensor_parallel_size=4 .* 14 .* 2 key .*: use 2\."),
        ({"num_key_value_heads": 7}, {"tensor_parallel_size": 2}, r"=2 .* 7 key .*: use 1\."),
    ],
)
def test_a_model_that_no_device_runs_in_vllm_is_refused(
    model: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    for on_cpu in (False, True):
        with pytest.raises(ValueError, match=message):
            check(on_cpu, model, **settings)


def test_shards_that_divide_the_heads_or_copy_key_heads_pass() -> None:
    for size in (1, 2, 7, 14):
        kv_heads = 2 if size <= 2 else 1
        check(model={"num_key_value_heads": kv_heads}, tensor_parallel_size=size)


def test_a_model_that_overflows_in_float16_is_refused_in_it() -> None:
    with pytest.raises(ValueError, match=r"inference_model\.dtype=float16 .*gemma2"):
        check(model={"model_type": "gemma2"}, dtype="float16")
    check(model={"model_type": "gemma2"}, dtype="bfloat16")
    check(dtype="float16")


def test_the_kv_cache_of_a_cpu_holds_the_longest_request_and_one_block() -> None:
    tokens = 2**30 // 24_576 // 32 * 32 - 32
    check(max_model_len=tokens, kv_cache_gib=1.0)
    message = (
        r"kv_cache_gib=1 must .* 43,649 tokens of 24,576 bytes each: use "
        r"inference_model\.max_model_len=43648 or inference_model\.kv_cache_gib=1\.01\."
    )
    with pytest.raises(ValueError, match=message):
        check(max_model_len=tokens + 1, kv_cache_gib=1.0)
    check(max_model_len=tokens + 1, kv_cache_gib=1.01)
    check(max_model_len=2 * tokens, kv_cache_gib=1.0, dtype="bfloat16")
    check(max_model_len=2 * tokens, kv_cache_gib=1.0, tensor_parallel_size=2)
    check(on_cpu=False, max_model_len=10 * tokens)
    check(model={"use_sliding_window": True, "max_window_layers": 0}, max_model_len=tokens + 1)


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=r"enforce_eager=false .*no-such-compiler",
    ):
        check(enforce_eager=False)
    check(enforce_eager=True)
    check(on_cpu=False, enforce_eager=False)


@pytest.mark.slow
def test_our_lists_are_those_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    from vllm.config.model import _FLOAT16_NOT_SUPPORTED_MODELS
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    assert set(NOT_IN_FLOAT16) == set(_FLOAT16_NOT_SUPPORTED_MODELS)
    assert {torch.float32, torch.bfloat16, torch.float16} <= set(current_platform.supported_dtypes)
    assert vllm_module._is_cpu_build() == current_platform.is_cpu()


def test_vllm_for_cuda_is_refused_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "_has_vllm", True)
    monkeypatch.setattr(vllm_module.sys, "platform", "linux")
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")
    require_vllm()
    with pytest.raises(
        ValueError,
        match=r"vLLM's build for CPUs.* vllm 0\.32\.0",
    ):
        require_vllm(on_cpu=True)
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0+cpu")
    require_vllm(on_cpu=True)


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({"num_attention_heads": 6}, [], "head sizes"),
        ({"quantization_config": {"quant_method": "awq"}}, [], "not quantized"),
        (
            {},
            ["inference_model.max_model_len=100000"],
            r"max_model_len=100000 must not exceed the model's context of",
        ),
        ({}, ["inference_model.kv_cache_gib=1e-4"], r"kv_cache_gib=0\.0001 must hold"),
    ],
)
def test_a_refusal_comes_before_weights_load(
    changed: dict[str, Any],
    overrides: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_module, "_has_vllm", True)
    shutil.copytree(starter_path(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    chosen = compose_config(
        *SMALL, "inference_model.backend=vllm", f"model.name={tmp_path}", *overrides
    )
    with pytest.raises(ConfigError, match=message):
        prepare(chosen, [])
