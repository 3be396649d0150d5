"""The transformers engine compared with the models' own forward and ``generate``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.finished import assert_each_response_is_told_when_it_ends
from tests.support.models import make_lora, make_tiny_model
from tests.support.weights import Trained
from torchrl_grpo.generation import Completion, SamplingParams, TransformersEngine, fused_decoder
from torchrl_grpo.generation.decoder import GenericDecoder
from torchrl_grpo.generation.fused_decoder import FusedDecoder, PackedLinear
from torchrl_grpo.generation.sampling import invert_cdf, sample, sampling_probs
from torchrl_grpo.weights import named_weights
from torchrl_grpo.weights.adapters import AdapterSender

SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2}
IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


def make_llama() -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 32
    biases = {"attention_bias": True, "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, **IDS, **biases, rope_parameters=rope))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def make_mistral() -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(**LLAMA, **IDS, num_key_value_heads=2, head_dim=12, sliding_window=None)
    )


def make_sliding_mistral() -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(**LLAMA, **IDS, num_key_value_heads=2, head_dim=12, sliding_window=4)
    )


def make_qwen3() -> PreTrainedModel:
    model = Qwen3ForCausalLM(Qwen3Config(**LLAMA, **IDS, num_key_value_heads=1, head_dim=16))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def make_gpt2() -> PreTrainedModel:
    sizes = {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **IDS, initializer_range=0.2))


def make_gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**LLAMA, **IDS))


def make_gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(
        Gemma2Config(**LLAMA, **IDS, num_key_value_heads=2, head_dim=8, sliding_window=8)
    )


FUSED = [make_tiny_model, make_llama, make_mistral, make_qwen3]
GENERIC = [make_gpt2, make_gpt_neox, make_gemma2, make_sliding_mistral]


def build(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(1)
    return make().eval()


def make_prompts(*lengths: int, vocab_size: int = 100) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab_size, (length,), generator=generator) for length in lengths]


def reference_log_probs(
    model: PreTrainedModel, prompt: Tensor, tokens: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the model's own log-probs [T, V] of every possible next token."""
    with torch.no_grad():
        logits = model(torch.cat((prompt, tokens)).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def largest_error(
    model: PreTrainedModel,
    prompts: list[Tensor],
    groups: list[list[Completion]],
    temperature: float,
) -> float:
    errors = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = reference_log_probs(model, prompt, completion.tokens, temperature)
            expected = expected.gather(-1, completion.tokens.unsqueeze(-1)).squeeze(-1)
            errors.append((completion.log_probs - expected).abs().max().item())
    return max(errors)


def same(left: list[list[Completion]], right: list[list[Completion]]) -> bool:
    """Return whether all tokens and log-probs are equal, bit for bit."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.log_probs, b.log_probs) for a, b in pairs
    )


def show_uninitialized_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill caches with NaN, which no result may have."""
    empty_cache = FusedDecoder.empty_cache
    monkeypatch.setattr(
        FusedDecoder,
        "empty_cache",
        lambda *args: tuple(cache.fill_(torch.nan) for cache in empty_cache(*args)),
    )


@pytest.mark.parametrize("make", FUSED + GENERIC)
def test_llama_like_models_alone_take_the_fused_decoder(make):
    assert isinstance(TransformersEngine(build(make)).decoder, FusedDecoder) == (make in FUSED)


def test_adapters_take_their_own_forward(tiny_model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    engine = TransformersEngine(peft.inject_adapter_in_model(config, tiny_model))
    assert isinstance(engine.decoder, GenericDecoder)


def test_a_fused_decoder_that_disagrees_with_the_model_is_not_used(tiny_model, monkeypatch):
    monkeypatch.setattr(
        FusedDecoder, "logits", lambda self, hidden: 1.1 * hidden @ self._lm_head.weight.t()
    )
    assert isinstance(TransformersEngine(tiny_model).decoder, GenericDecoder)


@pytest.mark.parametrize("make", FUSED + GENERIC)
def test_greedy_equals_generate_token_by_token(make):
    model = build(make)
    prompts = make_prompts(3, 11, 7)
    groups = TransformersEngine(model).generate(prompts, 2, SamplingParams(20, temperature=0))
    for prompt, group in zip(prompts, groups, strict=True):
        expected = model.generate(
            prompt.unsqueeze(0),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :]
        for completion in group:
            assert completion.tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("make", FUSED + GENERIC)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_model_at_the_temperature(make, temperature):
    model = build(make)
    prompts = make_prompts(3, 11, 7)
    params = SamplingParams(30, temperature=temperature, stop_token_ids=tuple(range(8)))
    groups = TransformersEngine(model).generate(prompts, 6, params)
    # Rows must have left at different times, so that their absence is tested as well.
    assert len({len(completion.tokens) for group in groups for completion in group}) > 3
    assert largest_error(model, prompts, groups, temperature) < 1e-5


@pytest.mark.parametrize("make", FUSED)
def test_packed_weights_give_the_models_log_probs_after_an_update_too(make, monkeypatch):
    monkeypatch.setattr(fused_decoder, "_LEAST", 1)
    model = build(make)
    prompts = make_prompts(5, 9, 3)
    params = SamplingParams(12)
    engine = TransformersEngine(model)
    assert isinstance(engine.decoder, FusedDecoder)
    assert largest_error(model, prompts, engine.generate(prompts, 4, params), 1.0) < 1e-5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.update_weights(named_weights(model), version=1)
    assert largest_error(model, prompts, engine.generate(prompts, 4, params), 1.0) < 1e-5


@pytest.mark.parametrize("targets", ["all-linear", ["k_proj", "up_proj", "dense"]])
@pytest.mark.parametrize("least", [1, 2**20])
@pytest.mark.parametrize("make", FUSED + GENERIC[1:])
def test_adapters_beside_the_weights_give_the_models_log_probs(make, least, targets, monkeypatch):
    """Two versions, on layers with and without a bias."""
    monkeypatch.setattr(fused_decoder, "_LEAST", least)
    base, prompts, params = build(make), make_prompts(5, 9), SamplingParams(12)
    engine, sender = TransformersEngine(base), AdapterSender(None)
    before = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    for version in (1, 2):
        torch.manual_seed(version)
        model = make_lora(deepcopy(base), target_modules=targets)
        engine.load(sender.send(Trained(model), version), version)
        assert engine.policy_version == version
        assert largest_error(model, prompts, engine.generate(prompts, 2, params), 1.0) < 2e-5
    assert all(torch.equal(w, before[name]) for name, w in engine.model.named_parameters())
    engine.update_weights(named_weights(base), 3)
    assert largest_error(base, prompts, engine.generate(prompts, 2, params), 1.0) < 2e-5


def layer_with(weight: Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight)
    return layer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("rows", [1, 64, 70])
@pytest.mark.parametrize("least", [1, 2**20])
def test_a_packed_linear_layer_adds_bias_and_residual(dtype, tolerance, rows, least, monkeypatch):
    monkeypatch.setattr(fused_decoder, "_LEAST", least)
    weight = torch.randn(48, 32, dtype=dtype) / 8
    bias = torch.randn(48, dtype=dtype)
    x, residual = torch.randn(rows, 32, dtype=dtype), torch.randn(rows, 48, dtype=dtype)
    for some_bias in (None, bias):
        linear = PackedLinear(weight, some_bias, (layer_with(weight),))
        linear.refresh()
        expected = x.double() @ weight.double().t() + (
            0 if some_bias is None else some_bias.double()
        )
        with torch.inference_mode():
            torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)
            added = linear(x, residual).double()
        torch.testing.assert_close(
            added, expected + residual.double(), rtol=tolerance, atol=tolerance
        )


def test_a_weight_is_packed_again_only_when_it_has_changed(monkeypatch):
    monkeypatch.setattr(fused_decoder, "_LEAST", 1)
    layer = layer_with(torch.ones(4, 4))
    weight = layer.weight
    linear = PackedLinear(weight.detach(), None, (layer,))
    linear.refresh()
    first = linear._packed
    linear.refresh()
    assert linear._packed is first
    with torch.no_grad():
        weight.mul_(2)
    linear.refresh()
    assert linear(torch.ones(1, 4)).tolist() == [[8.0] * 4]


def test_greedy_log_probs_are_those_of_temperature_1(tiny_model):
    prompts = make_prompts(4, 9)
    groups = TransformersEngine(tiny_model).generate(
        prompts, 1, SamplingParams(10, temperature=0, top_k=3, top_p=0.5)
    )
    assert largest_error(tiny_model, prompts, groups, 1.0) < 1e-5


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (8, 0.8)])
def test_filtered_log_probs_are_renormalized_over_what_is_kept(tiny_model, top_k, top_p):
    [prompt] = make_prompts(6)
    params = SamplingParams(16, temperature=1.3, top_k=top_k, top_p=top_p)
    [group] = TransformersEngine(tiny_model).generate([prompt], 4, params)
    for completion in group:
        steps = reference_log_probs(tiny_model, prompt, completion.tokens, 1.3).exp()
        for token, log_prob, probs in zip(
            completion.tokens, completion.log_probs, steps, strict=True
        ):
            ordered, index = probs.sort(descending=True)
            ordered, index = ordered[: top_k or None], index[: top_k or None]
            ordered = ordered / ordered.sum()
            count = int((ordered.cumsum(0) < top_p).sum()) + 1
            probs_left = dict(
                zip(
                    index[:count].tolist(),
                    (ordered[:count] / ordered[:count].sum()).tolist(),
                    strict=True,
                )
            )
            assert int(token) in probs_left
            assert log_prob.exp().item() == pytest.approx(probs_left[int(token)], abs=1e-5)


