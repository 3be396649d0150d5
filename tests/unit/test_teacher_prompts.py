"""A teacher with a prompt of its own: how it is written, which tokens are scored, and the step that
trains on it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.configs import SMALL, compose_config
from tests.support.losses import Table, make_batch
from tests.support.models import make_llama, make_tiny_model
from tests.support.padded import pad_batch
from tests.support.sglang_stub import SGLangStub
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.collectors.teacher_prompts import TeacherPrompts
from torchrl_grpo.config import ConfigError
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.integrations.served_teacher import ServedTeacher
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.drawing import Drawn
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.teacher import TeacherAdvantage, TeacherScoring, TeacherStates

FUNCTIONS = """
def shown(messages, solution):
    return [{"role": "user", "content": f"{solution} {messages[-1]['content']}"}]
def only_for_wrong(messages, peers, response, answer):
    return None if response == answer else [{"role": "user", "content": str(len(peers))}]
def rest(**columns):
    assert sorted(columns) == ["answer", "question", "solution"], sorted(columns)
    return [{"role": "user", "content": columns["solution"]}]
def failing(messages):
    return messages[7]
def strange(messages, weather):
    return messages
def graded(response, answer):
    return {"reward": float(answer in response), "feedback": f"{response} is not {answer}"}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "prompts.py").write_text(FUNCTIONS)
    rows = [
        {"question": f"{a}+{a}=?", "solution": f"{a}*2=", "answer": str(2 * a)}
        for a in range(1, 40)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def make_env(files: Path) -> LLMEnv:
    task = DatasetTask(
        str(files / "sums.jsonl"),
        test_fraction=0.2,
        answer_column="answer",
        completion_column="solution",
    )
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    return LLMEnv(task, tokenizer, num_envs=4, repeats=4)


def group(responses: list[tuple[str, float, bool]]) -> list[TensorDict]:
    """Return rows of a finished group: text, reward, and whether the reward is valid."""
    return [
        TensorDict(
            {
                keys.RESPONSE: torch.arange(20, 24),
                keys.REWARD: torch.tensor([reward]),
                keys.CORRECT: torch.tensor([reward == 1]),
                keys.REWARD_VALID: torch.tensor([valid]),
            }
        ).set_non_tensor(keys.RESPONSE_TEXT, text)
        for text, reward, valid in responses
    ]


def written(files: Path, name: str, rows: list[TensorDict], longest: int = 200) -> list[str]:
    """Return the prompts that a function writes for the rows of one group, as text."""
    env = make_env(files)
    problem = env.prompts.problems[env.prompts.usable[0]]
    TeacherPrompts(env, name.replace("HERE", str(files / "prompts.py")), longest)(
        Drawn(0, 0, problem), rows
    )
    return [env.tokenizer.decode(row[keys.TEACHER_PROMPT]) for row in rows]


RESPONSES = [("2", 1.0, True), ("3", 0.0, True), ("5", 0.5, True), ("4", 1.0, False)]


def test_a_function_writes_the_teachers_prompt_by_the_template(files: Path) -> None:
    [first, *_] = written(files, "HERE:shown", group(RESPONSES))
    assert first == "<|user|>1*2= 1+1=?<|end|><|assistant|>"
    [first, *_] = written(files, "HERE:rest", group(RESPONSES))
    assert first == "<|user|>1*2=<|end|><|assistant|>"


def test_peers_are_the_other_responses_with_a_valid_reward(files: Path) -> None:
    counts = [
        text.removeprefix("<|user|>").partition("<")[0]
        for text in written(files, "HERE:only_for_wrong", group(RESPONSES))
    ]
    assert counts == ["", "2", "2", "3"]


def test_built_in_prompts_show_solution_response_or_feedback(files: Path) -> None:
    [solution, *_] = written(files, "solution", group(RESPONSES))
    assert "1+1=?" in solution and "1*2=" in solution
    best = written(files, "best_response", group(RESPONSES))
    assert [bool(text) for text in best] == [False, True, True, True]
    assert all("\n2\n" in text for text in best[1:])  # the invalid one is not shown
    rows = group(RESPONSES)
    rows[1].set_non_tensor(keys.FEEDBACK, "3 is odd")
    feedback = written(files, "feedback", rows)
    assert [bool(text) for text in feedback] == [False, True, False, False]
    assert "3 is odd" in feedback[1]


def test_a_prompt_that_leaves_no_room_for_the_response_is_none(files: Path) -> None:
    rows = group(RESPONSES)
    [fits, *_] = written(files, "HERE:shown", rows)
    size = len(rows[0][keys.TEACHER_PROMPT])
    assert written(files, "HERE:shown", group(RESPONSES), longest=size + 4)[0] == fits
    assert written(files, "HERE:shown", group(RESPONSES), longest=size + 3) == [""] * 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("HERE:strange", r"teacher\.prompt=.*:strange needs weather, .* use only answer, "),
        ("HERE:failing", r"teacher\.prompt=.*:failing .* '1\+1=\?' it failed: IndexError"),
        ("HERE:gone", r"teacher\.prompt=.*:gone must name a function"),
        (
            "best",
            r"teacher\.prompt=best must be a built-in or installed name \(best_response, feedback, sol",
        ),
    ],
)
def test_a_function_that_cannot_write_prompts_is_refused(
    name: str, message: str, files: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        written(files, name, [])


def test_a_solution_needs_a_column(files: Path) -> None:
    env = make_env(files)
    env.task.completion_column = None
    with pytest.raises(ValueError, match=r"teacher\.prompt=solution .* env\.columns\.completion"):
        TeacherPrompts(env, "solution", 100)


def test_feedback_is_left_out_where_no_reward_function_gives_it() -> None:
    game = ("env.dataset=null", "env.environment=tests/pairs/functions.py:Game")
    teacher = ("algo=distill", "teacher.model=starter", "teacher.prompt=feedback")
    message = r"teacher\.prompt=feedback must be left out with env\.agent, env\.environment"
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config(*SMALL, *teacher, *game))


