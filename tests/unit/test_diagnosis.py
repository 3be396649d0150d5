"""Diagnostics of a step: its size, the source of numbers that are not finite, and options that
would save memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.assembly import roles
from torchrl_grpo.errors import MemoryShortError, NonFiniteError
from torchrl_grpo.extras.hints.memory import savings
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.host.text import size
from torchrl_grpo.learner.measures import StepMeasures
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import Shape, StepSetup, step_memory
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.transforms.kl_scoring import KLScoring


def reason(trainer: Any, batch: Any) -> str:
    with pytest.raises(NonFiniteError) as raised:
        trainer.train_batch(batch)
    return str(raised.value)


def test_an_entry_that_is_not_finite_is_named_with_its_samples() -> None:
    batch = make_batch()
    for index, row in enumerate(batch.unbind(0)):
        row.set_non_tensor(keys.QUERY, f"problem \x1b{index}")
    batch[2].get(keys.REF_LOG_PROBS)[5] = math.nan
    batch[0].get(keys.REF_LOG_PROBS)[0] = math.nan  # part of the prompt: nothing reads it
    text = reason(make_trainer(max_nonfinite_steps=1), batch)
    assert (
        "entry next.ref_log_probs.full is not finite in 1 samples ('problem \\\\x1b2'), before any pass"
        in text
    )


@pytest.mark.slow
def test_the_first_module_that_is_not_finite_is_named_with_its_samples() -> None:
    model = make_tiny_model()
    batch = make_batch()
    broken = model.model.layers[1].mlp.gate_proj
    wanted = int(batch[3].get(keys.FULL)[4])

    def break_one(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        bad = (model.seen == wanted)[..., None]
        return torch.where(bad, math.nan, output)

    model.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: setattr(model, "seen", args[0])
    )
    broken.register_forward_hook(break_one)
    text = reason(make_trainer(model, max_nonfinite_steps=1, micro_batch_tokens=40), batch)
    assert (
        "are those of the module model.layers.1.mlp.gate_proj (Linear), for 1 samples (row 3)"
        in text
    )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_named() -> None:
    model = make_tiny_model()
    norm = model.model.layers[0].input_layernorm
    norm.register_full_backward_hook(lambda *_: (torch.full_like(_[1][0], math.nan),))
    text = reason(make_trainer(model, max_nonfinite_steps=1), make_batch())
    assert (
        "the gradient of model.embed_tokens.weight, for 8 samples (row 0, row 1, row 2 and 5 more)"
        in text
    )


def test_a_weight_that_is_not_finite_is_named() -> None:
    trainer = make_trainer(max_nonfinite_steps=1)
    trainer.model.get_parameter("model.norm.weight").data[0] = math.nan
    assert "1 weights are not finite, the first of which is model.norm.weight" in reason(
        trainer, make_batch()
    )


def test_only_the_first_bad_step_in_a_row_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "torchrl_grpo.extras.doctor.diagnosis.where_not_finite",
        lambda *args, **more: calls.append(0) or "the reason",
    )
    trainer = make_trainer(max_nonfinite_steps=9)
    bad = make_batch()
    bad[0].get(keys.ADVANTAGE).fill_(math.nan)
    for batch in (bad, bad, make_batch(), bad):
        trainer.train_step(batch)
    assert len(calls) == 2


def test_running_out_of_memory_is_one_message_with_what_each_knob_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(micro_batch_tokens=1000)
    monkeypatch.setattr(trainer, "forward_backward", full)
    with pytest.raises(MemoryShortError) as raised:
        trainer.train_batch(make_batch())
    text = str(raised.value)
    assert text.startswith(
        "The training step ran out of memory (CUDA out of memory). On each device it holds about "
    )
    saved = savings(loading.shape_of(trainer.model), trainer.setup())
    assert (
        "train.micro_batch_tokens=38" in saved
    )  # of the 77 tokens of the pass, not of the 1,000 that it might have
    assert (
        all(f"{name} (about {size(count)})" in text for name, count in saved.items())
        and "\n" not in text
    )


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
    )


def test_sampling_without_memory_says_what_each_knob_saves() -> None:
    model = make_tiny_model()
    engine = TransformersEngine(model, copy=False)
    engine.decoder.start = full
    with pytest.raises(MemoryShortError) as raised:
        engine.generate([torch.arange(5), torch.arange(20)], 4, SamplingParams(100))
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    token = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers with 2 heads of 8 numbers
    logits = 8 * 261 * 4
    whole, shorter = 2 * (20 + 4 * 100) * token + logits, 2 * (20 + 4 * 50) * token + logits
    assert str(raised.value) == (
        f"Sampling ran out of memory (CUDA out of memory). On each device it holds about {size(weights)} of weights "
        f"and {size(whole)} of keys, values and logits of 8 responses, besides other allocations. Options that save "
        f"memory: half of env.num_envs (about {size(whole / 2)}), inference_model.max_new_tokens=50 (about "
        f"{size(whole - shorter)}), inference_model.dtype=bfloat16 (about {size(weights // 2)})."
    )


FORWARD = (3 * 64 + 2 * 32) * 4
"""Bytes of a token in a forward pass of the tiny model."""


def scored_without_memory(
    monkeypatch: pytest.MonkeyPatch, rows: int, **settings: Any
) -> tuple[str, int]:
    """Return the message when scoring runs out of memory (rows of 8 tokens, 6 of them sampled), and
    the bytes of the weights.
    """
    scoring = KLScoring(TokenScorer(make_tiny_model()), **settings)
    monkeypatch.setattr(scoring.scorer, "score_rows", full)
    tokens = torch.arange(5, 5 + rows * 8).view(rows, 8)
    mask = (torch.arange(8) >= 2).expand(rows, -1)
    with pytest.raises(MemoryShortError) as raised:
        scoring.log_probs(tokens, mask, torch.full((rows,), 8))
    return str(raised.value), sum(
        parameter.numel() for parameter in scoring.scorer.model.parameters()
    ) * 4


def test_scoring_without_memory_says_what_each_knob_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    message, weights = scored_without_memory(monkeypatch, 30)
    assert message == (
        f"Scoring with the reference model ran out of memory (CUDA out of memory). On each device it holds about "
        f"{size(weights)} of weights and {size(240 * FORWARD)} of activations, besides other allocations. Options "
        f"that save memory: train.micro_batch_tokens=120 (about {size(120 * FORWARD)}), train.mixed_precision=bf16 "
        f"(about {size(120 * FORWARD)}), train_model.lora.enabled=true (about {size(weights)}), "
        f"ref_model.dtype=bfloat16 (about {size(weights // 2)})."
    )


def test_exact_rescoring_without_memory_names_only_knobs_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message, weights = scored_without_memory(monkeypatch, 1, out_key=keys.LOG_PROBS)
    assert message == (
        "Rescoring the sampled responses (inference_model.exact=true) ran out of memory (CUDA out of memory). "
        f"On each device it holds about {size(weights)} of weights and {size(8 * FORWARD)} of activations, besides "
        f"other allocations. Options that save memory: inference_model.exact=false (about {size(8 * FORWARD)}), "
        f"train.mixed_precision=bf16 (about {size(4 * FORWARD)}), inference_model.max_new_tokens=3 (about "
        f"{size(3 * FORWARD)})."
    )


def test_the_proximal_policy_without_memory_is_not_called_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message, _ = scored_without_memory(monkeypatch, 30, out_key=keys.PROX_LOG_PROBS)
    assert message.startswith(
        "Scoring with the policy as it is before the step (policy.proximal=recomputed) ran out"
    )
    assert (
        "train.micro_batch_tokens=120" in message
        and "ref_model" not in message
        and "lora" not in message
    )


@pytest.mark.parametrize(
    ("settings", "purpose"),
    [
        ({"proximal": "recomputed"}, "the policy as it is before the step (policy.proximal"),
        ({"value_coeff": 0.5}, "the critic (policy.value_coef)"),
    ],
)
def test_a_pass_before_the_step_without_memory_is_named(
    settings: dict[str, Any], purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = TokenScorer(make_tiny_model())
    scorer.add_critic()
    weights = [*scorer.model.parameters()]
    loss = GRPOLoss(scorer, **settings)
    trainer = PolicyTrainer(loss, scorer.model, torch.optim.SGD(weights), optim_batch_size=8)
    monkeypatch.setattr(scorer, "score_rows", full)
    with pytest.raises(MemoryShortError, match=f"^Scoring with {re.escape(purpose)}"):
        trainer.score(make_batch())


def test_a_model_that_finds_no_room_is_named_with_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_model", full)
    config = compose_config()
    with pytest.raises(MemoryShortError, match=r"starter for ref_model .* 1\.\d+ MB"):
        roles.make_reference(SimpleNamespace(config=config), torch.device("cpu"))


def make_shape() -> tuple[Shape, int]:
    """Return the shape of a model without weights, and its number of parameters."""
    config = Qwen2Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = loading.AutoModelForCausalLM.from_config(config)
    return loading.shape_of(model), sum(parameter.numel() for parameter in model.parameters())


def test_savings_are_differences_of_the_peak_counted_by_hand() -> None:
    shape, count = make_shape()
    layer = 1000 * (16 * 64 + 4 * (4 * 64 + 2 * 32 + 4 * 128))
    passing = 1000 * 4 * 2 * (128 + 64)  # gradients in the backward pass of a layer
    head, weights = 4 * 100 * 64, 4 * count
    setup = StepSetup(1000, 20, passes=1, number=4)
    memory = step_memory(shape, setup)
    assert (memory.weights, memory.states) == (weights, 3 * weights)
    assert memory.activations == 3 * layer + passing
    assert (
        memory.peak == 3 * weights + 3 * layer + passing + head
    )  # one pass: its gradients are allocated while activations are freed
    by_knob = savings(shape, setup)
    assert by_knob["train.micro_batch_tokens=500"] == (3 * layer + passing) // 2 - weights
    in_16_bits = 1000 * (16 * 64 + 2 * (7 * 64 + 2 * 32 + 4 * 128))
    assert (
        by_knob["train.mixed_precision=bf16"] == 3 * (layer - in_16_bits) - weights // 2
    )  # bytes of their copies
    inputs = 3 * 1000 * 64 * 4
    assert by_knob["train_model.gradient_checkpointing=true"] == 2 * layer - inputs
    assert by_knob["optimizer.name=adamw_8bit"] == 3 * weights // 2
    attention, gated = 2 * 2 * 64 + 2 * (64 + 32), 3 * (64 + 128)
    adapters = 4 * 3 * 16 * (attention + gated)
    norms = 3 * 1000 * 2 * 4 * 64  # their memory for the weights
    assert by_knob["train_model.lora.enabled=true"] == 2 * weights + head + norms - 3 * adapters
    gathered = head + (weights - head) // 3
    assert by_knob["train_model.cpu_offload=true"] == 3 * weights - gathered
    assert "train_model.num_devices=2" in by_knob


def test_moments_of_one_byte_are_two_bytes_a_weight() -> None:
    shape, count = make_shape()
    whole = StepSetup(1000, 20, passes=1, number=2, master=4, small_states=True)
    half = replace(whole, master=2)
    assert step_memory(shape, whole).resting == (4 + 2) * count
    assert (step_memory(shape, half).resting, step_memory(shape, half).gradients) == (
        (2 + 2) * count,
        2 * count,
    )
    assert step_memory(shape, replace(half, ranks=4)).resting == (2 + 2) * count // 4
    assert step_memory(shape, replace(half, ranks=4, replicas=2)).resting == (2 + 2) * count // 2


def test_knobs_that_are_on_or_cannot_be_turned_are_not_named() -> None:
    shape, _ = make_shape()
    tuned = StepSetup(
        1000, 20, passes=4, number=2, checkpoints=True, adapters=16, small_states=True
    )
    assert set(savings(shape, tuned)) == {
        "train.micro_batch_tokens=500",
        "train_model.num_devices=2",
        "train_model.quantization=nf4",
    }
    alone = replace(
        tuned, sequences=1, small_states=False, ranks=2
    )  # a pass has at least one sequence
    assert set(savings(shape, alone)) == {
        "train_model.num_devices=4", "train_model.cpu_offload=true", "optimizer.name=adamw_8bit",
    }  # fmt: skip
    assert set(savings(shape, replace(alone, offloads=True))) == {"train_model.num_devices=4"}


def test_a_second_pass_that_costs_more_than_it_saves_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few tokens, gradients that exist during a second pass are more than half of the
    activations.
    """
    trainer = make_trainer()
    monkeypatch.setattr(trainer, "forward_backward", full)
    with pytest.raises(MemoryShortError) as raised:
        trainer.train_batch(make_batch((9, 14)))
    assert (
        savings(loading.shape_of(trainer.model), trainer.setup())["train.micro_batch_tokens=11"] < 0
    )
    assert "train.micro_batch_tokens" not in str(raised.value)


