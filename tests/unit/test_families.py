"""Model families: each part computes the log-probs of the model's own logits, or refuses the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    LlavaConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
)

from tests.support.families import (
    FAMILIES,
    IDS,
    MEASURES,
    distance,
    engine_distance,
    make_adapters,
    make_family,
    own_log_probs,
    random_sequences,
    scored,
)
from torchrl_grpo.generation import TransformersEngine
from torchrl_grpo.generation.vllm import check_parts
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.models.loading import load_config, load_model
from torchrl_grpo.weights import load_weights, named_weights

ROUNDING = 3e-5
CLAMPED = {"nemotron_h": 1e-3, "zamba2": 1e-3}
"""Hugging Face clamps their step sizes (``time_step_min``) except where it decodes."""

NO_CACHE = r"backend=transformers needs a model whose logits are the same token by token.* those of \w+ are not \("
NO_ADAPTERS = "must name modules of the model that can have adapters"
REFUSED = {
    "gemma2": {
        "scorer": r"off by 0\.0\d+ nats on average \(its config has final_logit_softcapping=30\.0\)"
    },
    "gemma3n_text": {"scorer": r"its config has final_logit_softcapping=30\.0"},
    "cohere": {"scorer": r"its config has logit_scale=0\.0625"},
    "cohere2": {"scorer": r"its config has logit_scale=0\.0625"},
    "falcon_h1": {
        "scorer": r"FalconH1ForCausalLM must have .* off by 0\.\d+ nats on average .*lm_head_multiplier=0\.5\); use",
        "LoRA": NO_ADAPTERS + ".*Module 'out_proj' is incompatible",
    },
    "modernbert-decoder": {
        "scorer": r"ModernBertDecoderForCausalLM must .* off by [\d.]+ nats on average; use another"
    },
    "recurrent_gemma": {"engine": NO_CACHE, "scorer": r"its config has logits_soft_cap=30\.0"},
    "bert": {
        "engine": NO_CACHE,
        "scorer": r"BertLMHeadModel must have .* depend on no later token.* off by",
    },
    "mamba": {"engine": NO_CACHE, "LoRA": NO_ADAPTERS},
    "mamba2": {"engine": NO_CACHE, "LoRA": NO_ADAPTERS},
    "granitemoehybrid": {"LoRA": NO_ADAPTERS},
    "bamba": {"LoRA": NO_ADAPTERS},
    "nemotron_h": {"LoRA": NO_ADAPTERS + r".*'out_proj' is incompatible with Mamba"},
    "zamba2": {"LoRA": NO_ADAPTERS},
    "rwkv": {"engine": NO_CACHE},
    "minimax": {"engine": NO_CACHE + "ValueError: MiniMax uses cache of its own"},
    "jamba": {"LoRA": r"layers\.0\.mamba\.in_proj.*: use \[q_proj,k_proj,v_proj,o_proj\], or"},
    "llama4_text": {
        "LoRA": r"Llama4ForCausalLM must .* cannot be had \(AttributeError: 'tuple' object"
    },
}


OF_EACH_KIND = (
    "llama",
    "gpt2",
    "gemma3_text",
    "mixtral",
    "deepseek_v3",
    "gemma2",
    "jamba",
    "mamba",
)
"""Sliding windows, experts, latent attention, and those of which each part refuses some."""


@pytest.mark.parametrize("what", [what for what in MEASURES if what != "vLLM"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.nightly)
        for name in FAMILIES
    ],
)
def test_log_probs_are_the_model_s_own_or_refused(name: str, what: str) -> None:
    refused = REFUSED.get(name, {})
    parts = {"engine": ["engine"], "LoRA": ["LoRA", "scorer", "engine"]}
    message = next((refused[part] for part in parts.get(what, ["scorer"]) if part in refused), None)
    if message is None:
        assert MEASURES[what](name) < CLAMPED.get(name, ROUNDING)
        return
    with pytest.raises(ValueError, match=message):
        MEASURES[what](name)


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "gpt_neox", "granitemoe", "jamba", "llama"]
)
def test_weights_are_sent_under_the_names_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = make_family(name)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    sent = dict(named_weights(model))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[key], expected[key]) for key in sent)
    copy = make_family(name, seed=1)
    load_weights(copy, reversed(sent.items()))
    assert all(
        torch.equal(a, b) for a, b in zip(copy.parameters(), model.parameters(), strict=True)
    )


def test_a_missing_expert_leaves_the_model_as_it_was() -> None:
    model = make_family("mixtral")
    weights = dict(named_weights(make_family("mixtral", seed=1)))
    weights.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        RuntimeError,
        match=r"1 missing .*layers\.1\.block_sparse_moe\.experts\.2\.w1",
    ):
        load_weights(model, weights.items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_lora_on_experts_sends_what_peft_merges() -> None:
    model = make_adapters(make_family("mixtral"))
    sent = dict(named_weights(model))
    merged = dict(named_weights(model.merge_and_unload()))
    base = dict(named_weights(make_family("mixtral")))
    assert sent.keys() == merged.keys()
    for name, weight in sent.items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)
    changed = {name for name in sent if not torch.equal(sent[name], base[name])}
    assert {
        "model.layers.0.block_sparse_moe.experts.3.w2.weight",
        "model.layers.0.self_attn.q_proj.weight",
    } <= changed


def test_an_exported_mixtral_is_loaded_as_it_was(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_family("mixtral")
    folder = export_model(model, tokenizer, tmp_path / "model", "")
    loaded = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2"])
def test_an_engine_merges_the_adapters_of_a_peft_model(name: str) -> None:
    model = make_adapters(make_family(name))
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    engine = TransformersEngine(model)
    assert engine_distance(engine, model) < ROUNDING
    engine.update_weights(named_weights(model), version=1)
    assert engine_distance(engine, model) < ROUNDING
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def make_multimodal() -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    text = Gemma3TextConfig(**IDS | FAMILIES["gemma3_text"])
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=127
    )
    return Gemma3ForConditionalGeneration(config).eval()


def test_a_multimodal_model_is_sampled_and_scored_but_not_with_vllm() -> None:
    model = make_multimodal()
    assert engine_distance(TransformersEngine(model), model) < ROUNDING
    sequences = random_sequences()
    assert distance(scored(model, sequences), own_log_probs(model, sequences)) < ROUNDING
    with pytest.raises(
        ValueError,
        match=r"model\.name=it .*backend=vllm.* gemma3",
    ):
        check_parts(model.config, "it")
    check_parts(model.config.text_config, "it")
    check_parts(Idefics3Config(), "it")
    with pytest.raises(ValueError, match=r"model\.name=it .*backend=vllm.* llava"):
        check_parts(LlavaConfig(), "it")


def test_a_model_that_makes_no_text_is_refused_by_its_config(tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"causal language model.* qwen2_vl",
    ):
        load_config(str(tmp_path))
