"""TorchRL's tests of its GRPO loss, for ours; docs/torchrl.md explains the differences."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import MetaData, TensorDict, lazy_stack, set_list_to_stack
from torchrl.data import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.common import ChatHistory, Masks
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from transformers import AutoTokenizer

from tests.support.losses import Table, make_batch, total
from tests.support.models import make_tiny_model
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import CISPOLoss, GRPOLoss, GRPOLossOutput, SFTLoss
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
    """Return one dialog in TorchRL's history mode, with an advantage for each token, [1, T, 1]."""
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
    with pytest.raises(AttributeError, match=r"'loss_critic', .*loss_objective"):
        _ = out.loss_critic


def test_log_probs_and_reference_that_are_missing_are_named(actor, batch):
    """Ours only needs log-probs of the response; TorchRL's loss needs those of all tokens."""
    out = GRPOLoss(actor, kl_to_ref_coeff=None, kl_to_inference_coeff=None)(batch)
    assert out.loss_objective.isfinite()
    with pytest.raises(KeyError, match=r"no entry next\.ref_log_probs\.full"):
        GRPOLoss(actor, kl_to_ref_coeff=0.1)(batch)
    with pytest.raises(KeyError, match=r"tokens\.full, .* log_probs\.full or log_probs\.response"):
        GRPOLoss(actor)(batch.exclude("log_probs"))


def test_torchrls_metrics_are_entries_and_attributes():
    logits, rows = make_batch(0)
    loss = GRPOLoss(Table(logits), kl_to_ref_coeff=0.1)
    out = loss(lazy_stack(rows))
    assert out.loss_objective is out["loss_objective"]
    assert out.get("clip_fraction") == out["clip_fraction_low"] + out["clip_fraction_high"]
    assert out.get("kl_approx") == out.kl_approx == -out["kl_k1_to_inference"]
    assert out.get("kl_to_ref") == out.kl_to_ref == out["kl_k3_to_ref"]
    assert out.detach().get("kl_to_inference") == out["kl_k3_to_inference"]
    assert set(out.keys()) == set(loss.out_keys)


def test_setting_an_attribute_sets_the_entry():
    """TorchRL's output supports ``out.loss_objective = out.loss_objective / 8`` too."""
    out = GRPOLossOutput({"loss_objective": torch.tensor(4.0)})
    out.loss_objective = out.loss_objective / 8
    out.loss_entropy = torch.tensor(1.0)
    assert {name: value.item() for name, value in out.items()} == {
        "loss_objective": 0.5,
        "loss_entropy": 1.0,
    }
    assert not hasattr(out, "clip_fraction")
    out.batch_size = []
    assert "batch_size" not in out and pickle.loads(pickle.dumps(out)).loss_entropy == 1


def test_torchrls_mean_of_the_output_is_the_loss():
    """TorchRL's ``grpo-sync.py`` calls ``loss.mean(reduce=True)``."""
    logits, rows = make_batch(0)
    loss = GRPOLoss(Table(logits), kl_to_ref_coeff=0.1, entropy_coeff=0.01)
    out = loss(lazy_stack(rows))
    expected = total(out)
    gradients = torch.autograd.grad(expected, loss.parameters(), retain_graph=True)
    assert out.mean(reduce=True) == out.sum(reduce=True) == expected
    own = torch.autograd.grad(out.mean(reduce=True), loss.parameters())
    torch.testing.assert_close(own, gradients, rtol=0, atol=0)
    assert out.mean().loss_objective == out.loss_objective


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        ({"entropy_bonus": True}, "entropy_coeff"),
        ({"samples_mc_entropy": 4}, "computed exactly"),
        ({"gamma": 0.9}, r"GroupAdvantage\(level='token', gamma="),
        ({"reduction": "sum"}, "aggregation='constant' with constant_length=1"),
        ({"clip_value": 0.2}, "no value function"),
        ({"masking_strategy": "generic"}, r"set_keys\(mask="),
        ({"ref_log_prob_padding_side": "left"}, "aligned with the tokens"),
    ],
)
def test_torchrls_arguments_are_refused_with_ours(arguments: dict[str, Any], use: str):
    (name,) = arguments
    for make in (GRPOLoss, CISPOLoss):
        message = f"{name}=.* is an argument of TorchRL's class that {make.__name__} does not have: .*{use}"
        with pytest.raises(TypeError, match=message):
            make(Table(torch.zeros(1, 1, 2)), **arguments)


