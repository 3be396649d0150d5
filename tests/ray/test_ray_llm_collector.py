"""TorchRL's ``RayLLMCollector`` with our environment and policy."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import RayLLMCollector

from tests.support.echo import EchoTask
from tests.support.models import make_tiny_model
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine


def make_env(tokenizer: Any) -> LLMEnv:
    return LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2)


def test_a_policy_travels_to_the_actor_and_takes_weights_there(tokenizer: Any) -> None:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    model = make_tiny_model()
    collector = RayLLMCollector(
        partial(make_env, tokenizer),
        policy=GenerationPolicy(TransformersEngine(model), SamplingParams(max_new_tokens=4)),
        dialog_turns_per_batch=4,
        total_dialog_turns=-1,
        track_policy_version=True,
        remote_config={"num_cpus": 1},
    )
    try:
        assert collector.next()["policy_version"].unique().tolist() == [0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        collector.update_policy_weights_(TensorDict.from_module(model).data)
        batch = collector.next()
        assert collector.policy_version == 1
        for key in ("policy_version", ("next", "policy_version")):
            assert batch[key].unique().tolist() == [1]
        for row in batch.reshape(-1).unbind(
            0
        ):  # a model whose weights are all zero samples uniformly
            log_probs = row["log_probs", "full"][-len(row["tokens", "response"]) :]
            assert log_probs.tolist() == pytest.approx([-5.564520] * len(log_probs), abs=1e-5)
    finally:
        collector.shutdown()
        del collector  # its finalizer calls Ray, which would start a new cluster after the shutdown
        gc.collect()
        ray.shutdown()
