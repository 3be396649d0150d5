"""TorchRL's tests of ``LLMCollector`` and its LLM environments, for ``RolloutCollector`` and
``LLMEnv``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import ParallelEnv, SerialEnv, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms.policy_version import PolicyVersion
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLLoss
from torchrl.testing import DummyStrDataLoader

from tests.support.echo import EchoTask, TwoTurnTask
from tests.support.envs import END, ScriptedEngine
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.transforms import GroupAdvantage, KLScoring

PARAMS = SamplingParams(max_new_tokens=4)


def make_policy() -> GenerationPolicy:
    return GenerationPolicy(ScriptedEngine(lambda prompt, copy: ([10 + copy, END], "stop")), PARAMS)


def make_env(tokenizer: Any, task: Any = None) -> LLMEnv:
    return LLMEnv(task or EchoTask(), tokenizer, num_envs=4, repeats=2, max_turns=2)


@pytest.mark.parametrize("total", [1, 10, 20])
def test_iteration_fills_a_replay_buffer_and_yields_none(tokenizer, total):
    buffer = ReplayBuffer(storage=LazyStackStorage(40))
    collector = RolloutCollector(
        make_env(tokenizer), make_policy(), total_dialog_turns=total, replay_buffer=buffer
    )
    assert set(collector) == {None}
    assert len(buffer) == collector.dialog_turns == -(-total // 4) * 4
    sample = buffer.sample(4)
    assert sample.shape == (4,) and all(
        isinstance(text, str) for text in sample["text", "response"]
    )


def test_postproc_makes_what_is_yielded_and_written(tokenizer):
    buffer = ReplayBuffer(storage=LazyStackStorage(8))
    settings = {"total_dialog_turns": 8, "postproc": GroupAdvantage(2)}
    for batch in RolloutCollector(make_env(tokenizer), make_policy(), **settings):
        assert batch["advantage"].shape == (4, 1)
    list(RolloutCollector(make_env(tokenizer), make_policy(), replay_buffer=buffer, **settings))
    assert buffer[:]["advantage"].shape == (8, 1)
    plain = RolloutCollector(make_env(tokenizer), make_policy(), postproc=GroupAdvantage(2))
    assert plain.rollout().get("advantage", None) is None


def test_a_dialog_counts_once_and_torchrl_counts_its_turns(tokenizer):
    """Every dialog has two turns: 8 trajectories are two batches of 4 for us, and 16 turns for
    TorchRL.
    """
    collector = RolloutCollector(
        make_env(tokenizer, TwoTurnTask()), make_policy(), total_dialog_turns=8
    )
    assert len(collector) == len(list(collector)) == 2
    assert collector.dialog_turns == 8 and collector.last.turns == 8
    theirs = LLMCollector(
        make_env(tokenizer, TwoTurnTask()), policy=make_policy(), dialog_turns_per_batch=4, total_dialog_turns=8,
        yield_only_last_steps=True,
    )  # fmt: skip
    assert sum(batch.numel() for batch in theirs) == 4


def test_torchrls_collector_plays_our_environment_and_policy(tokenizer):
    settings = {"dialog_turns_per_batch": 4, "total_dialog_turns": 8}
    theirs = list(LLMCollector(make_env(tokenizer), policy=make_policy(), **settings))
    ours = list(RolloutCollector(make_env(tokenizer), make_policy(), **settings))
    for one, other in zip(theirs, ours, strict=True):
        assert one.shape == (4, 1) and other.shape == (4,)
        # TorchRL's collector resets the environment once more, so its groups have other numbers.
        assert [len(batch["group_id"].unique()) for batch in (one, other)] == [2, 2]
        assert (
            one["next", "reward"].flatten().tolist() == other["next", "reward"].flatten().tolist()
        )


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        ({"steps_per_batch": 4}, "use dialog_turns_per_batch"),
        ({"total_steps": 8}, "use total_dialog_turns"),
        ({"yield_completed_trajectories": False}, "an element is a whole dialog"),
        ({"flatten_data": False}, "batches are flat"),
        ({"track_policy_version": PolicyVersion()}, "each token has its version"),
        ({"async_envs": True}, r"use sota/grpo/grpo-async\.py"),
        ({"weight_updater": object()}, r"use update_policy_weights_\("),
        ({"queue": []}, "use replay_buffer"),
        ({"verbose": True}, "`last` has the counts"),
    ],
)
def test_torchrls_arguments_are_refused_with_the_reason(tokenizer, arguments, use):
    (name,) = arguments
    with pytest.raises(
        TypeError,
        match=f"{name}=.*TorchRL's .*RolloutCollector .*: .*{use}",
    ):
        RolloutCollector(make_env(tokenizer), make_policy(), **arguments)


def test_torchrls_arguments_that_say_what_is_so_are_taken(tokenizer):
    same = {
        "yield_only_last_steps": True,
        "flatten_data": True,
        "track_policy_version": True,
        "async_envs": False,
    }
    collector = RolloutCollector(
        env=make_env(tokenizer),
        policy=make_policy(),
        **same,
        weight_updater=None,
        verbose=False,
        queue=None,
    )
    assert collector.rollout().shape == (4,)
    with pytest.raises(
        TypeError, match="RolloutCollector got an unexpected keyword argument 'wurst'"
    ):
        RolloutCollector(make_env(tokenizer), make_policy(), wurst=1)


def test_start_needs_a_buffer(tokenizer):
    with pytest.raises(RuntimeError, match="replay_buffer"):
        RolloutCollector(make_env(tokenizer), make_policy()).start()


def test_torchrls_attributes_and_constructors_are_there(tokenizer):
    """TorchRL's trainers, loggers and hooks read these from its own collectors."""
    arguments: dict[str, Any] = {
        "policy_factory": make_policy,
        "dialog_turns_per_batch": 4,
        "total_dialog_turns": 8,
        "yield_only_last_steps": False,
    }
    ours = RolloutCollector(lambda: make_env(tokenizer), **arguments)
    theirs = LLMCollector(lambda: make_env(tokenizer), **arguments)
    for name in ("dialog_turns_per_batch", "total_dialog_turns", "yield_only_last_steps"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.init_random_frames == 0 and ours.yield_completed_trajectories
    assert ours.get_policy_version() == ours.stats()["policy_version"] == 0
    ours.reset()
    ours.set_postproc(GroupAdvantage(2))
    assert next(iter(ours))["advantage"].shape == (4, 1)
    with pytest.raises(RuntimeError, match="postproc"):
        ours.set_postproc(GroupAdvantage(2))
    for parts in ({}, {"policy": make_policy(), "policy_factory": make_policy}):
        with pytest.raises(TypeError, match="one of policy and policy_factory"):
            RolloutCollector(make_env(tokenizer), **parts)


def test_weights_come_in_every_form_of_torchrls_collectors(tokenizer, tiny_model):
    policy = GenerationPolicy(TransformersEngine(tiny_model), PARAMS)
    collector = RolloutCollector(make_env(tokenizer), policy)
    wrapper = TransformersWrapper(tiny_model, tokenizer=tokenizer, input_mode="tokens")
    parameters = dict(tiny_model.named_parameters())
    loss = GRPOLoss(TokenScorer(tiny_model))
    forms = (
        *(tiny_model, TokenScorer(tiny_model), loss, wrapper, TorchRLLoss(wrapper)),
        *(TensorDict.from_module(tiny_model), TensorDict.from_module(tiny_model).data),
        *(TensorDict.from_module(loss), TensorDict.from_module(wrapper)),
        *(tiny_model.state_dict(), parameters.items(), TensorDict(parameters)),
    )
    with torch.no_grad():
        for version, weights in enumerate(forms, start=1):
            policy.engine.model.lm_head.weight.zero_()
            collector.update_policy_weights_(weights)
            assert collector.policy_version == version
            assert torch.equal(policy.engine.model.lm_head.weight, tiny_model.lm_head.weight)
    keywords = (
        {"policy_or_weights": tiny_model},
        {"weights": TensorDict.from_module(tiny_model)},
        {"policy": tiny_model, "model_id": "policy"},
        {"weights_dict": {"policy": tiny_model}},
        {"policy_or_weights": parameters.items(), "version": 40},
    )
    for arguments in keywords:
        collector.update_policy_weights_(**arguments)
    assert collector.policy_version == 40
    with pytest.raises(TypeError, match=r"weights.*: use update_policy_weights_\(model\)"):
        collector.update_policy_weights_()
    with pytest.raises(TypeError, match="once"):
        collector.update_policy_weights_(tiny_model, policy=tiny_model)
    with pytest.raises(KeyError, match="critic"):
        collector.update_policy_weights_(tiny_model, model_id="critic")
    with pytest.raises(RuntimeError, match="2 unknown"):
        collector.update_policy_weights_({**parameters, "a": torch.ones(1), "b": torch.ones(1)})
    assert collector.policy_version == 40


def test_the_version_can_be_raised_alone_and_the_draws_go_on(tokenizer, tiny_model):
    def make() -> RolloutCollector:
        collector = RolloutCollector(
            make_env(tokenizer), GenerationPolicy(TransformersEngine(tiny_model), PARAMS)
        )
        collector.set_seed(3)
        collector.rollout()
        return collector

    collector = make()
    collector.increment_version()
    raised = collector.rollout()
    plain = make().rollout()
    assert collector.policy_version == 1 and raised["policy_version"].unique().tolist() == [1]
    for one, other in zip(raised.unbind(0), plain.unbind(0), strict=True):
        assert one["tokens", "full"].tolist() == other["tokens", "full"].tolist()


def test_another_environment_or_policy_is_refused(tokenizer, tiny_model):
    wrapper = TransformersWrapper(tiny_model, tokenizer=tokenizer, input_mode="tokens")
    with pytest.raises(
        ValueError,
        match=r"policy=TransformersWrapper .*: use TorchRL's LLMCollector",
    ):
        RolloutCollector(make_env(tokenizer), wrapper)


# Environments


class AllLengths(EchoTask):
    def problems(self, split):
        return [Problem("abcdef"[: 1 + length], "a") for length in range(6)]


def test_specs_with_reference_log_probs_are_right(tokenizer, tiny_model):
    check_env_specs(
        TransformedEnv(make_env(tokenizer, AllLengths()), KLScoring(TokenScorer(tiny_model)))
    )


@pytest.mark.parametrize("input_mode", ["tokens", "history"])
def test_a_chat_env_is_refused_with_what_plays_it(tokenizer, tiny_model, input_mode):
    env = ChatEnv.from_dataloader(
        dataloader=DummyStrDataLoader(2),
        batch_size=2,
        group_repeats=True,
        input_mode=input_mode,
        tokenizer=tokenizer,
    )
    policy = GenerationPolicy(TransformersEngine(tiny_model), SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match="LLMEnv, or TransformersWrapper"):
        policy(env.reset())


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_a_batched_environment_is_refused_when_it_is_built(tokenizer, batched):
    with pytest.raises(ValueError, match=r"LLMEnv .*\[2\].*: use num_envs"):
        batched(2, lambda: make_env(tokenizer))
    with pytest.raises(ValueError, match="LLMEnv must not be stacked"):
        batched(2, lambda: TransformedEnv(make_env(tokenizer), GroupAdvantage(2)))


def test_torchrls_transforms_learn_that_the_mode_is_tokens(tokenizer):
    class Asks(Transform):
        def _reset(self, tensordict, tensordict_reset):
            self.mode = self.parent.base_env.input_mode
            return tensordict_reset

    env = TransformedEnv(make_env(tokenizer), Asks())
    env.reset()
    assert env.transform.mode == env.input_mode == "tokens"


def test_rewards_and_outcomes_of_a_step_have_the_shape_of_the_batch(tokenizer):
    data = make_env(tokenizer).rollout(1, make_policy())
    for name in ("reward", "done", "terminated", "truncated"):
        assert data["next", name].shape == (4, 1, 1)
    assert torch.is_floating_point(data["next", "reward"])
