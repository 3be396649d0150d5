"""TorchRL's KL transforms on our batches and in our environment: the same numbers as ours, or a
documented refusal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs import TransformedEnv
from torchrl.envs.llm.transforms import (
    KLComputation,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
)
from torchrl.envs.transforms import Transform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.transforms import GroupAdvantage, KLScoring, RewardShaping

G = 4
GENERATION, REFERENCE = ("gen_log_probs", "full"), ("ref_log_probs", "full")

tokenizer = AutoTokenizer.from_pretrained(starter_path())


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(starter_path()).eval()


@pytest.fixture(scope="module")
def reference(policy: PreTrainedModel) -> PreTrainedModel:
    """Return the policy with noise."""
    model = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def collect(policy: PreTrainedModel, *transforms: Transform) -> TensorDictBase:
    """Return one batch of 2 groups of 4 with fixed draws; the transforms are in the environment."""
    env: Any = LLMEnv(ArithmeticTask(), tokenizer, num_envs=2 * G, repeats=G)
    for transform in transforms:
        env = TransformedEnv(env, transform)
    params = SamplingParams(max_new_tokens=24, stop_token_ids=(tokenizer.eos_token_id,))
    collector = RolloutCollector(env, GenerationPolicy(TransformersEngine(policy), params))
    collector.set_seed(1)
    batch = collector.rollout()
    collector.shutdown()
    return batch


@pytest.fixture(scope="module")
def scored(policy: PreTrainedModel, reference: PreTrainedModel) -> TensorDictBase:
    """Return a batch with the reference log-probs that ``KLScoring`` writes."""
    batch = KLScoring(TokenScorer(reference))(collect(policy))
    assert len({row[keys.FULL].numel() for row in batch.unbind(0)}) > 1
    return batch


def wrap(model: PreTrainedModel, **settings: Any) -> TransformersWrapper:
    settings = {"generate": False, "return_log_probs": True, "input_mode": "tokens"} | settings
    return TransformersWrapper(model, tokenizer=tokenizer, **settings)


def retrieve_log_prob(model: PreTrainedModel, **settings: Any) -> RetrieveLogProb:
    return RetrieveLogProb(
        wrap(model, **settings), log_probs_full_key=REFERENCE, assistant_only=False
    )


def retrieve_kl(policy: PreTrainedModel, reference: PreTrainedModel, **settings: Any) -> RetrieveKL:
    models = (
        wrap(model, log_probs_key=key[0])
        for model, key in ((policy, GENERATION), (reference, REFERENCE))
    )
    return RetrieveKL(
        *models,
        gen_log_probs_full_key=GENERATION,
        ref_log_probs_full_key=REFERENCE,
        **({"assistant_only": False} | settings),
    )


def without_reference(batch: TensorDictBase) -> TensorDictBase:
    return batch.exclude(("next", "ref_log_probs")).clone()


def of_sampled(batch: TensorDictBase, masks: TensorDictBase, key: Any) -> Tensor:
    """Return the values at the sampled tokens of all sequences, concatenated."""
    rows = zip(batch["next"].get(key, as_list=True), masks.unbind(0), strict=True)
    return torch.cat([values[row[keys.ASSISTANT_MASK]] for values, row in rows])


def kl_by_hand(scored: TensorDictBase) -> Tensor:
    rows = scored.unbind(0)
    return torch.cat(
        [(row[keys.LOG_PROBS] - row[keys.REF_LOG_PROBS])[row[keys.ASSISTANT_MASK]] for row in rows]
    )


@pytest.mark.slow
@torch.no_grad()
def test_retrieve_log_prob_gives_the_log_probs_of_kl_scoring(
    scored: TensorDictBase, reference: PreTrainedModel
) -> None:
    theirs = retrieve_log_prob(reference)(without_reference(scored))
    ours = of_sampled(scored, scored, REFERENCE)
    assert ours.min() < -1
    torch.testing.assert_close(of_sampled(theirs, scored, REFERENCE), ours, rtol=0, atol=1e-4)


@torch.no_grad()
def test_torchrls_wrapper_that_packs_scores_other_tokens(
    scored: TensorDictBase, reference: PreTrainedModel
) -> None:
    """So ``pad_model_input`` must stay True, its default: nothing reports that the numbers are
    wrong.
    """
    theirs = retrieve_log_prob(reference, pad_model_input=False)(without_reference(scored))
    assert (
        of_sampled(theirs, scored, REFERENCE) - of_sampled(scored, scored, REFERENCE)
    ).abs().max() > 1
    batch = GroupAdvantage(G)(scored.clone())
    ours = GRPOLoss(TokenScorer(reference))(batch)["loss_objective"].item()
    batch["advantage"] = batch["advantage"].unsqueeze(-1)
    values = [
        TorchRLGRPOLoss(
            wrap(reference, pad_model_input=pads), aggregation="prompt_mean", entropy_bonus=False
        )(batch).loss_objective.item()
        for pads in (True, False)
    ]
    assert values[0] == pytest.approx(ours, rel=1e-4)
    assert abs(values[1] - ours) > 0.5 * abs(ours)


@torch.no_grad()
def test_retrieve_kl_is_the_difference_to_the_reference(
    scored: TensorDictBase, policy: PreTrainedModel, reference: PreTrainedModel
) -> None:
    theirs = retrieve_kl(policy, reference, add_to_reward=False)(without_reference(scored))
    expected = kl_by_hand(scored)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(
        of_sampled(theirs, scored, "kl_penalty"), expected, rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        of_sampled(theirs, scored, REFERENCE),
        of_sampled(scored, scored, REFERENCE),
        rtol=0,
        atol=1e-4,
    )


def test_kl_computation_with_a_reward_a_token_is_reward_shaping(scored: TensorDictBase) -> None:
    """It needs both log-probs under "next" and a reward for each token, [T, 1]; here only the last
    one is not 0.
    """
    shaped = RewardShaping(kl_coef=0.5)(scored.clone())
    rows = []
    for row in shaped.unbind(0):
        reward = torch.zeros(row[keys.FULL].numel(), 1)
        reward[-1] = row[keys.REWARD]
        log_probs = {
            "log_probs": {"full": row[keys.LOG_PROBS]},
            "ref_log_probs": {"full": row[keys.REF_LOG_PROBS]},
        }
        rows.append(TensorDict({"next": {**log_probs, "reward": reward}}))
    theirs = KLComputation(coeff=0.5)(lazy_stack(rows))
    torch.testing.assert_close(of_sampled(theirs, scored, "kl_penalty"), kl_by_hand(scored))
    assert kl_by_hand(scored).abs().max() > 0.1
    for reward, row in zip(
        theirs["next"].get("reward", as_list=True), shaped.unbind(0), strict=True
    ):
        torch.testing.assert_close(reward.squeeze(-1), row[keys.TOKEN_REWARD])


def test_kl_scoring_in_an_environment_writes_what_it_writes_to_a_batch(
    scored: TensorDictBase, policy: PreTrainedModel, reference: PreTrainedModel
) -> None:
    batch = collect(policy, KLScoring(TokenScorer(reference)))
    torch.testing.assert_close(
        of_sampled(batch, scored, REFERENCE), of_sampled(scored, scored, REFERENCE)
    )


REFUSED: dict[
    str,
    tuple[Callable[[PreTrainedModel, PreTrainedModel, TensorDictBase], Any], type[Exception], str],
] = {
    "assistant_only": (
        lambda policy, reference, batch: RetrieveLogProb(wrap(reference)),
        ValueError,
        "must have `input_mode='history'` when `assistant_only=True`",
    ),
    "RetrieveLogProb in LLMEnv": (
        lambda policy, reference, batch: collect(policy, retrieve_log_prob(reference)),
        KeyError,
        "ref_log_probs.*unaccounted for by the transform",
    ),
    "RetrieveKL in LLMEnv": (
        lambda policy, reference, batch: collect(
            policy, retrieve_kl(policy, reference, add_to_reward=False)
        ),
        KeyError,
        "log_probs.*unaccounted for by the transform",
    ),
    "a reward a sequence": (
        lambda policy, reference, batch: retrieve_kl(policy, reference)(batch),
        ValueError,
        "rewards should have one more dimension than the KL",
    ),
    "KLComputation of log-probs that are not under next": (
        lambda policy, reference, batch: KLComputation(add_to_reward=False)(batch),
        AttributeError,
        "gen_log_probs_key",
    ),
    "KLRewardTransform of a batch": (
        lambda policy, reference, batch: KLRewardTransform(wrap(reference))(batch),
        AttributeError,
        "action_key",
    ),
    "KLRewardTransform in LLMEnv": (
        lambda policy, reference, batch: collect(policy, KLRewardTransform(wrap(reference))),
        RuntimeError,
        "Failed to stack tensors",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_torchrls_kl_transforms_do_not_take(
    name: str, scored: TensorDictBase, policy: PreTrainedModel, reference: PreTrainedModel
) -> None:
    tried, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        tried(policy, reference, without_reference(scored))