def test_ragged_prompts_give_what_each_gives_alone(tiny_model):
    prompts = make_prompts(2, 17, 9, 17)
    params = SamplingParams(24, temperature=0, stop_token_ids=(3, 4, 5, 6))
    engine = TransformersEngine(tiny_model)
    together = engine.generate(prompts, 3, params)
    for prompt, group in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], 1, params)
        for completion in group:
            assert completion.tokens.tolist() == alone[0].tokens.tolist()
            torch.testing.assert_close(completion.log_probs, alone[0].log_probs, atol=1e-5, rtol=0)


def test_prompts_computed_in_slices_give_what_one_forward_gives(tiny_model, monkeypatch):
    prompts = make_prompts(2, 17, 9, 17, 5)
    params = SamplingParams(6, temperature=0)
    engine = TransformersEngine(tiny_model)
    whole = engine.generate(prompts, 2, params)
    show_uninitialized_memory(monkeypatch)
    monkeypatch.setattr(fused_decoder, "_PREFILL_TOKENS", 18)
    sliced = engine.generate(prompts, 2, params)
    for a, b in zip(itertools.chain(*whole), itertools.chain(*sliced), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [make_tiny_model, make_mistral, make_qwen3])
def test_both_decoders_draw_the_same_tokens(make):
    model = build(make)
    prompts = make_prompts(3, 12, 7, 7)
    params = SamplingParams(24, top_p=0.95, stop_token_ids=tuple(range(9)))
    engines = TransformersEngine(model), TransformersEngine(model)
    engines[1].decoder = GenericDecoder(engines[1].model)
    results = []
    for engine in engines:
        engine.seed(3)
        results.append(engine.generate(prompts, 5, params))
    for fused, generic in zip(*results, strict=True):
        for a, b in zip(fused, generic, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.finish_reason == b.finish_reason
            torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_near_the_models_own(dtype):
    model = make_tiny_model(initializer_range=0.05).to(dtype)
    prompts = make_prompts(5, 9)
    groups = TransformersEngine(model).generate(prompts, 4, SamplingParams(16))
    assert groups[0][0].log_probs.dtype == torch.float32
    assert largest_error(model, prompts, groups, 1.0) < 2e-2


@pytest.mark.slow
def test_first_tokens_follow_the_models_distribution(tiny_model):
    [prompt] = make_prompts(5)
    engine = TransformersEngine(tiny_model)
    engine.seed(0)
    count = 20000
    [group] = engine.generate([prompt], count, SamplingParams(1, temperature=1.5))
    drawn = (
        torch.stack([completion.tokens[0] for completion in group]).bincount(minlength=261).double()
        / count
    )
    probs = reference_log_probs(tiny_model, prompt, torch.tensor([0]), 1.5)[0].exp()
    # The expected total variation of an exact sampler is about sum(sqrt(2 p (1 - p) / (pi count))) / 2.
    expected = (2 * probs * (1 - probs) / (torch.pi * count)).sqrt().sum() / 2
    assert (drawn - probs).abs().sum() / 2 < 1.3 * expected


def test_equal_seeds_reproduce_a_run_and_others_do_not(tiny_model):
    prompts = make_prompts(4, 9)
    params = SamplingParams(12)
    runs = []
    for seed in (7, 7, 8):
        engine = TransformersEngine(tiny_model)
        engine.seed(seed)
        runs.append([engine.generate(prompts, 4, params) for _ in range(2)])
    assert all(same(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not same(runs[0][0], runs[0][1])
    assert not same(runs[0][0], runs[2][0])


def test_a_restored_state_continues_the_run_exactly(tiny_model):
    prompts = make_prompts(4, 9)
    params = SamplingParams(12)
    engine = TransformersEngine(tiny_model)
    engine.seed(7)
    engine.generate(prompts, 4, params)
    engine.update_weights(tiny_model.named_parameters(), version=3)
    state = engine.state_dict()
    expected = engine.generate(prompts, 4, params)

    resumed = TransformersEngine(tiny_model)
    resumed.load_state_dict(state)
    assert resumed.policy_version == 3
    assert same(resumed.generate(prompts, 4, params), expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*FUSED, make_gpt2])
def test_groups_that_wait_for_room_are_sampled_as_all_at_once(make, monkeypatch):
    monkeypatch.setattr(fused_decoder, "_BLOCK", 5)
    show_uninitialized_memory(monkeypatch)
    model = build(make)
    prompts = make_prompts(4, 9, 2, 12, 6, 9, 3)
    params = SamplingParams(20, stop_token_ids=tuple(range(12)))
    whole = TransformersEngine(model)
    refilled = TransformersEngine(model, kv_cache_bytes=2 * whole.decoder.cache_bytes(12, 4, 20))
    results = []
    for engine in (whole, refilled):
        engine.seed(1)
        results.append(engine.generate(prompts, 4, params))
    assert largest_error(model, prompts, results[1], 1.0) < 1e-5
    for a, b in zip(*(itertools.chain(*result) for result in results), strict=True):
        assert (a.tokens.tolist(), a.finish_reason) == (b.tokens.tolist(), b.finish_reason)
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)


def test_waiting_groups_take_finished_rows_places_within_the_cache(tiny_model, monkeypatch):
    prompts = make_prompts(*[8] * 12)
    params = SamplingParams(40, stop_token_ids=tuple(range(2, 12)))
    engine = TransformersEngine(tiny_model, kv_cache_bytes=100_000)
    added = []
    reports = []
    batch_type = type(engine.decoder.start(1))
    add = batch_type.add
    row_bytes = engine.decoder.cache_bytes(0, 1, 40)
    prompt_bytes = engine.decoder.cache_bytes(8, 0, 40)

    def watch(self, more, n):
        logits = add(self, more, n)
        added.append(
            (
                len(self._group) - len(more) * n,
                len(self._lengths) * prompt_bytes + len(self._group) * row_bytes,
            )
        )
        return logits

    monkeypatch.setattr(batch_type, "add", watch)
    groups = engine.generate(
        prompts, 2, params, lambda i, number, done: reports.append((i, number, len(added)))
    )
    assert added[0][0] == 0
    assert all(
        before > 0 for before, _ in added[1:]
    )  # the slots of some rows, while others continue
    assert max(size for _, size in added) <= 100_000
    assert len({(i, number) for i, number, _ in reports}) == len(reports) == 24
    assert min(additions for _, _, additions in reports) < len(
        added
    )  # reported before the last group had started
    assert all(len(group) == 2 for group in groups)


def test_a_stop_token_ends_a_response_and_is_counted_in(tiny_model):
    prompts = make_prompts(4, 9)
    stops = tuple(range(2, 20))
    groups = TransformersEngine(tiny_model).generate(
        prompts, 8, SamplingParams(15, stop_token_ids=stops)
    )
    reasons = set()
    for completion in itertools.chain(*groups):
        reasons.add(completion.finish_reason)
        body = completion.tokens[:-1].tolist()
        last = int(completion.tokens[-1])
        assert not set(body) & set(stops)
        assert (last in stops) == (completion.finish_reason == "stop")
        assert len(completion.log_probs) == len(completion.tokens)
        assert completion.finish_reason == "stop" or len(completion.tokens) == 15
    assert reasons == {"stop", "length"}


def test_a_stop_token_at_the_last_place_is_a_stop(tiny_model):
    [prompt] = make_prompts(4)
    engine = TransformersEngine(tiny_model)
    [[free]] = engine.generate([prompt], 1, SamplingParams(9, temperature=0))
    last = int(free.tokens[-1])
    place = free.tokens.tolist().index(last)
    params = SamplingParams(place + 1, temperature=0, stop_token_ids=(last,))
    [[stopped]] = engine.generate([prompt], 1, params)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: place + 1].tolist()


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_a_response_ends_with_the_context(make):
    model = build(make)
    prompts = make_prompts(60, 5, 63)
    groups = TransformersEngine(model).generate(prompts, 2, SamplingParams(20))
    lengths = [[len(completion.tokens) for completion in group] for group in groups]
    assert lengths == [[4, 4], [20, 20], [1, 1]]
    assert all(completion.finish_reason == "length" for completion in itertools.chain(*groups))
    assert largest_error(model, prompts, groups, 1.0) < 1e-5


