"""The critic of PPO: its values, their targets and loss, and that engines and exports never see it."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.objectives.value import GAE

from tests.support.configs import compose_config
from tests.support.models import make_lora, make_tiny_model
from tests.support.runs import SMALL, at, run, steps
from tests.support.training import make_batch, peak_of
from torchrl_grpo import keys
from torchrl_grpo.assembly.estimates import step_setup
from torchrl_grpo.assembly.run import build
from torchrl_grpo.extras.export.export import export
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.loading import shape_of
from torchrl_grpo.models.memory import step_memory
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.models.segments import Segments
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.objectives.output import accumulate
from torchrl_grpo.objectives.parts import Value
from torchrl_grpo.objectives.tokens import Tokens
from torchrl_grpo.transforms import GroupAdvantage

PPO = ("algo=ppo", "critic.lr=1e-2")


def with_critic(model: Any = None, *, seed: int = 0) -> TokenScorer:
    """Return a scorer whose critic has random weights."""
    scorer = TokenScorer(make_tiny_model() if model is None else model)
    scorer.add_critic()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in scorer.critic.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return scorer


def make_trainer(scorer: TokenScorer, **settings: Any) -> PolicyTrainer:
    loss = GRPOLoss(scorer, value_coeff=0.5, value_clip=0.2, aggregation="token_mean")
    named = dict(scorer.model.named_parameters())
    trained = [p for name, p in named.items() if "critic" not in name and p.requires_grad]
    critic = [p for name, p in named.items() if "critic" in name]
    optimizer = make_optimizer(trained, lr=1e-3, critic=critic, critic_lr=1e-2)
    return PolicyTrainer(loss, scorer.model, optimizer, **({"optim_batch_size": 8} | settings))


def rewarded(batch: TensorDictBase, *, seed: int = 0) -> TensorDictBase:
    """Return a batch with rewards of tokens, the later ones of which are larger."""
    generator = torch.Generator().manual_seed(seed)
    for number, row in enumerate(batch.unbind(0)):
        reward = torch.rand(len(row[keys.FULL]), generator=generator)
        row[keys.TOKEN_REWARD] = reward * row[keys.ASSISTANT_MASK]
        row[keys.GROUP_ID] = torch.tensor([number])
    return batch


def advantages(batch: TensorDictBase, **settings: Any) -> TensorDictBase:
    defaults = {"level": "token", "mean": "batch", "std": "batch", "lmbda": 0.9}
    return GroupAdvantage(1, **(defaults | settings))(batch)


# Values


@pytest.mark.parametrize("lora", [False, True])
def test_a_value_is_of_the_state_that_predicts_the_token(lora: bool) -> None:
    model: Any = make_lora() if lora else make_tiny_model()
    scorer = with_critic(model)
    batch = make_batch(repeats=4)
    trainer = make_trainer(scorer, micro_batch_tokens=20)
    trainer.score(batch)
    for row in batch.unbind(0):
        tokens, mask = row[keys.FULL][None], row[keys.ASSISTANT_MASK]
        states = scorer.base(tokens, output_hidden_states=True).hidden_states[-1][0, :-1]
        unit = torch.nn.functional.normalize(states, dim=-1)
        values = states.shape[-1] ** 0.5 * scorer.critic(unit).squeeze(-1)
        expected = torch.cat([torch.zeros(1), values]) * mask
        torch.testing.assert_close(row[keys.STATE_VALUE], expected, rtol=1e-5, atol=1e-5)
    assert keys.VALUE in scorer.out_keys
    out = scorer(batch.clone())
    for row, (before, length) in enumerate(
        zip(batch.unbind(0), map(len, batch.get(keys.FULL, as_list=True)), strict=True)
    ):
        now = out.get(keys.VALUE, as_list=True)[row][:length]
        torch.testing.assert_close(now.detach(), before[keys.STATE_VALUE], rtol=1e-5, atol=1e-5)


def test_a_new_critic_has_no_opinion_and_changes_no_log_prob() -> None:
    model = make_tiny_model()
    plain = TokenScorer(model)
    batch = make_batch()
    rows = Rows.read(batch)
    before = plain.score_rows(plain.layout(rows))["log_prob"]
    plain.add_critic()
    scores = plain.score_rows(plain.layout(rows), value=True)
    assert torch.equal(scores["log_prob"], before) and not scores["value"].any()
    assert "value" not in plain.score_rows(plain.layout(rows))


def test_values_do_not_depend_on_the_scale_of_the_states() -> None:
    scorer = with_critic()
    rows = Rows.read(make_batch())
    layout = scorer.layout(rows)
    values = scorer.score_rows(layout, value=True)["value"]
    norm: Any = scorer.base.model.norm
    with torch.no_grad():
        norm.weight *= 16
    larger = scorer.score_rows(layout, value=True)["value"]
    torch.testing.assert_close(larger, values, rtol=1e-3, atol=1e-3)


# Targets


def gae_of_torchrl(
    reward: Tensor, value: Tensor, gamma: float, lmbda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and targets of one sequence of steps, [T] each, by TorchRL's module."""
    done = torch.arange(len(reward)) == len(reward) - 1
    steps = TensorDict(
        {
            "state_value": value.double(),
            "next": {
                "state_value": torch.cat([value[1:], value[:1] + 100]).double(),
                "reward": reward.double(),
                "done": done,
                "terminated": done,
            },
        }
    ).unsqueeze(-1)
    steps = TensorDict({key: v.reshape(-1, 1) for key, v in steps.items(True, True)}, [len(reward)])
    module = GAE(gamma=gamma, lmbda=lmbda, value_network=None, average_gae=False)
    out = module(steps)
    return out["advantage"].squeeze(-1), out["value_target"].squeeze(-1)


