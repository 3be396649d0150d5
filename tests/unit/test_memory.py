"""One estimate of memory: all reports agree, and a run that cannot fit is refused before anything
is loaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.configs import compose_config
from tests.support.runs import SMALL, numbers, run, steps
from torchrl_grpo.assembly import prepare as prepare_module
from torchrl_grpo.assembly import roles
from torchrl_grpo.assembly import shares as shares_module
from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.config import ConfigError
from torchrl_grpo.errors import MemoryShortError
from torchrl_grpo.extras.doctor import doctor
from torchrl_grpo.extras.plan.command import parse, settings_of
from torchrl_grpo.host.out_of_memory import in_words
from torchrl_grpo.host.text import size
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import ModelMemory, StepMemory, StepSetup
from torchrl_grpo.runtime.placement import DevicePlan

MIB = 2**20
STARTER = 427_776
"""Parameters."""


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        (),
        ("train_model.lora.enabled=true", "train_model.lora.r=8"),
        (
            "train.mixed_precision=bf16",
            "inference_model.dtype=bfloat16",
            "ref_model.dtype=bfloat16",
        ),
        (
            "train_model.gradient_checkpointing=true",
            "train_model.dtype=bfloat16",
            "train_model.lora.enabled=true",
        ),
        ("train_model.lora.enabled=true", "train_model.quantization=nf4"),
    ],
    ids=["full", "lora", "bf16", "checkpointing", "nf4"],
)
def test_all_memory_reports_agree(job: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if "train_model.quantization=nf4" in job:
        pytest.importorskip("bitsandbytes")
    config = compose_config(*SMALL, "train.micro_batch_tokens=100", *job)
    context = prepare(config)
    memory = {role: share.memory for role, share in shares(context).items()}

    for role, share in shares(context).items():
        held = memory[role]
        assert share.row()["memory per device"] == (0 if held is None else held.peak)

    details = {row["resource"]: row["details"] for row in doctor.memory_rows(context)}
    for role, held in memory.items():
        assert held is None or in_words(held.parts()) in details[f"memory of {role}"]
    assert "KV cache" in details["memory of inference"] and " 0 bytes" not in " ".join(
        details.values()
    )

    prompt = max(map(len, context.train_env.prompts.first(100)))
    options = parse(
        [f"--prompt-tokens={prompt}", f"--response-tokens={config.max_response_tokens}"]
    )
    settings = settings_of(config, options)
    work = settings.work
    assert work.shape == context.shape
    assert work.train_memory(1) == memory["train"]
    reference = memory["reference"]
    assert work.reference_memory(1) == (0 if reference is None else reference.weights)
    assert ModelMemory(work.weight_bytes, int(4 * work.group_memory())) == memory["inference"]

    trainer = roles.make_trainer(context, torch.device("cpu"))
    monkeypatch.setattr(
        trainer, "train_step", full
    )  # before the first pass: the largest possible one
    with pytest.raises(MemoryShortError) as raised:
        trainer.train_batch(TensorDict({}, [16]))
    assert in_words(memory["train"].parts()) in str(raised.value)


def test_full_training_takes_four_numbers_a_parameter_and_a_16_bit_copy() -> None:
    train = shares(prepare(compose_config(*SMALL, "train.mixed_precision=bf16")))["train"].memory
    assert isinstance(train, StepMemory)
    assert (train.parameters, train.copies) == (4 * STARTER, 2 * STARTER)
    assert (train.gradients, train.moments, train.resting) == (
        4 * STARTER,
        8 * STARTER,
        12 * STARTER,
    )


def test_passes_are_as_large_as_the_budget_and_no_sequence_is_divided() -> None:
    setup = StepSetup(100, 8, passes=1, number=4)
    of = [
        (step.tokens, step.passes)
        for step in (setup.of_batch(*sizes) for sizes in ((60, 20), (250, 20), (250, 120)))
    ]
    assert of == [(60, 1), (100, 3), (120, 3)]
    assert dataclasses.replace(setup, ranks=4).of_batch(250, 20).tokens == 63


def shared(monkeypatch: pytest.MonkeyPatch, total: int, *overrides: str) -> Context:
    """Return the context of a vLLM run whose roles share a GPU with this many bytes."""
    monkeypatch.setattr(shares_module, "accelerators_in_use", lambda: {"cuda:0": (0, total)})
    monkeypatch.setattr(vllm_module, "require_vllm", lambda **_: None)
    gpu = torch.device("cuda:0")
    return prepare(compose_config(*SMALL, "inference_model.backend=vllm", *overrides), [gpu])


def check(context: Context, *, turns: bool = True) -> None:
    shares_module.check_devices(dataclasses.replace(context, turns=turns))


@pytest.mark.slow
def test_a_shared_gpu_without_room_for_the_moments_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights and moments (12 bytes a parameter), reference (4) and vLLM's 40% are present when the
    engine wakes.
    """
    total = STARTER * 16 * 10 // 6
    check(shared(monkeypatch, total + 100))
    context = shared(monkeypatch, total - 100)
    with pytest.raises(ConfigError) as raised:
        check(context)
    assert str(raised.value) == (
        f"inference_model.gpu_memory_utilization=0.4 must be a share of cuda:0 that holds the engine's "
        f"{size(4 * STARTER)} of weights and fits beside {size(12 * STARTER)} of trained weights and optimizer state "
        f"and {size(4 * STARTER)} of the reference model, but that is {size(0.4 * (total - 100))} of "
        f"{size(total - 100)}: use inference_model.gpu_memory_utilization=0.39, train_model.cpu_offload=true, "
        "train_model.lora.enabled=true, or bfloat16 as inference_model.dtype and ref_model.dtype."
    )
    check(shared(monkeypatch, total - 100, "inference_model.gpu_memory_utilization=0.39"))
    check(shared(monkeypatch, total - 100, "ref_model.dtype=bfloat16"))
    check(shared(monkeypatch, total - 100, "train_model.cpu_offload=true"))


