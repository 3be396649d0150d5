"""Training with truncated sampling: log-probs of trainer and engine are over the kept tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tests.support.models import make_tiny_model
from tests.support.runs import run, steps
from torchrl_grpo import keys
from torchrl_grpo.generation.base import Completion, SamplingParams, cut_off
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.sampling import sample, sampling_probs
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.generation.vllm_answers import kept_tokens
from torchrl_grpo.models.head import chunked_log_probs
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives.grpo import GRPOLoss
from torchrl_grpo.transforms.kl_scoring import KLScoring

PARAMS = SamplingParams(
    12, temperature=0.7, top_k=8, top_p=0.9, min_p=0.02, stop_token_ids=(3, 5), return_kept=True
)


def rollout(params: SamplingParams = PARAMS) -> tuple[torch.nn.Module, lazy_stack]:
    """Return a model, and a batch that an engine sampled with it: two groups of three."""
    model = make_tiny_model(seed=1)
    engine = TransformersEngine(model)
    engine.seed(0)
    prompts = [torch.arange(2, 7)] * 3 + [torch.arange(30, 33)] * 3
    rows = [TensorDict({keys.PROMPT: prompt}) for prompt in prompts]
    batch = lazy_stack(rows)
    return model, GenerationPolicy(engine, params)(batch)


@torch.no_grad()
def log_probs_by_hand(model, row: TensorDict, params: SamplingParams) -> tuple[list, list]:
    """Return log-probs of a row's sampled tokens under the truncated distribution, and the tokens
    that it keeps, from one pass over the whole row.
    """
    full, mask = row[keys.FULL], row[keys.ASSISTANT_MASK]
    logits = model(input_ids=full[None]).logits[0].double() / params.temperature
    values, sets = [], []
    for place in mask.nonzero().squeeze(-1).tolist():
        probs = logits[place - 1].softmax(-1)
        order = probs.argsort(descending=True)[: params.top_k].tolist()
        order = [token for token in order if probs[token] >= params.min_p * probs.max()]
        mass = 0.0
        kept = []
        total = sum(float(probs[token]) for token in order)
        for token in order:
            if mass < params.top_p:
                kept.append(token)
            mass += float(probs[token]) / total
        masked = torch.full_like(probs, -torch.inf)
        masked[kept] = logits[place - 1][kept]
        values.append(float(masked.log_softmax(-1)[full[place]]))
        sets.append(set(kept))
    return values, sets


def test_engine_and_trainer_have_the_log_probs_of_one_masked_pass():
    model, batch = rollout()
    scored = TokenScorer(model, temperature=0.7)(batch.copy())[keys.CUR_LOG_PROBS]
    smaller = 0
    for row, trained in zip(batch.unbind(0), scored, strict=True):
        expected, sets = log_probs_by_hand(model, row, PARAMS)
        mask = row[keys.ASSISTANT_MASK]
        kept = [{token for token in ids if token >= 0} for ids in row[keys.KEPT].tolist()]
        assert kept == sets
        smaller += sum(len(ids) < PARAMS.top_k for ids in kept)
        expected = torch.tensor(expected)
        torch.testing.assert_close(row[keys.LOG_PROBS][mask], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(trained[: len(mask)][mask], expected, rtol=0, atol=1e-5)
    assert smaller  # rows with -1 existed


def test_the_ratio_and_both_kls_of_the_first_step_are_1_and_0():
    model, batch = rollout()
    for row in batch.unbind(0):
        row[keys.ADVANTAGE] = torch.tensor([1.0])
    scorer = TokenScorer(model, temperature=0.7)
    out = GRPOLoss(scorer, kl_to_ref_coeff=0.1)(KLScoring(scorer)(batch))
    assert float(out["ratio_mean"]) == pytest.approx(1, abs=1e-5)
    for name in ("kl_k1_to_inference", "kl_k3_to_inference", "kl_k1_to_ref", "kl_k3_to_ref"):
        assert float(out[name]) == pytest.approx(0, abs=1e-5)
    # The result of the trainer's full distribution would be different.
    whole = GRPOLoss(scorer)(batch.exclude(keys.KEPT))
    assert float(whole["ratio_mean"]) < 0.95


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("most", [1, 200, None])
def test_values_and_gradients_of_kept_tokens_are_those_of_masked_logits(bias, most):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden = random(11, 6)
    weight = random(40, 6)
    bias_V = random(40) if bias else None
    kept = torch.stack([torch.randperm(40, generator=generator)[:5] for _ in range(11)]).int()
    targets = kept[torch.arange(11), torch.arange(11) % 3].long()
    kept[::2, 3:] = -1
    leaves = [leaf for leaf in (hidden, weight, bias_V) if leaf is not None]
    slopes = torch.randn(2, 11, generator=generator, dtype=torch.float64)

    log_probs, entropies = chunked_log_probs(
        hidden,
        weight,
        targets,
        bias_V=bias_V,
        kept=kept.unique(return_inverse=True),
        temperature=0.7,
        max_chunk_elements=most,
    )
    got = torch.autograd.grad((slopes[0] * log_probs + slopes[1] * entropies).sum(), leaves)

    logits = torch.nn.functional.linear(hidden, weight, bias_V) / 0.7
    outside = torch.ones(11, 40, dtype=torch.bool)
    for row, ids in enumerate(kept.tolist()):
        outside[row, [token for token in ids if token >= 0]] = False
    log_p = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(outside, 0)).sum(-1)
    chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, chosen)
    torch.testing.assert_close(entropies, entropy)
    expected = torch.autograd.grad((slopes[0] * chosen + slopes[1] * entropy).sum(), leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_target_that_is_not_kept_has_no_probability():
    kept = torch.tensor([[0, 1, -1]]).unique(return_inverse=True)
    log_probs, _ = chunked_log_probs(
        torch.ones(1, 2),
        torch.ones(4, 2),
        torch.tensor([3]),
        kept=kept,
    )
    assert log_probs.tolist() == [-torch.inf]


def test_all_kept_tokens_give_what_the_whole_vocabulary_gives():
    hidden, weight = torch.randn(7, 8), torch.randn(30, 8)
    targets = torch.arange(7)
    whole = chunked_log_probs(hidden, weight, targets)
    kept = chunked_log_probs(
        hidden,
        weight,
        targets,
        kept=torch.arange(30).expand(7, 30).int().unique(return_inverse=True),
    )
    for one, other in zip(kept, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_of_tied_tokens_as_many_are_kept_as_top_k_says():
    logits = torch.zeros(1, 6)
    params = SamplingParams(1, top_k=2, return_kept=True)
    draws = [sample(logits, params, torch.tensor([u])) for u in (0.0, 0.4, 0.6, 0.999)]
    assert (sampling_probs(logits, params) > 0).sum() == 6
    kept = {tuple(ids[0].tolist()) for _, _, ids, _ in draws}
    assert len(kept) == 1 and {int(token) for token, *_ in draws} == {*next(iter(kept))}
    for _, log_prob, *_ in draws:
        assert float(log_prob.exp()) == pytest.approx(0.5)


def test_a_vocabulary_smaller_than_top_k_is_padded():
    params = SamplingParams(1, top_k=5, return_kept=True)
    _, _, kept, _ = sample(torch.tensor([[0.0, 1.0, 0.5]]), params, torch.tensor([0.5]))
    assert kept.tolist() == [[1, 2, 0, -1, -1]]


def test_a_response_that_is_cut_off_is_cut_with_its_kept_tokens():
    kept = torch.arange(8, dtype=torch.int32).view(4, 2)
    done = Completion(torch.arange(4), torch.zeros(4), "stop", kept=kept)
    assert torch.equal(cut_off(done, 2, None).kept, kept[:2])


def test_tokens_with_a_probability_are_those_kept():
    """vLLM returns the log-prob of the sampled token, then those of the most likely ones."""
    inf = torch.inf
    ids = torch.tensor([[7, 4, 7, 2], [2, 4, 2, 9], [8, 1, 3, 5], [6, 6, 0, 1]], dtype=torch.int32)
    log_probs = torch.tensor(
        [[-1.0, -0.5, -1, -3], [-1, -0.5, -1, -inf], [-2, -1, -2, -2], [0.0, 0, -9999, -9999]]
    )
    kept, of_kept = kept_tokens(ids, log_probs)
    # The third ties with the last one and replaces it.
    assert kept.tolist() == [[4, 7, 2], [4, 2, -1], [1, 3, 8], [6, -1, -1]]
    assert kept.dtype == torch.int32
    assert of_kept.tolist() == [
        [-0.5, -1, -3], [-0.5, -1, -inf], [-1, -2, -2], [0, -inf, -inf]
    ]  # fmt: skip


def test_without_truncation_nothing_travels():
    _, batch = rollout(SamplingParams(4))
    assert batch[0].get(keys.KEPT, None) is None
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(4, return_kept=True)


TRUNCATED = ("inference_model.top_k=20", "inference_model.top_p=0.9")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("policy.proximal=recomputed", "train.mixed_precision=bf16"),
        ("env.max_turns=2", "env.retry_prompt=Again."),
    ],
)
def test_a_truncated_run_begins_on_policy(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    rows = run(tmp_path, *TRUNCATED, "inference_model.temperature=0.9", *overrides, steps(2))
    rows = [row for row in rows if "train/loss" in row]
    close = 1e-2 if "train.mixed_precision=bf16" in overrides else 1e-4
    for row in rows:
        assert row["train/ratio_mean"] == pytest.approx(1, abs=close)
        assert row["train/kl_k3_to_inference"] == pytest.approx(0, abs=close)
        assert 1 <= row["rollout/kept_tokens"] < 20
        assert 0 <= row["rollout/kept_tokens_capped"] < 0.5
    assert rows[0].get("train/kl_k3_to_ref", 0) == pytest.approx(0, abs=close)


@pytest.mark.slow
def test_an_exact_truncated_run_has_a_ratio_of_1_to_the_last_bit(tmp_path: Path) -> None:
    rows = run(tmp_path, *TRUNCATED, "inference_model.exact=true", steps(2))
    kls = [row["train/kl_k3_to_inference"] for row in rows if "train/loss" in row]
    assert kls == [0.0, 0.0]
