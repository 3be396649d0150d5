"""Sequences packed behind one copy of their prompt, compared with one forward pass per sequence."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from transformers import AttentionInterface

from tests.support.families import make_family
from tests.support.models import make_lora, make_tiny_model
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.models import attention as attending
from torchrl_grpo.models import layout as layouts
from torchrl_grpo.models import loading, passes, scoring
from torchrl_grpo.models.layout import GatherIndex, packed, padded, pick, shared_prefixes
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.transforms.kl_scoring import KLScoring

ENDS = (12, 9, 6, 7, 15, 8, 0, 11)
PROMPTS = (5, 5, 5, 5, 3, 3, 3, 7)


def make_group(vocabulary: int = 128) -> tuple[Tensor, Tensor]:
    """Return groups of four, three (one without a response) and one; the third response is one
    token.
    """
    tokens = torch.randint(
        5, vocabulary, (len(ENDS), max(ENDS)), generator=torch.Generator().manual_seed(0)
    )
    tokens[1:4, :5], tokens[5:7, :3] = tokens[0, :5], tokens[4, :3]
    place = torch.arange(max(ENDS))
    mask = (place >= torch.tensor(PROMPTS)[:, None]) & (place < torch.tensor(ENDS)[:, None])
    mask[0, 8] = False  # as between two turns
    return tokens, mask


def one_by_one(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return log-probs [B, T] from full logits, one sequence at a time."""
    out = []
    for row, scored in zip(tokens, mask, strict=True):
        log_probs = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        picked = log_probs.gather(-1, row[1:, None]).squeeze(-1)
        out.append(torch.where(scored[1:], picked, 0.0))
    return torch.stack(out)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the gradients, and clear them for the next backward pass."""
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out


def test_a_row_holds_each_prompt_once_and_each_token_at_its_position() -> None:
    tokens, mask = make_group()
    layout = packed(Rows.from_padded(tokens, mask))
    assert layout.paths == (
        ((0, 11),),
        ((0, 5), (11, 14)),
        ((0, 5), (14, 15)),
        ((15, 29),),
        ((15, 18), (29, 33)),
        ((33, 43),),
    )  # without the last token; none for a sequence of one token
    assert layout.positions[0].tolist() == [
        *range(11),
        5,
        6,
        7,
        5,
        *range(14),
        *range(3, 7),
        *range(10),
    ]
    assert layout.tokens[0, :11].equal(tokens[0, :11]) and layout.tokens[0, 11:14].equal(
        tokens[1, 5:8]
    )
    rows = Rows.from_padded(tokens, mask)
    same = padded(rows)
    assert layout.targets.equal(same.targets) and layout.first is same.first is None
    for predictor, place in zip(
        layout.predictors.places.tolist(), rows.scored.tolist(), strict=True
    ):
        row, at = divmod(place, tokens.shape[1])
        assert (
            layout.tokens[0, predictor] == tokens[row, at - 1]
            and layout.positions[0, predictor] == at - 1
        )


def test_a_pass_that_scores_nothing_is_one_token() -> None:
    tokens, mask = make_group()
    layout = packed(Rows.from_padded(tokens, torch.zeros_like(mask)))
    assert (layout.tokens.tolist(), layout.paths, len(layout.predictors.places)) == (
        [[tokens[0, 0]]],
        (((0, 1),),),
        0,
    )
    scores, _ = TokenScorer(make_tiny_model()).score(tokens, torch.zeros_like(mask))
    scores.sum().backward()
    assert scores.abs().max() == 0


def test_short_prefixes_are_shared_only_as_whole_prompts() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 9, 9], [5, 6, 7, 8]])
    mask = torch.arange(4) >= torch.tensor([[3], [3], [2], [3]])
    assert shared_prefixes(Rows.from_padded(tokens, mask)) == ([0, 1, 3, 2], [0, 3, 3, 0])


@pytest.mark.parametrize(
    "name", ["qwen2", "llama", "qwen3", "gemma", "phi3", "gpt2", "mixtral", "deepseek_v3"]
)
def test_log_probs_and_gradients_are_those_of_single_sequences(name: str) -> None:
    model = make_family(name)
    tokens, mask = make_group()
    scorer = TokenScorer(model)
    assert scorer.packs(tokens.shape[1])
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    scores, _ = scorer.score(tokens, mask)
    (scores * weight).sum().backward()
    got = gradients(model)
    expected = one_by_one(model, tokens, mask)
    (expected * weight[:, 1:]).sum().backward()
    torch.testing.assert_close(scores[:, 1:], expected, rtol=0, atol=1e-5)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(
            got[key], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item()
        )


def test_in_float64_packing_changes_nothing_but_rounding() -> None:
    model = make_family("gpt2").double()  # the other models' norms compute in float32
    tokens, mask = make_group()
    scores, _ = TokenScorer(model).score(tokens, mask)
    scores.sum().backward()
    got = gradients(model)
    expected = one_by_one(model, tokens, mask)
    expected.sum().backward()
    torch.testing.assert_close(scores[:, 1:], expected, rtol=0, atol=1e-12)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-9, atol=1e-11)


def test_no_token_reaches_another_response_or_an_earlier_token() -> None:
    model = make_tiny_model()
    tokens, mask = make_group()
    scorer = TokenScorer(model)
    before, _ = scorer.score(tokens, mask)
    for row, place in ((0, 6), (1, 5), (4, 4), (5, 6), (7, 8)):
        changed = tokens.clone()
        changed[row, place] = (changed[row, place] + 1) % 128
        after, _ = scorer.score(changed, mask)
        moved = (after - before).abs()
        assert moved[row, place:].max() > 1e-3
        moved[row, place:] = 0
        assert moved.max() < 1e-7


def test_a_changed_prompt_token_reaches_all_responses_behind_it() -> None:
    tokens, mask = make_group()
    scorer = TokenScorer(make_tiny_model())
    before, _ = scorer.score(tokens, mask)
    changed = tokens.clone()
    changed[:4, 1] += 1
    after, _ = scorer.score(changed, mask)
    moved = (after - before).abs().amax(1)
    assert (moved[:4] > 1e-3).all() and moved[4:].max() < 1e-7


def trained(
    repeats: int, *, shared: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[dict, dict]:
    """Return the metrics of a step and the weights after it, with or without packing."""
    model = settings.pop("model")
    trainer = make_trainer(model, **settings)
    if not shared:
        monkeypatch.setattr(TokenScorer, "packs", lambda *_: False)
    metrics = trainer.train_batch(make_batch(repeats=repeats))
    monkeypatch.undo()
    return metrics, {name: value.clone() for name, value in trainer.weights()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("micro_batch_tokens", [16, 10_000])
def test_a_training_step_is_that_of_padded_sequences(
    lora: bool, checkpointing: bool, micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(3)
        model = make_lora(make_tiny_model().double()) if lora else make_tiny_model().double()
        if checkpointing:
            loading.enable_gradient_checkpointing(model)
        return model

    settings: dict[str, Any] = {
        "micro_batch_tokens": micro_batch_tokens,
        "monkeypatch": monkeypatch,
    }
    metrics, weights = trained(4, shared=True, model=make_model(), **settings)
    expected_metrics, expected = trained(4, shared=False, model=make_model(), **settings)
    efficiency = (
        metrics.pop("train/token_efficiency"),
        expected_metrics.pop("train/token_efficiency"),
    )
    assert efficiency[0] > 1 > efficiency[1]
    metrics.pop("train/micro_batches"), expected_metrics.pop("train/micro_batches")
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_the_way_of_other_devices_gives_the_same_attention() -> None:
    """This attention copies the keys that each sequence attends to; it is used where heads of keys
    and values differ.
    """
    tokens, mask = make_group()
    layout = packed(Rows.from_padded(tokens, mask))
    size = layout.tokens.shape[1]
    query, key, value = (torch.randn(1, heads, size, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected, _ = attending.attention(nn.Identity(), query, key, value, None, layout=layout)
    key, value = (tensor.index_select(2, layout.keys.places) for tensor in (key, value))
    got = attending._each_sequence(query, key, value, layout, 14, 8**-0.5, 0.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert [bound.tolist() for bound in layout.bounds] == [
        [0, 11, 14, 15, 29, 33, 43],
        [0, 11, 19, 25, 39, 46, 56],
    ]


def test_layers_share_their_masks_and_a_whole_sequence_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = packed(Rows.from_padded(*make_group()))
    masks = []

    def noted(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *rest: Any,
        is_causal: bool,
        **named: Any,
    ) -> Tensor:
        masks.append((mask, is_causal))
        return v[:, :, -q.shape[2] :]

    monkeypatch.setattr(attending, "scaled_dot_product_attention", noted)
    for _ in range(2):
        query, key = (torch.randn(1, 4, sum(part), 8) for part in layout.lengths)
        attending._each_sequence(query, key, key, layout, 14, 1.0, 0.0)
    first, second = masks[:6], masks[6:]
    assert [(mask is None, causal) for mask, causal in first] == [
        (at in (0, 3, 5),) * 2 for at in range(6)
    ]
    assert all(one is other for (one, _), (other, _) in zip(first, second, strict=True))
    assert (first[1][0] == 0).tolist() == torch.ones(3, 8, dtype=torch.bool).tril(5).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_repeated_picks_are_summed_in_order_and_in_float32(dtype: torch.dtype) -> None:
    places = torch.tensor([0, 1, 2, 4, 1, 2, 3, 2, 1, 2])  # 5 is excluded
    picks = GatherIndex(places)
    sums = picks._sums()
    assert [part.tolist() for part in sums] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 6, 3], [1, 2], [[4, 5], [8, 7], [-1, 9]],
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2, 3, 6, 4, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(2, 3, len(places), 4, generator=generator).to(dtype)
    out = pick(tensor, 2, GatherIndex(places, sums))
    assert torch.equal(out, tensor[:, :, places])
    out.backward(weight)
    exact = torch.zeros(2, 3, 6, 4, dtype=torch.float64).index_add_(2, places, weight.double())
    if dtype == torch.float64:
        torch.testing.assert_close(tensor.grad, exact, rtol=0, atol=1e-15)
    else:
        assert torch.equal(tensor.grad, exact.float().to(dtype))
        assert not torch.equal(
            tensor.grad, torch.zeros_like(tensor).index_add_(2, places, weight)
        )  # each partial sum is rounded


def test_nothing_to_pick_is_summed_to_zeros() -> None:
    tensor = torch.ones(3, 2, requires_grad=True)
    places = torch.empty(0, dtype=torch.int64)
    pick(tensor, 0, GatherIndex(places, GatherIndex(places)._sums())).sum().backward()
    assert tensor.grad.tolist() == [[0.0, 0.0]] * 3


def test_what_goes_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (calls.append("pinned"), self)[1])
    monkeypatch.setattr(
        Tensor, "to", lambda self, *args, **named: (calls.append((*args, named)), self)[1]
    )
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        layouts.send(torch.ones(2), device)
        assert calls.pop() == (device, {"non_blocking": True})
    assert calls == ["pinned"]
    with FakeTensorMode():
        layouts.send(torch.empty(2, device="cuda:0"), torch.device("cuda", 0))
    assert calls[1:] == [
        (torch.device("cuda", 0), {"non_blocking": True})
    ]  # CUDA's own memory cannot be pinned


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "are padded" in record.getMessage()]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    scoring._warn_once.cache_clear()
    logging.getLogger("torchrl").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("torchrl").removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("gptj", {}, "its attention is eager, not sdpa"),
        ("mamba", {}, "its attention is eager, not sdpa"),
        # As if their recurrent layers were not known
        ("lfm2", {}, "their log-probs would be off by 0.74 nats on average"),
        ("jamba", {}, "their log-probs would be off by 0.86 nats on average"),
        # With such weights the first tokens after another sequence hardly differ, but they do.
        (
            "lfm2",
            {"initializer_range": 0.02},
            "their log-probs would depend on the other sequences, by 0.0017 nats",
        ),
        # It scales queries by their place in the row from 8192 on.
        (
            "llama4_text",
            {"attn_temperature_tuning": True, "no_rope_layers": [0, 1]},
            "their log-probs would be off by 0.011 nats on average",
        ),
    ],
)
def test_a_model_that_cannot_be_packed_is_padded_and_says_so_once(
    name: str,
    settings: dict[str, Any],
    why: str,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (tokens, mask) = make_family(name, **settings), make_group()
    monkeypatch.setattr(scoring, "pack_recurrent", lambda _: [])
    if name == "gptj":
        model.set_attn_implementation("eager")  # in some versions of transformers it has only this
    scorer = TokenScorer(model)
    for _ in range(2):
        scores, _ = scorer.score(tokens, mask)
    torch.testing.assert_close(scores[:, 1:], one_by_one(model, tokens, mask), rtol=0, atol=1e-5)
    assert warnings_of(log) == [
        f"The sequences of {type(model).__name__} are padded, and each has its prompt computed: {why}."
    ]


def test_sequences_longer_than_a_chunk_are_padded(log: pytest.LogCaptureFixture) -> None:
    model, (tokens, mask) = make_family("llama4_text", attention_chunk_size=13), make_group()
    scorer = TokenScorer(model)
    assert scorer.packs(13) and not scorer.packs(14)
    assert warnings_of(log)[0].endswith(": some are longer than attention_chunk_size=13.")
    scores, _ = scorer.score(tokens, mask)
    torch.testing.assert_close(scores[:, 1:], one_by_one(model, tokens, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [2, 4, 10, 13])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "exaone4"])
def test_sequences_longer_than_a_sliding_window_are_packed(name: str, window: int) -> None:
    model, (tokens, mask) = make_family(name, sliding_window=window), make_group()
    tokens, mask = tokens.repeat(1, 2)[:, :21], mask.repeat(1, 2)[:, :21]
    scorer = TokenScorer(model)
    assert scorer.packs(tokens.shape[1])
    scores, _ = scorer.score(tokens, mask)
    scores.sum().backward()
    got = gradients(model)
    expected = one_by_one(model, tokens, mask)
    expected.sum().backward()
    torch.testing.assert_close(scores[:, 1:], expected, rtol=0, atol=1e-5)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(
            got[key], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item()
        )


def test_a_window_that_does_not_reach_the_attention_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_window(*args: Any, **kwargs: Any) -> Any:
        return attending.attention(*args, **(kwargs | {"sliding_window": None}))

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_window)
    model = make_family("mistral", sliding_window=64)
    assert not TokenScorer(model).packs(10)
    assert "nats on average" in model.unpacked_because
    assert model.config.sliding_window == 64


def test_an_attention_that_ignores_the_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attending._sdpa)
    model = make_tiny_model()
    assert not TokenScorer(model).packs(10)
    assert "nats on average" in model.unpacked_because


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "varlen"),
    [
        ((8, 0), 64, torch.bfloat16, True),
        ((9, 0), 256, torch.float16, True),
        ((7, 5), 64, torch.float16, False),  # T4
        ((7, 0), 64, torch.float16, False),  # V100
        ((9, 0), 512, torch.bfloat16, False),
        ((9, 0), 100, torch.bfloat16, False),
        ((9, 0), 64, torch.float32, False),
    ],
)
def test_a_card_takes_the_attention_that_it_has(
    capability: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    varlen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The card is simulated: only shapes and devices are checked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    calls = []
    for name in ("_flash_on_cuda", "_each_sequence"):
        way = getattr(attending, name)
        monkeypatch.setattr(
            attending, name, lambda *args, name=name, way=way: (calls.append(name), way(*args))[1]
        )
    layout = packed(Rows.from_padded(*make_group()))
    rows = layout.tokens.shape[1]
    lengths = layout.keys.places, *layout.bounds  # made on the CPU, with values
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (
            torch.empty(1, heads, rows, size, dtype=dtype, device="cuda:0") for heads in (4, 2, 2)
        )
        there = dataclasses.replace(
            layout, tokens=torch.empty(1, rows, dtype=torch.int64, device="cuda:0")
        )
        on_card = [torch.empty_like(part, device="cuda:0") for part in lengths]
        vars(there).update(keys=GatherIndex(on_card[0]), bounds=tuple(on_card[1:]))
        out, _ = attending.attention(nn.Identity(), query, key, value, None, layout=there)
    assert calls == ["_flash_on_cuda" if varlen else "_each_sequence"]
    assert (out.shape, out.dtype) == ((1, rows, 4, size), dtype)


@pytest.mark.parametrize("asks_for_gqa", [True, False])
@pytest.mark.parametrize("window", [None, 1, 6, 13, 14, 64])
def test_windows_of_a_card_are_those_of_other_devices(
    window: int | None, asks_for_gqa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernel is replaced by the documented behavior of Flash Attention: ``left`` keys
    before a query's own.

    The function around it has the signature of torch 2.13, or that of 2.11.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        begin_q: Tensor,
        begin_k: Tensor,
        *_: int,
        window_size: Any,
        **named: Any,
    ) -> Tensor:
        (left, right), outs = window_size, []
        assert right == 0
        for at in range(len(begin_q) - 1):
            own_q, own_k, own_v = (
                tensor[begin[at] : begin[at + 1]].transpose(0, 1)
                for tensor, begin in ((q, begin_q), (k, begin_k), (v, begin_k))
            )
            queries, keys = own_q.shape[1], own_k.shape[1]
            behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
            seen = (behind >= 0) & ((behind <= left) | (left < 0))
            own_k, own_v = (
                tensor.repeat_interleave(len(own_q) // len(own_k), 0) for tensor in (own_k, own_v)
            )
            scores = (own_q @ own_k.mT * named["scale"]).masked_fill(~seen, -torch.inf)
            outs.append((scores.softmax(-1) @ own_v).transpose(0, 1))
        return torch.cat(outs)

    def with_gqa(*tensors: Any, scale: float, window_size: Any, enable_gqa: bool = False) -> Tensor:
        assert enable_gqa
        return attend(*tensors, scale=scale, window_size=window_size)

    def without_gqa(*tensors: Any, scale: float, window_size: Any) -> Tensor:
        return attend(*tensors, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", with_gqa if asks_for_gqa else without_gqa)
    layout = packed(Rows.from_padded(*make_group()))
    size = layout.tokens.shape[1]
    query, key, value = (torch.randn(1, heads, size, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected, _ = attending.attention(
        nn.Identity(), query, key, value, None, layout=layout, sliding_window=window
    )
    key, value = (tensor.index_select(2, layout.keys.places) for tensor in (key, value))
    got = attending._flash_on_cuda(query, key, value, layout, window or 14, 8**-0.5)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_packing_is_checked_once_in_the_precision_of_the_run(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """An attention without a kernel for mixed precision, as on some cards, must be found."""
    calls = []
    attention = attending.attention

    def without_kernel(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("layout") is not None and torch.is_autocast_enabled("cpu"):
            calls.append(torch.get_autocast_dtype("cpu"))
            raise RuntimeError("no kernel for this")
        return attention(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_kernel)
    model = make_tiny_model()
    assert TokenScorer(model).packs(14)
    got = make_trainer(model, autocast_dtype=torch.bfloat16).train_batch(make_batch(repeats=4))
    for _ in range(2):
        KLScoring(TokenScorer(make_tiny_model()), autocast_dtype=torch.bfloat16)
    assert calls == [torch.bfloat16] * 3  # one for each model
    assert model.unpacked_because == "RuntimeError: no kernel for this"
    assert got["train/token_efficiency"] < 1
    assert make_trainer().train_batch(make_batch(repeats=4))["train/token_efficiency"] > 1


def test_packing_leaves_a_models_own_forward_and_config_as_they_are() -> None:
    model = make_tiny_model()
    tokens, _ = make_group()
    real = torch.ones_like(tokens)
    real[1, :4] = 0  # padding on the left
    before = model(input_ids=tokens, attention_mask=real).logits
    TokenScorer(model)
    assert torch.equal(model(input_ids=tokens, attention_mask=real).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_reference_and_proximal_scoring_compute_a_prompt_once() -> None:
    model = make_tiny_model()
    seen = []
    scoring_ = KLScoring(TokenScorer(model))
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    batch = make_batch(repeats=4)
    scoring_(batch.exclude(keys.REF_LOG_PROBS))
    assert seen == [sum((9, 14, 6, 11, 8, 12, 7, 10)) - 8 - 6 * 3]


def test_a_step_and_scoring_lay_out_a_pass_when_they_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = make_tiny_model(), make_batch(repeats=4)
    events = []
    trainer = make_trainer(model, micro_batch_tokens=30)
    scoring_ = KLScoring(TokenScorer(model), max_tokens=30)
    model.model.register_forward_pre_hook(lambda *_: events.append("pass"))

    def record(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (events.append(name), function(*args))[1])

    record(scoring, "packed")
    record(passes, "shared_prefixes")
    trainer.train_step(batch)
    assert events == ["shared_prefixes", *["packed", "pass"] * 3]
    events.clear()
    scoring_(batch.exclude(keys.REF_LOG_PROBS))
    assert events == ["shared_prefixes", *["packed", "pass"] * 3]
