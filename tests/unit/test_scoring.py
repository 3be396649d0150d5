"""The token scorer against full logits, in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.models import make_tiny_model
from torchrl_grpo.models import loading
from torchrl_grpo.models.head import chunk_width, chunked_log_probs, chunks_of
from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer


def make_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 261, (4, 12), generator=generator)
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[0, 4:] = True
    mask[1, 2:7] = True
    mask[3, 11:] = True  # row 2 has no token to score
    return tokens, mask


def by_full_logits(model: nn.Module, tokens: torch.Tensor, mask: torch.Tensor, temperature: float):
    log_p = (model(tokens).logits / temperature).log_softmax(-1)[:, :-1]
    picked = torch.where(mask[:, 1:], log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1), 0.0)
    entropy = torch.where(mask[:, 1:], -(log_p.exp() * log_p).sum(-1), 0.0)
    return picked, entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_chunk_elements", [261, 1000, 2**25])
def test_log_probs_entropy_and_all_gradients_equal_full_logits(
    temperature: float, max_chunk_elements: int
) -> None:
    model = make_tiny_model().double()
    tokens, mask = make_batch()
    scorer = TokenScorer(model, temperature=temperature, max_chunk_elements=max_chunk_elements)
    weight = torch.randn(2, 4, 12, dtype=torch.float64)
    log_probs, entropy = scorer.score(tokens, mask)
    (log_probs * weight[0] + entropy * weight[1]).sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected_log_probs, expected_entropy = by_full_logits(model, tokens, mask, temperature)
    (expected_log_probs * weight[0, :, 1:] + expected_entropy * weight[1, :, 1:]).sum().backward()
    torch.testing.assert_close(log_probs[:, 1:], expected_log_probs)
    torch.testing.assert_close(entropy[:, 1:], expected_entropy)
    assert log_probs[:, 0].abs().max() == 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_gradient_of_one_output_alone(which: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,))

    def run(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = chunked_log_probs(h, w, targets, bias_V=b, temperature=1.3, max_chunk_elements=22)
        return out[0] if which == "log_probs" else out[1]

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def test_bf16_stays_close_to_float32() -> None:
    model = make_tiny_model()
    tokens, mask = make_batch()
    exact, _ = TokenScorer(model).score(tokens, mask)
    rough, _ = TokenScorer(make_tiny_model().bfloat16()).score(tokens, mask)
    assert rough.dtype == torch.float32
    assert (exact - rough).abs().max() < 0.15
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, _ = TokenScorer(model).score(tokens, mask)
    assert (exact - mixed).abs().max() < 0.15


def test_no_tensor_of_all_logits_is_ever_made() -> None:
    """Count the elements of every tensor that an operation returns, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else [out]:
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return out

    vocabulary = 5000
    scored = 4 * 39
    model = make_tiny_model(vocab_size=vocabulary)
    tokens = torch.randint(0, vocabulary, (4, 40))
    with Watch():
        log_probs, entropy = TokenScorer(model, max_chunk_elements=10 * vocabulary).score(
            tokens, torch.ones(4, 40) > 0
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert largest <= max(
        10 * vocabulary, vocabulary * 32
    )  # one chunk, or the embedding and its gradient
    assert largest < scored * vocabulary


def test_models_that_change_their_logits_are_refused() -> None:
    model = make_tiny_model()
    model.register_forward_hook(lambda _, args, out: setattr(out, "logits", out.logits * 0.5))
    with pytest.raises(
        ValueError,
        match=r"Qwen2ForCausalLM .*LM head.* off by [\d.]+ nats",
    ):
        TokenScorer(model)


def test_a_setting_that_changes_logits_is_refused_in_any_dtype() -> None:
    model = make_tiny_model().bfloat16()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(
        ValueError,
        match=r"final_logit_softcapping=30\.0.*; use another",
    ):
        TokenScorer(model)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    model = make_tiny_model()
    model.model.norm.register_forward_hook(
        lambda _, args, hidden: hidden + hidden.mean(1, keepdim=True)
    )
    with pytest.raises(ValueError, match="depend on no later token"):
        TokenScorer(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_of_a_scorer_leaves_model_and_draws_as_they_are(dtype: torch.dtype) -> None:
    model = make_tiny_model(attention_dropout=0.5).to(dtype).train()
    model.model.layers[1].eval()
    training = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    TokenScorer(model, temperature=0.7)
    assert [module.training for module in model.modules()] == training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0, -1.0, 1e-30, math.nan, math.inf])
