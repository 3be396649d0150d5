"""TorchRL's ``Trainer`` and ``GRPOTrainer`` drive ``RolloutCollector`` and ``GRPOLoss``."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint, StateDictCheckpointAdapter
from torchrl.collectors import BaseCollector
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import StepCounter, TransformedEnv, VecNormV2
from torchrl.trainers import Trainer, UpdateWeights
from torchrl.trainers.algorithms.grpo import GRPOTrainer

from tests.support.echo import EchoTask
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.tasks.base import Score
from torchrl_grpo.transforms import GroupAdvantage

PARAMS = SamplingParams(max_new_tokens=4)
STEPS = 3


class Length(EchoTask):
    """A task whose reward is the length of the response."""

    def score(self, problem, responses):
        return Score(float(len(responses[-1])), False)


def make_env(tokenizer: Any) -> LLMEnv:
    return LLMEnv(Length(), tokenizer, num_envs=4, repeats=2)


def make_collector(tokenizer: Any, model: Any, **arguments: Any) -> RolloutCollector:
    collector = RolloutCollector(
        make_env(tokenizer),
        GenerationPolicy(TransformersEngine(model), PARAMS),
        total_dialog_turns=4 * STEPS,
        **arguments,
    )
    collector.set_seed(0)
    return collector


class Logger:
    """Record the losses that a trainer logs."""

    exp_name = "test"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        if name == "loss_objective":
            self.losses.append(float(value))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None, **_: Any) -> None:
        for name, value in metrics.items():
            self.log_scalar(name, value)


def reference_losses(tokenizer: Any, model: Any) -> tuple[list[float], Any]:
    """Return the losses of a handwritten loop."""
    collector = make_collector(tokenizer, model, postproc=GroupAdvantage(2))
    loss = GRPOLoss(TokenScorer(model))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in collector:
        out = loss(batch)
        out["loss_objective"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out["loss_objective"]))
        collector.update_policy_weights_(model)
    return losses, model


def same_weights(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("getter", ["model", "tensordict", "map", "loss"])
def test_torchrls_trainer_trains_like_a_loop_by_hand(tokenizer, tiny_model, getter):
    expected, reference = reference_losses(tokenizer, copy.deepcopy(tiny_model))
    model = copy.deepcopy(tiny_model)
    collector = make_collector(tokenizer, model, postproc=GroupAdvantage(2))
    logger = Logger()
    loss = GRPOLoss(TokenScorer(model))
    trainer = Trainer(
        collector=collector,
        total_frames=4 * STEPS,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        clip_norm=1.0,
        progress_bar=False,
        logger=logger,
        log_interval=1,
    )
    sources = {
        "model": lambda: model,
        "tensordict": lambda: TensorDict.from_module(model),
        "loss": lambda: loss,
    }
    where = {"weight_update_map": {"policy": "loss_module.actor_network"}}
    if getter != "map":
        where = {"policy_weights_getter": sources[getter]}
    UpdateWeights(collector, 1, trainer=trainer, **where).register(trainer)
    trainer.train()
    assert trainer.collected_frames == collector.dialog_turns == 4 * STEPS
    assert collector.policy_version == STEPS
    assert any(expected) and logger.losses == pytest.approx(expected)
    assert same_weights(model, reference)


class Sender:
    """A sender of weights as TorchRL's trainer expects it."""

    def __init__(self, collector: BaseCollector, model: Any) -> None:
        self.collector, self.model, self.sent = collector, model, threading.Event()

    def update_weights(self) -> None:
        self.collector.update_policy_weights_(self.model)
        self.sent.set()


@pytest.mark.slow
@pytest.mark.parametrize("writes", [True, False])
def test_torchrls_grpo_trainer_trains_like_a_loop_by_hand(tokenizer, tiny_model, writes):
    expected, reference = reference_losses(tokenizer, copy.deepcopy(tiny_model))
    model = copy.deepcopy(tiny_model)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4
    )
    collector = make_collector(
        tokenizer, model, postproc=GroupAdvantage(2), replay_buffer=buffer if writes else None
    )
    logger = Logger()
    trainer = GRPOTrainer(
        collector=collector,
        total_frames=4 * STEPS,
        loss_module=GRPOLoss(TokenScorer(model)),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        weight_sync_sender=Sender(collector, model),
        empty_replay_buffer_on_weight_update=True,
        replay_buffer=buffer,
        progress_bar=False,
        logger=logger,
        log_interval=1,
    )
    trainer.train()
    assert trainer.collected_frames == 4 * STEPS and collector.policy_version == STEPS
    assert any(expected) and logger.losses == pytest.approx(expected)
    assert same_weights(model, reference)


def test_torchrls_trainer_trains_while_the_collector_samples(tokenizer, tiny_model):
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=4)
    collector = make_collector(tokenizer, tiny_model, replay_buffer=buffer)
    sender = Sender(collector, tiny_model)

    def after_the_first_update(batch: TensorDict) -> TensorDict:
        assert collector.dialog_turns == 4 or sender.sent.wait(300)
        return GroupAdvantage(2)(batch)

    collector.set_postproc(after_the_first_update)
    trainer = GRPOTrainer(
        collector=collector,
        total_frames=4 * STEPS,
        optim_steps_per_batch=1,
        loss_module=GRPOLoss(TokenScorer(tiny_model)),
        optimizer=torch.optim.SGD(tiny_model.parameters(), 0.1),
        weight_sync_sender=sender,
        replay_buffer=buffer,
        async_collection=True,
        progress_bar=False,
    )
    trainer.train()
    assert buffer.write_count == 4 * STEPS
    assert collector.policy_version >= 1 and not collector.is_running()
    assert buffer[-1]["policy_version"] >= 1


