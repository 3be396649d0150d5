"""TorchRL's wrappers, environments and collectors combined with ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, TransformedEnv
from torchrl.envs.llm.transforms import PythonInterpreter
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm import TransformersWrapper

from tests.support.echo import EchoTask, TwoTurnTask
from tests.support.envs import END, ScriptedEngine
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.transforms import GroupAdvantage, HistoryTransforms, KLScoring, RewardShaping


class SameLength(EchoTask):
    def problems(self, split):
        return [Problem(letter, letter) for letter in "abcdef"]


def make_env(tokenizer: Any, task: Any = None, **arguments: Any) -> LLMEnv:
    return LLMEnv(task or SameLength(), tokenizer, num_envs=4, repeats=2, max_turns=2, **arguments)


def make_policy() -> GenerationPolicy:
    params = SamplingParams(max_new_tokens=4)
    return GenerationPolicy(ScriptedEngine(lambda *_: ([10, END], "stop")), params)


def make_wrapper(model: Any, tokenizer: Any, mode: str = "tokens") -> TransformersWrapper:
    model.generation_config.eos_token_id = END
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode=mode,
        generate=True,
        pad_output=False,
        generate_kwargs={"max_new_tokens": 3, "do_sample": True},
    )


def test_torchrls_wrapper_plays_dialogs_of_several_turns(tokenizer, tiny_model):
    with torch.no_grad():  # the end of a turn is as likely as all other tokens together
        tiny_model.lm_head.weight[END] *= 3
    torch.manual_seed(0)
    collector = LLMCollector(
        lambda: make_env(tokenizer, TwoTurnTask()),
        policy=make_wrapper(tiny_model, tokenizer),
        dialog_turns_per_batch=4,
        total_dialog_turns=24,
    )
    rows = [row for batch in collector for row in batch.reshape(-1).unbind(0)]
    ended = [int(row["tokens", "response"][-1]) == END for row in rows]
    assert any(ended) and not all(ended)
    for row, end in zip(rows, ended, strict=True):
        prompt = row["tokens", "prompt"]
        assert row["tokens", "full"].tolist()[: len(prompt)] == prompt.tolist()
        if not end:  # cut off by max_new_tokens
            assert row["next", "truncated"].all() and row["next", "done"].all()
    turns = [row for row, end in zip(rows, ended, strict=True) if end]
    assert any(len(row["next", "tokens", "prompt"]) > len(row["tokens", "full"]) for row in turns)


def test_an_environment_has_a_device(tokenizer):
    env = make_env(tokenizer, device="cpu")
    assert env.device == torch.device("cpu")
    check_env_specs(env)
    assert RolloutCollector(env, make_policy()).rollout().device == env.device
    assert make_env(tokenizer).to("cpu").rollout(2, make_policy()).device == env.device


def test_specs_of_chat_transforms_are_those_of_the_data(tokenizer):
    env = TransformedEnv(make_env(tokenizer), HistoryTransforms(PythonInterpreter(timeout=5)))
    check_env_specs(env)


def test_a_batch_of_a_wrapper_is_scored_and_trained(tokenizer, tiny_model):
    """KLScoring and TokenScorer read its response tokens, which have log-probs."""
    wrapper = make_wrapper(tiny_model, tokenizer)
    collector = LLMCollector(
        make_env(tokenizer), policy=wrapper, dialog_turns_per_batch=4, flatten_data=True
    )
    batch = KLScoring(TokenScorer(tiny_model))(next(iter(collector)))
    for row in batch.unbind(0):
        ref, sampled = row["next", "ref_log_probs", "full"], row["log_probs", "response"]
        length, start = len(row["tokens", "full"]), len(row["tokens", "prompt"])
        assert ref.shape == (length,) and not ref[:start].any()
        known = sampled != 0  # TorchRL writes 0 for the first token
        assert known.sum() >= length - start - 1
        torch.testing.assert_close(ref[start:][known], sampled[known])
    batch = GroupAdvantage(2)(batch)
    batch.set("advantage", torch.ones(4, 1))
    out = GRPOLoss(TokenScorer(tiny_model), kl_to_ref_coeff=0.1)(batch)
    assert float(out["loss_objective"]) == pytest.approx(-1)
    assert float(out["kl_k3_to_ref"]) == pytest.approx(0, abs=1e-6)


def test_a_batch_that_is_padded_on_the_left_scores_as_the_ragged_one(tokenizer, tiny_model):
    policy = GenerationPolicy(TransformersEngine(tiny_model), SamplingParams(max_new_tokens=4))
    collector = RolloutCollector(make_env(tokenizer), policy)
    collector.set_seed(0)
    batch = collector.rollout().set("advantage", torch.tensor([[1.0], [-2.0], [0.5], [3.0]]))
    width = 1 + max(len(row["tokens", "full"]) for row in batch.unbind(0))
    of_tokens = [("tokens", "full"), ("log_probs", "full")]
    of_tokens += [("masks", "all_assistant_mask"), ("masks", "all_attention_mask")]
    padded = torch.stack(
        [
            row.select("advantage").update(
                {key: pad(row[key], (width - len(row[key]), 0)) for key in of_tokens}
            )
            for row in batch.unbind(0)
        ]
    )
    scoring = KLScoring(TokenScorer(tiny_model))
    loss = GRPOLoss(TokenScorer(tiny_model))
    scores = scoring(padded)["next", "ref_log_probs", "full"]
    for score, row in zip(scores, scoring(batch).unbind(0), strict=True):
        expected = row["next", "ref_log_probs", "full"]
        torch.testing.assert_close(score[-len(expected) :], expected)
    for name, value in loss(batch).items():
        torch.testing.assert_close(loss(padded)[name], value, msg=name)
    normalized = loss(loss.normalize(padded))["loss_objective"]
    torch.testing.assert_close(normalized, loss(batch)["loss_objective"])


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_a_pool_of_environments_has_groups_if_its_seeds_are_equal(tokenizer, seeds):
    def make(seed: int) -> LLMEnv:
        return LLMEnv(SameLength(), tokenizer, num_envs=1, repeats=1, seed=seed)

    pool = AsyncEnvPool([partial(make, seed) for seed in seeds], backend="threading", stack="lazy")
    collector = LLMCollector(
        pool,
        policy=make_policy(),
        dialog_turns_per_batch=4,
        total_dialog_turns=400,
        yield_completed_trajectories=True,
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=GroupAdvantage(2), batch_size=2)
    try:
        if seeds[0] == seeds[1]:
            for batch in collector:
                buffer.extend(batch)
                if len(buffer):
                    break
            assert len(set(map(str, buffer[:2]["query"]))) == 1
        else:
            with pytest.raises(
                ValueError, match="'group_id' must be equal only within one problem"
            ):
                for batch in collector:
                    buffer.extend(batch)
    finally:
        collector.shutdown()


@pytest.mark.parametrize("name", ["advantage", "shaping", "scoring"])
def test_a_transform_that_is_appended_inverted_writes_what_is_extended(tokenizer, tiny_model, name):
    """TorchRL's script adds its KL transform by ``append_transform(..., invert=True)``."""
    make, key = {
        "advantage": (lambda: GroupAdvantage(2), "advantage"),
        "shaping": (lambda: RewardShaping(scale=2.0), ("next", "shaped_reward")),
        "scoring": (lambda: KLScoring(TokenScorer(tiny_model)), ("next", "ref_log_probs", "full")),
    }[name]
    batch = RolloutCollector(make_env(tokenizer, EchoTask()), make_policy()).rollout()
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    buffer.append_transform(make(), invert=True)
    buffer.extend(batch.clone())
    expected = make()(batch.clone())
    for sample in (buffer[:], buffer.sample()):
        assert len(buffer) == len(sample) == 4
        for row in sample.unbind(0):
            same = [
                candidate for candidate in expected.unbind(0) if candidate["query"] == row["query"]
            ]
            assert any(torch.equal(row[key], candidate[key]) for candidate in same)