def dialogs(seed: int) -> list[TensorDict]:
    """Return dialogs of 1 to 4 turns of 1 to 4 tokens, with values and rewards of all tokens."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for index in range(6):
        mask = []
        for _ in range(number(1, 5)):
            mask += [False] * number(1, 4) + [True] * number(1, 5)
        mask += [False] * number(0, 3)
        sampled = torch.tensor(mask)
        row = TensorDict()
        row[keys.FULL] = torch.arange(len(mask))
        row[keys.ASSISTANT_MASK] = sampled
        row[keys.GROUP_ID], row[keys.REWARD] = torch.tensor([index]), torch.zeros(1)
        row[keys.STATE_VALUE] = torch.randn(len(mask), generator=generator) * sampled
        row[keys.TOKEN_REWARD] = torch.randn(len(mask), generator=generator) * sampled
        row[keys.TURN_REWARDS] = row[keys.TOKEN_REWARD].double()
        rows.append(row)
    return rows


def turns_of(mask: Tensor) -> list[list[int]]:
    places = mask.nonzero().flatten().tolist()
    turns: list[list[int]] = []
    for place in places:
        if not turns or turns[-1][-1] != place - 1:
            turns.append([])
        turns[-1].append(place)
    return turns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lmbda"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_advantages_and_targets_are_those_of_torchrls_module(
    level: str, gamma: float, lmbda: float, seed: int
) -> None:
    rows = dialogs(seed)
    arguments = {"mean": "none", "std": "none", "gamma": gamma, "lmbda": lmbda}
    out = GroupAdvantage(1, level=level, **arguments)(lazy_stack([row.clone() for row in rows]))
    for row, got in zip(rows, out.unbind(0), strict=True):
        turns = turns_of(row[keys.ASSISTANT_MASK])
        units = [[place] for turn in turns for place in turn] if level == "token" else turns
        reward = torch.stack([row[keys.TURN_REWARDS][unit].sum() for unit in units])
        value = torch.stack([row[keys.STATE_VALUE][unit[0]] for unit in units])
        advantage, target = gae_of_torchrl(reward, value, gamma, lmbda)
        for key, expected in ((keys.ADVANTAGE, advantage), (keys.VALUE_TARGET, target)):
            full = torch.zeros(len(row[keys.FULL]))
            for unit, number in zip(units, expected, strict=True):
                full[unit] = number.float()
            torch.testing.assert_close(got[key], full, rtol=1e-6, atol=1e-6)


def test_targets_are_not_normalized_and_follow_a_trajectory_of_two_rows() -> None:
    """lambda 0: a token's target is its reward plus the value of the next token, which may be in the
    trajectory's next row.
    """
    rows = []
    for index, done in enumerate((False, True)):
        row = TensorDict({keys.GROUP_ID: torch.tensor([0]), keys.TRAJECTORY: torch.tensor([7])})
        row[keys.DONE] = torch.tensor([done])
        row[keys.ASSISTANT_MASK] = torch.tensor([False, True, True])
        row[keys.STATE_VALUE] = torch.tensor([0.0, 1.0, 2.0]) + 10 * index
        row[keys.TOKEN_REWARD] = torch.tensor([0.0, 0.25, 0.5])
        rows.append(row)
    out = advantages(lazy_stack(rows), lmbda=0.0)
    targets = [row[keys.VALUE_TARGET].tolist() for row in out.unbind(0)]
    assert targets == [[0.0, 2.25, 11.5], [0.0, 12.25, 0.5]]
    estimates = torch.tensor([1.25, 9.5, 1.25, -11.5])
    expected = (estimates - estimates.mean()) / estimates.std()
    got = torch.cat([row[keys.ADVANTAGE][1:] for row in out.unbind(0)])
    torch.testing.assert_close(got, expected)


# Loss


def value_loss_of_trl(vpred: Tensor, values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return the terms whose masked mean, times 0.5, is TRL's value loss
    (``trl/experimental/ppo/ppo_trainer.py``) and verl's (``compute_value_loss``).
    """
    vpredclipped = torch.clamp(vpred, values - clip, values + clip)
    return torch.max(torch.square(vpred - returns), torch.square(vpredclipped - returns))


