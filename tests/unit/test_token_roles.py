"""Rules over the whole batch for single tokens (Clip-Cov, KL-Cov, top entropies); coefficient of
the entropy bonus.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import lazy_stack
from torch import Tensor

from tests.support.configs import compose_config
from tests.support.losses import Table, make_batch, tokens_of, total
from tests.support.models import make_tiny_model
from tests.support.training import make_batch as make_sequences
from tests.support.training import make_trainer
from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.config import ConfigError
from torchrl_grpo.learner.checkpoint import Checkpointer, read_checkpoint
from torchrl_grpo.learner.optimizer import EntropyControl
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import (
    ClipCov,
    ClipCovLoss,
    GRPOLoss,
    KLCov,
    KLCovLoss,
    Tokens,
    TopEntropy,
)

LOG_PROB = torch.tensor([-1.0, -4.0, -2.0, -5.0, -3.0]).double()
ADVANTAGE = torch.tensor([3.0, 3.0, -2.0, -2.0, -2.0]).double()
# Means of -3 and 0: covariances of 6 and -3; -2, 4 and 0.


def sampled() -> Tokens:
    return tokens_of(2, 3, sample_log_prob=LOG_PROB, advantage=ADVANTAGE)


@pytest.mark.parametrize(
    ("bounds", "share", "expected"),
    [
        ((-10.0, 10.0), 1.0, [[1, 1], [1, 1, 1]]),
        ((-2.5, 5.0), 1.0, [[0, 0], [1, 1, 1]]),
        ((3.9, 4.1), 1.0, [[0, 0], [0, 1, 0]]),
        ((3.9, 6.0), 1.0, [[0, 0], [0, 1, 0]]),  # a bound is outside
        ((6.0, 9.0), 1.0, [[0, 0], [0, 0, 0]]),
        ((5.0, 9.0), 0.01, [[1, 0], [0, 0, 0]]),  # at least one
    ],
)
def test_tokens_of_clip_cov_by_hand(
    bounds: tuple[float, float], share: float, expected: list[list[int]]
) -> None:
    out = ~ClipCov(share, *bounds)(sampled())
    assert [part.int().tolist() for part in out.split([2, 3])] == expected


@pytest.mark.parametrize(("share", "count"), [(0.1, 1), (0.59, 2), (0.61, 3), (1.0, 5)])
def test_clip_cov_draws_at_most_its_share_and_always_the_same(share: float, count: int) -> None:
    drawn = [~ClipCov(share, -9, 9)(sampled()) for _ in range(2)]
    assert drawn[0].sum() == count
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.01, [[1, 0], [0, 0, 0]]),
        (0.4, [[1, 0], [0, 1, 0]]),
        (0.79, [[1, 0], [0, 1, 1]]),
        (1.0, [[1, 1], [1, 1, 1]]),
    ],
)
def test_tokens_of_kl_cov_by_hand(share: float, expected: list[list[int]]) -> None:
    out = KLCov(share).prepare(sampled())["penalized"]
    assert [part.int().tolist() for part in out.split([2, 3])] == expected


def test_a_batch_without_tokens_has_none_to_treat_apart() -> None:
    nothing = sampled().take(torch.zeros(5, dtype=torch.bool))
    nothing["prox_entropy"] = nothing["advantage"]
    assert ClipCov(1.0, -9, 9)(nothing).tolist() == []
    assert KLCov(1.0).prepare(nothing)["penalized"].tolist() == []
    assert TopEntropy(0.5)(nothing) is True


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, [0.5, 1.0, 2.0, 3.0, 3.0]),
        (0.75, [1.0, 2.0, 3.0, 3.0]),  # the quantile 1/4 is the second of five
        (0.74, [2.0, 3.0, 3.0]),  # 1.04
        (0.5, [2.0, 3.0, 3.0]),
        (0.49, [3.0, 3.0]),
        (1e-9, [3.0, 3.0]),
    ],
)
def test_top_entropies_by_hand(share: float, expected: list[float]) -> None:
    entropy = torch.tensor([3.0, 0.5, 1.0, 3.0, 2.0])
    out = TopEntropy(share)(tokens_of(prox_entropy=entropy))
    assert sorted((entropy if out is True else entropy[out]).tolist()) == expected


def test_the_penalty_of_kl_cov_by_hand() -> None:
    ratio = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64, requires_grad=True)
    penalized = torch.tensor([True, True, False])
    advantage = torch.full((3,), 3.0).double()
    out = KLCov(penalty=0.1)(tokens_of(ratio=ratio, advantage=advantage, penalized=penalized))
    log2 = 0.1 * math.log(2)
    torch.testing.assert_close(out, torch.tensor([6 - log2, 1.5 - log2, 12.0]).double())
    out.sum().backward()
    assert ratio.grad.tolist() == [3 - 0.05, 3 + 0.2, 3.0]


# In the losses


def apart(rows: list[Any], number: int) -> list[tuple[int, int]]:
    """Return this many tokens of the largest covariance with the sampling log-probs, by a plain
    loop.
    """
    places = [
        (i, t) for i, row in enumerate(rows)
        for t in row["masks", "all_assistant_mask"].nonzero().flatten().tolist()
    ]  # fmt: skip
    sampled = {(i, t): rows[i]["log_probs", "full"][t].item() for i, t in places}
    advantage = {(i, t): rows[i]["advantage"].item() for i, t in places}
    means = [sum(values.values()) / len(places) for values in (sampled, advantage)]
    return sorted(places, key=lambda it: -(sampled[it] - means[0]) * (advantage[it] - means[1]))[
        :number
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_losses_of_the_covariance_equal_plain_loops(kind: str, seed: int) -> None:
    logits, rows = make_batch(seed)
    count = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)
    chosen = apart(rows, int(0.3 * count))
    if kind == "clip":
        low = 1e-9 + max(  # just above the largest covariance that is not selected
            value for value in covariances(rows).values() if value not in
            [covariances(rows)[place] for place in chosen]
        )  # fmt: skip
        loss: GRPOLoss = ClipCovLoss(
            Table(logits.clone()), covariance_share=1.0, covariance_low=low, covariance_high=1e9
        )
    else:
        loss = KLCovLoss(Table(logits.clone()), covariance_share=0.3, penalty=0.7)
    out = total(loss(lazy_stack(rows)))
    out.backward()

    logits = logits.clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        places = row["masks", "all_assistant_mask"].nonzero().flatten().tolist()
        log_p = logits[i].log_softmax(-1)
        a = row["advantage"].item()
        for t in places:
            gap = log_p[t, int(row["tokens", "full"][t])] - row["log_probs", "full"][t]
            ratio = gap.exp()
            if kind == "clip":
                value = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * ((i, t) not in chosen)
            else:
                value = ratio * a - 0.7 * gap.abs() * ((i, t) in chosen)
            expected = expected - value / len(places) / len(rows)
    expected.backward()
    torch.testing.assert_close(out.detach(), expected.detach())
    torch.testing.assert_close(loss.actor_network.logits.grad, logits.grad)


def covariances(rows: list[Any]) -> dict[tuple[int, int], float]:
    places = apart(rows, 10**6)
    sampled = {(i, t): rows[i]["log_probs", "full"][t].item() for i, t in places}
    advantage = {(i, t): rows[i]["advantage"].item() for i, t in places}
    means = [sum(values.values()) / len(places) for values in (sampled, advantage)]
    return {it: (sampled[it] - means[0]) * (advantage[it] - means[1]) for it in places}


def with_entropies(seed: int) -> tuple[Tensor, Any]:
    logits, rows = make_batch(seed, (7, 7, 7, 7))
    generator = torch.Generator().manual_seed(seed)
    for row in rows:
        row[keys.PROX_LOG_PROBS] = row["log_probs", "full"].clone()
        row[keys.PROX_ENTROPY] = torch.rand(7, generator=generator, dtype=torch.float64)
    return logits, lazy_stack(rows).contiguous()


@pytest.mark.parametrize("kind", [GRPOLoss, ClipCovLoss, KLCovLoss])
def test_micro_batches_add_up_whatever_the_rule(kind: Any) -> None:
    logits, batch = with_entropies(2)
    settings: dict[str, Any] = {"proximal": "recomputed", "top_entropy_quantile": 0.5}
    if kind is not GRPOLoss:
        settings["covariance_share"] = 0.3
    if kind is ClipCovLoss:
        settings |= {"covariance_low": -0.5}
    whole = kind(Table(logits.clone()), **settings)
    total(whole(batch)).backward()
    loss = kind(Table(logits.clone()), **settings)
    for part in loss.normalize(batch.clone()).split(1):
        total(loss(part)).backward()
    torch.testing.assert_close(loss.actor_network.logits.grad, whole.actor_network.logits.grad)
    prepared = loss.prepare(loss.read(batch)).values
    trained = prepared[keys.TOKEN_ROLES]
    assert not trained[~TopEntropy(0.5)(tokens_of(prox_entropy=prepared[keys.PROX_ENTROPY]))].any()
    assert trained.any() and not trained.all()
    assert (("loss", "penalized") in prepared) == (kind is KLCovLoss)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_of_low_entropy_leaves_the_objective_alone(seed: int) -> None:
    """They act like tokens with an advantage of 0; the other terms and the divisor stay."""
    logits, batch = with_entropies(seed)
    settings: dict[str, Any] = {"proximal": "recomputed", "kl_to_ref_coeff": 0.3}
    loss = GRPOLoss(Table(logits.clone()), top_entropy_quantile=0.4, **settings)
    out = loss(batch)
    total(out).backward()
    mask = batch["masks", "all_assistant_mask"]
    bound = batch[keys.PROX_ENTROPY][mask].quantile(0.6)
    plain = GRPOLoss(Table(logits.clone()), **settings)
    is_selected = batch[keys.PROX_ENTROPY] >= bound
    batch["advantage"] = torch.where(is_selected, batch["advantage"], 0.0)
    expected = plain(batch)
    total(expected).backward()
    torch.testing.assert_close(total(out), total(expected))
    torch.testing.assert_close(loss.actor_network.logits.grad, plain.actor_network.logits.grad)
    assert keys.PROX_ENTROPY in set(loss.required_in_keys) - set(plain.in_keys)


@pytest.mark.parametrize("micro_batch_tokens", [30, 10_000])
def test_entropies_are_those_of_the_policy_before_the_batch(micro_batch_tokens: int) -> None:
    model = make_tiny_model()
    trainer = make_trainer(model, optim_batch_size=4, micro_batch_tokens=micro_batch_tokens)
    trainer.loss = GRPOLoss(TokenScorer(model), proximal="recomputed", top_entropy_quantile=0.2)
    seen: list[Any] = []
    prepare = trainer.loss.prepare
    trainer.loss.prepare = lambda rows: (seen.append(prepare(rows)), seen[-1])[1]  # type: ignore[method-assign, func-returns-value]
    before = TokenScorer(make_tiny_model())
    trainer.train_batch(make_sequences())
    assert len(seen) == 2
    for rows in seen:
        scores = before.score_rows(before.layout(rows))
        entropy, values = scores["entropy"].detach(), rows.values
        torch.testing.assert_close(values[keys.PROX_ENTROPY], entropy, rtol=0, atol=1e-5)
        log_probs = scores["log_prob"].detach()
        torch.testing.assert_close(values[keys.PROX_LOG_PROBS], log_probs, rtol=0, atol=1e-5)
        trained = values[keys.TOKEN_ROLES]
        assert entropy[trained].min() >= entropy[~trained].max()
        assert abs(int(trained.sum()) - 0.2 * len(trained)) <= 1


# The coefficient of the entropy bonus


def test_the_coefficient_follows_the_entropy_by_hand() -> None:
    control = EntropyControl(0.01, target=1.0, delta=0.02, largest=0.04)
    steps = []
    for entropy in (0.9, 1.0, 0.5, math.nan, 1.1, 1.2, 1.3, 0.2):
        steps.append(control.applied)
        control.update(entropy)
    # 0.03, 0.04 (bounded), 0.04; then 0.02, 0.0 and 0.0 (bounded), but it is not applied
    assert steps == pytest.approx([0, 0.03, 0.04, 0.04, 0.04, 0, 0, 0])
    assert control.applied == pytest.approx(0.02)


def test_a_trainer_applies_the_coefficient_and_resumes_with_it(tmp_path: Path) -> None:
    def trainer() -> Any:
        return make_trainer(entropy_control=EntropyControl(0.1, target=100.0, delta=0.5))

    first = trainer()
    metrics = [first.train_batch(make_sequences())["train/entropy_coef"] for _ in range(2)]
    assert metrics == pytest.approx([0.0, 0.6])  # at first the entropy is unknown
    path = CheckpointWriter().start(Checkpointer(tmp_path, {}), first, {})
    other = trainer()
    other.load_state_dict(read_checkpoint(path)["trainer"], path)
    one, two = (each.train_batch(make_sequences()) for each in (first, other))
    assert one == two and one["train/entropy_coef"] == pytest.approx(1.0)
    # The bonus is a mean over sequences, the metric one over tokens.
    assert one["train/loss_entropy"] == pytest.approx(-one["train/entropy"], rel=0.01)


def test_a_batch_whose_steps_differ_in_the_bonus_reports_its_mean() -> None:
    """It is applied in the second of two steps."""
    control = EntropyControl(0.0, target=100.0, delta=0.5)
    trainer = make_trainer(entropy_control=control, optim_batch_size=4)
    first = trainer.train_batch(make_sequences())
    assert first["train/entropy_coef"] == pytest.approx(0.25)
    parts = sum(value for name, value in first.items() if name.startswith("train/loss_"))
    assert parts == pytest.approx(first["train/loss"], rel=1e-4)
    assert first["train/loss_entropy"] < -0.1
    control.entropy, control.target = 0.0, 0.1
    second = trainer.train_batch(make_sequences())  # now only in the first one
    assert second["train/entropy_coef"] == pytest.approx(0.5)
    assert second["train/loss_entropy"] < 0


def test_a_checkpoint_without_a_coefficient_begins_with_its_own(tmp_path: Path) -> None:
    first = make_trainer()
    first.train_batch(make_sequences())
    path = CheckpointWriter().start(Checkpointer(tmp_path, {}), first, {})
    state = read_checkpoint(path)["trainer"]
    for _ in range(2):
        other = make_trainer(entropy_control=EntropyControl(0.1, target=100.0))
        other.load_state_dict(state, path)
        assert other.train_batch(make_sequences())["train/entropy_coef"] == 0.0
        state.pop("entropy_control", None)


# The config


def test_presets_of_the_covariance() -> None:
    actor = Table(make_batch(0)[0])
    clip = make_loss(compose_config("algo=clip_cov"), actor)
    assert (clip.covariance_low, clip.covariance_high) == (1.0, 5.0)
    assert clip.covariance_share == 0.0002
    kl = make_loss(compose_config("algo=kl_cov"), actor)
    assert (kl.covariance_share, kl.penalty) == (0.0002, 1.0)


def test_a_top_entropy_keeps_the_forward_pass_of_a_single_step() -> None:
    words = ("policy.top_entropy_quantile=0.2", "policy.proximal=recomputed")
    actor = Table(make_batch(0)[0])
    assert make_loss(compose_config(*words), actor).proximal == "recomputed"
    assert make_loss(compose_config(words[1]), actor).proximal == "current"


def test_top_entropies_of_a_policy_that_is_not_recomputed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.top_entropy_quantile"):
        compose_config("policy.top_entropy_quantile=0.2")


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (GRPOLoss, {"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        (GRPOLoss, {"top_entropy_quantile": 1.5, "proximal": "recomputed"}, "top_entropy_quantile"),
        (ClipCovLoss, {"covariance_share": 0.0}, "covariance_share"),
        (ClipCovLoss, {"covariance_low": 5.0}, "covariance_low"),
        (KLCovLoss, {"covariance_share": 1.1}, "covariance_share"),
        (KLCovLoss, {"penalty": 0.0}, "penalty"),
    ],
)
def test_arguments_out_of_range_are_refused(kind: Any, settings: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kind(Table(make_batch(0)[0]), **settings)