def test_bad_requests_name_field_value_and_fix(tiny_model):
    engine = TransformersEngine(tiny_model)
    params = SamplingParams(4)
    with pytest.raises(ValueError, match=r"prompts\[1\] .*1 to 511 .* got 512: drop or shorten"):
        engine.generate(make_prompts(4, 512), 2, params)
    with pytest.raises(ValueError, match=r"prompts\[0\] .*1 to 511 .* got 0"):
        engine.generate([torch.tensor([], dtype=torch.int64)], 2, params)
    with pytest.raises(ValueError, match=r"prompts\[0\] .*\[0, 261\), got 3 to 261"):
        engine.generate([torch.tensor([3, 261])], 2, params)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        engine.generate(make_prompts(4), 0, params)
    assert engine.generate([], 2, params) == []


@pytest.mark.parametrize("make", [make_tiny_model, make_gpt2])
def test_the_prompt_is_computed_once_for_its_group(make, monkeypatch):
    computed = []
    forward = FusedDecoder.forward

    def count(self, tokens, *args):
        computed.append(len(tokens))
        return forward(self, tokens, *args)

    engine = TransformersEngine(build(make))
    monkeypatch.setattr(FusedDecoder, "forward", count)
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    engine.generate(make_prompts(10, 10), 8, SamplingParams(4))
    assert computed == [20, 16, 16, 16]


