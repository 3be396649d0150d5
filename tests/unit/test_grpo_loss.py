"""The GRPO loss: value and gradient against a plain loop in float64, invariances, and TorchRL citizenship."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictSequential

from tests.support.losses import SETTINGS, Table, make_batch, total
from tests.support.models import make_tiny_model
from tests.support.training import make_batch as make_model_batch
from torchrl_grpo import keys
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.models.segments import Segments
from torchrl_grpo.objectives import (
    CISPOLoss,
    ClipCovLoss,
    GMPOLoss,
    GRPOLoss,
    KLCovLoss,
    SAPOLoss,
    Tokens,
    VESPOLoss,
)


def test_only_loss_entries_carry_a_gradient() -> None:
    """Averaging the whole output would scale the gradient by the number of metrics if they were
    differentiable.
    """
    logits, rows = make_batch(4)
    out = GRPOLoss(Table(logits), **SETTINGS)(lazy_stack(rows))
    assert {name for name, value in out.items() if value.requires_grad} == {
        "loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy",
    }  # fmt: skip


def test_a_batch_without_tokens_gives_zero_and_no_nan() -> None:
    logits, rows = make_batch(5)
    for row in rows:
        row["masks", "all_assistant_mask"].zero_()
    loss = GRPOLoss(Table(logits), **SETTINGS)
    out = loss(lazy_stack(rows))
    total(out).backward()
    assert total(out).item() == 0.0
    assert all(torch.isfinite(value) for value in out.values())
    assert loss.actor_network.logits.grad.abs().max() == 0


def test_in_and_out_keys_say_what_is_read_and_written() -> None:
    logits, rows = make_batch(6)
    plain, full = GRPOLoss(Table(logits)), GRPOLoss(Table(logits), **SETTINGS)
    assert ("next", "ref_log_probs", "full") not in plain.required_in_keys
    assert ("next", "ref_log_probs", "full") in full.required_in_keys
    assert set(full(lazy_stack(rows)).keys()) == set(full.out_keys)
    for row in rows:
        del row["next"]
    assert set(plain(lazy_stack(rows)).keys()) == set(plain.out_keys)
    with pytest.raises(KeyError, match=r"no entry next\.ref_log_probs\.full"):
        full(lazy_stack(rows))


def with_optional_entries(kind: str) -> TensorDictBase:
    batch = make_model_batch(spread=0.3)
    for number, row in enumerate(batch.unbind(0)):
        mask = row[keys.ASSISTANT_MASK]
        if kind == "invalid":
            row[keys.REWARD_VALID] = torch.tensor([number % 3 > 0])
        elif kind == "kept":
            sampled = row[keys.FULL][mask]
            row[keys.KEPT] = torch.stack([sampled, (sampled + 1) % 200], -1).int()
            row[keys.KEPT_LOG_PROBS] = torch.full((len(sampled), 2), -0.7)
        elif kind == "samples":
            row[keys.TRAJECTORY] = torch.tensor([number // 3])
        elif kind == "teacher":
            row[keys.TEACHER_LOG_PROBS] = row[keys.LOG_PROBS] - 0.1 * number
            row[keys.TEACHER_VALID] = torch.tensor([number % 3 > 0])
    return batch


@pytest.mark.parametrize("kind", ["invalid", "kept", "samples", "teacher", "normalized", "part"])
def test_a_batch_of_the_in_keys_alone_gives_the_same_loss(kind: str) -> None:
    loss = GRPOLoss(TokenScorer(make_tiny_model()), entropy_coeff=0.1)
    batch = with_optional_entries(kind)
    if kind in ("normalized", "part"):
        batch = loss.normalize(batch)[: 3 if kind == "part" else 8]
    whole, few = loss(batch), loss(batch.select(*loss.in_keys, strict=False))
    assert set(whole.keys()) == set(few.keys())
    assert all(torch.equal(whole[name], few[name]) for name in whole.keys())  # noqa: SIM118
    if kind in ("invalid", "kept", "samples", "part"):
        required = loss(batch.select(*loss.required_in_keys))
        assert total(required) != total(whole)


def test_normalized_ragged_micro_batches_add_up_to_the_batch() -> None:
    loss = GRPOLoss(TokenScorer(make_tiny_model()), aggregation="token_mean", entropy_coeff=0.1)
    batch = make_model_batch(spread=0.3)
    expected = total(loss(batch.copy()))
    parts = loss.normalize(batch.copy()).split(2)
    torch.testing.assert_close(sum(total(loss(part)) for part in parts), expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_losses_share_a_scorer_and_leave_it_alone(wrapped: bool) -> None:
    scorer = TokenScorer(make_tiny_model())
    actor = TensorDictSequential(scorer) if wrapped else scorer
    one, batch = GRPOLoss(actor), with_optional_entries("kept")
    expected, in_keys = total(one(batch)), one.in_keys
    options = {
        "proximal": "current",
        "behaviour_weight": "truncate",
        "score_centering": not wrapped,
    }
    two = GRPOLoss(actor, **options)
    two.set_keys(action=("t", "x"), mask=("m", "x"))
    renamed = batch.copy()
    for row in renamed.unbind(0):
        row["t", "x"] = row[keys.FULL]
        row["m", "x"] = row[keys.ASSISTANT_MASK] & (torch.arange(len(row[keys.FULL])) > 4)
        row["kept_tokens", "sampled"] = row[keys.KEPT][row["m", "x"][row[keys.ASSISTANT_MASK]]]
        row["kept_log_probs", "sampled"] = row[keys.KEPT_LOG_PROBS][: len(row[keys.KEPT])]
        del row["tokens"], row["masks"]
    assert two(renamed)["loss_objective"].isfinite()
    assert total(one(batch)) == expected and one.in_keys == in_keys


def test_set_keys_renames_inputs_nested_ones_too() -> None:
    logits, rows = make_batch(7)
    expected = GRPOLoss(Table(logits), **SETTINGS)(lazy_stack(rows))
    for row in rows:
        row["adv", "mine"] = row.pop("advantage")
        row["behaviour"] = row["log_probs", "full"]
        del row["log_probs"]
    loss = GRPOLoss(Table(logits), **SETTINGS)
    loss.set_keys(advantage=("adv", "mine"), sample_log_prob="behaviour")
    got = loss(lazy_stack(rows))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)


def test_a_new_clip_epsilon_clips_and_is_checked() -> None:
    logits, rows = make_batch(6)
    loss, expected = GRPOLoss(Table(logits)), GRPOLoss(Table(logits), clip_epsilon=(0.01, 0.05))
    assert loss(lazy_stack(rows)).loss_objective != expected(lazy_stack(rows)).loss_objective
    loss.clip_epsilon = (0.01, 0.05)
    assert loss(lazy_stack(rows)).loss_objective == expected(lazy_stack(rows)).loss_objective
    loss.clip_epsilon_high = 0.4
    bounds = [loss.state_dict()[f"objective.{end}"].item() for end in ("low", "high")]
    assert bounds == pytest.approx([0.01, 0.4])
    with pytest.raises(ValueError, match=r"clip_epsilon=1\.5"):
        loss.clip_epsilon = 1.5


@pytest.mark.parametrize(
    "cls", [GRPOLoss, CISPOLoss, SAPOLoss, GMPOLoss, VESPOLoss, ClipCovLoss, KLCovLoss]
)
def test_each_argument_of_a_loss_is_an_attribute(cls: type[GRPOLoss]) -> None:
    loss = cls(Table(torch.zeros(1, 1, 2)))
    parameters = [
        parameter
        for base in cls.__mro__
        if issubclass(base, GRPOLoss)
        for parameter in inspect.signature(base.__init__).parameters.values()
    ]
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"device"}
    assert len(names) > 20
    assert not [name for name in names if not hasattr(loss, name)]


def test_select_out_keys_leaves_the_selected_outputs_until_reset() -> None:
    logits, rows = make_batch(6)
    loss = GRPOLoss(Table(logits), **SETTINGS)
    before = loss.out_keys
    value = loss(lazy_stack(rows)).loss_objective
    loss.select_out_keys("loss_objective", "ESS")
    out = loss(lazy_stack(rows))
    assert set(out.keys()) == set(loss.out_keys) == {"loss_objective", "ESS"}
    assert out.sum(reduce=True) == value
    assert set(loss.reset_out_keys()(lazy_stack(rows)).keys()) == set(before) == set(loss.out_keys)


def test_a_renamed_mask_is_what_the_scorer_scores(tiny_model) -> None:
    """Tokens that only the renamed mask includes are scored too, and don't get the log-prob 0."""
    tokens = torch.randint(5, 200, (1, 8), generator=torch.Generator().manual_seed(0))
    mine = torch.arange(8).unsqueeze(0) > 2
    batch = TensorDict(
        {
            ("tokens", "full"): tokens,
            ("masks", "all_assistant_mask"): torch.arange(8).unsqueeze(0) > 5,
            "mine": mine,
            ("log_probs", "full"): TokenScorer(tiny_model).score(tokens, mine)[0].detach(),
            "advantage": torch.ones(1, 1),
        },
        [1],
    )
    loss = GRPOLoss(TokenScorer(tiny_model))
    loss.set_keys(mask="mine")
    assert loss(batch)["ratio_mean"].item() == pytest.approx(1.0, abs=1e-5)
    assert "mine" in loss.in_keys and ("masks", "all_assistant_mask") not in loss.in_keys


