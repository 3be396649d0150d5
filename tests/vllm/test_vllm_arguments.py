"""vLLM's own arguments: the ones with which engines are started, and the ones that a config may
set.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.vllm import engine_arguments
from torchrl_grpo.generation.vllm_arguments import argument_names, check_engine_kwargs
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.starter import starter_path

PROMPT = torch.tensor([5, 6, 7])
PARAMS = SamplingParams(max_new_tokens=4)
SPECULATION = ("spec_method", "spec_model", "spec_tokens", "speculative_config")


def test_the_arguments_read_from_the_source_are_vllms_own() -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = argument_names()
    assert names == tuple(field.name for field in dataclasses.fields(EngineArgs))
    assert set(SPECULATION) == {name for name in names if name.startswith(("spec_", "speculative"))}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_num_sequences",
            r"engine_kwargs\.max_num_sequences=1 must be an argument of .*: did you mean max_num_seqs\?",
        ),
        ("qqq", r"engine_kwargs\.qqq=1 must be an argument of .*: leave it out"),
        ("dtype", r"engine_kwargs\.dtype=1 must be left out, .* use inference_model\.dtype\."),
        (
            "data_parallel_size",
            r"must be left out, because another key sets it: use inference_model\.num_devices\.",
        ),
        ("logprobs_mode", r"engine_kwargs\.logprobs_mode=1 must be left out: exact log-probs"),
        ("logits_processors", r"engine_kwargs\.logits_processors=1 must be left out: exact"),
        ("watermark_config", r"engine_kwargs\.watermark_config=1 must be left out: exact"),
        *(
            (name, rf"engine_kwargs\.{name}=1 must be left out: .* speculative")
            for name in SPECULATION
        ),
    ],
)
def test_an_argument_that_is_not_the_users_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine_kwargs({"max_num_seqs": 4, name: 1})


@pytest.mark.nightly
def test_an_engine_serves_what_is_sampled_and_own_arguments_reach_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "vllm.log"
    with AsyncVLLMEngine(
        str(starter_path()),
        max_model_len=128,
        enforce_eager=True,
        kv_cache_gib=0.1,
        num_sequences=300,
        engine_kwargs={"max_num_batched_tokens": 512},
        log_file=str(log),
    ) as engine:
        scheduler = engine._llm.vllm_config.scheduler_config  # type: ignore[attr-defined]
        # vLLM's own defaults for concurrent requests are 256 and 4,096 on a CPU, or 128 and 2,048
        # without a context.
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (300, 512)
        assert len(engine.generate([PROMPT], 8, PARAMS)[0]) == 8
    lines = log.read_text().splitlines()
    assert (
        len({line.split()[4] for line in lines if line.startswith("INFO ")}) >= 2
    )  # this process and the scheduler
    assert "INFO" not in "".join(capfd.readouterr())


def test_own_arguments_win() -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    _, arguments = engine_arguments(
        str(starter_path()), {"num_sequences": 300, "engine_kwargs": settings}
    )
    assert arguments.items() >= settings.items()


@pytest.mark.parametrize(("num_sequences", "value"), [(256, None), (257, 257), (10_000, 4096)])
def test_the_number_of_sequences_is_raised_and_never_lowered(
    num_sequences: int, value: int | None
) -> None:
    _, arguments = engine_arguments(
        str(starter_path()), {"num_sequences": num_sequences, "enforce_eager": True}
    )
    assert arguments.get("max_num_seqs") == value


ON_AN_H100 = """
import json, sys, types
for name in ("vllm._C_stable_libtorch", "vllm.cumem_allocator"):
    sys.modules[name] = types.ModuleType(name)  # kernels, which only a CUDA build has
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

class H100(NonNvmlCudaPlatform):
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)
    device_count = classmethod(lambda cls: 1)
    num_compute_units = classmethod(lambda cls, device_id=0: 132)
    is_cumem_allocator_available = lambda self: True

vllm.platforms._current_platform = H100()
from torchrl_grpo.generation.vllm import engine_arguments
from torchrl_grpo.starter import starter_path
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext

def made(kind, **settings):
    settings = {"num_sequences": 2000, "gpu_memory_utilization": 0.4, "max_model_len": 512} | settings
    _, arguments = engine_arguments(str(starter_path()), settings)
    config = kind(**arguments, **own[kind]).create_engine_config(UsageContext.LLM_CLASS)
    model = config.model_config
    return {
        "device": config.device_config.device_type,
        "dtypes": [str(model.dtype), str(model.head_dtype)],
        "lengths": [model.max_model_len, config.scheduler_config.max_num_seqs],
        "log-probs": [model.logprobs_mode, model.max_logprobs],
        "sleeps": model.enable_sleep_mode,
        "share": config.cache_config.gpu_memory_utilization,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "worker": config.parallel_config.worker_extension_cls,
    }

own = {EngineArgs: {"enable_sleep_mode": True}, AsyncEngineArgs: {}}
both = [made(EngineArgs, dtype="bfloat16", max_logprobs=50), made(AsyncEngineArgs, enforce_eager=True)]
print("\\n" + json.dumps(both))
"""
"""Make the engine configs of both engines as on an H100, in a process that takes its platform for
one: vLLM's modules read the platform while they are imported.
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_vllm_accepts_our_arguments_on_a_simulated_h100() -> None:
    command = [sys.executable, "-c", ON_AN_H100]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    inline, concurrent = json.loads(done.stdout.splitlines()[-1])
    common = {
        "device": "cuda",
        "lengths": [512, 2000],
        "share": 0.4,
        "worker": "torchrl_grpo.weights.worker.WeightSyncExtension",
    }
    assert inline.pop("graphs").startswith("FULL")  # which kind depends on vLLM's environment
    assert inline == common | {
        "dtypes": ["torch.bfloat16", "torch.float32"],
        "log-probs": ["processed_logprobs", 50],
        "sleeps": True,
    }
    assert concurrent == common | {
        "dtypes": ["torch.float32", "torch.float32"],
        "log-probs": ["processed_logprobs", 20],
        "sleeps": False,
        "graphs": "NONE",
    }
