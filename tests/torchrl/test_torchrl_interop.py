"""Both directions with the real TorchRL: its loss and advantage on our data, our loss on its data,
and the LossModule API.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torch import Tensor, nn
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer, Unbounded
from torchrl.envs import Transform
from torchrl.envs.llm.chat import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from torchrl.objectives.llm import MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.support.configs import ROOT
from tests.support.documentation import blocks
from tests.support.losses import SETTINGS, Table, make_batch
from tests.support.models import make_tiny_model
from tests.support.padded import pad_batch
from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.models import TokenScorer, WrapperScorer
from torchrl_grpo.models.entries import pad, sequences_of
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import INSTRUCTION, ArithmeticTask
from torchrl_grpo.transforms import GroupAdvantage, KLScoring, RewardShaping

G = 4


@pytest.fixture(scope="module")
def starter_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(starter_path())


@pytest.fixture(scope="module")
def starter() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(starter_path()).eval()


@pytest.fixture(scope="module")
def trained(starter: PreTrainedModel) -> PreTrainedModel:
    """Return the starter a few steps on: its ratios to the starter are not 1, and some are clipped."""
    model = copy.deepcopy(starter)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def our_batch(starter: PreTrainedModel, starter_tokenizer: Any) -> TensorDictBase:
    """Return a batch of our collector: 4 groups of 4 ragged sequences."""
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(starter_tokenizer.eos_token_id,))
    env = LLMEnv(ArithmeticTask(), starter_tokenizer, num_envs=4 * G, repeats=G)
    collector = RolloutCollector(env, GenerationPolicy(TransformersEngine(starter), params))
    collector.set_seed(1)
    batch = collector.rollout()
    collector.shutdown()
    assert len({row[keys.FULL].numel() for row in batch.unbind(0)}) > 1
    return batch


def wrap(model: PreTrainedModel, tokenizer: Any, **settings: Any) -> TransformersWrapper:
    """Return TorchRL's actor, which scores whole sequences of tokens."""
    settings = {"generate": False, "input_mode": "tokens", "pad_model_input": True} | settings
    return TransformersWrapper(model, tokenizer=tokenizer, **settings)


def with_advantage(batch: TensorDictBase) -> TensorDictBase:
    return GroupAdvantage(G)(batch.clone())


