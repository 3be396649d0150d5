"""The trainer: gradients compared with one large batch, precision, its state, and steps that are
skipped.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import make_tiny_model
from tests.support.training import make_batch, make_trainer
from torchrl_grpo import keys
from torchrl_grpo.errors import NonFiniteError, NoSignalError
from torchrl_grpo.learner import PolicyTrainer
from torchrl_grpo.learner.checkpoint import Checkpointer, read_checkpoint
from torchrl_grpo.learner.shards import tensors_in
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models import loading
from torchrl_grpo.models.passes import make_passes
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import Clip, GRPOLoss, PolicyLoss, Term, Tokens


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.weights()}


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 45, 10_000])
def test_any_token_budget_gives_the_result_of_one_large_batch(micro_batch_tokens: int) -> None:
    whole = make_trainer(make_tiny_model().double(), micro_batch_tokens=10**6)
    expected = whole.train_batch(make_batch())
    parts = make_trainer(make_tiny_model().double(), micro_batch_tokens=micro_batch_tokens)
    got = parts.train_batch(make_batch())
    assert got.pop("train/micro_batches") == {1: 8, 20: 5, 45: 2, 10_000: 1}[micro_batch_tokens]
    expected.pop("train/micro_batches")
    assert got == pytest.approx(expected, rel=1e-6)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=0, atol=1e-9)


def test_the_batch_is_split_into_optimizer_steps_and_repeated_for_epochs() -> None:
    trainer = make_trainer(optim_batch_size=4, epochs=3)
    trainer.train_batch(make_batch())
    assert (trainer.optim_steps, trainer.version) == (6, 1)


def test_on_policy_data_has_ratio_one() -> None:
    metrics = make_trainer().train_batch(make_batch(spread=0.0))
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ESS"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/clip_fraction_low"] == metrics["train/clip_fraction_high"] == 0.0
    assert metrics["train/kl_k3_to_ref"] == pytest.approx(0.0, abs=1e-6)


def test_sequences_with_an_invalid_reward_have_no_effect() -> None:
    batch = make_batch()
    batch[2].get(keys.REWARD_VALID).zero_()
    batch[5].get(keys.REWARD_VALID).zero_()
    with_invalid, without = make_trainer(), make_trainer()
    with_invalid.train_batch(batch)
    without.train_batch(lazy_stack([batch[i] for i in (0, 1, 3, 4, 6, 7)]))
    for name, value in weights(without).items():
        torch.testing.assert_close(weights(with_invalid)[name], value, rtol=0, atol=1e-6)


def test_a_batch_in_which_no_token_counts_changes_nothing() -> None:
    """Adam would move by itself, because it has the moments of the step before."""
    trainer = make_trainer()
    batch = make_batch()
    trainer.train_batch(batch)
    before = weights(trainer)
    for row in batch.unbind(0):
        row[keys.REWARD_VALID] = torch.tensor([False])
    metrics = trainer.train_batch(batch)
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())
    assert (trainer.optim_steps, metrics["train/skipped_steps"]) == (1, 1.0)
    assert all(
        math.isnan(metrics[f"train/{name}"])
        for name in ("loss", "loss_objective", "entropy", "grad_norm")
    )


def test_a_step_without_sampled_tokens_does_not_blame_truncation() -> None:
    batch = make_batch()
    for row in batch.unbind(0)[1:]:
        row[keys.REWARD_VALID] = torch.tensor([False])
    batch[0].get(keys.ASSISTANT_MASK).zero_()
    with pytest.raises(NoSignalError, match="the policy sampled no tokens"):
        make_trainer(max_nonfinite_steps=1).train_step(batch)


def test_steps_without_a_token_that_counts_end_the_run() -> None:
    trainer = make_trainer(max_nonfinite_steps=3)
    batch = make_batch()
    for row in batch.unbind(0):
        row[keys.REWARD_VALID] = torch.tensor([False])
    for one in (
        batch,
        batch,
        make_batch(),
        batch,
        batch,
    ):  # a good step in between resets the count
        trainer.train_step(one)
    with pytest.raises(
        NoSignalError,
        match=r"3 optimizer steps .*rewards are invalid",
    ):
        trainer.train_step(batch)


def test_a_batch_whose_responses_are_all_masked_is_not_called_invalid() -> None:
    trainer = make_trainer(max_nonfinite_steps=1)
    batch = make_batch()
    trainer.loss.mask_truncated = True
    for row in batch.unbind(0):
        row[keys.TRUNCATED] = torch.tensor([True])
    with pytest.raises(
        NoSignalError, match=r"policy\.mask_truncated.*inference_model\.max_new_tokens"
    ) as error:
        trainer.train_step(batch)
    assert "invalid" not in str(error.value)


def test_mask_truncated_treats_truncated_sequences_as_invalid() -> None:
    batch = make_batch()
    invalid = make_batch()
    masking = make_trainer()
    plain = make_trainer()
    for index, (row, other) in enumerate(zip(batch.unbind(0), invalid.unbind(0), strict=True)):
        row[keys.TRUNCATED] = torch.tensor([index == 3])
        other[keys.REWARD_VALID] = torch.tensor([index != 3])
    masking.loss.mask_truncated = True
    masking.train_batch(batch)
    plain.train_batch(invalid)
    assert all(torch.equal(weights(masking)[name], value) for name, value in weights(plain).items())


@pytest.mark.parametrize("of_tokens", [False, True])
def test_staleness_is_counted_from_the_version_that_sampled(of_tokens: bool) -> None:
    """Of a whole sequence, or of each of its tokens."""
    trainer = make_trainer()
    trainer.version, trainer.loss.proximal = 7, "interpolated"
    batch = make_batch()
    expected = []
    for version, row in zip([7, 6, 5, 4, 7, 7, 7, 0], batch.unbind(0), strict=True):
        versions = torch.full((len(row[keys.FULL]),), version)
        row[keys.POLICY_VERSION] = versions[:1]
        if of_tokens:
            versions = torch.arange(len(versions)) % 8
            row[keys.POLICY_VERSIONS] = versions
        expected.append(7 - versions[row[keys.ASSISTANT_MASK]])
    seen: list[Rows] = []
    prepare = trainer.loss.prepare
    trainer.loss.prepare = lambda rows: (seen.append(rows), prepare(rows))[1]  # type: ignore[method-assign]
    trainer.train_batch(batch)
    [rows] = seen
    assert rows.values[keys.STALENESS].tolist() == torch.cat(expected).tolist()


class Rewarded(Term):
    """A term that reads a number of each sequence and one of each token."""

    name = "rewarded"
    in_keys = (("next", "reward"), "importance")

    def forward(self, t: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = t["importance"] * t["next", "reward"]
        return value, {"seen": value.sum()}


class WithForward(GRPOLoss):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().forward(tensordict)


def test_a_loss_with_its_own_forward_is_refused_by_the_trainer() -> None:
    model = make_tiny_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"WithForward\.forward .*: write a Term"):
        PolicyTrainer(WithForward(TokenScorer(model)), model, optimizer, optim_batch_size=8)


def test_a_part_gets_the_extra_entries_it_reads() -> None:
    batch = make_batch()
    for index, row in enumerate(batch.unbind(0)):
        row["next", "reward"] = torch.tensor([float(index)])
        row["importance"] = torch.full((len(row[keys.FULL]),), 0.5)
    masks = [row[keys.ASSISTANT_MASK] for row in batch.unbind(0)]
    expected = sum(0.5 * index * int(mask.sum()) for index, mask in enumerate(masks))
    model = make_tiny_model()
    trainer = PolicyTrainer(
        PolicyLoss(TokenScorer(model), Clip(), terms=[Rewarded(0.1)]),
        model,
        torch.optim.SGD(model.parameters()),
        optim_batch_size=8,
    )
    assert trainer.train_batch(batch)["train/seen"] == pytest.approx(expected)


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_an_advantage_with_torchrls_last_dimension_is_the_same(level: str) -> None:
    losses = []
    for shape in ((-1,), (-1, 1)):
        batch = make_batch()
        for row in batch.unbind(0):
            if level == "token":
                row[keys.ADVANTAGE] = torch.linspace(-1, 2, len(row[keys.FULL]))
            row[keys.ADVANTAGE] = row[keys.ADVANTAGE].reshape(shape)
        losses.append(make_trainer(micro_batch_tokens=20).train_batch(batch)["train/loss"])
    assert losses[0] == losses[1] and abs(losses[0]) > 0.01


def test_training_moves_probability_from_bad_to_good_sequences() -> None:
    trainer = make_trainer(optimizer=None)
    batch = make_batch(spread=0.0)
    for _ in range(5):
        trainer.train_batch(batch)
    after = TokenScorer(trainer.model)(batch.clone()).get(("cur_log_probs", "full")).sum(-1)
    before = torch.stack([row.get(keys.LOG_PROBS).sum() for row in batch.unbind(0)])
    good = torch.tensor([True, False] * 4)
    assert (after[good] > before[good]).all()
    assert (after[~good] < before[~good]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_trains_close_to_full_precision(dtype: torch.dtype) -> None:
    full, mixed = make_trainer(), make_trainer(autocast_dtype=dtype)
    expected = full.train_batch(make_batch())
    got = mixed.train_batch(make_batch())
    assert mixed.scaler.is_enabled() == (dtype == torch.float16)
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)
    assert got["train/loss"] == pytest.approx(expected["train/loss"], abs=0.02)
    assert all(value.dtype == torch.float32 for value in weights(mixed).values())


def test_the_loss_scaler_lives_as_long_as_the_trainer() -> None:
    """A scaler that is recreated each step never adapts its scale."""
    trainer = make_trainer(autocast_dtype=torch.float16)
    scaler = trainer.scaler
    scaler._growth_interval = 2
    start = scaler.get_scale()
    for _ in range(2):
        trainer.train_batch(make_batch())
    assert trainer.scaler is scaler
    assert scaler.get_scale() == 2 * start


@pytest.mark.slow
def test_a_loss_scale_overflow_is_skipped_and_counted() -> None:
    trainer = make_trainer(autocast_dtype=torch.float16, max_nonfinite_steps=1)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    before = weights(trainer)
    metrics = trainer.train_batch(make_batch())
    assert metrics["train/skipped_steps"] == 1
    assert trainer.optim_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    for _ in range(30):
        trainer.train_batch(make_batch())
    assert trainer.optim_steps > 0


def test_a_non_finite_loss_changes_no_weight_and_stops_after_n_in_a_row() -> None:
    trainer = make_trainer(max_nonfinite_steps=2)
    bad = make_batch()
    bad[0].get(keys.ADVANTAGE).fill_(math.nan)
    before = weights(trainer)
    trainer.train_step(bad)
    assert trainer.skipped_steps == 1
    trainer.train_step(make_batch())  # a good step in between resets the count
    changed = weights(trainer)
    assert any(not torch.equal(value, before[name]) for name, value in changed.items())
    trainer.train_step(bad)
    with pytest.raises(NonFiniteError, match=r"2 optimizer steps .*\(nan\)"):
        trainer.train_step(bad)
    assert all(torch.equal(value, changed[name]) for name, value in weights(trainer).items())


def test_warmup_reaches_the_learning_rate_after_its_steps() -> None:
    model = make_tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    trainer = make_trainer(model, optimizer=optimizer, scheduler=scheduler)
    assert [trainer.train_step(make_batch())["train/lr"] for _ in range(5)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
    ]


def save(trainer: PolicyTrainer, folder: Path) -> tuple[dict[str, Any], Path]:
    """Write a checkpoint; return the argument of ``load_state_dict``."""
    path = CheckpointWriter().start(Checkpointer(folder, {}), trainer, {})
    return read_checkpoint(path)["trainer"], path


def test_restored_state_continues_bit_for_bit(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train_batch(make_batch())
    checkpoint = save(trainer, tmp_path)
    trainer.train_batch(make_batch())
    other = make_trainer(make_tiny_model(seed=7))
    other.load_state_dict(*checkpoint)
    other.train_batch(make_batch())
    assert (other.version, other.optim_steps) == (2, 2)
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(trainer).items())


def test_lora_trains_and_saves_adapters_alone(tmp_path: Path) -> None:
    model = loading.add_lora(make_tiny_model(), r=4, alpha=8)
    trainer = make_trainer(model)
    base = {name: value.clone() for name, value in make_tiny_model().named_parameters()}
    trainer.train_batch(make_batch())
    merged = weights(trainer)
    assert merged.keys() == base.keys()
    assert any(not torch.equal(value, base[name]) for name, value in merged.items())
    state, path = save(trainer, tmp_path)
    names = [name for name, _ in tensors_in(path)]
    assert names and all("lora_" in name for name in names)
    other = make_trainer(loading.add_lora(make_tiny_model(), r=4, alpha=8))
    other.load_state_dict(state, path)
    assert all(torch.equal(value, weights(other)[name]) for name, value in merged.items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = save(make_trainer(loading.add_lora(make_tiny_model(), r=4, alpha=8)), tmp_path)
    with pytest.raises(
        RuntimeError, match="the checkpoint does not fit the model: 28 unknown entries"
    ):
        make_trainer().load_state_dict(*checkpoint)


def test_the_recomputed_proximal_policy_is_that_before_the_first_step() -> None:
    model = make_tiny_model()
    trainer = make_trainer(model, optim_batch_size=4, epochs=2)
    trainer.loss = GRPOLoss(TokenScorer(model), proximal="recomputed", behaviour_weight="truncate")
    seen: list[Rows] = []
    prepare = trainer.loss.prepare
    trainer.loss.prepare = lambda rows: (seen.append(rows), prepare(rows))[1]  # type: ignore[method-assign]
    batch = make_batch()
    before = TokenScorer(make_tiny_model())
    trainer.train_batch(batch)
    assert len(seen) == 4
    for rows in seen:
        scores = before.score_rows(before.layout(rows))["log_prob"].detach()
        torch.testing.assert_close(rows.values[keys.PROX_LOG_PROBS], scores, rtol=0, atol=1e-5)
    assert keys.PROX_LOG_PROBS not in list(batch.keys(True, True))
    assert (
        max(
            (weights(trainer)[name] - value).abs().max()
            for name, value in before.model.named_parameters()
        )
        > 1e-3
    )


class Conversions(TorchDispatchMode):
    """Context that counts the conversions of each parameter, and those to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[int] = Counter()
        self.to_float32 = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.of[id(args[0])] += isinstance(args[0], torch.nn.Parameter)
            self.to_float32 += kwargs.get("dtype") == torch.float32
        return func(*args, **kwargs or {})