def test_the_clip_range_is_on_the_models_device():
    model = make_tiny_model().to("meta")
    for make in (GRPOLoss, CISPOLoss):
        loss = make(TokenScorer(model))
        assert {buffer.device.type for buffer in loss.objective.buffers()} == {"meta"}


def test_torchrls_defaults_that_change_nothing_are_taken():
    same = {
        "kl_mask_threshold": None,
        "gamma": None,
        "reduction": "mean",
        "clip_value": False,
        "aggregation": "prompt_mean",
        "device": torch.device("meta"),
    }
    for strategy in ("rlhf", "sft"):
        loss = GRPOLoss(
            Table(torch.zeros(1, 1, 2)), **same, masking_strategy=strategy, kl_to_ref_coeff=None
        )
    assert loss.kl_to_ref_coeff == 0.0 and loss.aggregation == "sequence_mean"
    assert loss.clip_epsilon_low.device.type == "meta"
    with pytest.raises(ValueError, match="actor_network=NoneType must be"):
        GRPOLoss(None)
    with pytest.raises(ValueError, match="aggregation='none' must be one of"):
        GRPOLoss(Table(torch.zeros(1, 1, 2)), aggregation="none")
    with pytest.raises(TypeError, match="CISPOLoss got an unexpected keyword argument 'foo'"):
        CISPOLoss(Table(torch.zeros(1, 1, 2)), foo=1)
    with pytest.raises(TypeError, match=r"tokenizer=.*torchrl\.objectives\.llm\.SFTLoss"):
        SFTLoss(Table(torch.zeros(1, 1, 2)), tokenizer="a tokenizer")


def test_methods_of_former_losses_still_work_with_a_warning():
    class Former(GRPOLoss):
        """The surrogate of a clip of 0.3, whatever the range."""

        def surrogate(self, ratio, log_prob, advantage):
            assert ratio.ndim == log_prob.ndim == advantage.ndim == 2
            return torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage)

        def clipped(self, ratio, advantage):
            return (ratio < 0.7) & (advantage < 0), (ratio > 1.3) & (advantage > 0)

    logits, rows = make_batch(0)
    with pytest.warns(FutureWarning, match=r"Former\.\w+ works for one more release: write a Surr"):
        former = Former(Table(logits))
    got, expected = (
        loss(lazy_stack(rows)) for loss in (former, GRPOLoss(Table(logits), clip_epsilon=0.3))
    )
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize(
    ("method", "part"),
    [("ratio", "OffPolicy"), ("behaviour", "Surr"), ("token_roles", "Sel"), ("_objective", "Surr")],
)
def test_other_methods_of_former_losses_are_refused(method, part):
    kind = type("Former", (GRPOLoss,), {method: lambda self, *args: None})
    with pytest.raises(
        TypeError, match=rf"Former\.{method} must not be overridden.*write an? {part}"
    ):
        kind(Table(torch.zeros(1, 1, 2)))


