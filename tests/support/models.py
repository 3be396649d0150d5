"""Tiny random models, and their log-probs from plain Hugging Face logits."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM


def make_tiny_model(seed: int = 0, **overrides: object) -> Qwen2ForCausalLM:
    """Return a random Qwen2 model whose weights are large enough for distributions far from
    uniform.
    """
    torch.manual_seed(seed)
    settings: dict = {
        "vocab_size": 261,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(settings | overrides))).float().eval()


def make_llama(seed: int) -> LlamaForCausalLM:
    """Return a random Llama model whose LM head is not tied."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).float().eval()


def make_lora(base: nn.Module | None = None, **overrides: object) -> nn.Module:
    settings: dict = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "init_lora_weights": False,
    }
    base = make_tiny_model() if base is None else base
    return get_peft_model(base, LoraConfig(**(settings | overrides)))


def response_log_probs(model: nn.Module, temperature: float = 1.0):
    """Return a ``score_fn`` that uses plain Hugging Face logits."""

    @torch.no_grad()
    def score(sequences: list[Tensor], prompt_lengths: list[int]) -> list[Tensor]:
        rows = []
        for tokens, start in zip(sequences, prompt_lengths, strict=True):
            log_probs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
            rows.append(log_probs[start - 1 : -1].gather(1, tokens[start:, None])[:, 0])
        return rows

    return score
