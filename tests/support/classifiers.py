"""Tiny reward models, and the processes that score with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support.processes import command_line

SCORER = "graders.reward_scorer"


def make_classifier(
    folder: Path, tokenizer: PreTrainedTokenizerFast, labels: int = 1, pad: int | None = 0
) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=labels, pad_token_id=pad, initializer_range=0.3,
    )  # fmt: skip
    return save(LlamaForSequenceClassification(config), folder, tokenizer)


def save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def scorers(pids: list[int]) -> set[psutil.Process]:
    """Return the models' processes among the descendants of processes."""
    below = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    return {child for child in below if SCORER in command_line(child)}