def test_another_kl_estimator_is_a_method_for_both_terms():
    class Squared(GRPOLoss):
        def kl(self, log_prob, other_log_prob):
            return (log_prob - other_log_prob).square()

    logits, rows = make_batch(0)
    settings = {"kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2}
    with pytest.warns(FutureWarning, match=r"Squared\.kl works for one more release: write a Term"):
        own = Squared(Table(logits), **settings)(lazy_stack(rows))
    k2 = GRPOLoss(Table(logits), kl_estimator="k2", **settings)(lazy_stack(rows))
    for name in ("loss_kl_to_ref", "loss_kl_to_inference"):
        torch.testing.assert_close(own[name], 2 * k2[name])


def test_sampled_log_probs_with_a_gradient_are_data():
    """TorchRL's ``RetrieveLogProb`` writes log-probs that require a gradient, with which the
    ratio's would be 0.
    """
    logits, rows = make_batch(0)
    loss = GRPOLoss(Table(logits))
    expected = torch.autograd.grad(total(loss(lazy_stack(rows))), loss.parameters())
    for row in rows:
        row["log_probs", "full"] = row["log_probs", "full"] + 0 * loss.actor_network.logits.sum()
    own = torch.autograd.grad(total(loss(lazy_stack(rows))), loss.parameters())
    torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_in_keys_can_be_set_until_keys_are_renamed():
    loss = GRPOLoss(Table(torch.zeros(1, 1, 2)))
    before = loss.in_keys
    loss.in_keys = [*before, "weight"]
    assert loss.in_keys == [*before, "weight"]
    loss.set_keys(advantage="mine")
    assert "mine" in loss.in_keys and "weight" not in loss.in_keys


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_tokens_may_have_another_key(wrapped: bool):
    """TorchRL calls it with ``set_keys(action=...)``."""
    model = make_tiny_model()
    tokens = torch.arange(5, 13).expand(2, 8)
    mask = (torch.arange(8) > 3).expand(2, 8)
    entries = {
        ("tokens", "full"): tokens,
        ("masks", "all_assistant_mask"): mask,
        ("log_probs", "full"): torch.full((2, 8), -1.0),
        "advantage": torch.ones(2, 1),
    }
    batch = TensorDict(entries, [2])
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    actor = (
        TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
        if wrapped
        else TokenScorer(model)
    )
    loss = GRPOLoss(actor, entropy_coeff=0.1)
    expected = total(loss(batch))
    batch.rename_key_(("tokens", "full"), "ids")
    loss.set_keys(action="ids")
    assert "ids" in loss.in_keys and ("tokens", "full") not in loss.in_keys
    assert total(loss(batch)) == expected


def test_a_single_sequence_is_refused_with_advice_that_works(tiny_model):
    tokens = torch.arange(5, 13).expand(2, 8)
    mask = (torch.arange(8) > 3).expand(2, 8)
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


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_kl_mask_drops_the_tokens_that_torchrls_drops(aggregation: str):
    model = make_tiny_model()
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 60, (3, 9), generator=generator)
    mask = (torch.arange(9) > 3).expand(3, 9)
    log_probs, _ = TokenScorer(model).score(tokens, mask)
    noise = torch.randn(3, 9, generator=generator)
    batch = TensorDict(
        {
            ("tokens", "full"): tokens,
            ("tokens", "prompt"): tokens[:, :4],
            ("tokens", "response"): tokens[:, 4:],
            ("masks", "all_attention_mask"): torch.ones(3, 9, dtype=torch.bool),
            ("masks", "all_assistant_mask"): mask,
            ("log_probs", "full"): torch.where(mask, log_probs.detach() + noise, 0.0),
            "advantage": torch.randn(3, 1, 1, generator=generator),
        },
        [3],
    )
    settings = {"kl_mask_threshold": 0.5, "aggregation": aggregation}
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_model_input=True
    )
    theirs = TorchRLGRPOLoss(actor, entropy_bonus=False, masking_strategy="rlhf", **settings)
    ours = GRPOLoss(TokenScorer(model), **settings)(batch)
    unmasked = GRPOLoss(TokenScorer(model), aggregation=aggregation)(batch)
    torch.testing.assert_close(ours.loss_objective, theirs(batch).loss_objective.reshape(()))
    assert abs(ours.loss_objective - unmasked.loss_objective) > 0.01
    assert (noise[:, 4:].square() > 1).any()
