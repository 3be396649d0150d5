"""Layers and digests of tensors on a CUDA device: trees of prefixes, recurrent layers and weights in
4 bits. Never run on a GPU so far.

``GPU_CHECK_DEVICE=cpu`` runs them on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.support.families import make_family
from tests.support.trees import gradients, one_by_one, random_tree, rows_of, share_everything
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_weights
from torchrl_grpo.weights.receipts import digest

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "lfm2", "qwen3_5_text", "qwen3_next"])
def test_a_tree_in_float32_scores_like_single_sequences(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last three have convolutions, for which CUDA rounds inputs to TF32."""
    share_everything(monkeypatch)
    model = make_family(name, **({"sliding_window": 7} if name == "mistral" else {})).to(DEVICE)
    scorer, tree = TokenScorer(model), random_tree(0)
    assert scorer.packs(max(len(tokens) for tokens, _ in tree))
    layout = scorer.layout(rows_of(tree))
    assert max(map(len, layout.paths)) == 3
    results = []
    for log_probs in (scorer.score_rows(layout)["log_prob"], one_by_one(model, tree)):
        weight = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0))
        (log_probs * weight.to(DEVICE)).sum().backward()
        results.append((log_probs.detach(), gradients(model)))
    (got, of_tree), (expected, of_each) = results
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)
    for key, gradient in of_each.items():
        assert (of_tree[key] - gradient).norm() <= 1e-2 * gradient.norm() + 1e-4, key


def test_a_tree_in_bfloat16_is_as_exact_as_single_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share_everything(monkeypatch)
    tree = random_tree(0)

    def gradient(dtype: torch.dtype, packs: bool) -> torch.Tensor:
        model = make_family("qwen2").to(DEVICE, dtype)
        scorer = TokenScorer(model)
        assert scorer.packs(max(len(tokens) for tokens, _ in tree))
        log_probs = (
            scorer.score_rows(scorer.layout(rows_of(tree)))["log_prob"]
            if packs
            else one_by_one(model, tree)
        )
        log_probs.float().sum().backward()
        return torch.cat([value.flatten().float() for value in gradients(model).values()])

    exact = gradient(torch.float32, packs=False)
    of_tree, of_each = (
        ((gradient(torch.bfloat16, packs) - exact).norm() / exact.norm()).item()
        for packs in (True, False)
    )
    assert of_tree < max(1.5 * of_each, 0.01)
    assert of_each < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_digest_is_the_same_on_the_device_and_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (3,), (7, 5), (2**19 + 1,), (1000, 300)):
        tensor = (torch.randn(shape, generator=generator) * 50).abs().to(dtype)
        for each in (tensor, tensor.mT if tensor.dim() == 2 else tensor):
            assert digest(each.to(DEVICE)).item() == digest(each).item()


def load(dtype: torch.dtype, quantization: str | None) -> Any:
    return loading.load_model(
        str(starter_path()), dtype=dtype, device=torch.device(DEVICE), quantization=quantization
    )


def with_adapters(model: Any) -> Any:
    adapted = loading.add_lora(model, r=4, alpha=8)
    generator = torch.Generator().manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return adapted


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.03)], ids=["float", "half"]
)
def test_a_base_of_4_bits_trains_like_the_dequantized_one(
    dtype: torch.dtype, tolerance: float
) -> None:
    pytest.importorskip("bitsandbytes")
    dequantized = load(dtype, None)
    dequantized.load_state_dict(dict(named_weights(load(dtype, "nf4"))), strict=False)
    tokens = torch.randint(0, 261, (6, 40), generator=torch.Generator().manual_seed(0))
    tokens[1::2, :20] = tokens[0::2, :20]
    mask = torch.arange(40).expand(6, 40) >= 20
    results = []
    for base in (load(dtype, "nf4"), dequantized):
        model = with_adapters(base)
        log_probs, _ = TokenScorer(model).score(tokens.to(DEVICE), mask.to(DEVICE))
        log_probs.float().sum().backward()
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        results.append([log_probs.detach(), *trained])
    for ours, expected in zip(*results, strict=True):
        assert (ours.float() - expected.float()).norm() <= tolerance * expected.float().norm()


def test_an_engine_samples_with_what_a_base_of_4_bits_computes() -> None:
    pytest.importorskip("bitsandbytes")
    trained = with_adapters(load(torch.float32, "nf4"))
    engine = TransformersEngine(load(torch.float32, None))
    engine.update_weights(named_weights(trained), 1)
    engine.seed(0)
    prompt = torch.tensor([3, 40, 50, 1, 4])
    [group] = engine.generate([prompt], 4, SamplingParams(16))
    scorer = TokenScorer(trained)
    for done in group:
        tokens = torch.cat([prompt, done.tokens])[None].to(DEVICE)
        mask = torch.arange(tokens.shape[1], device=DEVICE)[None] >= len(prompt)
        with torch.no_grad():
            scored = scorer.score(tokens, mask)[0][0, len(prompt) :].cpu()
        torch.testing.assert_close(done.log_probs, scored, rtol=0, atol=2e-3)