def test_feedback_is_no_part_of_the_reward(files: Path) -> None:
    """Feedback reaches the score in this process and through a process of the pool."""
    rewards = make_rewards(f"{files / 'prompts.py'}:graded")
    problem = Problem("1+1=?", "2")
    dialog = Dialog(problem, ["3"])
    score = rewards(dialog)
    assert (score.reward, dict(score.parts)) == (0.0, {"graded/reward": 0.0})
    assert score.feedback == "3 is not 2"
    task = WithRewards(make_env(files).task, rewards)
    pool = RewardPool(task, 1, timeout_s=300)
    try:
        assert pool.submit(dialog).result().score.feedback == "3 is not 2"
    finally:
        pool.close()


def prompted() -> TensorDictBase:
    """Return sequences that a teacher sees after longer, shorter and no prompts; one has two turns."""
    rows = []
    two_turns = [*range(5, 8), *range(10, 14)]
    for length, sampled, prompt in ((9, range(4, 9), 7), (14, two_turns, 2), (8, range(3, 8), 0)):
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(20, 90, (length,), generator=generator)
        mask = torch.zeros(length, dtype=torch.bool)
        mask[list(sampled)] = True
        rows.append(
            TensorDict(
                {
                    keys.FULL: tokens,
                    keys.RESPONSE: tokens[sampled[0] :],
                    keys.ASSISTANT_MASK: mask,
                    keys.LOG_PROBS: torch.where(mask, -1.0, 0.0),
                    keys.ADVANTAGE: torch.tensor([2.0]),
                    keys.TEACHER_PROMPT: torch.randint(20, 90, (prompt,), generator=generator),
                }
            )
        )
    return lazy_stack(rows)


def logits_of_view(model: torch.nn.Module, row: TensorDictBase) -> torch.Tensor:
    """Return logits [S, V] at the sampled tokens, after the teacher's prompt."""
    tokens = torch.cat([row[keys.TEACHER_PROMPT], row[keys.RESPONSE]])
    mask = row[keys.ASSISTANT_MASK][-len(row[keys.RESPONSE]) :]
    start = len(row[keys.TEACHER_PROMPT]) - 1
    with torch.no_grad():
        return model(tokens[None]).logits[0, start:-1][mask]