def test_update_size_is_the_relative_norm_of_the_change() -> None:
    trainer = make_trainer()
    before = [parameter.detach().clone() for parameter in trainer.parameters]
    metrics = trainer.train_step(make_batch())
    few = [  # at most 1024 numbers, of whole rows
        (old[: 1024 // old[0].numel()], new.detach()[: 1024 // old[0].numel()])
        for old, new in zip(before, trainer.parameters, strict=True)
    ]
    changed = sum((new - old).square().sum() for old, new in few) ** 0.5
    assert metrics["train/update_size"] == pytest.approx(
        float(changed / sum(old.square().sum() for old, _ in few) ** 0.5)
    )
    bad = make_batch()
    bad[0].get(keys.ADVANTAGE).fill_(math.nan)
    assert math.isnan(trainer.train_step(bad)["train/update_size"])


@pytest.mark.slow
def test_the_gradient_noise_scale_is_found_from_adams_moments() -> None:
    """Gradients of 8 sequences, each with a mean of 0.5 and a variance of 4 in each of 2,000
    numbers.
    """
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(1000)), torch.nn.Parameter(torch.ones(40, 25))]
    optimizer = torch.optim.AdamW(weights, lr=1e-6)
    measures = StepMeasures(weights)
    estimates = []
    for step in range(1, 301):
        before = measures.before()
        for weight in weights:
            weight.grad = 0.5 + 2.0 * torch.randn_like(weight) / 8**0.5
        optimizer.step()
        estimates.append(measures.after(before, optimizer, step, 8).get("grad_noise_scale"))
    assert estimates[0] is None and float(estimates[-1]) == pytest.approx(4 / 0.5**2, rel=0.15)
    plain = torch.optim.SGD(weights, lr=1e-6)
    assert set(measures.after(measures.before(), plain, 300, 8)) == {"update_size"}