def for_torchrl(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch with an advantage [B, 1, 1], because TorchRL's loss wants a time axis."""
    return GroupAdvantage(G, token_dim=True)(batch.exclude("advantage"))


def total(out: TensorDictBase) -> Tensor:
    """Return the sum of the ``loss_*`` entries of either loss."""
    names = [name for name in list(out.keys()) if name.startswith("loss_")]
    return sum(
        (out.get(name).sum() for name in names if out.get(name) is not None), torch.zeros(())
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def by_hand(model: PreTrainedModel, batch: TensorDictBase, clip: float = 0.2) -> Tensor:
    """Return the mean over sequences of the mean over tokens of the clipped surrogate, by one
    unpadded forward per sequence.
    """
    values = []
    for row in batch.unbind(0):
        tokens = row[keys.FULL]
        start = row[keys.PROMPT].numel()
        log_p = model(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
        ratio = (log_p.gather(-1, tokens[start:, None])[:, 0] - row[keys.LOG_PROBS][start:]).exp()
        advantage = row["advantage"].item()
        values.append(
            torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        )
    return -torch.stack(values).mean()


# TorchRL's parts on our data


@pytest.mark.parametrize("prompt_key", ["group_id", "query"])
def test_torchrls_mc_advantage_on_our_batch_equals_group_advantage(
    our_batch: TensorDictBase, prompt_key: str
) -> None:
    """TorchRL divides by max(std, 1e-6) and we by std + 1e-6: the relative difference is 1e-6 /
    std.
    """
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4 * G), transform=MCAdvantage(G, prompt_key=prompt_key)
    )
    buffer.extend(our_batch.clone())
    theirs = buffer[:]
    ours = with_advantage(our_batch)["advantage"]
    assert ours.abs().max() > 0.5
    assert len(theirs) == 4 * G
    torch.testing.assert_close(
        theirs["advantage"].reshape(-1), ours.reshape(-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("masking", ["sft", "rlhf"])
def test_torchrls_loss_on_our_batch_equals_ours_and_the_hand_computation(
    our_batch: TensorDictBase, trained: PreTrainedModel, starter_tokenizer: Any, masking: str
) -> None:
    """The definitions coincide for aggregation="prompt_mean", no entropy bonus and responses that
    are not empty.
    """
    batch = with_advantage(our_batch)
    actor = wrap(trained, starter_tokenizer)
    theirs = TorchRLGRPOLoss(
        actor, aggregation="prompt_mean", entropy_bonus=False, masking_strategy=masking
    )
    their_value = total(theirs(for_torchrl(batch)))
    our_value = total(GRPOLoss(TokenScorer(trained))(batch))
    assert torch.isfinite(their_value) and abs(our_value.item()) > 1e-3
    torch.testing.assert_close(their_value, our_value, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(our_value, by_hand(trained, batch), rtol=1e-4, atol=1e-6)
    our_gradients = gradients(trained, our_value)
    for name, gradient in gradients(trained, their_value).items():
        torch.testing.assert_close(gradient, our_gradients[name], rtol=1e-3, atol=1e-5)


def test_where_torchrls_values_differ_from_ours_and_by_what_factor(
    our_batch: TensorDictBase,
    starter: PreTrainedModel,
    trained: PreTrainedModel,
    starter_tokenizer: Any,
) -> None:
    batch = KLScoring(TokenScorer(starter))(with_advantage(our_batch))
    settings = {"kl_to_ref_coeff": 0.5, "kl_to_inference_coeff": 0.25, "entropy_coeff": 0.1}
    ours = GRPOLoss(TokenScorer(trained), **settings)(batch)
    theirs = TorchRLGRPOLoss(wrap(trained, starter_tokenizer), **settings, masking_strategy="rlhf")(
        for_torchrl(batch)
    )

    mask = pad(batch, keys.ASSISTANT_MASK, False)
    share = mask.sum() / mask.numel()
    assert share < 0.7
    # Their KL is a mean over prompt and padding too, so more padding makes it smaller.
    torch.testing.assert_close(theirs.kl_to_ref, ours["kl_k3_to_ref"] * share, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        theirs.kl_to_inference, ours["kl_k3_to_inference"] * share, rtol=1e-3, atol=1e-6
    )
    # Their default aggregation weighs all tokens equally, ours all sequences. Our metric
    # "objective" is a token mean.
    torch.testing.assert_close(
        theirs.loss_objective.squeeze(), -ours["objective"], rtol=1e-3, atol=1e-6
    )
    torch.testing.assert_close(
        theirs.loss_entropy.squeeze(), -0.1 * ours["entropy"], rtol=1e-3, atol=1e-6
    )
    torch.testing.assert_close(theirs.ESS, ours["ESS"], rtol=1e-3, atol=1e-6)


# Our loss on TorchRL's data


class EvenReward(Transform):
    """A task for ``ChatEnv``: reward the share of even token ids in the response, with one turn per
    dialog.
    """

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        responses = tensordict.get(("tokens", "response"), as_list=True)
        reward = torch.stack([(tokens % 2 == 0).float().mean() for tokens in responses])
        next_tensordict.set("reward", reward.reshape(-1, 1, 1))
        for name in ("done", "terminated"):
            next_tensordict.set(name, torch.ones_like(next_tensordict.get(name)))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


class Queries:
    """A data loader of problems whose prompts differ in length."""

    batch_size = 1

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        for query in ("5+7=?", "23+45=?"):
            yield {"query": [query + INSTRUCTION]}


def collect(model: PreTrainedModel, tokenizer: Any, **settings: Any) -> TensorDictBase:
    """Return one batch of ``LLMCollector`` with advantages by ``MCAdvantage``: 2 groups of 4.

    Text mode, because TorchRL 0.14's ``ChatEnv`` in tokens mode cannot stack sequences of different
    lengths.
    """
    torch.manual_seed(0)
    with set_list_to_stack(True):
        env = DatasetChatEnv.from_dataloader(
            Queries(), repeats=G, batch_size=(2 * G,), tokenizer=tokenizer, input_mode="text"
        )
        env.append_transform(EvenReward())
        sampling = {"max_new_tokens": 24, "do_sample": True}
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode="text", generate_kwargs=sampling, **settings
        )
        buffer = ReplayBuffer(storage=LazyStackStorage(2 * G), transform=MCAdvantage(G))
        collector = LLMCollector(
            env,
            policy=policy,
            dialog_turns_per_batch=2 * G,
            total_dialog_turns=2 * G,
            flatten_data=True,
        )
        for batch in collector:
            buffer.extend(batch)
        collector.shutdown()
        return buffer[:]


def with_log_probs(batch: TensorDictBase, model: PreTrainedModel, tokenizer: Any) -> TensorDictBase:
    """Add ``("log_probs", "full")`` like TorchRL, by a second pass, because its engine only returns
    the response's.
    """
    scored = wrap(model, tokenizer, inplace=False)(
        batch.select(("tokens", "full"), ("masks", "all_attention_mask"))
    )
    rows = [row.clone() for row in batch.unbind(0)]
    for row, score in zip(rows, scored.unbind(0), strict=True):
        row.set("log_probs", TensorDict({"full": score.get(("log_probs", "full")).detach()}))
    return lazy_stack(rows)


@pytest.fixture(scope="module")
def their_batch(starter: PreTrainedModel, starter_tokenizer: Any) -> TensorDictBase:
    return collect(starter, starter_tokenizer)


@pytest.mark.slow
def test_our_loss_equals_torchrls_on_its_actor_and_batch(
    their_batch: TensorDictBase,
    starter: PreTrainedModel,
    trained: PreTrainedModel,
    starter_tokenizer: Any,
) -> None:
    batch = with_log_probs(their_batch, starter, starter_tokenizer)
    actor = wrap(trained, starter_tokenizer)
    ours = GRPOLoss(actor)(batch)
    theirs = TorchRLGRPOLoss(actor, aggregation="prompt_mean", entropy_bonus=False)(batch)
    assert abs(total(ours).item()) > 1e-3
    torch.testing.assert_close(total(ours), total(theirs), rtol=1e-4, atol=1e-6)
    their_gradients = gradients(trained, total(theirs))
    for name, gradient in gradients(trained, total(ours)).items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_our_loss_trains_on_torchrls_samples_without_a_second_pass(
    their_batch: TensorDictBase, starter: PreTrainedModel, starter_tokenizer: Any
) -> None:
    """TorchRL's engine gives the first response token the log-prob 0. It is unknown, so the token
    is excluded from the loss. Without an update all other ratios are 1, the loss is minus the mean
    advantage of the sequences, and the KL is 0.
    """
    model = copy.deepcopy(starter)
    loss = GRPOLoss(TransformersWrapper(model, tokenizer=starter_tokenizer, input_mode="tokens"))
    assert isinstance(loss.actor_network, WrapperScorer)
    out = loss(their_batch)
    assert out["kl_k3_to_inference"].item() == pytest.approx(0, abs=1e-6)
    assert out["ESS"].item() == pytest.approx(1, abs=1e-4)
    lengths = torch.tensor([row["tokens", "response"].numel() - 1 for row in their_batch.unbind(0)])
    ours = sequences_of(their_batch)
    assert pad(ours, keys.ASSISTANT_MASK, False).sum(-1).tolist() == lengths.tolist()
    advantage = their_batch["advantage"].reshape(-1)[lengths > 0]
    assert out["loss_objective"].item() == pytest.approx(-advantage.mean().item(), abs=1e-5)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    values = []
    for _ in range(3):
        value = total(loss(their_batch))
        value.backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    assert values[2] < values[1] < values[0]


@pytest.mark.slow
def test_what_torchrls_loss_refuses_and_ours_takes(
    our_batch: TensorDictBase,
    their_batch: TensorDictBase,
    starter: PreTrainedModel,
    starter_tokenizer: Any,
) -> None:
    """That is an advantage [B, 1], and log-probs of the response only, which is what TorchRL's own
    engine writes.
    """
    actor = wrap(starter, starter_tokenizer)
    batch = with_advantage(our_batch)
    with pytest.raises(ValueError, match=r"advantage and log_weight .*dimensions"):
        TorchRLGRPOLoss(actor)(batch)
    with pytest.raises(KeyError, match="Couldn't find the log-prob"):
        TorchRLGRPOLoss(actor)(their_batch)
    assert total(GRPOLoss(actor)(batch)).item() == pytest.approx(
        total(GRPOLoss(TokenScorer(starter))(batch)).item()
    )
    assert torch.isfinite(total(GRPOLoss(actor)(their_batch)))


@pytest.mark.slow
def test_padding_on_both_sides_changes_nothing(
    their_batch: TensorDictBase,
    starter: PreTrainedModel,
    trained: PreTrainedModel,
    starter_tokenizer: Any,
) -> None:
    """With pad_output=True TorchRL pads prompts on the left and responses on the right; the draws
    are the same.
    """
    padded = collect(starter, starter_tokenizer, pad_output=True)
    attention = padded["masks", "all_attention_mask"]
    assert not attention[:, 0].all() and not attention[:, -1].all()
    loss = GRPOLoss(wrap(trained, starter_tokenizer), kl_to_inference_coeff=0.1)
    padded["advantage"] = their_batch["advantage"]
    expected, got = loss(their_batch), loss(padded)
    assert total(expected).abs() > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)


def test_an_unknown_log_prob_leaves_the_loss() -> None:
    """TorchRL marks tokens that were not scored with NaN."""
    row = TensorDict({"tokens": {"prompt": torch.tensor([5]), "full": torch.tensor([5, 6, 7, 8])}})
    row["log_probs", "full"] = torch.tensor([torch.nan, -1.0, torch.nan, -2.0])
    out = sequences_of(lazy_stack([row]))
    assert out[keys.ASSISTANT_MASK].tolist() == [[False, True, False, True]]
    assert out[keys.LOG_PROBS].tolist() == [[0.0, -1.0, 0.0, -2.0]]
    del row["log_probs"]
    with pytest.raises(
        KeyError, match=r"log_probs\.full or log_probs\.response, but has only tokens"
    ):
        sequences_of(lazy_stack([row]))


def test_a_wrapper_without_gradients_is_refused() -> None:
    wrapper = TransformersWrapper.__new__(TransformersWrapper)
    nn.Module.__init__(wrapper)
    wrapper.__dict__["model"] = "an engine in another process"
    with pytest.raises(ValueError, match="actor_network=TransformersWrapper must"):
        GRPOLoss(wrapper)


# LossModule citizenship


@pytest.fixture
def padded_batch(our_batch: TensorDictBase) -> TensorDict:
    per_token = {keys.FULL: 0, keys.ASSISTANT_MASK: False, keys.LOG_PROBS: 0.0}
    return pad_batch(with_advantage(our_batch), per_token, ["advantage"])


def test_the_transforms_read_renamed_keys(
    our_batch: TensorDictBase, trained: PreTrainedModel
) -> None:
    names = {
        keys.FULL: "ids",
        keys.ASSISTANT_MASK: ("masks", "mine"),
        keys.REWARD: ("next", "score"),
        keys.REWARD_VALID: "valid",
        keys.LOG_PROBS: "sampled_log_probs",
    }

    def shape(
        batch: TensorDictBase, scoring_keys: dict[str, Any], shaping_keys: dict[str, Any]
    ) -> TensorDictBase:
        reference = KLScoring(TokenScorer(trained), out_key="reference", **scoring_keys)
        shaping = RewardShaping(kl_coef=0.1, ref_log_probs_key="reference", **shaping_keys)
        return shaping(reference(batch))

    expected = shape(our_batch.clone(), {}, {})
    renamed = lazy_stack(
        [
            row.update({new: row[old] for old, new in names.items()}).exclude(*names)
            for row in our_batch.clone().unbind(0)
        ]
    )
    out = shape(
        renamed,
        {"tokens_key": "ids", "mask_key": ("masks", "mine")},
        {
            "mask_key": ("masks", "mine"),
            "reward_key": ("next", "score"),
            "valid_key": "valid",
            "sample_log_prob_key": "sampled_log_probs",
        },
    )
    assert expected[keys.SHAPED_REWARD].unique().numel() > 2
    for one, other in zip(out.unbind(0), expected.unbind(0), strict=True):
        for key in (keys.SHAPED_REWARD, keys.TOKEN_REWARD):
            torch.testing.assert_close(one[key], other[key])


def test_with_torchrls_actor_in_keys_leave_out_what_the_actor_writes(
    their_batch: TensorDictBase, starter: PreTrainedModel, starter_tokenizer: Any
) -> None:
    loss = GRPOLoss(wrap(starter, starter_tokenizer))
    assert loss.required_in_keys == [keys.FULL, "advantage"]
    assert set(loss(their_batch).keys()) == set(loss.out_keys)


def test_state_dict_round_trip_restores_weights_and_scheduled_clip_bounds(
    padded_batch: TensorDict, starter: PreTrainedModel, trained: PreTrainedModel
) -> None:
    source = GRPOLoss(TokenScorer(trained), clip_epsilon=(0.1, 0.1))
    source.clip_epsilon_high = 0.3
    target = GRPOLoss(TokenScorer(copy.deepcopy(starter)))
    before = total(target(padded_batch))
    target.load_state_dict(source.state_dict())
    assert target.clip_epsilon_low.item() == pytest.approx(0.1)
    assert target.clip_epsilon_high.item() == pytest.approx(0.3)
    assert total(target(padded_batch)).item() == total(source(padded_batch)).item() != before.item()


def test_scorer_and_loss_compute_with_other_parameters(
    padded_batch: TensorDict, starter: PreTrainedModel, trained: PreTrainedModel
) -> None:
    loss = GRPOLoss(TokenScorer(copy.deepcopy(starter)))
    expected = GRPOLoss(TokenScorer(trained))(padded_batch)
    own = total(loss(padded_batch)).item()
    parameters = TensorDict.from_module(GRPOLoss(TokenScorer(trained)))
    with parameters.to_module(loss):
        inside = loss(padded_batch)
    torch.testing.assert_close(total(inside), total(expected))
    assert total(loss(padded_batch)).item() == own != total(inside).item()
    gradient = torch.autograd.grad(total(inside), trained.parameters())
    torch.testing.assert_close(gradient, torch.autograd.grad(total(expected), trained.parameters()))
    called = torch.func.functional_call(
        loss.actor_network, dict(TokenScorer(trained).named_parameters()), (padded_batch.copy(),)
    )
    scores = TokenScorer(trained)(padded_batch.copy())
    torch.testing.assert_close(called[keys.CUR_LOG_PROBS], scores[keys.CUR_LOG_PROBS])


def assert_compiled_equals_eager(loss: GRPOLoss, batch: TensorDictBase, **settings: Any) -> None:
    expected = loss(batch)
    got = torch.compile(loss, **settings)(batch)
    assert set(got.keys()) == set(expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    compiled, eager = gradients(loss, total(got)), gradients(loss, total(expected))
    for name, gradient in eager.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_with_a_model_the_loss_has_the_same_value_and_gradient(
    padded_batch: TensorDict,
) -> None:
    """The whole graph is compiled, without code generation, which is slow for a transformer."""
    model = make_tiny_model(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1
    )
    loss = GRPOLoss(TokenScorer(model), kl_to_inference_coeff=0.1, entropy_coeff=0.01)
    assert_compiled_equals_eager(loss, padded_batch[:4], backend="aot_eager")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_the_compiled_loss_has_the_same_value_and_gradient() -> None:
    logits, rows = make_batch(0, lengths=(6, 6, 6))
    loss = GRPOLoss(Table(logits), **SETTINGS)
    assert_compiled_equals_eager(loss, torch.stack(rows))


# The loop by hand


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("part", "most_lines"), [(slice(-1), 40), (slice(-1, None), 60)])
def test_the_loops_of_the_tutorial_are_short_and_learn(part: slice, most_lines: int) -> None:
    """A separate process runs it, as a user would; the reward rises by at least 0.15 in 20 steps."""
    source = "".join(block.text for block in blocks("tutorials/loop")[part])
    assert len(source.splitlines()) <= most_lines
    source += "\nprint('REWARDS', *rewards)\n"
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(value) for value in done.stdout.rpartition("REWARDS")[2].split()]
    assert len(rewards) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15


@pytest.mark.slow
def test_the_maths_of_the_loss_compile_in_one_graph() -> None:
    """One graph, without breaks, serves ragged batches of any sizes."""
    torch._dynamo.reset()  # earlier tests have compiled the same code
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    settings = {"behaviour_weight": "truncate", "proximal": "current", "kl_mask_threshold": 9.0}
    compiled = None
    for seed, lengths in enumerate([(6, 9, 4), (7, 3, 8), (5, 5, 12), (20, 3, 4)]):
        logits, rows = make_batch(seed, lengths=lengths)
        loss = GRPOLoss(Table(logits), **SETTINGS, **settings)
        batch = loss._act(lazy_stack(rows))
        expected = loss(lazy_stack(rows))
        if compiled is None:
            own = loss
            compiled = torch.compile(own.of_tokens, backend=backend, fullgraph=True, dynamic=True)
        scored = [keys.CUR_LOG_PROBS, keys.ENTROPY, *loss.required_in_keys]
        tokens, _ = own.tokens(loss.read(batch, scored), {})
        got = compiled(tokens)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value)
    assert len(graphs) == 1