def test_temperature_must_be_a_usable_number(temperature: float) -> None:
    with pytest.raises(ValueError, match=rf"temperature .*0\.01, got {temperature}: use 1\.0"):
        TokenScorer(make_tiny_model(), temperature=temperature)


def test_adapter_off_scorer_gives_the_base_models_scores() -> None:
    tokens, mask = make_batch()
    expected, _ = TokenScorer(make_tiny_model()).score(tokens, mask)
    model = loading.add_lora(make_tiny_model(), r=4, alpha=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    trained, _ = TokenScorer(model).score(tokens, mask)
    reference, _ = AdapterOffScorer(model).score(tokens, mask)
    assert (trained - expected).abs().max() > 0.01
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-6)
    assert all(
        parameter.requires_grad for name, parameter in model.named_parameters() if "lora_" in name
    )


def test_in_16_bits_no_rounding_of_the_head_reaches_the_targets_logit():
    """A logit of 10 in bfloat16 is off by 0.02 on average; the remaining error averages out in the
    normalizer.
    """
    torch.manual_seed(0)
    hidden = torch.randn(400, 64).bfloat16()
    weight = (0.5 * torch.randn(1000, 64)).bfloat16()
    bias = torch.randn(1000).bfloat16()
    targets = (hidden.float() @ weight.float().T + bias).softmax(-1).multinomial(1).squeeze(-1)
    wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    exact, entropy = chunked_log_probs(wide[0], wide[1], targets, bias_V=wide[2], temperature=0.8)
    plain = torch.nn.functional.linear(hidden, weight, bias).float().div(0.8).log_softmax(-1)
    plain = plain.gather(-1, targets[:, None]).squeeze(-1)
    own = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    got, got_entropy = chunked_log_probs(
        own[0], own[1], targets, bias_V=own[2], temperature=0.8, max_chunk_elements=400 * 130
    )
    assert got.dtype == torch.float32 and got.max() < 1e-6
    error = (got - exact).abs()
    before = (plain - exact).abs()
    assert error.mean() < 0.7 * before.mean() and before.mean() > 3e-3
    assert (got_entropy - entropy).abs().mean() < 0.02
    for out, inputs in (
        ((exact + 0.1 * entropy).sum(), wide),
        ((got + 0.1 * got_entropy).sum(), own),
    ):
        out.backward()
        assert all(x.grad is not None for x in inputs)
    for x, y in zip(wide, own, strict=True):
        assert ((y.grad.double() - x.grad).norm() / x.grad.norm()).item() < 0.05


@pytest.mark.parametrize("rows", [1, 700, 9873, 40_000])
def test_large_chunks_of_the_vocabulary_begin_at_aligned_addresses(rows: int) -> None:
    hidden = torch.empty(rows, 4, device="meta")
    width = chunk_width(hidden, 151_936)
    assert width % 8 == 0 or width < 1024
    assert rows * (width - 64) <= 2**25 or width == 1
    chunks = [part for part, _, _ in chunks_of(torch.empty(151_936, 1), None, width)]
    assert [part.start for part in chunks] == list(range(0, 151_936, width))


def test_a_model_of_another_kind_is_refused_with_what_to_use(tiny_model) -> None:
    for part in (torch.nn.Linear(2, 2), TokenScorer(tiny_model), tiny_model.model):
        with pytest.raises(ValueError, match=f"model={type(part).__name__}.*AutoModelForCausalLM"):
            TokenScorer(part)
