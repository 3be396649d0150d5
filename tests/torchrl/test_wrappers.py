"""TorchRL's wrappers, environments and collectors with ours: who plays whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import PythonInterpreter
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm import TransformersWrapper

from tests.support.echo import EchoTask, TwoTurnTask
from tests.support.envs import END, ScriptedEngine
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams
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


def test_a_policy_of_tokens_says_what_plays_a_history(tokenizer):
    env = ChatEnv(batch_size=(1,), tokenizer=tokenizer, input_mode="history")
    with pytest.raises(ValueError, match=r"use LLMEnv, or TransformersWrapper .* for ChatEnv"):
        make_policy()(env.fake_tensordict())


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
    """KLScoring and TokenScorer read its tokens after the prompt, whose log-probs it has."""
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


@pytest.mark.parametrize("name", ["advantage", "shaping", "scoring"])
def test_a_transform_that_is_appended_inverted_writes_what_is_extended(tokenizer, tiny_model, name):
    """``append_transform(..., invert=True)`` is how TorchRL's script adds its KL transform."""
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
            same = [one for one in expected.unbind(0) if one["query"] == row["query"]]
            assert any(torch.equal(row[key], one[key]) for one in same)