@pytest.mark.parametrize("clip", [0.2, 1.5, None])
def test_the_value_loss_is_that_of_trl_and_verl(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    value, before, target = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    value.requires_grad_()
    names = {"value": value, "state_value": before, "value_target": target}
    t = Tokens(names | {"log_prob": value, "sample_log_prob": before}, Segments.of([40]))
    t.values |= Value(0.5, clip).prepare(t)
    loss, metrics = Value(0.5, clip)(t)
    bound = 1e9 if clip is None else clip
    expected = value_loss_of_trl(value, before, target, bound)
    torch.testing.assert_close(loss, 0.5 * expected)
    ours, theirs = (
        torch.autograd.grad(x.sum(), value, retain_graph=True)[0] for x in (loss, expected / 2)
    )
    torch.testing.assert_close(ours, theirs)
    clipped = (value - before).abs() > bound
    worse = clipped & (expected > (value - target) ** 2)
    assert metrics["value_clip_fraction"] == worse.sum()
    assert (worse.any() and not worse.all()) == (clip is not None)
    share = 1 - (target - before).var(correction=0) / target.var(correction=0)
    assert metrics["explained_variance"] / 40 == pytest.approx(max(-1.0, float(share)))


# Training


def trained_state(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def train(micro_batch_tokens: int, batch: TensorDictBase, **settings: Any) -> tuple[Any, Any]:
    """Return the metrics and weights of two batches of one step in float64."""
    scorer = with_critic(make_tiny_model().double())
    trainer = make_trainer(scorer, micro_batch_tokens=micro_batch_tokens, **settings)
    metrics = []
    for _ in range(2):
        batch = advantages(trainer.score(batch))
        metrics.append(trainer.train_batch(batch))
    return metrics, trained_state(trainer)


def test_micro_batches_and_shared_prompts_change_no_value_and_no_gradient() -> None:
    whole, weights = train(10**6, rewarded(make_batch(repeats=4)))
    parts, same = train(18, rewarded(make_batch(repeats=4)))
    assert parts[0]["train/micro_batches"] > 3 > whole[0]["train/micro_batches"]
    for name, weight in weights.items():  # to what Adam makes of values rounded to float32
        torch.testing.assert_close(same[name], weight, rtol=0, atol=1e-6)
    for name in ("loss_value", "value_clip_fraction", "explained_variance", "grad_norm"):
        for one, other in zip(whole, parts, strict=True):
            assert one[f"train/{name}"] == pytest.approx(other[f"train/{name}"], rel=1e-6)
    assert whole[1]["train/loss_value"] < whole[0]["train/loss_value"]


def test_an_invalid_sequence_has_no_effect_on_the_critic() -> None:
    batch = rewarded(make_batch())
    batch[3][keys.REWARD_VALID] = torch.tensor([False])
    batch[3][keys.TOKEN_REWARD] = torch.full_like(batch[3][keys.TOKEN_REWARD], 50.0)
    metrics, weights = train(10**6, batch)
    rest = lazy_stack([row for number, row in enumerate(batch.unbind(0)) if number != 3])
    expected, same = train(10**6, rest)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, same[name], rtol=1e-9, atol=1e-12)
    assert metrics[1]["train/loss_value"] == pytest.approx(expected[1]["train/loss_value"])


def test_a_valid_row_of_an_invalid_trajectory_keeps_its_values() -> None:
    batch = rewarded(make_batch())
    for number, row in enumerate(batch.unbind(0)):
        row[keys.GROUP_ID] = row[keys.TRAJECTORY] = torch.tensor([number // 2])
        row[keys.DONE] = torch.tensor([number % 2 == 1])
        row[keys.REWARD_VALID] = torch.tensor([number > 0])
    scorer = with_critic()
    trainer = make_trainer(scorer)
    batch = advantages(trainer.score(batch), level="token")
    _, second, *rest = batch.unbind(0)
    torch.testing.assert_close(second[keys.VALUE_TARGET], second[keys.STATE_VALUE])
    assert not second[keys.ADVANTAGE].any() and second[keys.VALUE_TARGET].any()
    assert all((row[keys.VALUE_TARGET] != row[keys.STATE_VALUE]).any() for row in rest)


def test_the_size_of_an_update_is_the_policys() -> None:
    """Engines are told by it that their weights must change."""
    scorer = with_critic()
    trainer = make_trainer(scorer)
    before = [p.detach().clone() for p in scorer.critic.parameters()]
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0 if group["lr"] == 1e-3 else 0.5
    metrics = trainer.train_batch(advantages(trainer.score(rewarded(make_batch()))))
    assert metrics["train/update_size"] == 0
    assert all(
        (p - old).abs().min() > 0.1
        for p, old in zip(scorer.critic.parameters(), before, strict=True)
    )


def test_a_loss_of_parts_of_a_normalized_batch_adds_up_to_the_whole() -> None:
    trainer = make_trainer(with_critic())
    batch = advantages(trainer.score(rewarded(make_batch())))
    whole, parts = trainer.loss(batch), dict[str, Tensor]()
    for part in trainer.loss.normalize(batch).split(3):
        accumulate(parts, trainer.loss(part))
    for name in ("loss_objective", "loss_value", "value_clip_fraction", "explained_variance"):
        torch.testing.assert_close(parts[name], whole[name])


def test_without_different_targets_there_is_no_explained_variance() -> None:
    batch = make_batch()
    for row in batch.unbind(0):
        row[keys.STATE_VALUE] = torch.zeros(len(row[keys.FULL]))
        row[keys.VALUE_TARGET] = torch.ones(len(row[keys.FULL]))
    metrics = make_trainer(with_critic()).train_step(batch)
    assert math.isnan(metrics["train/explained_variance"])
    assert math.isfinite(metrics["train/loss_value"])


def test_the_explained_variance_is_at_least_minus_1() -> None:
    target = torch.tensor([0.99, 1.0, 1.0, 1.01])
    values = torch.tensor([0.0, 0.5, 1.0, 1.5])  # 1 - 0.306 / 0.00005
    t = Tokens(
        {"value_target": target, "state_value": values, "sample_log_prob": values},
        Segments.of([4]),
    )
    assert Value(0.5).prepare(t)["explained_variance"].tolist() == [-1.0] * 4
    constant = Tokens(t.values | {"state_value": torch.zeros(4)}, Segments.of([4]))
    assert Value(0.5).prepare(constant)["explained_variance"].tolist() == [0.0] * 4


def test_values_are_those_before_the_first_of_several_steps() -> None:
    scorer = with_critic()
    trainer = make_trainer(scorer, optim_batch_size=4, epochs=2)
    trainer.loss.proximal = "recomputed"
    batch = rewarded(make_batch())
    rows = Rows.read(batch)
    with torch.no_grad():
        scores = scorer.score_rows(scorer.layout(rows), value=True)
    metrics = trainer.train_batch(advantages(trainer.score(batch)))
    assert trainer.optim_steps == 4
    for name, key in (("value", keys.STATE_VALUE), ("log_prob", keys.PROX_LOG_PROBS)):
        for row, expected in zip(batch.unbind(0), rows.split(scores[name]), strict=True):
            torch.testing.assert_close(row[key], expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        now = scorer.score_rows(scorer.layout(rows), value=True)["value"]
    assert (now - scores["value"]).abs().max() > 1e-3
    assert metrics["train/clip_fraction_low"] >= 0


def test_a_critic_learns_the_return_that_a_prompt_announces() -> None:
    """The reward is that of the prompt; after training, the values explain it."""
    batch = make_batch((9, 9, 9, 9, 9, 9, 9, 9), repeats=2)
    for number, row in enumerate(batch.unbind(0)):
        row[keys.TOKEN_REWARD] = torch.zeros(9)
        row[keys.TOKEN_REWARD][-1] = float(number // 2 % 2)
        row[keys.GROUP_ID] = torch.tensor([number])
    scorer = TokenScorer(make_tiny_model())
    scorer.add_critic()
    trainer = make_trainer(scorer)
    shares = []
    for _ in range(30):
        batch = advantages(trainer.score(batch), lmbda=1.0)
        shares.append(trainer.train_batch(batch)["train/explained_variance"])
    assert shares[0] == pytest.approx(0, abs=1e-6) and shares[-1] > 0.8


@pytest.mark.slow
def test_the_memory_that_a_critic_takes_in_a_step_is_planned() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}

    def memory(coeff: float) -> tuple[int, int]:
        """Return the measured and the planned peak above what is there between steps."""
        scorer = with_critic(make_tiny_model(**sizes, num_attention_heads=4, num_key_value_heads=4))
        loss = GRPOLoss(scorer, value_coeff=coeff, aggregation="token_mean")
        optimizer = make_optimizer(list(scorer.model.parameters()), lr=1e-4)
        trainer = PolicyTrainer(loss, scorer.model, optimizer, optim_batch_size=8)
        batch = rewarded(make_batch((300,) * 8))
        if coeff:
            batch = advantages(trainer.score(batch))
        trainer.train_step(batch)
        planned = step_memory(shape_of(scorer.model), trainer.setup())
        return peak_of(lambda: trainer.train_step(batch)), planned.peak - planned.resting

    (without, plan), (measured, planned) = memory(0.0), memory(0.5)
    assert planned / measured == pytest.approx(1.0, abs=0.1)
    assert (planned - plan) / (measured - without) == pytest.approx(1.0, abs=0.1)
    for overrides in ((), ("algo=ppo",)):
        setup = step_setup(compose_config(*SMALL, *overrides))
        assert setup.critic == bool(overrides)


# Who sees it


@pytest.mark.parametrize("lora", [False, True])
def test_engines_and_exports_get_the_policy_alone(lora: bool, tmp_path: Path) -> None:
    plain: Any = make_lora() if lora else make_tiny_model()
    model: Any = make_lora() if lora else make_tiny_model()
    trainer = make_trainer(with_critic(model))
    named = dict(make_trainer_without(plain).weights())
    sent = dict(trainer.weights())
    assert sent.keys() == named.keys()
    assert all(torch.equal(sent[name], named[name]) for name in named)


def make_trainer_without(model: Any) -> PolicyTrainer:
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = GRPOLoss(TokenScorer(model))
    return PolicyTrainer(loss, model, torch.optim.AdamW(trained), optim_batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_saves_its_critic_and_exports_the_policy(lora: bool, tmp_path: Path) -> None:
    more = ("train_model.lora.enabled=true", "train_model.lora.r=4") if lora else ()
    rows = run(tmp_path, *PPO, *more, steps(3), "train.checkpoint_frequency=3", "env.repeats=1")
    assert {
        "train/loss_value",
        "train/value_clip_fraction",
        "train/explained_variance",
        "time/values_s",
    } < rows[-1].keys()
    checkpoint = at(tmp_path, 3)
    saved = {
        name: tensor
        for path in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    critic = [name for name in saved if "critic" in name]
    assert sum(name.startswith("weights/") for name in critic) == 2
    assert sum(name.startswith("moments/") for name in critic) == 4
    exported = load_file(checkpoint.with_name("model") / "model.safetensors")
    assert exported and not any("critic" in name for name in exported)
    again = load_file(export(str(checkpoint), tmp_path / "again") / "model.safetensors")
    assert again.keys() == exported.keys()
    assert all(torch.equal(again[name], exported[name]) for name in again)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [None, 0.3])
def test_a_run_has_an_optimizer_group_of_the_critic(lr: float | None, tmp_path: Path) -> None:
    more = () if lr is None else (f"critic.lr={lr}",)
    config = compose_config(*SMALL, "algo=ppo", *more, "optimizer.weight_decay=0.1")
    with closing(build(config, tmp_path)) as built:
        groups = built.learner.trainer.optimizer.param_groups
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        hidden = built.learner.trainer.loss.actor_network.base.config.hidden_size
        of_policy, of_critic = config.optimizer.lr, lr or 0.4 / hidden
        assert [group["initial_lr"] for group in groups] == [of_policy] * 2 + [of_critic] * 2
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
        assert sizes[2:] == [hidden, 1]