class Operations(TorchDispatchMode):
    """Counts operations other than views."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_are_exact_and_take_no_operation_per_parameter(dtype: torch.dtype) -> None:
    numbers = []
    for count in (2, 20):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(30, 20, dtype=dtype)) for _ in range(count)]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, betas=(0.5, 0.9))
        measures = StepMeasures(weights)
        with Operations() as operations:
            before = measures.before()
        old = torch.cat([weight.detach().double() for weight in weights])
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        with operations:
            metrics = measures.after(before, optimizer, 10, 8)
        numbers.append(operations.number)
        new = torch.cat([weight.detach() for weight in weights])
        change = (new - old.to(dtype)).double()
        assert float(metrics["update_size"]) == pytest.approx(float(change.norm() / old.norm()))
        mean, square = (
            torch.cat([optimizer.state[weight][name].double() for weight in weights])
            for name in ("exp_avg", "exp_avg_sq")
        )
        signal = mean.square().sum() / (1 - 0.5**10) ** 2
        noise_share = 0.5 / 1.5 * (1 + 0.5**10) / (1 - 0.5**10)
        variance = (square.sum() / (1 - 0.9**10) - signal) / (1 - noise_share)
        signal = signal - noise_share * variance
        scale = float(8 * variance / signal) if signal > 0 else math.inf
        assert float(metrics["grad_noise_scale"]) == pytest.approx(scale, rel=1e-5)
    assert numbers[0] == numbers[1]
