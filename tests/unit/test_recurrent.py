"""Hybrid models packed: their recurrent layers keep sequences apart, and compute a group's prompt once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.families import (
    distance,
    engine_distance,
    make_adapters,
    make_family,
    own_log_probs,
    random_sequences,
    sampled,
    scored,
)
from tests.support.training import make_batch, make_trainer
from torchrl_grpo.generation import TransformersEngine
from torchrl_grpo.models import loading, recurrent
from torchrl_grpo.models.layout import packed
from torchrl_grpo.models.recurrent import PackedLayer
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer

PROMPTS = (130, 130, 130, 70, 70, 1, 1, 2)
RESPONSES = (70, 3, 1, 66, 9, 2, 7, 80)
"""Three groups and a single sequence. Some are longer than the 64 tokens of a scan's chunk, and some
shorter than the 4 or 3 of a convolution.
"""

EVERY = (
    "lfm2",
    "qwen3_next",
    "granitemoehybrid",
    "jamba",
    "falcon_h1",
    "lfm2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "bamba",
    "nemotron_h",
    "zamba2",
    "mamba2",
)
BY_DAY = 3
"""A convolution, a delta rule and a state-space model."""


def make_hybrid(name: str, **settings: Any) -> Any:
    if name == "falcon_h1":
        settings |= {"lm_head_multiplier": 1.0}
    return make_family(name, **settings)


def make_groups() -> tuple[Tensor, Tensor]:
    prompts, ends = torch.tensor(PROMPTS), torch.tensor(PROMPTS) + torch.tensor(RESPONSES)
    place = torch.arange(int(ends.max()))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 128, (len(ends), len(place)), generator=generator)
    for first, others in ((0, (1, 2)), (3, (4,)), (5, (6,))):
        for row in others:
            tokens[row, : PROMPTS[row]] = tokens[first, : PROMPTS[row]]
    return tokens, (place >= prompts[:, None]) & (place < ends[:, None])


def one_by_one(model: nn.Module, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the scored tokens, [S], from one forward per sequence."""
    log_probs, entropies = [], []
    for row, scored_ in zip(tokens, mask, strict=True):
        end = int(scored_.nonzero().max()) + 1
        logits = model(input_ids=row[None, :end], use_cache=False).logits[0, :-1].log_softmax(-1)
        picked = scored_[1:end]
        log_probs.append(logits.gather(-1, row[1:end, None]).squeeze(-1)[picked])
        entropies.append(-(logits.exp() * logits).sum(-1)[picked])
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out


def layers_of(model: nn.Module) -> list[PackedLayer]:
    return [module for module in model.modules() if isinstance(module, PackedLayer)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if at < BY_DAY else pytest.mark.nightly)
        for at, name in enumerate(EVERY)
    ],
)
def test_hybrid_is_packed_as_single_sequences_and_leaks_nothing(name: str) -> None:
    model = make_hybrid(name)
    scorer, (tokens, mask) = TokenScorer(model), make_groups()
    assert scorer.packs(tokens.shape[1])
    assert {layer.forks for layer in layers_of(model)} == {name != "jamba"}
    log_probs, entropies = (part[mask] for part in scorer.score(tokens, mask))
    weight = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1))
    (log_probs * weight + entropies).sum().backward()
    got = gradients(model)
    expected, expected_entropies = one_by_one(model, tokens, mask)
    (expected * weight + expected_entropies).sum().backward()
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-5)
    for key, gradient in gradients(model).items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(got[key], gradient, rtol=0, atol=3e-5 * max(largest, 1.0))
    with torch.no_grad():
        before, _ = scorer.score(tokens, mask)
        for row, place in ((0, 131), (0, 195), (3, 72), (6, 2), (7, 3)):
            changed = tokens.clone()
            changed[row, place] = 3 + (changed[row, place] - 2) % 125
            moved = (scorer.score(changed, mask)[0] - before).abs()
            assert moved[row, place:].max() > 1e-4
            moved[row, place:] = 0
            # Experts round by the tokens that they share.
            assert moved.max() <= (1e-5 if "moe" in name or name == "qwen3_next" else 0.0)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        # Prompts, and then what follows them or is alone, by length
        ("lfm2", [(1, 130), (1, 70), (3, 81), (4, 8)]),
        ("jamba", [(3, 199), (2, 81), (2, 7)]),
    ],
)
def test_prompt_is_computed_once_by_layers_that_take_states(
    name: str, shapes: list[tuple[int, int]]
) -> None:
    model = make_hybrid(name)
    scorer, (tokens, mask) = TokenScorer(model), make_groups()
    seen: list[tuple[int, ...]] = []
    layer = layers_of(model)[0]
    layer.in_proj.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    with torch.no_grad():
        scorer.score(tokens, mask)
    assert seen == shapes


