"""Fixtures: a tiny random Qwen2 model and a byte-level tokenizer, made here, so that nothing is downloaded."""

from __future__ import annotations

import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the suite runs in as many processes as there are cores
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 bytes and 5 special tokens: every text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<|pad|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(seed: int = 0, **overrides: object) -> Qwen2ForCausalLM:
    """A random Qwen2 model whose weights are large enough for its distributions to be far from uniform."""
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


@pytest.fixture
def tiny_model() -> Qwen2ForCausalLM:
    """A fresh tiny random model, float32, eval mode."""
    return make_tiny_model()


def worker_processes() -> list[psutil.Process]:
    """Our child processes, without those that Python and wandb (of other tests) keep until we exit."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if not re.search("resource_tracker|forkserver|wandb", " ".join(one.cmdline()))]