@pytest.mark.parametrize("make", FUSED + GENERIC)
def test_new_weights_give_the_new_models_responses(make):
    old, new = build(make), build(make)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    prompts = make_prompts(4, 9)
    params = SamplingParams(8)
    engine, fresh = TransformersEngine(old), TransformersEngine(new)
    engine.seed(2)
    before = engine.generate(prompts, 2, params)
    engine.update_weights(named_weights(new), version=5)
    assert engine.policy_version == 5
    engine.seed(2)
    fresh.seed(2)
    after = engine.generate(prompts, 2, params)
    assert not same(after, before)
    assert same(after, fresh.generate(prompts, 2, params))


def test_a_tied_head_may_be_sent_or_left_out(tiny_model):
    engine = TransformersEngine(tiny_model)
    assert "lm_head.weight" not in dict(tiny_model.named_parameters())
    engine.update_weights(tiny_model.named_parameters(), version=1)
    engine.update_weights(tiny_model.state_dict().items(), version=2)
    assert engine.policy_version == 2


def test_weights_of_another_dtype_are_cast():
    model = make_tiny_model()
    engine = TransformersEngine(make_tiny_model(seed=1).bfloat16())
    engine.update_weights(model.named_parameters(), version=1)
    expected = TransformersEngine(model.bfloat16())
    params = SamplingParams(6, temperature=0)
    assert same(
        engine.generate(make_prompts(5), 1, params), expected.generate(make_prompts(5), 1, params)
    )