def test_layer_that_mishandles_states_computes_prompts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = recurrent._States.last
    monkeypatch.setattr(
        recurrent._States, "last", lambda self: tuple(map(torch.zeros_like, last(self)))
    )
    model, (tokens, mask) = make_hybrid("lfm2"), make_groups()
    scorer = TokenScorer(model)
    assert scorer.packs(tokens.shape[1]) and not layers_of(model)[0].forks
    with torch.no_grad():
        expected, _ = one_by_one(model, tokens, mask)
        torch.testing.assert_close(scorer.score(tokens, mask)[0][mask], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), [("lfm2", False), ("qwen3_5_text", True)])
def test_training_step_with_checkpointing_is_that_of_padded_sequences(
    name: str, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = []
    for packs in (True, False):
        model = make_hybrid(name, vocab_size=261)
        model = make_adapters(model) if lora else model
        loading.enable_gradient_checkpointing(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        trainer = make_trainer(model, optimizer=optimizer, micro_batch_tokens=40)
        if not packs:
            monkeypatch.setattr(TokenScorer, "packs", lambda *_: False)
        metrics = trainer.train_batch(make_batch(repeats=4))
        assert (metrics["train/token_efficiency"] > 1) == packs
        after.append({key: value.clone() for key, value in trainer.weights()})
    for key, value in after[0].items():
        torch.testing.assert_close(value, after[1][key], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_packed_model_still_samples_and_a_copy_has_weights_of_its_own() -> None:
    model = make_hybrid("qwen3_next")
    TokenScorer(model)
    engine = TransformersEngine(model)
    sequences = sampled(engine)
    log_probs = [part for *_, part in sequences]
    assert distance(log_probs, scored(model, sequences)) < 3e-5
    assert engine_distance(engine, model) < 3e-5
    twin, sequences = copy.deepcopy(model), random_sequences()
    expected = own_log_probs(model, sequences)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert distance(scored(twin, sequences), expected) < 3e-5


def test_responses_of_one_computed_token_are_those_of_single_sequences() -> None:
    """Hugging Face would update the states of such a batch in place."""
    model, tokens = make_hybrid("granitemoehybrid"), torch.randint(3, 128, (2, 7))
    tokens[1, :5] = tokens[0, :5]
    mask = torch.arange(7).expand(2, 7) >= 5
    (scores := TokenScorer(model).score(tokens, mask)[0][mask]).sum().backward()
    got = gradients(model)
    expected, _ = one_by_one(model, tokens, mask)
    expected.sum().backward()
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-5)


def test_plan_of_a_row_holds_each_token_once() -> None:
    layout = packed(Rows.from_padded(*make_groups()))
    for forks in (True, False):
        prefixes, sequences, order = recurrent._make_plan(layout, forks)
        calls = [*(call for call, _ in prefixes), *sequences]
        used = torch.cat([call.source.places[call.own] for call in calls])
        assert used[order].equal(torch.arange(layout.tokens.shape[1]))
