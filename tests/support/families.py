"""A tiny random model of each family, and the distance of our log-probs from the model's own
logits.

Heads have 32 dimensions, the smallest that vLLM runs on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.weights import Trained
from torchrl_grpo.generation.base import Engine, SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.models.loading import add_lora, enable_gradient_checkpointing
from torchrl_grpo.models.recurrent import PackedLayer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.weights import named_weights
from torchrl_grpo.weights.adapters import AdapterSender
from torchrl_grpo.weights.named import adapted_layers

VOCABULARY, CONTEXT = 128, 256
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
RANGE = {"initializer_range": 0.1}
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
PLAIN = SIZES | RANGE | {"intermediate_size": 96}
GROUPED = PLAIN | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 32}
GPT = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT} | RANGE
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
LOCAL = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.05,  # with larger weights, the rule multiplies rounding
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": HEADS | {"sliding_window": None},
    "qwen2": GROUPED,
    "qwen3": HEADS,
    "gemma": HEADS,
    "gemma3_text": HEADS | {"sliding_window": 64},
    "gemma4_text": HEADS | LOCAL | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
    | {"global_head_dim": 32, "num_hidden_layers": 3, "num_kv_shared_layers": 1}
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "phi": PLAIN,
    "phi3": GROUPED,
    "opt": SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 128, "init_std": 0.1, "dropout": 0.1},
    "gpt2": GPT,
    "gpt_neo": SIZES | RANGE | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": PLAIN,
    "gpt_bigcode": GPT,
    "gptj": GPT | {"rotary_dim": 16},
    "codegen": GPT | {"rotary_dim": 16},
    "falcon": SIZES | RANGE | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": GROUPED | {"sliding_window": 64},
    "granite": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "smollm3": GROUPED,
    "glm4": HEADS,
    "exaone4": HEADS | {"sliding_window": 64},
    "ernie4_5": HEADS,
    "apertus": GROUPED,
    "nemotron": HEADS,
    "bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4} | RANGE,
    "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT, "expansion_ratio": 1} | RANGE,
    "xglm": {"d_model": 128, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96, "init_std": 0.1, "dropout": 0.1},
    "biogpt": PLAIN,
    "mixtral": HEADS | {"num_local_experts": 4},
    "qwen2_moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": HEADS | EXPERTS,
    "olmoe": GROUPED | EXPERTS,
    "granitemoe": GROUPED | {"num_local_experts": 4},
    "gpt_oss": HEADS | {"num_local_experts": 4, "sliding_window": 64},
    "deepseek_v3": PLAIN | LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "lfm2": GROUPED | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": GROUPED | {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "num_dense_layers": 1},
    "qwen3_next": HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": HEADS | LINEAR,
    "qwen3_5_moe_text": HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "olmo_hybrid": GROUPED | LINEAR,
    "granitemoehybrid": GROUPED | MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "bamba": GROUPED | MAMBA | {"attn_layer_indices": [1]},
    "nemotron_h": HEADS | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"ssm_state_size": 16, "n_groups": 1, "chunk_size": 64},
    "zamba2": GROUPED | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "chunk_size": 64}
    | {"mamba_d_state": 16, "mamba_headdim": 32, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1},
    "jamba": GROUPED | {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "llama4_text": HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 64},
    # These models are refused.
    "gemma2": HEADS,
    "gemma3n_text": HEADS | LOCAL | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
    | {"num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]}
    | {"intermediate_size": [96, 96]},
    "cohere": GROUPED,
    "cohere2": GROUPED,
    "falcon_h1": HEADS | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    | {"mamba_n_groups": 1, "lm_head_multiplier": 0.5},
    "modernbert-decoder": PLAIN,
    "mamba": {"hidden_size": 128, "state_size": 16, "num_hidden_layers": 2} | RANGE,
    "mamba2": {"hidden_size": 128, "state_size": 16, "num_hidden_layers": 2, "num_heads": 8, "n_groups": 1}
    | {"head_dim": 32},
    "rwkv": {"hidden_size": 128, "attention_hidden_size": 128, "num_hidden_layers": 2, "context_length": CONTEXT},
    "recurrent_gemma": HEADS | {"lru_width": 128, "attention_window_size": 64, "num_hidden_layers": 3},
    "minimax": HEADS | {"num_local_experts": 4},
    "bert": PLAIN,
}  # fmt: skip


def make_family(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random model in float32 and eval mode; biases and norms are random too."""
    torch.manual_seed(seed)
    model = (
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**(IDS | FAMILIES[name] | overrides)))
        .float()
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


Sequences = list[tuple[Tensor, int, Tensor]]
"""Prompt and response together, how long the prompt is, and the engine's log-probs of the response."""


