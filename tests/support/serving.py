"""An asynchronous vLLM engine on any device: many callers, and weights that change while it
samples.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.finished import assert_each_response_is_told_when_it_ends
from tests.support.models import response_log_probs
from tests.support.prompts import PROMPTS
from tests.support.stops import assert_stop_strings_end_responses
from tests.support.waiting import until
from tests.support.weights import mismatch
from torchrl_grpo.generation.base import Completion, SamplingParams
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights import named_weights

CONTEXT = 512


LONG = SamplingParams(max_new_tokens=200)
SHORT = SamplingParams(max_new_tokens=12)


def make_model(seed: int) -> nn.Module:
    """Return the starter model with noise that is large enough to tell its log-probs apart."""
    model = AutoModelForCausalLM.from_pretrained(starter_path()).float().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0)
    return model


def errors(model: nn.Module, prompt: Tensor, done: Completion) -> Tensor:
    """Return the differences [T] of a completion's log-probs from those of a model."""
    full = torch.cat([prompt, done.tokens])
    return (done.log_probs - response_log_probs(model)([full], [len(prompt)])[0].detach()).abs()


def start(
    engine: AsyncVLLMEngine, pool: ThreadPoolExecutor, params: SamplingParams
) -> list[Future]:
    """Start calls from four threads and return once each has sampled some tokens."""
    calls = [pool.submit(engine.generate, [prompt], 4, params) for prompt in PROMPTS]
    states = engine._llm.output_processor.request_states
    until(
        lambda: (
            len(states) == 16
            and all(s.detokenizer.num_output_tokens() > 5 for s in states.values())
        )
    )
    return calls


def calls_from_four_threads_have_the_trainers_log_probs(
    engine: AsyncVLLMEngine, pool: ThreadPoolExecutor, rounding: float
) -> None:
    """Check log-probs, versions, greedy tokens, and prompts that do not fit."""
    model = make_model(1)
    engine.update_weights(named_weights(model), 1)
    assert engine.policy_version == 1
    for prompt, call in zip(PROMPTS, start(engine, pool, LONG), strict=True):
        (group,) = call.result()
        assert len(group) == 4
        for done in group:
            assert errors(model, prompt, done).max() < rounding
            assert done.versions.tolist() == [1] * 200 and done.versions.dtype == torch.int64
    (group,) = engine.generate([PROMPTS[0]], 3, SamplingParams(max_new_tokens=8, temperature=0))
    best = model(torch.cat([PROMPTS[0], group[0].tokens])[None]).logits[0, 99:-1].argmax(-1)
    assert [done.tokens.tolist() for done in group] == [best.tolist()] * 3
    assert engine.generate([], 2, SHORT) == []
    with pytest.raises(ValueError, match=r"context of 512 tokens, .* 512"):
        engine.generate([torch.zeros(512, dtype=torch.int64)], 2, SHORT)


def wait_lets_running_calls_end_and_holds_new_ones_back(
    engine: AsyncVLLMEngine, pool: ThreadPoolExecutor, rounding: float
) -> None:
    """Check that every response is of one version."""
    engine._in_flight, before = "wait", engine.restarted_requests
    old, new = make_model(2), make_model(3)
    engine.update_weights(named_weights(old), 2)
    calls = start(engine, pool, LONG)
    with ThreadPoolExecutor(2) as others:
        update = others.submit(engine.update_weights, named_weights(new), 3)
        until(lambda: not engine._admitting.is_set())
        late = others.submit(engine.generate, [PROMPTS[0]], 2, SHORT)
        for prompt, call in zip(PROMPTS, calls, strict=True):
            for done in call.result()[0]:
                assert done.versions.unique().tolist() == [2]
                assert errors(old, prompt, done).max() < rounding < errors(new, prompt, done).max()
        for done in late.result()[0]:
            assert (
                done.versions.unique().tolist() == [3]
                and errors(new, PROMPTS[0], done).max() < rounding
            )
        update.result()
    assert engine.restarted_requests == before


def keep_goes_on_with_new_weights_and_each_token_has_its_version(
    engine: AsyncVLLMEngine, pool: ThreadPoolExecutor, rounding: float
) -> None:
    """Check each token's log-prob under the weights of its version."""
    engine._in_flight = "keep"
    models = {version: make_model(version) for version in (4, 5, 6)}
    engine.update_weights(named_weights(models[4]), 4)
    calls = start(engine, pool, LONG)
    engine.update_weights(named_weights(models[5]), 5)
    assert not any(call.done() for call in calls)
    engine.update_weights(named_weights(models[6]), 6)
    gaps, versions = [], []
    for prompt, call in zip(PROMPTS, calls, strict=True):
        for done in call.result()[0]:
            assert (done.versions.diff() >= 0).all()
            versions.append(done.versions)
            gaps.append(
                torch.stack([errors(models[version], prompt, done) for version in (4, 5, 6)])
            )
    of, which = torch.cat(gaps, 1), torch.cat(versions)
    # Keys and values were recomputed, so every token's log-prob is that of one set of weights and
    # of no other.
    assert of.gather(0, which[None] - 4).max() < rounding
    assert {4, 6} <= set(which.tolist())
    for version in which.unique().tolist():
        others = [i for i in range(3) if i != version - 4]
        assert of[others][:, which == version].amax(1).min() > 0.1
    assert (
        mismatch(engine, response_log_probs(models[6]), PROMPTS, SHORT)[1] < rounding
    )  # no prefix computed with old weights


def abort_starts_running_requests_again_and_counts_them(
    engine: AsyncVLLMEngine, pool: ThreadPoolExecutor, rounding: float
) -> None:
    """Check that every response is of the new version."""
    engine._in_flight = "abort"
    old, new = make_model(7), make_model(8)
    engine.update_weights(named_weights(old), 7)
    before = engine.restarted_requests
    calls = start(engine, pool, LONG)
    engine.update_weights(named_weights(new), 8)
    for prompt, call in zip(PROMPTS, calls, strict=True):
        for done in call.result()[0]:
            assert len(done.tokens) == 200 and done.versions.unique().tolist() == [8]
            assert errors(new, prompt, done).max() < rounding
    assert engine.restarted_requests - before == 4


def stop_strings_and_each_response_are_told(
    engine: AsyncVLLMEngine, pool: ThreadPoolExecutor, rounding: float
) -> None:
    """Check stop strings and reports of finished responses, with any weights."""
    engine._in_flight = "wait"
    assert_stop_strings_end_responses(engine, PROMPTS[:2], repeats=False)
    assert_each_response_is_told_when_it_ends(engine, PROMPTS, tuple(range(2, 30)), in_order=False)


SERVES = (
    stop_strings_and_each_response_are_told,
    calls_from_four_threads_have_the_trainers_log_probs,
    wait_lets_running_calls_end_and_holds_new_ones_back,
    keep_goes_on_with_new_weights_and_each_token_has_its_version,
    abort_starts_running_requests_again_and_counts_them,
)
"""Each takes an engine, a pool of threads, and how far its log-probs may be off; in any order."""