@pytest.mark.parametrize(
    ("settings", "missing", "fix"),
    [
        ({"mask_truncated": True}, r"next\.truncated", "use mask_truncated=False"),
        (
            {"kl_to_ref_coeff": 0.1},
            r"next\.ref_log_probs\.full",
            r"apply KLScoring\(TokenScorer\(reference\)\)",
        ),
        (
            {"proximal": "recomputed"},
            r"prox_log_probs\.full",
            r"apply KLScoring\(TokenScorer\(model\), out_key=",
        ),
        ({"proximal": "interpolated"}, "staleness", "policy_version"),
        ({}, "advantage", r"apply GroupAdvantage\(repeats\)"),
        ({}, r"masks\.all_assistant_mask", "write it, or set the key"),
        ({}, r"log_probs\.full", "write it, or set the key"),
    ],
)
def test_a_missing_entry_is_named_with_what_writes_it(
    settings: dict, missing: str, fix: str
) -> None:
    logits, rows = make_batch(0)
    name = tuple(missing.split(r"\."))
    for row in rows:
        row.pop("next" if name[0] == "next" else name, None)
    with pytest.raises(
        KeyError, match=f"no entry {missing}, only .*tokens.full.*: {fix}|: .*{fix}"
    ):
        GRPOLoss(Table(logits), **settings)(lazy_stack(rows))


