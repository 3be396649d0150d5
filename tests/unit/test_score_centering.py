"""Score centering: the mean score under the sampling policy, by hand, against autograd and in the loss."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from tests.support.configs import compose_config
from tests.support.losses import Table, make_batch, rows_of
from tests.support.models import make_tiny_model
from tests.support.runs import SMALL, run, steps
from torchrl_grpo import functional as F
from torchrl_grpo import keys
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.models.head import chunked_log_probs
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

INF = torch.inf
BOUNDS: list[dict[str, Any]] = [
    {"bound": "none", "cap": 5.0, "floor": 0.0},
    {"bound": "truncate", "cap": 1.2, "floor": 0.7},
    {"bound": "mask", "cap": 1.3, "floor": 0.6},
]


@pytest.mark.parametrize(
    ("bounds", "weights"),
    [
        (BOUNDS[0], [1.0, 1.0, 1.0]),
        (BOUNDS[1], [1.2, 0.8, 0.7]),
        (BOUNDS[2], [0.0, 0.8, 0.0]),
    ],
)
def test_shares_by_hand(bounds: Any, weights: list[float]) -> None:
    """Ratios of 2, 0.8 and 0.5, and no fourth token."""
    q = torch.tensor([[0.2, 0.5, 0.3, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.4, 0.4, 0.15, 1.0]], dtype=torch.float64)
    got = F.centering_coefficients(p.log(), q.log(), **bounds)
    expected = q * torch.tensor([[*weights, 0.0]]).double()
    torch.testing.assert_close(got, expected)


def random_head(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kept = torch.stack([torch.randperm(30, generator=generator)[:6] for _ in range(7)]).int()
    kept[1, 4:], kept[5, 1:] = -1, -1
    sample = normal(7, 6).masked_fill(kept < 0, -INF).log_softmax(-1)
    targets = kept.gather(1, torch.zeros(7, 1, dtype=torch.int64))[:, 0].long()
    return {
        "hidden": normal(7, 4), "weight": normal(30, 4), "bias": normal(30),
        "kept": kept, "sample": sample, "targets": targets, "slope": normal(3, 7),
    }  # fmt: skip


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_score_is_that_of_autograd(bounds: Any, seed: int) -> None:
    data = random_head(seed)
    inputs = [data[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    scores = chunked_log_probs(
        *inputs[:2], data["targets"], bias_V=inputs[2], kept=data["kept"].unique(return_inverse=True), temperature=0.7,
        sample_NK=data["sample"], centering=partial(F.centering_coefficients, **bounds),
        max_chunk_elements=50,
    )  # fmt: skip
    sum((part * slope).sum() for part, slope in zip(scores, data["slope"], strict=True)).backward()
    got = [part.grad.clone() for part in inputs]

    for part in inputs:
        part.grad = None
    logits = torch.nn.functional.linear(*inputs) / 0.7
    of_kept = logits.gather(1, data["kept"].clamp(min=0).long())
    log_p = of_kept.masked_fill(data["kept"] < 0, -INF).log_softmax(-1)
    exists = data["kept"] >= 0
    ratio = (log_p - data["sample"]).exp().detach()
    weight = torch.ones_like(ratio)
    if bounds["bound"] == "truncate":
        weight = ratio.clamp(0.7, 1.2)
    elif bounds["bound"] == "mask":
        weight = torch.where((ratio >= 0.6) & (ratio <= 1.3), ratio, 0.0)
    share = torch.where(exists, data["sample"].exp() * weight, 0.0)
    log_p = torch.where(exists, log_p, 0.0)
    entropy = -torch.where(exists, log_p.exp() * log_p, 0.0).sum(-1)
    expected = [log_p[:, 0], entropy, (share * log_p).sum(-1)]
    for part, value in zip(scores, expected, strict=True):
        torch.testing.assert_close(part, value)
    sum(
        (part * slope).sum() for part, slope in zip(expected, data["slope"], strict=True)
    ).backward()
    for gradient, part in zip(got, inputs, strict=True):
        torch.testing.assert_close(gradient, part.grad)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_the_update_of_a_prefix_has_a_mean_of_0(bounds: Any) -> None:
    """The mean is over all tokens that its policy may sample there, whatever the weight."""
    data = random_head(0)
    hidden = data["hidden"][:1].expand(6, 4)
    weight = data["weight"].requires_grad_()
    kept = data["kept"][:1].expand(6, 6)
    near = (hidden[0] @ weight[kept[0].long()].T).detach() + data["slope"][0, :6]
    sample = near.log_softmax(-1).expand(6, 6)
    centering = partial(F.centering_coefficients, **bounds)
    log_prob, _, centered = chunked_log_probs(
        hidden,
        weight,
        kept[0].long(),
        kept=kept.unique(return_inverse=True),
        sample_NK=sample,
        centering=centering,
    )
    q = sample[0].exp()
    log_ratio = (log_prob.detach() - sample[0])[:, None]
    own = F.bounded_weight(log_ratio[:, 0], **bounds)
    (plain,) = torch.autograd.grad((q * own * log_prob).sum(), weight, retain_graph=True)
    (whole,) = torch.autograd.grad((q * (own * log_prob - centered)).sum(), weight)
    assert whole.abs().max() < 1e-12 < 1e-3 < plain.abs().max()


def rollout() -> Any:
    """Return a batch that another model sampled than the trained one: two groups of three."""
    engine = TransformersEngine(make_tiny_model(seed=1))
    engine.seed(0)
    params = SamplingParams(
        9, temperature=0.7, top_k=8, top_p=0.95, return_kept=True, return_kept_log_probs=True
    )
    prompts = [torch.arange(2, 7)] * 3 + [torch.arange(30, 33)] * 3
    batch = GenerationPolicy(engine, params)(
        lazy_stack([TensorDict({keys.PROMPT: prompt}) for prompt in prompts])
    )
    for number, row in enumerate(batch.unbind(0)):
        row[keys.ADVANTAGE] = torch.tensor([number - 2.0])
    return batch


def test_an_engine_lists_the_log_probs_of_what_it_kept() -> None:
    for row in rollout().unbind(0):
        kept, of_kept = row[keys.KEPT], row[keys.KEPT_LOG_PROBS]
        torch.testing.assert_close(of_kept.logsumexp(-1), torch.zeros(len(kept)), atol=1e-5, rtol=0)
        assert torch.equal(of_kept.isneginf(), kept < 0)
        sampled = row[keys.FULL][row[keys.ASSISTANT_MASK]]
        own = of_kept[kept == sampled[:, None]]
        log_probs = row[keys.LOG_PROBS][row[keys.ASSISTANT_MASK]]
        torch.testing.assert_close(own, log_probs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_the_loss_subtracts_the_mean_score_of_each_token(bounds: Any) -> None:
    """Its gradient is that of A (w log p - sum of q w log p), computed by a plain loop."""
    batch = rollout()
    model = make_tiny_model(seed=1).double()
    generator = torch.Generator().manual_seed(0)
    for part in model.parameters():
        noise = torch.randn(part.shape, generator=generator, dtype=part.dtype)
        part.data += 0.1 * part.std() * noise
    scored = TokenScorer(model, temperature=0.7)(batch.copy())[keys.CUR_LOG_PROBS].detach()
    mask = batch.get(keys.ASSISTANT_MASK, as_padded_tensor=True)
    sampled = batch.get(keys.LOG_PROBS, as_padded_tensor=True)
    drift = rows_of(mask).mean((scored - sampled)[mask]).abs()
    bound = drift.sort().values[2:4].mean().exp().item()  # half of the sequences are beyond it
    weight = {f"behaviour_{name.replace('bound', 'weight')}": bounds[name] for name in bounds}
    loss = GRPOLoss(
        TokenScorer(model, temperature=0.7), proximal="current", score_centering=True,
        rejection={"geometric": bound}, **weight,
    )  # fmt: skip
    out = loss(batch)
    assert set(out.keys()) >= {"loss_objective", "loss_score_centering", *loss.out_keys}
    (out["loss_objective"] + out["loss_score_centering"]).backward()
    got = {name: part.grad.clone() for name, part in model.named_parameters()}
    model.zero_grad()

    total = torch.zeros((), dtype=torch.float64)
    rejected = 0
    for row in batch.unbind(0):
        places = row[keys.ASSISTANT_MASK].nonzero().flatten().tolist()
        logits = model(input_ids=row[keys.FULL][None]).logits[0] / 0.7
        sequence = torch.zeros((), dtype=torch.float64)
        gaps = []
        for number, t in enumerate(places):
            ids = [token for token in row[keys.KEPT][number].tolist() if token >= 0]
            log_p = logits[t - 1, ids].log_softmax(-1)
            log_q = row[keys.KEPT_LOG_PROBS][number, : len(ids)].double()
            own = ids.index(int(row[keys.FULL][t]))
            gaps.append((log_p[own] - row[keys.LOG_PROBS][t]).item())
            ratio = (log_p - log_q).detach().exp()
            w = {
                "none": torch.ones_like(ratio),
                "truncate": ratio.clamp(0.7, 1.2),
                "mask": ratio * ((ratio >= 0.6) & (ratio <= 1.3)),
            }[bounds["bound"]]
            sequence = sequence + w[own] * log_p[own] - (log_q.exp() * w * log_p).sum()
        mean = sum(gaps) / len(gaps)
        keeps = abs(mean) <= math.log(bound)
        rejected += not keeps
        total = total - keeps * row[keys.ADVANTAGE].item() * sequence / len(places) / len(batch)
    total.backward()
    assert rejected == 3
    for name, part in model.named_parameters():
        torch.testing.assert_close(got[name], part.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_run_centers_its_scores(tmp_path: Path) -> None:
    """The engine is in bfloat16; with an equal engine the mean score is 0 and its value the
    entropy.
    """
    words = (
        "policy.score_centering=true",
        "policy.proximal=recomputed",
        "train.optim_batch_size=16",
    )
    words += ("inference_model.top_k=20", "policy.behaviour_weight=truncate")
    rows = run(tmp_path, *words, "inference_model.dtype=bfloat16", steps(2))
    rows = [row for row in rows if "train/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert torch.tensor(row["train/loss_score_centering"]).isfinite()
        assert row["train/ratio_mean"] == 1.0


CENTERED = (
    "policy.score_centering=true",
    "policy.proximal=recomputed",
    "inference_model.top_k=20",
    "train.optim_batch_size=16",
)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((*CENTERED, "policy.proximal=behaviour"), "policy.proximal"),
        ((*CENTERED, "train.epochs=2"), "train.epochs"),
        (
            (*CENTERED, "policy.behaviour_weight=mask", "policy.behaviour_level=sequence"),
            "policy.behaviour_level",
        ),
        ((*CENTERED, "policy.rejection={token_ratio: 2}"), "policy.rejection.token_ratio"),
    ],
)
def test_what_cannot_be_centered_is_refused(words: tuple[str, ...], key: str) -> None:
    compose_config(*SMALL, *CENTERED, "policy.rejection={geometric: 1.1}")
    with pytest.raises(ConfigError) as error:
        compose_config(*SMALL, *words)
    assert key in str(error.value)


def test_a_loss_that_is_not_on_policy_refuses_it() -> None:
    with pytest.raises(ValueError, match="proximal"):
        GRPOLoss(Table(make_batch(0)[0]), score_centering=True)
    with pytest.raises(ValueError, match="return_kept"):
        SamplingParams(4, top_k=3, return_kept_log_probs=True)