def gradients_of(trainer: PolicyTrainer, each_alone: bool = False) -> list[torch.Tensor]:
    """Return the gradients of several passes."""
    batch = make_batch()
    passes = make_passes(trainer.loss.actor_network, trainer._prepare(batch), 45, 0, 1)
    assert len(passes) > 1
    for part in [[each] for each in passes] if each_alone else [passes]:
        trainer._accumulate_gradients(part, batch)
    gradients = [parameter.grad for parameter in trainer.parameters if parameter.grad is not None]
    assert len(gradients) == len(trainer.parameters)
    trainer.optimizer.zero_grad()
    return gradients


def test_weights_are_converted_once_in_a_step() -> None:
    trainer = make_trainer(autocast_dtype=torch.bfloat16)
    weight = id(trainer.model.model.layers[0].mlp.up_proj.weight)
    with Conversions() as once:
        gradients = gradients_of(trainer)
    with Conversions() as often:
        expected = gradients_of(trainer, each_alone=True)
    assert (once.of[weight], often.of[weight]) == (1, 2)
    assert all(map(torch.equal, gradients, expected))
    loading.enable_gradient_checkpointing(trainer.model)  # their memory is freed in a pass
    with Conversions() as again:
        gradients_of(trainer)
    assert again.of[weight] > 2


