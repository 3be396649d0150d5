"""The steps of a first user with GPUs, in order, with a table at the end. Those without vLLM and
Ray have run on an H200.

    python -m pytest tests/gpu -n 0 -s

The model has the shape of Qwen2.5-0.5B and random weights, and the data has the format of GSM8K, so
nothing is downloaded. ``GPU_CHECK_DEVICE=cpu`` rehearses it on a CPU, with a small model.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.configs import compose_config
from torchrl_grpo.assembly.run import build
from torchrl_grpo.host.files import read_jsonl
from torchrl_grpo.starter import starter_path

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True, "rope_theta": 1_000_000.0,
}  # fmt: skip
DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
STEPS, ROWS, NEW_TOKENS = 3, 64, 256
if DEVICE == "cpu":
    SHAPE |= {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    SHAPE |= {"num_attention_heads": 4}  # of a size that vLLM has on a CPU
    STEPS, ROWS, NEW_TOKENS = 1, 16, 16
BATCH = (
    f"env.num_envs={ROWS}", "env.repeats=8", f"inference_model.max_new_tokens={NEW_TOKENS}",
    f"train.total_dialog_turns={ROWS * STEPS}",
)  # fmt: skip
COMMON = ("evaluation.num_prompts=16", "logging.tensorboard=false", "train.mixed_precision=bf16")
PLAIN = "inference_model.backend=transformers"

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
GPUS = torch.cuda.device_count()
needs_one = pytest.mark.skipif(
    DEVICE == "cuda" and GPUS != 1, reason="needs one CUDA device: CUDA_VISIBLE_DEVICES=0"
)
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    tokenizer = json.loads((starter_path() / "config.json").read_text())
    ends = {
        name: tokenizer[name]
        for name in ("eos_token_id", "pad_token_id", "bos_token_id")
        if name in tokenizer
    }
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, **ends)).save_pretrained(folder)
    for path in starter_path().glob("*token*"):
        shutil.copy(path, folder)
    for path in starter_path().glob("*.jinja"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split, numbers in (("train", range(512)), ("test", range(512, 576))):
        rows = [
            {"question": f"What is {i} + 1?", "answer": f"Add one. #### {i + 1}"} for i in numbers
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, float, float, float]]]:
    rows: list[tuple[str, float, float, float]] = []
    yield rows
    print(f"\n{'what':34}{'whole s':>10}{'step s':>10}{'GiB here':>10}")
    for name, seconds, step_s, gib in rows:
        print(f"{name:34}{seconds:10.1f}{step_s:10.2f}{gib:10.2f}")


@pytest.fixture
def run(
    model: Path,
    data: Path,
    table: list[Any],
    tmp_path: Path,
    record_property: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[dict[str, Any]]]:
    monkeypatch.setattr(logging.getLogger("torchrl"), "propagate", True)

    def run(name: str, *overrides: str, asynchronous: bool = False) -> list[dict[str, Any]]:
        start = time.monotonic()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        options = (f"model.name={model}", f"env.dataset_path={data}", *BATCH, *COMMON, *overrides)
        training_run = build(
            compose_config(*options, name="grpo_gsm8k"), tmp_path, asynchronous=asynchronous
        )
        try:
            training_run.fit()
        finally:
            training_run.close()
        rows = read_jsonl(tmp_path / "metrics.jsonl")
        gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        table.append((name, time.monotonic() - start, rows[-1]["time/step_s"], gib))
        record_property("step_s", round(rows[-1]["time/step_s"], 3))
        record_property("peak_gib", round(gib, 2))
        record_property("compiled_graphs", rows[-1].get("train/compiled_graphs"))
        record_property("slower", [text for text in caplog.messages if "slower" in text])
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        assert all(abs(row["train/loss"]) < 100 for row in rows[1:])
        assert "the weights go through the object store" not in caplog.text  # nor, in one process,
        assert "takes its weights through the host" not in caplog.text
        return rows

    return run


def free_memory() -> int:
    """Return the free bytes of the device; 0 in a rehearsal."""
    if not GPUS:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_the_default_job_takes_its_first_steps_without_vllm(run: Callable[..., Any]) -> None:
    run("default job, transformers", PLAIN)


@needs_vllm
@needs_one
def test_the_default_job_sleeps_and_wakes_vllm(run: Callable[..., Any]) -> None:
    free = free_memory()
    run("default job, vLLM")
    assert free_memory() >= 0.95 * free  # the child process has released all of its memory


@needs_vllm
@pytest.mark.skipif(GPUS != 1, reason="needs one CUDA device")
def test_three_steps_near_the_limit_fit_in_turns(run: Callable[..., Any]) -> None:
    """Limit the GPU to 16 GiB. The memory plan expects 8 for the engine, 5.5 for weights and Adam's
    moments, 12 for a step.
    """
    free, total = torch.cuda.mem_get_info()
    ballast = torch.empty(free - 16 * 2**30, dtype=torch.uint8, device="cuda")
    share = f"inference_model.gpu_memory_utilization={8 * 2**30 / total:.4f}"
    run("near the limit, vLLM", share,
        "inference_model.dtype=bfloat16", "policy.kl_coef=0", "train.micro_batch_tokens=2048")  # fmt: skip
    del ballast


def test_adapters_are_trained(run: Callable[..., Any]) -> None:
    run("LoRA", PLAIN, "train_model.lora.enabled=true")


@needs_two
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_trainer_and_engine_have_a_gpu_each(backend: str, run: Callable[..., Any]) -> None:
    roles = ("train_model.devices=[0]", "inference_model.devices=[1]", "policy.kl_coef=0")
    run(f"two roles, two GPUs, {backend}", f"inference_model.backend={backend}", *roles)


@needs_ray
@needs_one
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=needs_vllm)])
@pytest.mark.parametrize("kind", ["auto", "cuda_ipc"])
def test_processes_on_one_gpu_share_weights(
    kind: str, backend: str, run: Callable[..., Any]
) -> None:
    options = (f"inference_model.weight_transfer={kind}", f"inference_model.backend={backend}")
    run(f"{kind}, {backend}", *options, asynchronous=True)


@needs_ray
@needs_two
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=needs_vllm)])
@pytest.mark.parametrize("kind", ["auto", "broadcast"])
def test_weights_travel_over_nccl(kind: str, backend: str, run: Callable[..., Any]) -> None:
    options = (
        f"inference_model.weight_transfer={kind}",
        f"inference_model.backend={backend}",
        "policy.kl_coef=0",
    )
    run(f"{kind}, {backend}", *options, asynchronous=True)


@needs_ray
@needs_two
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_ranks_and_engines_take_turns_on_all_gpus(backend: str, run: Callable[..., Any]) -> None:
    options = (f"inference_model.backend={backend}", "policy.kl_coef=0")
    two = ("train_model.devices=[0,1]", "inference_model.devices=[0,1]")
    run(f"two GPUs in turns, {backend}", *options, *two)


@needs_ray
@pytest.mark.skipif(GPUS < 3, reason="needs three CUDA devices")
@pytest.mark.parametrize("offload", ["false", "true"])
def test_the_model_is_divided_over_two_gpus(offload: str, run: Callable[..., Any]) -> None:
    options = (
        "train_model.num_devices=2",
        f"train_model.cpu_offload={offload}",
        "policy.kl_coef=0",
    )
    run(f"FSDP, cpu_offload={offload}", PLAIN, *options)
