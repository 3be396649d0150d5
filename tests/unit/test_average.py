"""A moving average of the trained weights: its arithmetic, its roles as a scorer, and
self-distillation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from tests.support.configs import SMALL, compose_config
from tests.support.models import make_lora, make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import AverageScorer, TokenScorer

TOKENS = torch.arange(20, 29)[None]
MASK = torch.arange(9)[None] > 3


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def change(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return trained(model)


@pytest.mark.parametrize("lora", [False, True])
def test_it_scores_with_the_average_and_leaves_the_weights_alone(lora: bool) -> None:
    model: Any = make_lora() if lora else make_tiny_model()
    scorer = AverageScorer(model, decay=0.75, every=2)
    versions = [trained(model), *(change(model, seed) for seed in (1, 2, 3, 4))]
    for version in range(1, 5):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in versions[version]:
                    parameter.copy_(versions[version][name])
        scorer.update(version)
    assert len(versions[0]) < len(list(model.parameters())) or not lora
    expected = {
        name: 0.75 * (0.75 * value + 0.25 * versions[2][name]) + 0.25 * versions[4][name]
        for name, value in versions[0].items()
    }
    for name, value in expected.items():
        torch.testing.assert_close(scorer.average[name], value)
    log_probs = scorer.score(TOKENS, MASK)[0]
    states = scorer.teacher_states(scorer.layout(Rows.from_padded(TOKENS, MASK)), top_k=2)
    for name, value in trained(model).items():
        assert torch.equal(value, versions[4][name])
    plain = TokenScorer(model)
    assert (plain.score(TOKENS, MASK)[0] - log_probs).abs().max() > 1e-4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in expected:
                parameter.copy_(expected[name])
    torch.testing.assert_close(plain.score(TOKENS, MASK)[0].detach(), log_probs.detach())
    wanted = plain.teacher_states(plain.layout(Rows.from_padded(TOKENS, MASK)), top_k=2)
    torch.testing.assert_close(wanted.detach(), states.detach())


def test_weights_come_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model()
    scorer = AverageScorer(model, decay=0.5)
    weights = change(model, 1)
    average = {name: value.clone() for name, value in scorer.average.items()}
    monkeypatch.setattr(scorer, "_score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(TOKENS, MASK)
    for name, value in trained(model).items():
        assert torch.equal(value, weights[name])
        assert torch.equal(scorer.average[name], average[name])


def test_passes_in_one_context_score_alike_and_change_places_once() -> None:
    model = make_tiny_model()
    scorer = AverageScorer(model, decay=0.5)
    weights = change(model, 1)
    wanted, _ = scorer.score(TOKENS, MASK)
    with scorer.for_passes():
        averages = {name: value.clone() for name, value in trained(model).items()}
        for _ in range(2):
            assert torch.equal(scorer.score(TOKENS, MASK)[0], wanted)
            assert all(torch.equal(p, averages[name]) for name, p in trained(model).items())
    assert not all(torch.equal(weights[name], value) for name, value in averages.items())
    assert all(torch.equal(p, weights[name]) for name, p in trained(model).items())


PROMPTS = """
def hint(messages, answer):
    return [{"role": "user", "content": f"{answer} {messages[-1]['content']}"}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("weights", ["live", "frozen", "ema"])
def test_a_policy_that_teaches_itself_scores_with_its_own_weights(
    weights: str, lora: bool, tmp_path: Path
) -> None:
    """The weights may be those at the start of the step or of the run, or their average; log-probs
    are of plain logits after the hint.
    """
    (tmp_path / "prompts.py").write_text(PROMPTS)
    config = compose_config(
        *SMALL,
        "algo=distill",
        "teacher.model=policy",
        f"teacher.weights={weights}",
        f"teacher.prompt={tmp_path / 'prompts.py'}:hint",
        f"train_model.lora.enabled={str(lora).lower()}",
        "optimizer.lr=1e-2",
        "train.total_steps=3",
        *(["teacher.decay=0.5"] if weights == "ema" else []),
    )
    run = build(config, tmp_path / "run")
    trainer = run.learner.trainer
    model = trainer.model
    start, latest, average = trained(model), trained(model), trained(model)
    train = trainer.train_batch
    worst = []

    def spy(batch: TensorDictBase) -> dict[str, float]:
        nonlocal latest, average
        teacher = {"live": latest, "frozen": start, "ema": average}[weights]
        row = batch[0]
        tokens = torch.cat([row[keys.TEACHER_PROMPT], row[keys.RESPONSE]])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in teacher:
                    parameter.copy_(teacher[name])
            logits = model(tokens[None]).logits[0, len(row[keys.TEACHER_PROMPT]) - 1 : -1]
            for name, parameter in model.named_parameters():
                if name in latest:
                    parameter.copy_(latest[name])
        expected = logits.log_softmax(-1).gather(-1, row[keys.RESPONSE][:, None]).squeeze(-1)
        log_probs = row[keys.TEACHER_LOG_PROBS][-len(expected) :]
        worst.append((log_probs - expected).abs().max().item())
        metrics = train(batch)
        latest = trained(model)
        average = {name: 0.5 * value + 0.5 * latest[name] for name, value in average.items()}
        return metrics

    trainer.train_batch = spy
    try:
        run.fit()
    finally:
        run.close()
    assert len(worst) == 3 and max(worst) < 1e-3
    assert any(not torch.equal(start[name], latest[name]) for name in start)


def test_the_plan_shows_where_own_weights_score() -> None:
    own = ["algo=distill", "teacher.model=policy", "teacher.weights=ema"]
    average = ["policy.kl_coef=0.1", "ref_model.refresh_every=1", "ref_model.decay=0.9"]
    context = prepare(compose_config(*SMALL, *own, *average))
    own_shares = shares(context)
    assert {"reference (average)", "teacher (ema)"} < {share.label for share in own_shares.values()}
    plain = prepare(compose_config(*SMALL, "policy.kl_coef=0"))
    weights = 4 * context.shape.parameters
    before, after = (
        each["train"].minimum["trained weights and optimizer state"]
        for each in (shares(plain), own_shares)
    )
    assert after == before + 2 * weights
    frozen = prepare(compose_config(*SMALL, *own[:2], "teacher.weights=frozen"))
    assert shares(frozen)["teacher"].row()["memory per device"] == weights
