"""QLoRA: a frozen base in 4 bits, against the same base dequantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from tests.support.configs import SMALL, compose_config
from tests.support.models import make_llama
from tests.support.runs import LORA, at, differences, numbers, run, state_of, steps
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.config import ConfigError
from torchrl_grpo.extras.export.command import main as export
from torchrl_grpo.integrations import bitsandbytes
from torchrl_grpo.learner.export import export_model, exported_bytes
from torchrl_grpo.learner.step import autocast
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import StepMemory, weight_bytes
from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_weights

CPU = torch.device("cpu")
NF4 = ("train_model.quantization=nf4", "train_model.lora.enabled=true")
LINEAR = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)
"""Numbers of the starter's linear layers without biases."""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    make_llama(0).save_pretrained(folder)
    return str(folder)


def load(name: str, dtype: torch.dtype, quantization: str | None = "nf4") -> Any:
    return loading.load_model(name, dtype=dtype, device=CPU, quantization=quantization)


def dequantized(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a plain model with the weights that the quantized one computes with."""
    model = load(name, dtype, None)
    model.load_state_dict(dict(named_weights(load(name, dtype))), strict=False)
    return model


def with_adapters(model: PreTrainedModel) -> torch.nn.Module:
    adapted = loading.add_lora(model, r=4, alpha=8)
    torch.manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    return adapted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["starter", "llama"])  # with biases and a tied head, and without
@pytest.mark.parametrize(
    ("dtype", "mixed", "tolerance"),
    [
        (torch.float32, None, 1e-6),
        (torch.bfloat16, None, 1e-3),
        (torch.float32, torch.bfloat16, 1e-3),
    ],
    ids=["float32", "bfloat16", "mixed"],
)
def test_value_and_gradient_equal_the_dequantized_models(
    name: str, dtype: torch.dtype, mixed: torch.dtype | None, tolerance: float, llama: str
) -> None:
    path = llama if name == "llama" else name
    tokens = torch.randint(0, 261, (6, 40), generator=torch.Generator().manual_seed(0))
    tokens[1::2, :20] = tokens[0::2, :20]  # prompts that two share
    mask = torch.arange(40).expand(6, 40) >= 20
    results = []
    for base in (load(path, dtype), dequantized(path, dtype)):
        model = with_adapters(base)
        scorer = TokenScorer(model)
        assert scorer.packs(40)
        with autocast(CPU, mixed):
            log_probs, entropy = scorer.score(tokens, mask)
            (log_probs.sum() + entropy.sum()).backward()
            with torch.no_grad():
                reference, _ = AdapterOffScorer(model).score(tokens, mask)
        trained = [p for p in model.parameters() if p.requires_grad]
        results.append([log_probs.detach(), reference, *(p.grad for p in trained)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= tolerance * expected.norm()
    assert (results[0][0] - results[0][1]).abs().max() > 0.1  # the adapters count


def test_linear_layers_but_the_head_are_packed_and_close(llama: str) -> None:
    model = load(llama, torch.float32)
    packed = {name for name, weight in model.named_parameters() if weight.dtype == torch.uint8}
    assert packed == {f"{name}.weight" for name in loading.inner_linears(model)} and packed
    whole = LlamaForCausalLM.from_pretrained(llama).state_dict()
    for name, weight in named_weights(model):
        error = ((weight - whole[name]).norm() / whole[name].norm()).item()
        assert 0.05 < error < 0.12 if name in packed else error == 0  # NF4 of a normal distribution


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nf4")
    run(folder, *NF4, *LORA, steps(2), "train.checkpoint_frequency=1", *CHECKED)
    return folder


CHECKED = ("policy.kl_coef=0.1",)


@pytest.mark.slow
def test_the_engine_samples_with_the_trainers_weights(
    whole_run: Path,
) -> None:
    rows = read_jsonl(whole_run / "metrics.jsonl")
    assert max(row["train/kl_k3_to_inference"] for row in rows[1:]) < 1e-8
    assert rows[1]["train/kl_k3_to_ref"] < 1e-9 < rows[-1]["train/kl_k3_to_ref"]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    whole_run: Path, tmp_path: Path
) -> None:
    rows = run(tmp_path, *NF4, *LORA, steps(2), f"train.resume={at(whole_run, 1)}", *CHECKED)
    assert numbers(rows, 2) == numbers(read_jsonl(whole_run / "metrics.jsonl"), 2)
    assert differences(state_of(at(tmp_path, 2)), state_of(at(whole_run, 2))) == []
    with pytest.raises(ConfigError, match=r"train_model\.quantization=null must be nf4"):
        run(tmp_path / "other", "train_model.quantization=null", *LORA, f"train.resume={whole_run}")


@pytest.mark.slow
def test_the_export_is_a_plain_model_with_the_adapters_merged(
    whole_run: Path, tmp_path: Path
) -> None:
    exported = whole_run / "checkpoints" / "model"
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    export([str(whole_run), "--output", str(tmp_path / "adapters"), "--adapters"])
    adapted: Any = PeftModel.from_pretrained(
        dequantized("starter", torch.float32), str(tmp_path / "adapters")
    )
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert max((merged[name] - expected[name]).abs().max().item() for name in merged) < 1e-6


def test_room_for_the_model_is_that_of_its_dense_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_adapters(load("starter", torch.float32))
    dense = sum(weight.nbytes for weight in load("starter", torch.float32, None).parameters())
    assert exported_bytes(model) == dense
    needed: list[int] = []
    monkeypatch.setattr(
        "torchrl_grpo.learner.export.check_room", lambda folder, size, what: needed.append(size)
    )
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    file = export_model(model, tokenizer, tmp_path / "model", "") / "model.safetensors"
    assert needed == [dense] and 0 <= file.stat().st_size - dense < 20_000  # the header


def test_the_plan_counts_the_packed_weights() -> None:
    context = prepare(compose_config(*SMALL, *NF4))
    row, memory = (share := shares(context)["train"]).row(), share.memory
    assert isinstance(memory, StepMemory) and row["dtype"] == "nf4"
    model = load("starter", torch.float32)
    assert loading.shape_of(loading.add_lora(model, r=16, alpha=32)) == context.shape
    held = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    base = weight_bytes(context.shape, 4, quantized=True)
    assert memory.parameters == base + held and context.shape.linear == LINEAR
    saved = weight_bytes(context.shape, 4) - base
    # Scales: 8 bits for 64 numbers, and in float32 for 256 of those.
    assert saved == pytest.approx(LINEAR * (4 - 0.5 - 1 / 64 - 4 / 64 / 256), abs=1)


@pytest.mark.parametrize(
    ("changed", "overrides", "devices", "message"),
    [
        ({}, (), 2, r"train_model\.num_devices=2 must be 1 .*: use train_model\.num_devices=1, or"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            ("train_model.quantization=null",),
            0,
            r"model\.name=.* not quantized, .*train_model\.quantization=nf4\.",
        ),
    ],
    ids=["two ranks", "a quantized model"],
)
def test_unquantizable_models_are_refused_before_weights_load(
    changed: dict[str, Any], overrides: tuple[str, ...], devices: int, message: str, tmp_path: Path
) -> None:
    shutil.copytree(starter_path(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    chosen = compose_config(*SMALL, *NF4, f"model.name={tmp_path}", *overrides,
                            *([f"train_model.num_devices={devices}"] if devices else []))  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        prepare(chosen, [])


def test_without_bitsandbytes_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr(bitsandbytes, "find_spec", absent)
    with pytest.raises(ConfigError, match=r"train_model\.quantization=nf4 .*torchrl_grpo\[qlora\]"):
        prepare(compose_config(*SMALL, *NF4), [])