def test_log_probs_are_those_after_the_teachers_prompt() -> None:
    model = make_llama(0).double()
    scoring = KLScoring(TokenScorer(model), out_key=keys.TEACHER_LOG_PROBS)
    batch = TeacherScoring(scoring)(prompted())
    assert batch[keys.TEACHER_VALID].tolist() == [[True], [True], [False]]
    for row in batch.unbind(0):
        mask, teacher_log_probs = row[keys.ASSISTANT_MASK], row[keys.TEACHER_LOG_PROBS]
        assert len(teacher_log_probs) == len(mask) and not teacher_log_probs[~mask].any()
        if not row[keys.TEACHER_VALID]:
            assert not teacher_log_probs.any()
            continue
        log_probs = logits_of_view(model, row).log_softmax(-1)
        expected = log_probs.gather(-1, row[keys.FULL][mask][:, None]).squeeze(-1)
        torch.testing.assert_close(teacher_log_probs[mask].double(), expected, rtol=1e-6, atol=1e-6)
    again = batch.clone()
    again[0][keys.TEACHER_LOG_PROBS].zero_()
    TeacherScoring(scoring)(again)
    assert torch.equal(again[0][keys.TEACHER_LOG_PROBS], batch[0][keys.TEACHER_LOG_PROBS])


def test_a_server_scores_the_teachers_prompt_too() -> None:
    pytest.importorskip("httpx2")
    stub = SGLangStub(str(starter_path()))
    try:
        there = TeacherScoring(ServedTeacher(stub.address, top_k=3), 6)(prompted())
    finally:
        stub.hangs.set()
        stub.stop()
    model = AutoModelForCausalLM.from_pretrained(starter_path()).float().eval()
    here = TeacherScoring(TeacherStates(TokenScorer(model), top_k=3), 7)(prompted())
    for served, mine in zip(there.unbind(0), here.unbind(0), strict=True):
        states = mine[keys.TEACHER_STATES]
        torch.testing.assert_close(served[keys.TEACHER_STATES], states[:, :6], rtol=0, atol=1e-5)
        assert states.any() == mine[keys.TEACHER_VALID]


@pytest.mark.parametrize("clip", [None, 0.4])
def test_the_advantage_has_a_clipped_kl_where_there_is_a_teacher(clip: float | None) -> None:
    batch = prompted()
    for row, valid in zip(batch.unbind(0), (True, True, False), strict=True):
        mask = row[keys.ASSISTANT_MASK]
        row[keys.TEACHER_LOG_PROBS] = torch.where(mask, -1 + 0.1 * torch.arange(len(mask)), 0.0)
        row[keys.TEACHER_VALID] = torch.tensor([valid])
    TeacherAdvantage(2.0, 0.5, clip)(batch)
    for row in batch.unbind(0):
        kl = -0.1 * torch.arange(len(row[keys.FULL])) * row[keys.TEACHER_VALID]
        kl = kl if clip is None else kl.clamp(-clip, clip)
        expected = torch.where(row[keys.ASSISTANT_MASK], 0.5 * 2.0 - 2.0 * kl, 0.0)
        torch.testing.assert_close(row[keys.ADVANTAGE], expected)


@pytest.mark.parametrize(
    ("beta", "clip", "top_k", "packs"),
    [
        *((beta, clip, None, True) for beta in (0.0, 0.5, 1.0) for clip in (None, 0.1)),
        (1.0, None, 261, True),
        (1.0, None, None, False),
        (0.5, 0.1, 261, False),
    ],
)
def test_the_loss_is_the_clipped_divergence_of_plain_logits(
    beta: float, clip: float | None, top_k: int | None, packs: bool
) -> None:
    """Value and gradient of a plain loop over the tokens, in float64, for a Qwen2 policy and a
    Llama teacher, through the states that are sent.
    """
    student = make_tiny_model().double()
    teacher = make_llama(1).double()
    states = TeacherStates(TokenScorer(teacher), top_k=top_k)
    width = 2 * top_k + 1 if top_k else teacher.config.hidden_size
    batch = TeacherScoring(states, width)(prompted())
    batch.set(keys.ADVANTAGE, torch.zeros(3, 1))
    scorer = TokenScorer(student)
    if not packs:
        student.unpacked_because = "it is not to be"
    head = None if top_k else teacher.get_output_embeddings().weight.detach()
    scorer.distill_from(Teacher(beta, head))
    loss = GRPOLoss(scorer, teacher_coeff=0.7, teacher_clip=clip, aggregation="token_mean")
    padded = pad_batch(
        batch,
        {key: 0 for key in (keys.FULL, keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.TEACHER_STATES)},
        [keys.ADVANTAGE, keys.TEACHER_VALID],
    )
    out = loss(padded)
    out["loss_teacher"].backward()
    grads = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for row in batch.unbind(0):
        start = len(row[keys.FULL]) - len(row[keys.RESPONSE])
        mask = row[keys.ASSISTANT_MASK]
        count += int(mask.sum())
        if not row[keys.TEACHER_VALID]:
            continue
        logits = student(row[keys.FULL][None]).logits[0, start - 1 : -1][mask[start:]]
        for p, q in zip(logits.softmax(-1), logits_of_view(teacher, row).softmax(-1), strict=True):
            m = beta * q + (1 - beta) * p
            terms = {0.0: q * (q / p).log(), 1.0: p * (p / q).log()}.get(
                beta, beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()
            )
            token = terms.sum()
            total = total + (token if clip is None else token.clamp(max=clip))
    expected = 0.7 * total / count
    expected.backward()
    close = {"rtol": 1e-3, "atol": 1e-5} if top_k else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(out["loss_teacher"], expected, **close)
    torch.testing.assert_close(out["divergence_to_teacher"], expected.detach() / 0.7, **close)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, **close)


