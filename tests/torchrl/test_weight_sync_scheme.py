"""The weights of an engine inside TorchRL's own collectors."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.collectors.llm import LLMCollector

from tests.support.echo import EchoTask
from tests.support.envs import END, ScriptedEngine
from tests.support.models import make_tiny_model
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.integrations.weight_sync import EngineWeightSyncScheme
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

PARAMS = SamplingParams(max_new_tokens=4)
TURNS = {"dialog_turns_per_batch": 4, "total_dialog_turns": -1}
FRAMES = {"frames_per_batch": 4, "trust_policy": True, "use_buffers": False}


def make_env(tokenizer: Any) -> LLMEnv:
    return LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2)


def make_policy() -> GenerationPolicy:
    return GenerationPolicy(TransformersEngine(make_tiny_model()), PARAMS)


def make_collector(kind: str, tokenizer: Any, policy: GenerationPolicy) -> Any:
    if kind == "rollout":
        return RolloutCollector(make_env(tokenizer), policy)
    if kind == "llm":
        return LLMCollector(make_env(tokenizer), policy=policy, track_policy_version=True, **TURNS)
    schemes = {"policy": EngineWeightSyncScheme()} if kind == "scheme" else None
    return Collector(
        make_env(tokenizer),
        policy,
        track_policy_version=True,
        weight_sync_schemes=schemes,
        **FRAMES,
    )


def head(policy: GenerationPolicy) -> torch.Tensor:
    return policy.model.lm_head.weight


@pytest.mark.parametrize("kind", ["llm", "plain", "scheme"])
def test_a_collector_of_torchrl_brings_weights_to_the_engine(tokenizer, tiny_model, kind):
    policy = make_policy()
    collector = make_collector(kind, tokenizer, policy)
    batches = iter(collector)
    assert next(batches)["policy_version"].unique().tolist() == [0]
    forms = (
        *(tiny_model, TokenScorer(tiny_model), GRPOLoss(TokenScorer(tiny_model))),
        *(TensorDict.from_module(tiny_model), tiny_model.state_dict()),
    )
    for version, weights in enumerate(forms, start=1):
        with torch.no_grad():
            tiny_model.lm_head.weight += 0.01
        collector.update_policy_weights_(weights)
        assert torch.equal(head(policy), tiny_model.lm_head.weight)
        assert policy.engine.policy_version == collector.policy_version == version
    batch = next(batches)
    for key in ("policy_version", ("next", "policy_version")):
        assert batch[key].unique().tolist() == [len(forms)]


@pytest.mark.parametrize("kind", ["llm", "plain", "scheme", "rollout"])
def test_an_update_without_weights_needs_a_registered_model(tokenizer, tiny_model, kind):
    policy = make_policy()
    collector = make_collector(kind, tokenizer, policy)
    next(iter(collector))
    before = head(policy).clone()
    collector.update_policy_weights_()  # the engine has the weights that it was made with
    with pytest.raises(RuntimeError, match="1 unknown"):
        collector.update_policy_weights_({"other": torch.ones(1)})
    assert policy.engine.policy_version == 0 and torch.equal(head(policy), before)
    collector.update_policy_weights_(tiny_model)
    with pytest.raises(TypeError, match="register_model"):
        collector.update_policy_weights_()
    policy.register_model(tiny_model)
    with torch.no_grad():
        tiny_model.lm_head.weight += 1
    collector.update_policy_weights_()
    assert policy.engine.policy_version == 2
    assert torch.equal(head(policy), tiny_model.lm_head.weight)


def test_a_sender_pushes_the_model_to_its_collectors(tokenizer, tiny_model):
    policies = [make_policy(), make_policy()]
    sender = EngineWeightSyncScheme().create_sender()
    sender.register_model(tiny_model)
    for policy in policies:
        sender.register_collector(make_collector("llm", tokenizer, policy))
    with torch.no_grad():
        tiny_model.lm_head.weight += 1
    sender.update_weights()
    for policy in policies:
        assert torch.equal(head(policy), tiny_model.lm_head.weight)
        assert policy.engine.policy_version == 1
    with torch.no_grad():
        tiny_model.lm_head.weight += 1
    for policy in policies:
        policy.update_weights()  # those of the sender's model
        assert torch.equal(head(policy), tiny_model.lm_head.weight)


@pytest.mark.nightly
@pytest.mark.slow  # starts a process
def test_workers_of_a_multi_sync_collector_take_the_weights(tokenizer, tiny_model):
    collector = MultiSyncCollector(
        [partial(make_env, tokenizer)],
        policy_factory=make_policy,
        weight_sync_schemes={"policy": EngineWeightSyncScheme()},
        total_frames=-1,
        cat_results="stack",
        **FRAMES | {"frames_per_batch": 4},
    )
    try:
        versions = []
        for batch in collector:
            versions.append(batch["policy_version"].unique().tolist())
            if len(versions) == 3:
                break
            collector.update_policy_weights_(tiny_model)
        assert versions == [[0], [1], [2]]
        with pytest.raises(RuntimeError, match=r"worker 0 did not take the weights.* 1 unknown"):
            collector.update_policy_weights_({"other": torch.ones(1)})
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))]
)
def test_a_copied_policy_samples_what_the_original_does(tokenizer, clone):
    policy = make_policy()
    policy.engine.seed(3)
    policy.update_weights(make_tiny_model(seed=1), 7)
    other = clone(policy)
    assert other.engine is not policy.engine and torch.equal(head(other), head(policy))
    data = make_env(tokenizer).reset()
    one = policy(data.clone())
    two = other(data.clone())
    for row, copied in zip(one.unbind(0), two.unbind(0), strict=True):
        assert row["tokens", "full"].tolist() == copied["tokens", "full"].tolist()
    assert two["policy_version"].unique().tolist() == [7]
    other.update_weights(make_tiny_model(seed=2))
    assert not torch.equal(head(other), head(policy))


def make_scripted() -> ScriptedEngine:
    return ScriptedEngine(say_end)


def say_end(prompt: torch.Tensor, copy: int) -> tuple[list[int], str]:
    return [10 + copy, END], "stop"


def test_an_engine_that_cannot_be_copied_is_made_again_by_its_function(tokenizer):
    with pytest.raises(TypeError, match="pass GenerationPolicy a function"):
        copy.deepcopy(GenerationPolicy(make_scripted(), PARAMS))
    policy = GenerationPolicy(make_scripted, PARAMS)
    assert policy.engine is policy.engine is copy.copy(policy).engine
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert other.engine is not policy.engine
        assert other(make_env(tokenizer).reset())["length_stopped"].shape == (4, 1)
