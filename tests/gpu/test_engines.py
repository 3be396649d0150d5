"""vLLM's engines on CUDA, with vLLM's default scheduling and model runner. Never run on a GPU so
far.

``GPU_CHECK_DEVICE=cpu`` runs them on a CPU, with weights in shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.models import response_log_probs
from tests.support.prompts import PROMPTS
from tests.support.serving import CONTEXT, SERVES, SHORT, make_model
from tests.support.stops import assert_stop_strings_end_responses
from tests.support.weights import Trained, mismatch
from torchrl_grpo.generation.base import AdapterSlots
from torchrl_grpo.generation.vllm import VLLMEngine, _has_vllm
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.models.loading import add_lora, load_model
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import Transfer, make_sender, named_weights
from torchrl_grpo.weights.adapters import AdapterSender

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
KIND = "ipc" if DEVICE == "cuda" else "object_store"
SETTINGS: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "kv_cache_gib": 0.5,
}
ROUNDING = 0.05
"""In float32 with the products of tensor cores; other weights give more than 0.1."""

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    pytest.mark.skipif(not _has_vllm, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncVLLMEngine]:
    engine = AsyncVLLMEngine(str(starter_path()), **SETTINGS)
    yield engine
    engine.close()


@pytest.mark.parametrize("check", SERVES, ids=lambda check: check.__name__)
def test_it_serves_many_callers_while_its_weights_change(
    check: Any, engine: AsyncVLLMEngine
) -> None:
    with ThreadPoolExecutor(4) as pool:
        check(engine, pool, ROUNDING)


def test_a_version_travels_to_the_engines_process_by_ipc(engine: AsyncVLLMEngine) -> None:
    sender = make_sender(Transfer(KIND), dtype=torch.float32)
    for version in (21, 22):
        model = make_model(version).to(DEVICE)
        engine.load(sender.send(Trained(model), version), version)
        sender.release(version)
        assert engine.policy_version == version
        assert mismatch(engine, response_log_probs(model.cpu()), PROMPTS, SHORT)[1] < ROUNDING
    sender.close()


def test_adapters_in_slots_sample_as_the_trainer_scores() -> None:
    """Their receipts are of the slots on the device."""
    sender, modules = AdapterSender(None), list[str]()
    for version in (1, 2):
        torch.manual_seed(version)
        base = load_model(str(starter_path()), dtype=torch.float32, device=torch.device(DEVICE))
        model = add_lora(base, r=4, alpha=8)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        handle = sender.send(Trained(model), version)
        if not modules:
            modules = sorted({name.split(".")[-2] for name, _ in handle.layers})
            engine = VLLMEngine(
                str(starter_path()), **SETTINGS, slots=AdapterSlots(4, tuple(modules))
            )
        engine.load(handle, version)
        assert engine.policy_version == version
        assert mismatch(engine, response_log_probs(model.cpu()), PROMPTS, SHORT)[1] < ROUNDING
    engine.close()


@pytest.mark.parametrize(
    "devices",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="needs two CUDA devices"
            ),
        ),
    ],
)
@pytest.mark.parametrize("eager", [True, False])
def test_the_engine_of_one_process_samples_and_takes_weights(devices: int, eager: bool) -> None:
    settings = SETTINGS | {"tensor_parallel_size": devices, "enforce_eager": eager}
    with VLLMEngine(str(starter_path()), **settings) as engine:
        assert_stop_strings_end_responses(engine, PROMPTS[:2], repeats=False)
        for version in (1, 2):
            model = make_model(version)
            engine.update_weights(named_weights(model), version)
            assert mismatch(engine, response_log_probs(model), PROMPTS, SHORT)[1] < ROUNDING
