"""vLLM's engines with asynchronous scheduling, which is the default on CUDA and off on a CPU.

A step is scheduled before the tokens of the one before are known, so stops, pauses and versions
come a step late.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.models import response_log_probs
from tests.support.prompts import PROMPTS
from tests.support.serving import CONTEXT, SERVES, SHORT, make_model
from tests.support.stops import assert_stop_strings_end_responses
from tests.support.weights import mismatch
from torchrl_grpo.generation.vllm import VLLMEngine
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_weights

pytestmark = [
    pytest.mark.skipif(not vllm_module._is_cpu_build(), reason="needs vLLM's build for CPUs"),
    pytest.mark.nightly,  # test_vllm_async.py makes the same checks
]
ROUNDING = 1e-3
SETTINGS: dict[str, Any] = {"max_model_len": CONTEXT, "enforce_eager": True, "kv_cache_gib": 0.5}


@pytest.fixture(scope="module")
def scheduled_ahead() -> Iterator[None]:
    """Make engines schedule asynchronously, on a CPU too."""
    platform: Any = import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config.__func__

    def switched_on(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "check_and_update_config", classmethod(switched_on))
        patch.setattr(vllm_module, "WORKER_EXTENSION", "tests.support.async_worker.AsyncWorker")
        yield


@pytest.fixture(scope="module")
def engine(scheduled_ahead: None) -> Iterator[AsyncVLLMEngine]:
    engine = AsyncVLLMEngine(str(starter_path()), **SETTINGS)
    assert engine._rpc("schedules_asynchronously") == [True]
    yield engine
    engine.close()


@pytest.mark.parametrize("check", SERVES, ids=lambda check: check.__name__)
def test_it_serves_many_callers_while_its_weights_change(
    check: Any, engine: AsyncVLLMEngine
) -> None:
    with ThreadPoolExecutor(4) as pool:
        check(engine, pool, ROUNDING)


def test_the_engine_of_one_process_samples_and_takes_weights_too(scheduled_ahead: None) -> None:
    with VLLMEngine(str(starter_path()), **SETTINGS) as engine:
        assert engine._rpc("schedules_asynchronously") == [True]
        assert_stop_strings_end_responses(engine, PROMPTS[:2])
        for version in (1, 2):
            model = make_model(version)
            engine.update_weights(named_weights(model), version)
            assert mismatch(engine, response_log_probs(model), PROMPTS, SHORT)[1] < ROUNDING