def test_what_ends_the_background_sampling_is_raised(tokenizer, tiny_model):
    def fails(batch: TensorDict) -> TensorDict:
        raise OSError("disk full")

    collector = make_collector(tokenizer, tiny_model, replay_buffer=ReplayBuffer(), postproc=fails)
    collector.start()
    collector._thread.join()
    with pytest.raises(RuntimeError, match="background") as error:
        collector.getattr_rb("write_count")
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.slow
@pytest.mark.parametrize("unified", [False, True])
def test_a_trainers_checkpoint_goes_on_as_an_uninterrupted_run(
    tokenizer, tiny_model, tmp_path, unified
):
    """The engine has weights of its own, which come from the trained model also when it resumes."""

    def make() -> tuple[Trainer, Logger]:
        model = copy.deepcopy(tiny_model)
        collector = make_collector(tokenizer, copy.deepcopy(tiny_model), postproc=GroupAdvantage(2))
        collector.policy.register_model(model)
        logger = Logger()
        trainer = Trainer(
            collector=collector,
            total_frames=4 * STEPS,
            frame_skip=1,
            optim_steps_per_batch=1,
            loss_module=GRPOLoss(TokenScorer(model)),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            progress_bar=False,
            logger=logger,
            log_interval=1,
            save_trainer_file=tmp_path / "checkpoint",
            checkpoint=Checkpoint() if unified else None,
        )
        UpdateWeights(collector, 1).register(trainer)
        return trainer, logger

    whole, logger = make()
    whole.train()
    first, _ = make()
    first.total_frames = 4
    first.train()
    state = copy.deepcopy(first.state_dict())
    first.save_trainer(force_save=True)
    second, resumed = make()
    if unified:
        second.load_from_file(tmp_path / "checkpoint")
    else:
        second.load_state_dict(state)
        second.collector.update_policy_weights_(version=second.collector.policy_version)
    second.train()
    assert resumed.losses == pytest.approx(logger.losses[1:])
    assert same_weights(second.loss_module.actor_network.model, second.collector.policy.model)


def test_a_ragged_buffer_is_saved_with_the_adapter_for_state_dicts(tokenizer, tiny_model, tmp_path):
    def make() -> tuple[ReplayBuffer, Checkpoint]:
        buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=GroupAdvantage(2))
        checkpoint = Checkpoint()
        checkpoint.register("replay_buffer", buffer, adapter=StateDictCheckpointAdapter())
        return buffer, checkpoint

    buffer, checkpoint = make()
    buffer.extend(make_collector(tokenizer, tiny_model).rollout())
    checkpoint.save(tmp_path / "checkpoint")
    restored, checkpoint = make()
    checkpoint.load(tmp_path / "checkpoint")
    assert len(restored) == 4
    for one, other in zip(buffer[:].unbind(0), restored[:].unbind(0), strict=True):
        assert one["tokens", "full"].tolist() == other["tokens", "full"].tolist()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_hooks_are_called_around_each_batch(tokenizer, tiny_model, ours, writes):
    """TorchRL's own collector beside ours."""
    calls: list[Any] = []
    buffer = ReplayBuffer(storage=LazyStackStorage(64)) if writes else None

    def postproc(batch: Any) -> Any:
        calls.append("postproc")
        return batch

    def note(batch: Any) -> None:
        calls.append(("after", batch.numel(), None if buffer is None else len(buffer)))

    policy = GenerationPolicy(TransformersEngine(tiny_model), PARAMS)
    rest = {"total_dialog_turns": 8, "replay_buffer": buffer, "postproc": postproc}
    env = make_env(tokenizer)
    collector: Any = (
        RolloutCollector(env, policy, **rest)
        if ours
        else LLMCollector(env, policy=policy, dialog_turns_per_batch=4, flatten_data=True, **rest)
    )
    collector.pre_collect_hook = lambda: calls.append("before")
    collector.set_post_collect_hook(note)
    list(collector)
    sizes = (0, 4) if writes else (None, None)
    names = ("before", "postproc") if ours else ("postproc",)  # theirs forgets the first hook
    assert calls == [call for size in sizes for call in (*names, ("after", 4, size))]


def test_enable_profile_traces_the_rollouts_that_were_asked_for(tokenizer, tiny_model):
    traces: list[Any] = []
    collector = make_collector(tokenizer, tiny_model)
    collector.enable_profile(
        num_rollouts=2,
        warmup_rollouts=1,
        activities=["cpu"],
        with_stack=False,
        record_shapes=False,
        on_trace_ready=traces.append,
    )
    assert len(list(collector)) == STEPS
    assert len(traces) == 1 and len(traces[0].events()) > 100


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_state_of_the_environments_transforms_is_resumed(tokenizer, tiny_model, nested):
    def make() -> RolloutCollector:
        env = TransformedEnv(make_env(tokenizer), VecNormV2(in_keys=["reward"]))
        if nested:
            env = TransformedEnv(env, StepCounter(), auto_unwrap=False)
        return RolloutCollector(env, GenerationPolicy(TransformersEngine(tiny_model), PARAMS))

    one = make()
    one.set_seed(0)
    one.rollout()
    one.rollout()
    state = copy.deepcopy(one.state_dict())
    other = make()
    other.load_state_dict(state)
    for _ in range(2):
        for before, after in zip(one.rollout(), other.rollout(), strict=True):
            assert before["tokens", "full"].tolist() == after["tokens", "full"].tolist()
            assert torch.equal(before["next", "reward"], after["next", "reward"])
