"""The silent bugs of the field that concern a loss or an advantage: one test each, named after what went wrong.

Those below are here; the others have a better place beside what they test:

- losses averaged together with the metrics (gradient over the number of outputs): ``test_grpo_loss.py``,
  ``test_only_loss_entries_carry_a_gradient``; in the trainer: below,
  ``test_no_gradient_is_lost_or_left_over_between_optimizer_steps``
- more padding, smaller metrics: ``test_algorithms.py``,
  ``test_padding_order_and_micro_batches_change_nothing``
- CISPO without stop-gradient: ``test_algorithms.py``,
  ``test_cispo_has_a_gradient_where_the_clipped_surrogate_has_none``
- gradient accumulation that is off by one, within an optimizer step: ``test_trainer.py``,
  ``test_any_token_budget_gives_the_result_of_one_large_batch``
- a loss scaler made anew each step: ``test_trainer.py``, ``test_the_loss_scaler_lives_as_long_as_the_trainer``
- AdamW in the config, Adam in the code: ``test_build.py``,
  ``test_the_optimizer_is_adamw_without_weight_decay_on_vectors``
- a group of one (NaN): ``test_group_advantage.py``,
  ``test_any_baseline_with_any_scale_equals_a_plain_loop``; equal rewards (noise over an epsilon):
  ``test_algorithms.py``, ``test_equal_rewards_give_exactly_zero_whatever_the_baseline``; counted:
  ``test_advantage_transform.py``, ``test_invalid_rewards_are_left_out_and_zero_variance_groups_counted``
- the policy version stamped when the environment steps: ``test_collector.py``,
  ``test_the_version_is_the_one_before_generation``
- truncation inferred from a length, where it is recorded: ``test_env.py``,
  ``test_step_scores_and_records_why_the_dialog_ended``, and ``test_transformers_engine.py``,
  ``test_a_stop_token_at_the_last_place_is_a_stop``; in the loss: ``test_trainer.py``,
  ``test_mask_truncated_treats_truncated_sequences_as_invalid``
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.configs import SMALL, compose_config
from tests.support.losses import SETTINGS, Table, make_batch, total
from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.assembly.run import build
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer, autocast
from torchrl_grpo.objectives import CISPOLoss, GRPOLoss, SAPOLoss

LENGTHS = (9, 14, 6, 11, 8, 12, 7)
LOG_RATIOS = torch.tensor([-0.5, -0.05, 0.05, 0.5], dtype=torch.float64)


@functools.cache
def exact_model() -> torch.nn.Module:
    return make_tiny_model().double()


@functools.cache
def token_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> TensorDictBase:
    """Return ragged sequences with 3 prompt tokens. Log-ratios of the tiny model to the sampling
    policy are random and well inside or well outside of the clip range, so that rounding clips no
    token.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        tokens = torch.randint(5, 261, (length,), generator=generator)
        mask = torch.arange(length) >= 3
        with torch.no_grad():
            log_p = exact_model()(tokens[None]).logits[0].log_softmax(-1)
        cur = torch.zeros(length, dtype=torch.float64)
        cur[1:] = log_p[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        noise = LOG_RATIOS[torch.randint(len(LOG_RATIOS), (2, length), generator=generator)]
        entries = {
            keys.FULL: tokens,
            keys.ATTENTION_MASK: torch.ones_like(mask),
            keys.ASSISTANT_MASK: mask,
            keys.LOG_PROBS: torch.where(mask, cur + noise[0], 0.0),
            keys.REF_LOG_PROBS: torch.where(mask, cur + noise[1], 0.0),
            keys.ADVANTAGE: torch.randn(1, generator=generator, dtype=torch.float64),
            keys.REWARD_VALID: torch.tensor([True]),
            keys.TRUNCATED: torch.tensor([False]),
        }
        rows.append(TensorDict(entries))
    return lazy_stack(rows)


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    """Return all gradients as one vector."""
    return parameters_to_vector(torch.autograd.grad(loss, tuple(model.parameters())))


# Averages


def test_kl_entropy_and_clip_fractions_average_sampled_tokens_alone() -> None:
    """Log-probs of prompts and padding may be anything: here NaN, 5 and random logits."""
    logits, rows = make_batch(0)
    kl_ref, kl_sample, entropy, low, high = [], [], [], [], []
    for index, row in enumerate(rows):
        mask = row["masks", "all_assistant_mask"]
        row["advantage"].fill_((-1.0) ** index)
        sample, ref = row["log_probs", "full"], row["next", "ref_log_probs", "full"]
        for t in mask.nonzero().flatten().tolist():
            log_p = logits[int(row["row"]), t].log_softmax(0)
            cur = log_p[row["tokens", "full"][t]].item()
            ratio = math.exp(cur - sample[t].item())
            advantage = row["advantage"].item()
            kl_ref.append(math.exp(ref[t].item() - cur) - 1 - (ref[t].item() - cur))
            kl_sample.append(cur - sample[t].item())
            entropy.append(-(log_p.exp() * log_p).sum().item())
            low.append(ratio < 0.8 and advantage < 0)
            high.append(ratio > 1.28 and advantage > 0)
        sample[~mask], ref[~mask] = math.nan, 5.0
    out = GRPOLoss(Table(logits), **SETTINGS)(lazy_stack(rows))
    count = len(entropy)
    assert sum(low) > 0 and sum(high) > 0 and count < logits[..., 0].numel()
    assert out["kl_k3_to_ref"].item() == pytest.approx(sum(kl_ref) / count)
    assert out["kl_k1_to_inference"].item() == pytest.approx(sum(kl_sample) / count)
    assert out["entropy"].item() == pytest.approx(sum(entropy) / count)
    assert out["clip_fraction_low"].item() == pytest.approx(sum(low) / count)
    assert out["clip_fraction_high"].item() == pytest.approx(sum(high) / count)


@pytest.mark.slow
def test_a_sequence_alone_is_its_row_in_a_padded_batch() -> None:
    """Compare log-probs, entropy, and the mean of losses and gradients, in float64 through a real
    model.
    """
    model = exact_model()
    scorer = TokenScorer(model)
    batch = token_batch()
    whole = scorer(batch.clone())
    width = max(LENGTHS)
    for length, row, log_probs, entropy in zip(
        LENGTHS,
        batch.unbind(0),
        whole["cur_log_probs", "full"],
        whole["entropy", "full"],
        strict=True,
    ):
        alone = scorer(lazy_stack([row.clone()]))
        assert log_probs.shape == entropy.shape == (width,)
        torch.testing.assert_close(
            alone["cur_log_probs", "full"][0], log_probs[:length], rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            alone["entropy", "full"][0], entropy[:length], rtol=0, atol=1e-12
        )
        assert (log_probs[length:] == 0).all() and (entropy[length:] == 0).all()
    loss = GRPOLoss(scorer, **SETTINGS)
    together = total(loss(batch))
    each = torch.stack([total(loss(lazy_stack([row]))) for row in batch.unbind(0)]).mean()
    # The weights of the tokens, 1 / (7 * length), are float32.
    torch.testing.assert_close(together, each, rtol=1e-7, atol=0)
    expected = gradient(model, each)
    assert (gradient(model, together) - expected).norm() <= 3e-7 * expected.norm()


# Precision

KINDS: dict[str, tuple[type[GRPOLoss], dict[str, Any]]] = {
    "grpo": (GRPOLoss, SETTINGS),
    "dr_grpo": (GRPOLoss, {"aggregation": "constant", "constant_length": 8}),
    "gspo": (GRPOLoss, {"ratio_level": "sequence", "clip_epsilon": 0.2}),
    "cispo": (CISPOLoss, {"aggregation": "token_mean"}),
    "sapo": (SAPOLoss, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("dtype", "value_bound", "gradient_bound"),
    [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 0.02, 0.05)],
)
def test_reduced_precision_stays_within_its_bounds_of_float64(
    name: str, dtype: torch.dtype, value_bound: float, gradient_bound: float
) -> None:
    """Weights in float32, the forward pass in ``dtype``: the loss, absolute, and the gradient, as
    the norm of the difference over the norm. float32: 1e-6 and 1e-5. bfloat16: 0.02 and 0.05.
    """
    kind, settings = KINDS[name]
    exact = exact_model()
    model = make_tiny_model()
    for seed in range(3):
        batch = token_batch(seed)
        expected = total(kind(TokenScorer(exact), **settings)(batch))
        single = batch.apply(lambda value: value.float() if value.is_floating_point() else value)
        with autocast(torch.device("cpu"), None if dtype == torch.float32 else dtype):
            got = total(kind(TokenScorer(model), **settings)(single))
        assert got.dtype == torch.float32
        reference = gradient(exact, expected)
        error = (gradient(model, got) - reference).norm() / reference.norm()
        assert abs(got.item() - expected.item()) <= value_bound
        assert error.item() <= gradient_bound


# Algorithms that differ from their name

WRITTEN = (keys.ADVANTAGE, keys.SHAPED_REWARD, keys.TOKEN_REWARD)
"""What the transforms of a preset make of the rewards."""


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "rloo"])
def test_dr_grpo_and_rloo_divide_by_no_standard_deviation_anywhere(
    algo: str, tmp_path: Path
) -> None:
    """Ten times the rewards is ten times the gradient, from the preset's advantage through its
    loss; GRPO's stays.
    """
    run = build(compose_config(*SMALL, f"algo={algo}", "policy.kl_coef=0"), tmp_path)
    try:
        run.rollouts.publish(run.learner.weights(), 0)
        groups = run.rollouts.next_batch()
        loss, model = run.learner.trainer.loss, run.learner.trainer.model
        gradients = []
        for factor in (1.0, 10.0):
            rows = [row.exclude(*WRITTEN) for group in groups for row in group.unbind(0)]
            for index, row in enumerate(rows):
                row[keys.REWARD] = torch.tensor([factor * (index % 3)])
            data = lazy_stack(rows)
            for _, transform in run.learner.transforms:
                data = transform(data)
            gradients.append(gradient(model, total(loss(data))))
    finally:
        run.close()
    assert gradients[0].norm() > 0
    scale = 1.0 if algo == "grpo" else 10.0
    torch.testing.assert_close(gradients[1], scale * gradients[0], rtol=1e-3, atol=1e-5)