@pytest.mark.nightly
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_loss_is_that_of_trls_self_distillation(alpha: float) -> None:
    """The policy teaches itself; value and gradient are those of TRL's SDPO and SDFT over the
    vocabulary.
    """
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    model = make_tiny_model().double()
    vocabulary = model.config.vocab_size
    states = TeacherStates(TokenScorer(model), top_k=vocabulary)
    batch = TeacherScoring(states, 2 * vocabulary + 1)(prompted())
    batch.set(keys.ADVANTAGE, torch.zeros(3, 1))
    scorer = TokenScorer(model)
    scorer.distill_from(Teacher(alpha))
    padded = pad_batch(
        batch,
        {key: 0 for key in (keys.FULL, keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.TEACHER_STATES)},
        [keys.ADVANTAGE, keys.TEACHER_VALID],
    )
    out = GRPOLoss(scorer, teacher_coeff=1.0)(padded)
    out["loss_teacher"].backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    rows = []
    for row in batch.unbind(0):
        if row[keys.TEACHER_VALID]:
            start = len(row[keys.FULL]) - len(row[keys.RESPONSE])
            mask = row[keys.ASSISTANT_MASK]
            logits = model(row[keys.FULL][None]).logits[0, start - 1 : -1][mask[start:]]
            tokens = trl.compute_full_logit_self_distillation_loss(
                logits[None], logits_of_view(model, row)[None], distillation_alpha=alpha
            )
            rows.append(tokens.mean())
    expected = torch.stack(rows).sum() / len(batch)
    expected.backward()
    torch.testing.assert_close(out["loss_teacher"], expected, rtol=1e-6, atol=1e-7)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_kl_metrics_leave_out_tokens_without_a_teacher() -> None:
    logits, rows = make_batch(0)
    for number, row in enumerate(rows):
        table = logits[number, : len(row[keys.FULL])].log_softmax(-1)
        current = table.gather(-1, row[keys.FULL][:, None]).squeeze(-1)
        row[keys.TEACHER_LOG_PROBS] = current - 0.5 if number else torch.zeros_like(current)
        row[keys.TEACHER_VALID] = torch.tensor([number > 0])
    sizes = [int(row[keys.ASSISTANT_MASK].sum()) for row in rows]
    out = GRPOLoss(Table(logits))(lazy_stack(rows))
    expected = torch.tensor(0.5 * sum(sizes[1:]) / sum(sizes), dtype=torch.float64)
    torch.testing.assert_close(out["kl_k1_to_teacher"], expected)


@pytest.mark.slow
def test_a_run_counts_the_responses_without_a_teacher(files: Path) -> None:
    """The starter solves some sums, so their groups have a response to show."""
    config = compose_config(
        *SMALL,
        "algo=distill",
        "teacher.model=starter",
        "teacher.prompt=best_response",
        "train.total_dialog_turns=32",
        "policy.reward_coef=1",
        "policy.teacher_divergence=reverse",
    )
    run = build(config, files / "run")
    try:
        run.fit()
        batch, row = run.learner._batch, run.logger.last_row
    finally:
        run.close()
    assert batch is not None
    valid = batch[keys.TEACHER_VALID].reshape(-1)
    group_ids = batch[keys.GROUP_ID].reshape(-1)
    correct = batch[keys.CORRECT].reshape(-1)
    for index in range(len(batch)):
        others = (group_ids == group_ids[index]) & (torch.arange(len(batch)) != index)
        assert bool(valid[index]) == bool(correct[others].any())
    assert 0 < valid.sum() < len(valid)
    assert row["rollout/without_teacher"] == pytest.approx(1 - valid.float().mean().item())
    assert row["train/divergence_to_teacher"] > 0
