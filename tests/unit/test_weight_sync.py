"""Names, merging, the weights that are sent and read, and the log-prob mismatch, all in this
process.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import make_lora, make_tiny_model, response_log_probs
from tests.support.weights import Trained, mismatch
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.weights import (
    ObjectSender,
    Transfer,
    check_weights,
    load_weights,
    make_sender,
    named_adapters,
    named_weights,
    transfer_kind,
)
from torchrl_grpo.weights.adapters import AdapterHandle
from torchrl_grpo.weights.named import merged


def test_named_weights_are_the_checkpoint_s_with_a_tied_head_left_out(tiny_model):
    weights = dict(named_weights(tiny_model))
    state = tiny_model.state_dict()
    assert set(weights) == set(state) - {"lm_head.weight"}
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    assert not any(weight.requires_grad for weight in weights.values())


def test_named_weights_hold_an_untied_head():
    assert "lm_head.weight" in dict(named_weights(make_tiny_model(tie_word_embeddings=False)))


def test_named_weights_of_a_lora_model_are_merged_and_leave_it_as_it_is():
    lora = make_lora()
    before = {name: weight.clone() for name, weight in lora.state_dict().items()}
    sent = {name: weight.clone() for name, weight in named_weights(lora)}
    assert all(torch.equal(weight, before[name]) for name, weight in lora.state_dict().items())
    base = dict(make_tiny_model().named_parameters())
    assert set(sent) == set(base)
    assert (
        sent["model.layers.1.mlp.up_proj.weight"] - base["model.layers.1.mlp.up_proj.weight"]
    ).abs().max() > 0.01
    merged = dict(lora.merge_and_unload().named_parameters())
    for name, weight in merged.items():
        torch.testing.assert_close(sent[name], weight, rtol=0, atol=1e-6)


def test_named_weights_of_a_merged_lora_model_do_not_add_twice():
    lora = make_lora()
    expected = {name: weight.clone() for name, weight in named_weights(lora)}
    lora.merge_adapter()
    for name, weight in named_weights(lora):
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_named_weights_refuse_an_adapter_that_is_not_added_to_the_weight():
    with pytest.raises(ValueError, match="only plain LoRA"):
        list(named_weights(make_lora(use_dora=True)))


def test_adapters_and_base_weights_make_what_named_weights_gives():
    for overrides in ({}, {"target_modules": ["q_proj", "embed_tokens"]}):
        lora = make_lora(**overrides)
        base = dict(named_weights(make_tiny_model()))
        expected = {name: weight.clone() for name, weight in named_weights(lora)}
        for name, delta in named_adapters(lora):
            base[name] = merged(base[name], [delta])
        assert base.keys() == expected.keys()
        assert all(torch.equal(base[name], expected[name]) for name in expected)
    lora.merge_adapter()
    with pytest.raises(ValueError, match="are merged into the weight"):
        list(named_adapters(lora))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_object_store_gives_each_version_as_sent_until_released(dtype: torch.dtype):
    models = [make_tiny_model(seed) for seed in range(3)]
    sender = make_sender(Transfer("object_store"), dtype=dtype)
    handles = [pickle.loads(pickle.dumps(sender.send(Trained(m), v))) for v, m in enumerate(models)]
    sender.release(0)
    for handle, model in list(zip(handles, models, strict=True))[1:]:
        got = dict(handle.weights())
        assert list(got) == [name for name, _ in named_weights(model)]
        assert all(
            torch.equal(got[name], weight.to(dtype)) for name, weight in named_weights(model)
        )
    sender.close()


def test_an_engine_in_the_trainers_process_reads_the_weights_of_now(tiny_model: nn.Module):
    handle = make_sender(Transfer("direct"), dtype=torch.bfloat16).send(Trained(tiny_model), 0)
    with torch.no_grad():
        tiny_model.get_parameter("model.norm.weight").fill_(3.0)
    with TransformersEngine(make_tiny_model(1)) as engine:
        engine.load(handle, 7)
        assert engine.policy_version == 7
        got = dict(handle.weights())
        assert (
            got["model.norm.weight"].tolist() == [3.0] * 32
            and got["model.norm.weight"].dtype == torch.float32
        )
        assert (
            mismatch(
                engine, response_log_probs(tiny_model), [torch.tensor([5, 6])], SamplingParams(8)
            )[1]
            < 1e-5
        )


def test_ranks_that_send_nothing_still_take_part_in_the_gathering(tiny_model: nn.Module):
    calls = []

    class Gathering(Trained):
        def weights(self, dtype=None):
            for name, weight in named_weights(self.model):
                calls.append(name)
                yield name, weight

    assert ObjectSender(None).send(Gathering(tiny_model), 0, keep=False) is None
    assert calls == [name for name, _ in named_weights(tiny_model)]


@pytest.mark.parametrize("kind", ["direct", "object_store", "nccl"])
def test_adapters_travel_alone_in_their_own_dtype_by_any_kind(kind: str):
    lora = make_lora()
    sender = make_sender(Transfer(kind), dtype=torch.float16, adapters=True)
    handle = sender.send(Trained(lora), 1)
    assert isinstance(handle, AdapterHandle)
    if kind != "direct":
        handle = pickle.loads(pickle.dumps(handle))
    got = handle.weights()
    base = dict(make_tiny_model().named_parameters())
    layers = dict(handle.layers)
    sent = dict(named_weights(lora))
    for (name, a), (_, b) in zip(got, got, strict=True):
        assert name.removesuffix(".A") in layers and a.dtype == torch.float32
        name = name.removesuffix(".A")
        expected = base.pop(name) + layers[name] * b @ a
        torch.testing.assert_close(sent[name], expected.detach(), rtol=0, atol=1e-6)
    assert all(torch.equal(sent[name], weight) for name, weight in base.items())
    sender.close()


CPU, GPU, GPU_1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


STORE, IPC, NCCL = Transfer("object_store"), Transfer("ipc"), Transfer("nccl")
TWO = [[GPU_1], [torch.device("cuda", 2)]]


@pytest.mark.parametrize(
    ("requested", "trainer", "engines", "options", "chosen"),
    [
        ("auto", CPU, [[CPU]], {}, STORE),
        ("auto", GPU, [[GPU]], {}, IPC),
        ("auto", GPU, [[GPU], [GPU]], {}, STORE),  # an export can be opened once
        ("auto", GPU, [[GPU_1]], {}, NCCL),
        ("auto", GPU, TWO, {}, Transfer("nccl", workers=2)),
        ("auto", GPU, [[GPU_1, GPU]], {"colocated": True}, STORE),
        (
            "auto",
            GPU,
            [[GPU], [GPU_1]],
            {"colocated": True},
            STORE,
        ),  # several GPUs that share work in turns
        ("auto", GPU, TWO, {"waits": True}, STORE),  # the engines would wait for each other
        ("auto", GPU, [[GPU_1]], {"waits": True}, NCCL),
        ("auto", GPU, [[GPU]], {"on_device": False}, STORE),
        ("auto", GPU, [[GPU_1]], {"adapters": True}, STORE),
        ("auto", GPU, [[GPU]], {"distributed": False}, Transfer("direct_ipc")),
        ("auto", GPU, [[GPU]], {"distributed": False, "on_device": False}, Transfer("direct")),
        ("auto", CPU, [[CPU]], {"distributed": False}, Transfer("direct")),
        ("auto", GPU, [[GPU_1]], {"distributed": False}, Transfer("direct")),
        ("cuda_ipc", GPU, [[GPU]], {}, IPC),
        ("cuda_ipc", GPU, [[GPU]], {"on_device": False}, STORE),
        ("broadcast", GPU, TWO, {"waits": True}, Transfer("nccl", workers=2)),
        ("broadcast", GPU, [[GPU_1]], {"adapters": True}, STORE),
        ("broadcast", CPU, [[CPU]], {}, STORE),
        ("object_store", GPU, [[GPU_1]], {}, STORE),
    ],
)
def test_auto_is_the_fastest_that_fits_and_what_is_asked_for_is_taken(
    requested: str,
    trainer: torch.device,
    engines: list[list[torch.device]],
    options: dict[str, Any],
    chosen: Transfer,
):
    settings = {"on_device": True, "colocated": engines[0][0] == trainer == GPU} | options
    assert transfer_kind(requested, trainer=trainer, engines=engines, **settings) == chosen


@pytest.mark.parametrize(
    ("requested", "trainer", "engines", "colocated", "fix"),
    [
        ("cuda_ipc", CPU, [[CPU], [CPU]], False, "auto"),
        ("cuda_ipc", GPU, [[GPU, GPU_1]], False, "broadcast"),
        ("broadcast", GPU, [[GPU]], True, "cuda_ipc"),
        ("broadcast", GPU, [[GPU], [GPU_1]], True, "auto"),
        ("cuda_ipc", GPU, [[GPU], [GPU_1]], True, "auto"),
    ],
)
def test_a_kind_that_cannot_work_there_is_refused(
    requested: str,
    trainer: torch.device,
    engines: list[list[torch.device]],
    colocated: bool,
    fix: str,
):
    message = rf"on {trainer}.*: use inference_model\.weight_transfer={fix}"
    with pytest.raises(ValueError, match=message):
        transfer_kind(
            requested, on_device=True, trainer=trainer, engines=engines, colocated=colocated
        )


def test_weights_that_are_not_the_model_s_are_refused_all_at_once(tiny_model: nn.Module):
    expected = {name: tuple(weight.shape) for name, weight in named_weights(tiny_model)}
    layout = [(name, list(shape)) for name, shape in expected.items()]
    check_weights(reversed(layout), expected, "Qwen2ForCausalLM")
    wrong = [(name, [31] if name == "model.norm.weight" else shape) for name, shape in layout[1:]]
    with pytest.raises(RuntimeError) as error:
        check_weights([*wrong, ("model.extra", [1]), layout[1]], expected, "Qwen2ForCausalLM")
    assert (
        "1 unknown (model.extra); 1 missing (model.embed_tokens.weight); "
        "1 sent twice (model.layers.0.self_attn.q_proj.weight); "
        "1 of another shape (model.norm.weight (31,) instead of (32,))"
    ) in str(error.value)


def test_a_tied_head_may_be_left_out_and_a_bad_update_changes_nothing(tiny_model: nn.Module):
    weights = {name: weight.clone() for name, weight in named_weights(make_tiny_model(1))}
    before = {name: weight.clone() for name, weight in tiny_model.state_dict().items()}
    for name, weight in list(weights.items())[:2]:
        with pytest.raises(RuntimeError, match=r"26 of Qwen2ForCausalLM.*1 sent twice"):
            load_weights(tiny_model, [*weights.items(), (name, weight)])
    assert all(
        torch.equal(weight, before[name]) for name, weight in tiny_model.state_dict().items()
    )
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    for update in (weights, weights | head):
        load_weights(tiny_model, update.items())
        assert all(torch.equal(weight, weights[name]) for name, weight in named_weights(tiny_model))
    untied = make_tiny_model(tie_word_embeddings=False)
    with pytest.raises(
        RuntimeError, match=r"the 27 of Qwen2ForCausalLM.*1 missing \(lm_head\.weight\)"
    ):
        load_weights(untied, weights.items())


def test_the_mismatch_is_rounding_for_equal_weights_and_large_for_others(tiny_model):
    params = SamplingParams(max_new_tokens=12, temperature=0.7)
    prompts = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])]
    with TransformersEngine(make_tiny_model()) as engine:
        mean, largest = mismatch(engine, response_log_probs(tiny_model, 0.7), prompts, params)
        assert 0 <= mean <= largest < 1e-5
        mean, largest = mismatch(
            engine, response_log_probs(make_tiny_model(1), 0.7), prompts, params
        )
        assert largest > mean > 0.1