def sampled(engine: Engine) -> Sequences:
    """Return responses to prompts of several lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (5, 40, 3)
    ]
    engine.seed(0)
    groups = engine.generate(prompts, 2, SamplingParams(max_new_tokens=12))
    return [
        (torch.cat((prompt, done.tokens)), len(prompt), done.log_probs)
        for prompt, group in zip(prompts, groups, strict=True)
        for done in group
    ]


@torch.no_grad()
def own_log_probs(model: nn.Module, sequences: Sequences) -> list[Tensor]:
    """Return log-probs of the responses from the model's own logits, one sequence at a time."""
    every = [
        model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
        for tokens, *_ in sequences
    ]
    return [
        log_probs[start - 1 : -1].gather(-1, tokens[start:, None]).squeeze(-1)
        for log_probs, (tokens, start, _) in zip(every, sequences, strict=True)
    ]


def scored(model: nn.Module, sequences: Sequences) -> list[Tensor]:
    """Return log-probs by ``TokenScorer``, with gradients; all sequences are padded to one width."""
    tokens = nn.utils.rnn.pad_sequence(
        [full for full, *_ in sequences], batch_first=True, padding_value=5
    )
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (full, start, _) in enumerate(sequences):
        mask[row, start : len(full)] = True
    scores, _ = TokenScorer(model).score(tokens, mask)
    scores.sum().backward()
    return [
        scores[row, start : len(full)].detach() for row, (full, start, _) in enumerate(sequences)
    ]


def distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest absolute difference."""
    return max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))


def engine_distance(engine: Engine, model: nn.Module) -> float:
    """Return the distance of the engine's log-probs from the model's own logits."""
    sequences = sampled(engine)
    return distance([log_probs for *_, log_probs in sequences], own_log_probs(model, sequences))


def make_adapters(model: PreTrainedModel) -> nn.Module:
    """Return a LoRA model whose adapters change its log-probs."""
    adapted = add_lora(model, r=2, alpha=2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def in_engine(name: str) -> float:
    model = make_family(name)
    return engine_distance(TransformersEngine(model), model)


def in_scorer(name: str) -> float:
    model = make_family(name)
    sequences = random_sequences()
    return distance(scored(model, sequences), own_log_probs(model, sequences))


def send(engine: Engine, model: nn.Module, version: int) -> None:
    """Send adapters, or whole weights if not all adapters are of linear layers, as a run does."""
    layers = adapted_layers(model).values()
    if all(isinstance(layer.get_base_layer(), nn.Linear) for layer in layers):
        handle = AdapterSender(None).send(Trained(model), version)
        assert handle is not None
        engine.load(handle, version)
    else:
        engine.update_weights(named_weights(model), version)


def packing(name: str) -> str:
    """Return how the scorer computes sequences: "yes" for packed, "in part" if recurrent layers
    compute prompts again, "no" for padded.
    """
    model = make_family(name)
    if not TokenScorer(model).packs(2):
        return "no"
    layers = (module for module in model.modules() if isinstance(module, PackedLayer))
    return "yes" if all(layer.forks for layer in layers) else "in part"


def with_adapters(name: str) -> float:
    """Return the distances of engine (updated with adapters) and scorer."""
    model = make_adapters(make_family(name))
    TokenScorer(model)  # is the part that refuses a model
    engine = TransformersEngine(make_family(name), copy=False)
    send(engine, model, 1)
    sequences = sampled(engine)
    expected = own_log_probs(model, sequences)
    assert distance(expected, own_log_probs(make_family(name), sequences)) > 0.01
    log_probs = [log_probs for *_, log_probs in sequences]
    return max(distance(log_probs, expected), distance(scored(model, sequences), expected))


def with_checkpointing(name: str) -> float:
    """Return the distance of the scorer if layers are recomputed in the backward pass."""
    model = make_family(name)
    sequences = random_sequences()
    expected = own_log_probs(model, sequences)
    enable_gradient_checkpointing(model)
    return distance(scored(model, sequences), expected)


def random_sequences() -> Sequences:
    generator = torch.Generator().manual_seed(2)
    lengths = ((20, 4), (50, 40), (9, 2))
    return [
        (torch.randint(3, VOCABULARY, (n,), generator=generator), start, torch.empty(0))
        for n, start in lengths
    ]


def in_vllm(name: str) -> float:
    """Return the distance of vLLM's engine after an update with other weights, and after one with
    merged LoRA weights.
    """
    from torchrl_grpo.generation.vllm import VLLMEngine

    with tempfile.TemporaryDirectory() as folder:
        make_family(name).save_pretrained(folder)
        engine = VLLMEngine(folder, max_model_len=CONTEXT, enforce_eager=True, kv_cache_gib=0.25)
    with engine:
        distances = []
        for version, model in enumerate(
            (make_family(name, seed=1), make_adapters(make_family(name))), start=1
        ):
            engine.update_weights(named_weights(model), version)
            distances.append(engine_distance(engine, model))
        return max(distances)


MEASURES: dict[str, Callable[[str], float]] = {
    "engine": in_engine,
    "scorer": in_scorer,
    "LoRA": with_adapters,
    "checkpointing": with_checkpointing,
    "vLLM": in_vllm,
}