def test_cispos_default_bounds_leave_ordinary_weights_alone() -> None:
    """With an upper bound of 0.2, or of 1.2, nearly every weight would be at it. Ratios up to 5 are
    not clipped, in the class and in the preset.
    """
    ratios = [0.01, 0.5, 0.9, 1.0, 1.3, 2.0, 4.9]
    log_probs = [0.0, *(math.log(0.5 / ratio) for ratio in ratios)]
    row = TensorDict(
        {
            keys.FULL: torch.zeros(len(log_probs), dtype=torch.int64),
            keys.ASSISTANT_MASK: torch.arange(len(log_probs)) > 0,
            keys.LOG_PROBS: torch.tensor(log_probs, dtype=torch.float64),
            keys.ADVANTAGE: torch.ones(1, dtype=torch.float64),
            "row": torch.tensor([0]),
        }
    )
    preset = compose_config("algo=cispo").policy
    for options in ({}, {"clip_epsilon": tuple(preset.clip_epsilon)}):
        loss = CISPOLoss(Table(torch.zeros(1, len(log_probs), 2, dtype=torch.float64)), **options)
        total(loss(lazy_stack([row]))).backward()
        # -weight / length * d log p(0) / d logit 0, which is 1/2
        weights = loss.actor_network.logits.grad[0, 1:, 0] * -2 * len(ratios)
        assert weights.tolist() == pytest.approx(ratios, rel=1e-6)


# Counts and when they are taken


@pytest.mark.slow
def test_no_gradient_is_lost_or_left_over_between_optimizer_steps() -> None:
    """7 sequences in optimizer steps of 3, 3 and 1, each of several micro-batches: the weights are
    those of three steps by hand, each with the gradient of its own sequences only.
    """
    model, by_hand = make_tiny_model().double(), make_tiny_model().double()
    loss = GRPOLoss(TokenScorer(model), **SETTINGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = PolicyTrainer(
        loss, model, optimizer, optim_batch_size=3, micro_batch_tokens=15, clip_grad_norm=math.inf
    )
    trainer.train_batch(token_batch())
    assert trainer.optim_steps == 3
    for part in token_batch().split(3):
        step = gradient(by_hand, total(GRPOLoss(TokenScorer(by_hand), **SETTINGS)(part)))
        moved = parameters_to_vector(by_hand.parameters()) - 0.1 * step
        vector_to_parameters(moved, by_hand.parameters())
    torch.testing.assert_close(
        parameters_to_vector(model.parameters()),
        parameters_to_vector(by_hand.parameters()),
        rtol=0,
        atol=1e-7,
    )