def broken(weights: list[tuple[str, Tensor]]):
    yield from weights[:3]
    raise OSError("connection lost")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda w: w[:-1], RuntimeError, r"1 missing \(model\.norm\.weight\)"),
        (
            lambda w: [*w, ("model.extra", torch.zeros(2))],
            RuntimeError,
            r"1 unknown \(model\.extra\)",
        ),
        (
            lambda w: [*w[:-1], (w[-1][0], torch.zeros(7))],
            RuntimeError,
            r"model\.norm\.weight \(7,\) instead of \(32,\)",
        ),
        (broken, OSError, "connection lost"),
    ],
)
def test_a_failed_update_leaves_all_as_it_was(tiny_model, spoil, error, message):
    prompts = make_prompts(4, 9)
    params = SamplingParams(8)
    engine = TransformersEngine(tiny_model)
    engine.update_weights(tiny_model.named_parameters(), version=4)
    engine.seed(1)
    before = engine.generate(prompts, 2, params)
    with pytest.raises(error, match=message):
        engine.update_weights(spoil(list(make_tiny_model(seed=9).named_parameters())), version=5)
    assert engine.policy_version == 4
    engine.seed(1)
    assert same(engine.generate(prompts, 2, params), before)


def test_training_the_model_does_not_touch_the_engine(tiny_model):
    prompts = make_prompts(4)
    params = SamplingParams(8)
    engine = TransformersEngine(tiny_model)
    engine.seed(1)
    before = engine.generate(prompts, 2, params)
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.zero_()
    engine.seed(1)
    assert same(engine.generate(prompts, 2, params), before)