def test_processes_that_keep_their_memory_need_room_for_the_gradients_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = shared(monkeypatch, STARTER * 16 * 10 // 6 + 100)
    check(context)
    with pytest.raises(ConfigError, match=r"gradients.* 1\.71 MB of the reference model"):
        check(context, turns=False)


def test_a_share_that_cannot_hold_the_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = shared(monkeypatch, 40 * STARTER, "inference_model.gpu_memory_utilization=0.05")
    with pytest.raises(ConfigError, match=r"utilization=0\.05 .*engine's 1\.71 MB"):
        check(context)


def test_a_device_that_cannot_hold_its_part_of_the_training_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [torch.device("cuda", index) for index in range(3)]
    plan = DevicePlan((gpus[0],), ((gpus[1],),), (gpus[2],), colocated=False)
    context = dataclasses.replace(shared(monkeypatch, 15 * STARTER), plan=plan)
    with pytest.raises(
        ConfigError,
        match=r"train_model\.num_devices=1 .*cuda:0 .*gradients",
    ):
        check(context)
    check(
        dataclasses.replace(
            context, plan=dataclasses.replace(plan, train=(gpus[0], gpus[2]), reference=())
        )
    )


def test_a_run_asks_for_room_before_it_loads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = [torch.device("cuda:0")]
    monkeypatch.setattr(prepare_module, "available_accelerators", lambda: gpu)
    monkeypatch.setattr(shares_module, "accelerators_in_use", lambda: {"cuda:0": (0, 15 * STARTER)})
    monkeypatch.setattr(vllm_module, "require_vllm", lambda **_: None)
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=r"inference_model\.gpu_memory_utilization=0\.4 .*cuda:0"):
        build(compose_config(*SMALL, "inference_model.backend=vllm"), tmp_path)


@pytest.mark.slow
def test_offloading_on_one_device_changes_no_number(tmp_path: Path) -> None:
    """On a CPU nothing has to be moved: the model is sharded over one rank, whose process group the
    run closes.
    """
    rows = [
        run(tmp_path / way, steps(2), f"train_model.cpu_offload={way}") for way in ("false", "true")
    ]
    assert numbers(rows[0], 1) == numbers(rows[1], 1)
    assert not torch.distributed.is_initialized()
