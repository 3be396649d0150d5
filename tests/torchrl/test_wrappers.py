"""TorchRL's wrappers, environments and collectors with ours: who plays whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
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
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.transforms import HistoryTransforms


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