def test_each_response_is_told_when_it_ends(tiny_model):
    engine = TransformersEngine(tiny_model)
    engine.seed(0)
    assert_each_response_is_told_when_it_ends(engine, make_prompts(4, 7), tuple(range(2, 30)))


def test_completions_can_be_used_by_autograd(tiny_model):
    [[completion]] = TransformersEngine(tiny_model).generate(make_prompts(4), 1, SamplingParams(5))
    weight = torch.ones(5, requires_grad=True)
    (weight * completion.log_probs).sum().backward()
    assert torch.equal(weight.grad, completion.log_probs)


def test_a_closed_engine_refuses_every_call(tiny_model):
    engine = TransformersEngine(tiny_model)
    engine.close()
    engine.close()
    calls = [
        lambda: engine.generate(make_prompts(4), 1, SamplingParams(5)),
        lambda: engine.update_weights([], 1),
        lambda: engine.seed(1),
        lambda: engine.state_dict(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_inverting_the_cdf_finds_the_token_over_many_blocks():
    probs = torch.rand(64, 1000, generator=torch.Generator().manual_seed(0)) ** 8
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cumulative = probs.double().cumsum(-1)
    expected = (cumulative <= uniform.unsqueeze(-1) * cumulative[:, -1:]).sum(-1)
    assert invert_cdf(probs, uniform).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [7, 256, 257, 2000])
def test_the_ends_of_the_unit_interval_never_give_an_impossible_token(vocab_size):
    probs = torch.zeros(4, vocab_size)
    probs[:2, 3], probs[2:, vocab_size // 2 : vocab_size // 2 + 2] = 1.0, 0.5
    uniform = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53], dtype=torch.float64)
    assert invert_cdf(probs, uniform).tolist() == [3, 3, vocab_size // 2, vocab_size // 2 + 1]


def test_top_k_top_p_and_min_p_keep_what_a_hand_computation_keeps():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    probs = sampling_probs(logits, SamplingParams(1, top_k=2))
    torch.testing.assert_close(probs, torch.tensor([[0, 4 / 7, 0, 3 / 7]]))
    probs = sampling_probs(logits, SamplingParams(1, top_p=0.75))
    torch.testing.assert_close(probs, torch.tensor([[0, 4 / 9, 2 / 9, 3 / 9]]))
    probs = sampling_probs(logits, SamplingParams(1, min_p=0.6))
    torch.testing.assert_close(probs, torch.tensor([[0, 4 / 7, 0, 3 / 7]]))
    probs = sampling_probs(
        logits, SamplingParams(1, min_p=0.3, temperature=0.5)
    )  # of 16/30, at least 4.8/30
    torch.testing.assert_close(probs, torch.tensor([[0, 16 / 25, 0, 9 / 25]]))
    probs = sampling_probs(logits, SamplingParams(1, temperature=0.5))
    torch.testing.assert_close(probs, torch.tensor([[1 / 30, 16 / 30, 4 / 30, 9 / 30]]))
    token, log_prob, *_ = sample(logits, SamplingParams(1, temperature=0), torch.zeros(1))
    assert token.tolist() == [1]
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.4]))
