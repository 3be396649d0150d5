"""A teacher: its divergence from the policy over the vocabulary, its part in the advantage, and a
run with one.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import lazy_stack
from torch import Tensor

from tests.support.configs import SMALL, compose_config
from tests.support.losses import Table, make_batch
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.config import ConfigError
from torchrl_grpo.models import divergence as divergence_module
from torchrl_grpo.models.divergence import Teacher, chunked_divergence, likely_tokens
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path

N, D, E, V = 5, 4, 3, 11


def plain_divergence(p_logits: Tensor, q_logits: Tensor, beta: float) -> Tensor:
    """Return the divergence one token at a time, one vocabulary entry after another, by the formula
    of arXiv 2306.13649.
    """
    out = []
    for p, q in zip(p_logits.softmax(-1), q_logits.softmax(-1), strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for pv, qv in zip(p, q, strict=True):
            if beta == 0:
                total = total + qv * torch.log(qv / pv)
            elif beta == 1:
                total = total + pv * torch.log(pv / qv)
            else:
                m = beta * qv + (1 - beta) * pv
                total = total + beta * qv * torch.log(qv / m) + (1 - beta) * pv * torch.log(pv / m)
        out.append(total)
    return torch.stack(out)


def random_heads(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((N, D), (V, D), (V,), (N, E), (V, E))
    hidden, weight, bias, states, head = (
        torch.randn(size, generator=generator, dtype=torch.float64) * 1.5 for size in sizes
    )
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), states, head


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("most", [1, 80, 10_000])
def test_divergence_and_gradient_equal_a_plain_loop(beta: float, most: int) -> None:
    """In float64, for chunks of 1, 4 and all 11 tokens of the vocabulary."""
    hidden, weight, bias, states, head = random_heads(0)
    scale = torch.arange(1.0, N + 1, dtype=torch.float64)
    p, q = (hidden @ weight.T + bias) / 0.7, states @ head.T / 0.7
    expected = plain_divergence(p, q, beta)
    wanted = torch.autograd.grad((scale * expected).sum(), (hidden, weight, bias))
    got = chunked_divergence(
        hidden,
        weight,
        states,
        Teacher(beta, head),
        bias_V=bias,
        temperature=0.7,
        max_chunk_elements=most,
    )
    grads = torch.autograd.grad((scale * got).sum(), (hidden, weight, bias))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_the_jensen_shannon_divergence_tends_to_both_kls() -> None:
    hidden, weight, _, states, head = random_heads(1)
    hidden, states = hidden * 0.2, states * 0.2  # close enough for the second order to be small
    near_0, near_1, forward, reverse = (
        chunked_divergence(hidden, weight, states, Teacher(beta, head)).detach()
        for beta in (1e-6, 1 - 1e-6, 0.0, 1.0)
    )
    torch.testing.assert_close(near_0 / 1e-6, forward, rtol=1e-3, atol=0)
    torch.testing.assert_close(near_1 / 1e-6, reverse, rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mine", [V, V // 2])
def test_the_likely_tokens_are_kept_and_the_others_share_the_rest(beta: float, mine: int) -> None:
    hidden, weight, _, states, head = random_heads(2)
    weight = weight[:mine]
    for k in (3, 8, V):
        likely = likely_tokens(states, head, k).double()
        q = torch.zeros(N, mine, dtype=torch.float64)
        for row in range(N):
            full = (head @ states[row]).softmax(0)
            best = full.argsort(descending=True)[:k]
            inside = best[best < mine]
            q[row] = (1 - full[best].sum()) / max(1, mine - len(inside))
            q[row, inside] = full[inside]
        q /= q.sum(-1, keepdim=True)  # tokens that the policy lacks have no share
        got = chunked_divergence(hidden, weight, likely, Teacher(beta), max_chunk_elements=80)
        torch.testing.assert_close(
            got, plain_divergence(hidden @ weight.T, q.log(), beta), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("rest", [1e-3, 1e-8, 1e-12])
def test_a_small_rest_does_not_cancel(rest: float) -> None:
    """A teacher that is nearly certain of two tokens; the other eight share what is left."""
    q = torch.tensor([[0.6, 0.4 - rest, *[rest / 8] * 8]], dtype=torch.float64)
    likely = likely_tokens(q.log().float(), torch.eye(10), 2)
    [log_q] = Teacher(1.0).chunks(likely, 10, 10, 1.0)
    torch.testing.assert_close(log_q.double(), q.log(), rtol=1e-6, atol=1e-6)
    # A server does not say the rest: it is known as well as the rounding of its log-probs allows.
    [log_q] = Teacher(1.0).chunks(likely[:, :4], 10, 10, 1.0)
    torch.testing.assert_close(log_q.exp().double(), q, rtol=1e-6, atol=2e-8)


def test_rows_that_one_head_alone_has_are_left_out() -> None:
    """Qwen2.5's heads have 151,936 or 152,064 rows for the same 151,665 tokens."""
    hidden, weight, _, states, head = random_heads(3)
    for mine, theirs in ((V, V - 2), (V - 2, V)):
        got = chunked_divergence(hidden, weight[:mine], states, Teacher(1.0, head[:theirs]))
        both = (hidden @ weight[: V - 2].T, states @ head[: V - 2].T)
        torch.testing.assert_close(got, plain_divergence(*both, 1.0))


