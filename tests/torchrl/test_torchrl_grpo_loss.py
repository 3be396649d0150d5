"""What TorchRL's tests of its GRPO loss test, for ours; docs/torchrl.md says what differs and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import MetaData, TensorDict, lazy_stack, set_list_to_stack
from torchrl.data import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.common import ChatHistory, Masks
from transformers import AutoTokenizer

from tests.support.losses import Table, make_batch
from tests.support.models import make_tiny_model
from torchrl_grpo.functional import token_weights
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import CISPOLoss, GRPOLoss, GRPOLossOutput
from torchrl_grpo.starter import starter_path


@pytest.fixture
def actor() -> TransformersWrapper:
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    return TransformersWrapper(
        make_tiny_model(),
        generate=False,
        pad_output=True,
        input_mode="history",
        tokenizer=tokenizer,
    )


@pytest.fixture
def batch() -> TensorDict:
    """One dialog in TorchRL's history mode, with an advantage for each token, [1, T, 1]."""
    with set_list_to_stack(True):
        tokenizer = AutoTokenizer.from_pretrained(starter_path())
        prompt = History(
            role=["system", "user"], content=["Answer.", "What is 2+2?"], batch_size=(2,)
        )
        response = History(role=["assistant"], content=["2 + 2 = 4."], batch_size=(1,))
        full = prompt.extend(response, inplace=False)
        history = ChatHistory(prompt=prompt, response=response, full=full).expand((1,))
        tokens = history.to_tokens(tokenizer)
        length = tokens.get(
            "full", as_padded_tensor=True, padding_side="left", padding_value=0
        ).shape[-1]
        generator = torch.Generator().manual_seed(0)
        attention = torch.ones(1, length, dtype=torch.bool)
        return TensorDict(
            {
                "advantage": torch.randn(1, length, 1, generator=generator),
                "history": history,
                "tokens": tokens % 261,
                "masks": Masks(
                    all_attention_mask=attention, all_assistant_mask=None, padded=MetaData(True)
                ),
                "log_probs": torch.randn_like(tokens, dtype=torch.float32),
            },
            [1],
        )


@pytest.mark.parametrize("make", [GRPOLoss, CISPOLoss])
@pytest.mark.parametrize("clip", [0.2, (0.2, 0.28)])
def test_history_mode_gives_outputs_that_are_attributes(actor, batch, make, clip):
    out = make(actor, clip_epsilon=clip, entropy_coeff=0.01)(batch)
    assert isinstance(out, GRPOLossOutput)
    for name in ("loss_objective", "clip_fraction", "kl_approx", "ESS", "entropy", "loss_entropy"):
        assert getattr(out, name).shape == () and getattr(out, name).isfinite()
    assert 0 <= out.clip_fraction <= 1
    assert out.loss_kl_to_ref is None and out.kl_to_ref is None
    with pytest.raises(
        AttributeError, match="has no attribute 'loss_critic', it has loss_objective"
    ):
        _ = out.loss_critic


def test_log_probs_and_reference_that_are_missing_are_named(actor, batch):
    """The log-probs of the response alone are enough for us, TorchRL's loss wants those of all tokens."""
    out = GRPOLoss(actor, kl_to_ref_coeff=None, kl_to_inference_coeff=None)(batch)
    assert out.loss_objective.isfinite()
    with pytest.raises(KeyError, match=r"no entry next\.ref_log_probs\.full"):
        GRPOLoss(actor, kl_to_ref_coeff=0.1)(batch)
    with pytest.raises(
        KeyError, match=r"must have tokens\.full, .* and log_probs\.full or log_probs\.response"
    ):
        GRPOLoss(actor)(batch.exclude("log_probs"))


def test_attributes_have_the_values_of_their_entries():
    logits, rows = make_batch(0)
    out = GRPOLoss(Table(logits), kl_to_ref_coeff=0.1)(lazy_stack(rows))
    assert out.loss_objective is out["loss_objective"]
    assert out.clip_fraction == out["clip_fraction_low"] + out["clip_fraction_high"]
    assert out.kl_approx == -out["kl_k1_to_inference"]
    assert out.kl_to_ref is out["kl_k3_to_ref"] and out.kl_to_inference is out["kl_k3_to_inference"]


def test_a_token_mean_is_over_the_tokens_of_the_mask():
    value = torch.arange(6.0).reshape(2, 3)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert (token_weights(mask, "token_mean") * value).sum() == value[mask].mean()


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        ({"kl_mask_threshold": 0.5}, "behaviour_weight='mask'"),
        ({"entropy_bonus": True}, "entropy_coeff"),
        ({"samples_mc_entropy": 4}, "computed exactly"),
        ({"gamma": 0.9}, r"GroupAdvantage\(level='token', gamma="),
        ({"reduction": "sum"}, "aggregation='constant' with constant_length=1"),
        ({"clip_value": 0.2}, "no value function"),
        ({"device": torch.device("cpu")}, r"loss\.to\(device\)"),
        ({"masking_strategy": "sft"}, r"set_keys\(mask="),
        ({"ref_log_prob_padding_side": "left"}, "aligned with the tokens"),
    ],
)
def test_torchrls_arguments_are_refused_with_ours(arguments: dict[str, Any], use: str):
    (name,) = arguments
    with pytest.raises(
        TypeError, match=f"{name}=.* is TorchRL's and GRPOLoss has no such argument: .*{use}"
    ):
        GRPOLoss(Table(torch.zeros(1, 1, 2)), **arguments)


def test_torchrls_defaults_that_change_nothing_are_taken():
    same = {
        "kl_mask_threshold": None,
        "gamma": None,
        "reduction": "mean",
        "clip_value": False,
        "device": None,
    }
    loss = GRPOLoss(
        Table(torch.zeros(1, 1, 2)), **same, masking_strategy="rlhf", kl_to_ref_coeff=None
    )
    assert loss.kl_to_ref_coeff == 0.0
    with pytest.raises(ValueError, match="actor_network=NoneType must be a TensorDict module"):
        GRPOLoss(None)
    with pytest.raises(
        ValueError, match=r"aggregation='prompt_mean' must be one of .*: use 'sequence_mean'"
    ):
        GRPOLoss(Table(torch.zeros(1, 1, 2)), aggregation="prompt_mean")
    with pytest.raises(ValueError, match="aggregation='none' must be one of"):
        GRPOLoss(Table(torch.zeros(1, 1, 2)), aggregation="none")


def test_a_single_sequence_is_refused_with_advice_that_works(tiny_model):
    tokens, mask = torch.arange(5, 13).expand(2, 8), (torch.arange(8) > 3).expand(2, 8)
    entries = {
        ("tokens", "full"): tokens,
        ("masks", "all_assistant_mask"): mask,
        "advantage": torch.ones(2, 1),
    }
    batch = TensorDict(entries | {("log_probs", "full"): torch.zeros(2, 8)}, [2])
    loss = GRPOLoss(TokenScorer(tiny_model))
    with pytest.raises(ValueError, match=r"batch_size=\[\] must be \[N\].*: use batch\[:1\]"):
        loss(batch[0])
    assert loss(batch[:1])["loss_objective"].isfinite()
    with pytest.raises(ValueError, match=r"batch_size=\[1, 2\] .* batch\.reshape\(-1\)"):
        loss(batch.unsqueeze(0))
    assert loss(batch.unsqueeze(0).reshape(-1))["loss_objective"].isfinite()
