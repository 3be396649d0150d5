"""KLScoring on its own, in a replay buffer and in an environment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast

from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.tasks import ArithmeticTask
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.transforms.kl_scoring import KLScoring


def make_batch(lengths: tuple[int, ...] = (5, 9, 7)) -> TensorDictBase:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        mask = torch.zeros(length, dtype=torch.bool)
        mask[2:] = True
        tokens = torch.randint(0, 261, (length,), generator=generator)
        rows.append(TensorDict({keys.FULL: tokens, keys.ASSISTANT_MASK: mask}))
    return lazy_stack(rows)


def expected(row: TensorDictBase) -> torch.Tensor:
    tokens = row.get(keys.FULL)
    log_p = make_tiny_model()(tokens[None]).logits[0].log_softmax(-1)
    scores = torch.zeros(len(tokens))
    scores[1:] = log_p[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
    return torch.where(row.get(keys.ASSISTANT_MASK), scores, 0.0).detach()


@pytest.mark.parametrize("max_tokens", [1, 14, 16384])
def test_scores_a_ragged_batch_with_any_token_budget(max_tokens: int) -> None:
    batch = make_batch()
    out = KLScoring(TokenScorer(make_tiny_model()), max_tokens=max_tokens)(batch)
    for row in out.unbind(0):
        torch.testing.assert_close(row.get(keys.REF_LOG_PROBS), expected(row), rtol=1e-4, atol=1e-5)


def test_scores_a_padded_batch_and_a_single_sequence() -> None:
    padded = TensorDict(
        {key: make_batch((6, 6)).get(key) for key in (keys.FULL, keys.ASSISTANT_MASK)},
        batch_size=[2],
    )
    scoring = KLScoring(TokenScorer(make_tiny_model()))
    out = scoring(padded)
    assert out.get(keys.REF_LOG_PROBS).shape == (2, 6)
    torch.testing.assert_close(
        out.get(keys.REF_LOG_PROBS)[1], expected(out[1]), rtol=1e-4, atol=1e-5
    )
    single = scoring(make_batch()[1])
    torch.testing.assert_close(
        single.get(keys.REF_LOG_PROBS), expected(single), rtol=1e-4, atol=1e-5
    )


def test_a_replay_buffer_scores_what_is_written_once() -> None:
    model = make_tiny_model()
    scorer = TokenScorer(model)  # which has checks of its own
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_pre_hook(count)
    model.model.register_forward_pre_hook(count)
    buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=3, transform=KLScoring(scorer))
    buffer.extend(make_batch())
    assert calls == 1
    sample = buffer.sample()
    assert calls == 1
    for row in sample.unbind(0):
        torch.testing.assert_close(row.get(keys.REF_LOG_PROBS), expected(row), rtol=1e-4, atol=1e-5)


def test_a_direct_call_scores_again() -> None:
    scoring, batch = KLScoring(TokenScorer(make_tiny_model())), make_batch()
    first = [row.get(keys.REF_LOG_PROBS) for row in scoring(batch).unbind(0)]
    for row in batch.unbind(0):
        row.set(keys.REF_LOG_PROBS, row.get(keys.REF_LOG_PROBS) + 1)
    second = [row.get(keys.REF_LOG_PROBS) for row in scoring(batch).unbind(0)]
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_no_gradient_is_kept() -> None:
    out = KLScoring(TokenScorer(make_tiny_model()))(make_batch())
    assert not any(row.get(keys.REF_LOG_PROBS).requires_grad for row in out.unbind(0))


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        KLScoring(TokenScorer(make_tiny_model()), max_tokens=0)


def test_a_model_or_a_torchrl_wrapper_in_the_place_of_a_scorer_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = make_tiny_model()
    wrapper = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    for scorer, name in ((model, "Qwen2ForCausalLM"), (wrapper, "TransformersWrapper")):
        with pytest.raises(
            ValueError, match=rf"scorer={name} must be a TokenScorer: use TokenScorer\("
        ):
            KLScoring(scorer)


class TwoTurns(ArithmeticTask):
    """Ask a second time after the first response to a problem whose first digit is odd."""

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        return "Sure?" if len(responses) == 1 and int(problem.query[0]) % 2 else None


@pytest.mark.slow
@pytest.mark.parametrize("task", [ArithmeticTask(2), TwoTurns(2)])
def test_in_an_environment_the_collector_keeps_each_steps_scores(
    task: ArithmeticTask, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Responses and dialogs have different lengths; the result must be as if the finished batch
    were scored.
    """
    model = make_tiny_model()
    engine = TransformersEngine(make_tiny_model(seed=1))
    engine.seed(0)
    base = LLMEnv(task, tokenizer, num_envs=8, repeats=2, max_turns=2)
    env = TransformedEnv(base, KLScoring(TokenScorer(model)))
    params = SamplingParams(max_new_tokens=40, stop_token_ids=tuple(range(40, 60)))
    batch = RolloutCollector(env, GenerationPolicy(engine, params)).rollout()
    lengths = {row.get(keys.FULL).numel() for row in batch.unbind(0)}
    assert len(lengths) > 2
    alone = KLScoring(TokenScorer(model), out_key="alone")(batch.clone())
    for row, other in zip(batch.unbind(0), alone.unbind(0), strict=True):
        torch.testing.assert_close(
            row.get(keys.REF_LOG_PROBS), other.get("alone"), rtol=1e-4, atol=1e-5
        )
        assert row.get(keys.REF_LOG_PROBS).abs().max() > 1


def test_autocast_is_the_trainers() -> None:
    batch = make_batch()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = TokenScorer(make_tiny_model())(batch.clone()).get(("cur_log_probs", "full"))
    out = KLScoring(TokenScorer(make_tiny_model()), autocast_dtype=torch.bfloat16)(batch)
    for row, other in zip(out.unbind(0), expected, strict=True):
        got = row.get(keys.REF_LOG_PROBS)
        torch.testing.assert_close(got, other[: len(got)], rtol=0, atol=1e-6)


def test_other_weights_become_the_reference_and_bad_ones_are_refused() -> None:
    scoring = KLScoring(TokenScorer(make_tiny_model()))
    other = make_tiny_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    scoring.update_weights(other.named_parameters())
    for name, value in scoring.scorer.model.named_parameters():
        assert torch.equal(value, dict(other.named_parameters())[name])
    names = list(other.named_parameters())
    with pytest.raises(RuntimeError, match="got 1 missing"):
        scoring.update_weights(names[1:])
    with pytest.raises(RuntimeError, match="got 1 sent twice"):
        scoring.update_weights([*names, names[0]])
    with pytest.raises(RuntimeError, match=r"got 25 missing .*; 1 of another shape"):
        scoring.update_weights([(names[0][0], torch.zeros(1))])