def test_no_more_logits_are_held_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = divergence_module.head_logits

    def record(*args: Tensor | None) -> Tensor:
        logits = plain(*args)  # type: ignore[arg-type]
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(divergence_module, "head_logits", record)
    hidden, weight, _, states, head = random_heads(4)
    chunked_divergence(
        hidden, weight, states, Teacher(0.5, head), max_chunk_elements=80
    ).sum().backward()
    # Chunks of 4 of the 11 tokens; twice each for the policy and the teacher, and again in backward.
    assert max(sizes) == 4 * N and len(sizes) == 3 * (2 + 2 + 1 + 2)


def test_the_kl_to_the_teacher_is_that_of_the_sampled_tokens() -> None:
    logits, rows = make_batch(0)
    log_ratios = []
    for number, row in enumerate(rows):
        table = logits[number, : len(row[keys.FULL])].log_softmax(-1)
        teacher = table.gather(-1, row[keys.FULL][:, None]).squeeze(-1) - 0.1 * torch.arange(
            len(table)
        )
        row[keys.TEACHER_LOG_PROBS] = torch.where(row[keys.ASSISTANT_MASK], teacher, 99.0)
        log_ratios.append(
            0.1 * torch.arange(len(table), dtype=torch.float64)[row[keys.ASSISTANT_MASK]]
        )
    out = GRPOLoss(Table(logits))(lazy_stack(rows))
    k1 = torch.cat(log_ratios)
    torch.testing.assert_close(out["kl_k1_to_teacher"], k1.mean())
    torch.testing.assert_close(out["kl_k3_to_teacher"], (torch.exp(-k1) - 1 + k1).mean())


RUN = (*SMALL, "train.total_dialog_turns=16", "policy.teacher_coef=0.5", "teacher.model=starter")


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["sampled", "jsd"])
def test_a_run_scores_with_reference_and_teacher_and_trains(
    divergence: str, tmp_path: Path
) -> None:
    run = build(compose_config(*RUN, f"policy.teacher_divergence={divergence}"), tmp_path)
    try:
        teacher = run.rollouts.teachers[0].part.scoring.scorer.model
        with torch.no_grad():
            teacher.get_input_embeddings().weight[20:60] *= 1.5  # a different model than the policy
        run.fit()
        batch, row = run.learner._batch, run.logger.last_row
    finally:
        run.close()
    assert batch is not None
    for sequence in batch.unbind(0):
        mask = sequence[keys.ASSISTANT_MASK]
        assert sequence[keys.REF_LOG_PROBS][mask].lt(0).all()
        if divergence == "sampled":
            tokens = sequence[keys.FULL]
            expected = (
                teacher(tokens[None])
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, tokens[1:, None])[:, 0]
            )
            log_probs = sequence[keys.TEACHER_LOG_PROBS]
            torch.testing.assert_close(log_probs[mask], expected[mask[1:]], rtol=1e-4, atol=1e-4)
            apart = sequence[keys.LOG_PROBS] - log_probs
            rest = (sequence[keys.ADVANTAGE] + 0.5 * apart)[
                mask
            ]  # the group's advantage, the same for all tokens
            torch.testing.assert_close(rest, rest[:1].expand_as(rest), rtol=1e-4, atol=1e-4)
    name = "kl_k3_to_teacher" if divergence == "sampled" else "divergence_to_teacher"
    assert row[f"train/{name}"] > 0
    if divergence == "jsd":
        assert row["train/loss_teacher"] > 0
        assert row["train/divergence_to_teacher"] < -0.5 * 2 * math.log(0.5)


def test_the_plan_shows_the_teacher_and_its_size() -> None:
    config = compose_config(*RUN)
    row = shares(prepare(config))["teacher"].row()
    assert (row["devices"], row["dtype"], row["memory per device"]) == (
        "cpu",
        "float32",
        4 * row["parameters"],
    )


def test_a_teacher_with_other_tokens_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    for file in starter_path().iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b'"!": 5', b'"\\u0100!": 5')
        (tmp_path / file.name).write_bytes(text)
    config = compose_config(*SMALL, "policy.teacher_coef=1", f"teacher.model={tmp_path}")
    with pytest.raises(ConfigError, match=r"teacher\.model=.* model\.name=starter, .* 5, .*'Ā!' .*'!'"):  # fmt: skip
        prepare(config)


@pytest.mark.slow
def test_weights_that_a_teacher_lacks_are_said_to_be_the_teachers(tmp_path: Path) -> None:
    shutil.copytree(starter_path(), tmp_path / "teacher")
    weights = load_file(tmp_path / "teacher" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "teacher" / "model.safetensors", metadata={"format": "pt"})
    config = compose_config(
        *SMALL, "policy.teacher_coef=1", f"teacher.model={tmp_path / 'teacher'}"
    )
    with pytest.raises(ValueError, match=r"teacher\.model=.* 1 .*\(model\.norm"):
        build(config, tmp_path / "run")


def test_a_teacher_that_is_not_there_is_refused_by_a_dry_run_too() -> None:
    teacher = ("algo=distill", "teacher.model=gone/", "dry_run=true")
    with pytest.raises(ConfigError, match=r"teacher\.model=gone/ must be a folder"):
        prepare(compose_config(*SMALL, *teacher))