@pytest.mark.parametrize("shape", [(4, 1), (4, 1, 1), (4, 9), (4, 9, 1)])
def test_an_advantage_per_sequence_or_token_may_have_axes_of_one(shape: tuple[int, ...]) -> None:
    logits, rows = make_batch(0, lengths=(9, 9, 9, 9))
    batch = torch.stack(rows)
    expected = GRPOLoss(Table(logits))(batch)
    batch["advantage"] = batch["advantage"].expand(4, shape[1]).reshape(shape)
    torch.testing.assert_close(total(GRPOLoss(Table(logits))(batch)), total(expected))


@pytest.mark.parametrize(
    ("name", "settings"), [("reward_valid", {}), (("next", "truncated"), {"mask_truncated": True})]
)
def test_what_leaves_tokens_out_may_be_said_of_each_token(name: Any, settings: dict) -> None:
    logits, rows = make_batch(0, lengths=(9, 9, 9, 9))
    out, fewer = torch.stack(rows), torch.stack(rows)
    gone = torch.arange(36).reshape(4, 9) % 3 == 0
    out[name] = gone if settings else ~gone
    mask = ("masks", "all_assistant_mask")
    fewer[mask] = fewer[mask] & ~gone
    torch.testing.assert_close(
        total(GRPOLoss(Table(logits), **settings)(out)), total(GRPOLoss(Table(logits))(fewer))
    )


@pytest.mark.parametrize(
    ("name", "settings", "shape", "fix"),
    [
        ("advantage", {}, (4,), r"use unsqueeze\(-1\)"),
        ("advantage", {}, (4, 3), "compute it for the tokens"),
        ("staleness", {"proximal": "interpolated"}, (4,), r"use unsqueeze\(-1\)"),
        (("next", "truncated"), {"mask_truncated": True}, (4,), r"use unsqueeze\(-1\)"),
        ("reward_valid", {}, (4,), r"use unsqueeze\(-1\)"),
    ],
)
def test_an_entry_of_another_shape_is_refused_by_name(
    name: Any, settings: dict, shape: tuple, fix: str
) -> None:
    logits, rows = make_batch(0, lengths=(9, 9, 9, 9))
    batch = torch.stack(rows)
    batch[name] = torch.ones(
        shape, dtype=torch.bool if name in ("reward_valid", ("next", "truncated")) else None
    )
    got = re.escape(f"entry {name!r} of shape {list(shape)} must be [4, 1]")
    with pytest.raises(
        ValueError, match=rf"{got}, .*, or \[4, [9T]\], one for each token: .*{fix}"
    ):
        GRPOLoss(Table(logits), **settings)(batch)
    with pytest.raises(ValueError, match=got):  # the same in a ragged batch
        GRPOLoss(Table(logits), **settings)(lazy_stack([row.clone() for row in batch.unbind(0)]))


def test_a_model_in_the_place_of_a_tensordict_module_is_refused(tiny_model) -> None:
    with pytest.raises(ValueError, match=r"actor_network=Qwen2ForCausalLM .*: use TokenScorer"):
        GRPOLoss(tiny_model)


@pytest.mark.parametrize("kind", [GRPOLoss, CISPOLoss])
def test_a_ratio_at_a_clip_bound_is_not_clipped(kind: type[GRPOLoss]) -> None:
    loss = kind(Table(torch.zeros(1, 1, 2)), clip_epsilon=(0.25, 0.5))
    ratio, rows = torch.tensor([0.75, 1.5, 0.7, 1.6]), Segments.of([4])
    low, high = (
        loss.objective.clipped(Tokens({"ratio": ratio, "advantage": sign * ratio}, rows))[i]
        for i, sign in ((0, -1.0), (1, 1.0))
    )
    assert low.tolist() == [False, False, True, False]
    assert high.tolist() == [False, False, False, True]


@pytest.mark.parametrize("size", [[2, 1], [], [0]])
def test_batches_of_other_dimensions_are_refused_with_advice(size: list[int]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"batch_size={size}") + ".*batch.reshape"):
        GRPOLoss(Table(torch.zeros(1, 1, 2)))(TensorDict(batch_size=size))
