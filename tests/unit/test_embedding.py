"""The gradient of an embedding that is tied to the LM head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo.models import scoring
from torchrl_grpo.models.scoring import TokenScorer

VOCABULARY = 500


def make_scorer(dtype: torch.dtype, padding: int | None, *, tied: bool = True) -> TokenScorer:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=padding,
        **sizes,
    )
    return TokenScorer(Qwen2ForCausalLM._from_config(config, dtype=dtype).eval())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two groups of four with shared prompts of 20 tokens, with few distinct ones."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 40, (8, 48))
    tokens[:, :20] = tokens[[0, 4]].repeat_interleave(4, 0)[:, :20]
    return tokens, torch.arange(48).expand(8, -1) >= 20


def gradients(scorer: TokenScorer, passes: int = 2) -> dict[str, torch.Tensor]:
    for _ in range(passes):
        log_probs, entropy = scorer.score(*batch())
        (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return {
        name: parameter.grad
        for name, parameter in scorer.model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_pytorch_to_the_last_bit(
    dtype: torch.dtype, padding: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = gradients(make_scorer(dtype, padding))
    monkeypatch.setattr(scoring, "tied_embedding", lambda base: None)
    theirs = gradients(make_scorer(dtype, padding))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.layout == torch.strided and torch.equal(gradient, theirs[name]), name


class Large(TorchDispatchMode):
    """Record operations that return a tensor as large as the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, torch.Tensor)
            and out.layout == torch.strided
            and out.shape == (VOCABULARY, 32)
        ):
            self.made.append(str(func))
        return out


@pytest.mark.parametrize(("tied", "dense"), [(True, 0), (False, 1)])
def test_a_tied_embedding_has_no_second_gradient_of_the_whole_vocabulary(
    tied: bool, dense: int
) -> None:
    scorer = make_scorer(torch.float32, None, tied=tied)
    with Large() as large:
        gradients(scorer, passes=1)
    assert sum("embedding_dense_backward" in name for name in large.made) == dense
    assert sum("empty_like" in name for name in large.made) == 1  # the gradient of the head


def test_adapters_leave_the_embedding_as_it_is() -> None:
    scorer = make_scorer(torch.float32, None)
    scorer.model.requires_grad_(False)
    assert scoring.tied_embedding(scorer.base) is None