def test_adapters_take_inputs_as_they_are_under_autocast() -> None:
    model = loading.add_lora(make_tiny_model().bfloat16(), r=2, alpha=4)
    adapters = [module for module in model.modules() if hasattr(module, "lora_B")]
    for module in adapters:
        torch.nn.init.normal_(module.lora_B["default"].weight)
    trainer = make_trainer(model, autocast_dtype=torch.bfloat16)
    with Conversions() as few:
        gradients = gradients_of(trainer)
    for module in adapters:
        module.cast_input_dtype_enabled = True
    with Conversions() as many:
        expected = gradients_of(trainer)
    assert few.to_float32 <= many.to_float32 - 2 * len(adapters)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("micro_batch_tokens", [20, 45, 10_000])
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
def test_the_ratio_to_the_recomputed_policy_is_1_to_the_last_bit(
    micro_batch_tokens: int, autocast_dtype: torch.dtype | None
) -> None:
    model = make_tiny_model()
    trainer = make_trainer(
        model,
        optim_batch_size=4,
        micro_batch_tokens=micro_batch_tokens,
        autocast_dtype=autocast_dtype,
    )
    trainer.loss = GRPOLoss(TokenScorer(model), proximal="recomputed")
    trainer.optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0
    )  # so that each step is a first one
    seen: list[torch.Tensor] = []
    trainer.loss.objective.register_forward_hook(lambda _, args, __: seen.append(args[0]["ratio"]))
    batch = make_batch()
    trainer.train_batch(batch)
    sampled = sum(int(row[keys.ASSISTANT_MASK].sum()) for row in batch.unbind(0))
    assert sum(len(values) for values in seen) == sampled
    assert all((values == 1).all() for values in seen)


def test_the_old_name_of_the_trainer_is_imported_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="PolicyTrainer"):
        from torchrl_grpo.learner import GRPOTrainer
    assert GRPOTrainer is PolicyTrainer
