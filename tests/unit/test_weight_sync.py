"""Names, merging, what is sent and read, and the gap, all in this process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tests.support.models import make_lora, make_tiny_model, response_log_probs
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.models.loading import CheckpointModel
from torchrl_grpo.weights import (
    AdapterSender,
    FileSender,
    ObjectSender,
    PlainHandle,
    Sender,
    SharedSender,
    SharedWeights,
    check_layout,
    named_adapters,
    named_weights,
    sync_mismatch,
)
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
    assert (sent["model.layers.1.mlp.up_proj.weight"] - base["model.layers.1.mlp.up_proj.weight"]).abs().max() > 0.01
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
        lora, base = make_lora(**overrides), dict(named_weights(make_tiny_model()))
        expected = {name: weight.clone() for name, weight in named_weights(lora)}
        for name, delta in named_adapters(lora):
            base[name] = merged(base[name], [delta])
        assert base.keys() == expected.keys()
        assert all(torch.equal(base[name], expected[name]) for name in expected)
    lora.merge_adapter()
    with pytest.raises(ValueError, match="are merged into the weight"):
        list(named_adapters(lora))


READER = """
import pickle, sys
weights = dict(pickle.loads(bytes.fromhex(sys.argv[1])).weights())
print(weights["norm"].sum().item(), flush=True)
sys.stdin.readline()
print(weights["norm"].sum().item(), flush=True)
"""


def test_another_process_keeps_the_weights_that_their_maker_dropped():
    shared = SharedWeights([("norm", torch.full((3,), 2.0)), ("embed", torch.zeros(4, 2))], torch.float32)
    block = shared.block
    command = [sys.executable, "-c", READER, pickle.dumps(block).hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert float(reader.stdout.readline()) == 6.0
        shared.close()
        assert reader.communicate("\n")[0].strip() == "6.0"
    with pytest.raises(RuntimeError, match="are gone: the process that made them dropped them"):
        block.weights()


def test_another_file_at_the_same_place_is_not_taken_for_the_weights():
    shared = SharedWeights([("norm", torch.zeros(3))], torch.float32)
    block = shared.block
    shared.close()
    others = [SharedWeights([("norm", torch.zeros(3))], torch.float32) for _ in range(50)]
    assert block.path in [other.block.path for other in others]
    with pytest.raises(RuntimeError, match="are gone"):
        block.weights()
    for other in others:
        other.close()


def test_weights_that_cannot_all_be_had_leave_no_block_behind():
    def broken():
        yield "norm", torch.zeros(3)
        raise ValueError("no more")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no more"):
        SharedWeights(broken(), torch.float32)
    assert len(os.listdir("/proc/self/fd")) == before


class Trained:
    """Stands for a trainer: a model and its version."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def weights(self):
        return named_weights(self.model)

    def adapters(self):
        return named_adapters(self.model)


def senders(folder: Path, dtype: torch.dtype) -> list[Sender]:
    return [ObjectSender(dtype), SharedSender(dtype), FileSender(folder, dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_gives_each_version_as_sent_until_released(dtype: torch.dtype, tmp_path: Path):
    models = [make_tiny_model(seed) for seed in range(3)]
    for sender in senders(tmp_path, dtype):
        handles = [pickle.loads(pickle.dumps(sender.send(Trained(m), v))) for v, m in enumerate(models)]
        sender.release(0)
        for handle, model in list(zip(handles, models, strict=True))[1:]:
            got = dict(handle.weights())
            assert list(got) == [name for name, _ in named_weights(model)]
            assert all(torch.equal(got[name], weight.to(dtype)) for name, weight in named_weights(model))
        if isinstance(handles[0], PlainHandle):
            with pytest.raises(RuntimeError, match="are gone"):
                handles[0].weights()
            kind, values = handles[1].plain()
            assert dict(json.loads(json.dumps(handles[1].layout))) == {n: list(w.shape) for n, w in got.items()}
            assert kind == type(handles[1]).__name__ and json.dumps(values)
        sender.close()
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"weights_000001.safetensors", "weights_000002.safetensors"}


def test_ranks_that_send_nothing_still_take_part_in_the_gathering(tiny_model: nn.Module):
    asked = []

    class Gathering(Trained):
        def weights(self):
            for name, weight in named_weights(self.model):
                asked.append(name)
                yield name, weight

    assert ObjectSender(None).send(Gathering(tiny_model), 0, keep=False) is None
    assert asked == [name for name, _ in named_weights(tiny_model)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_alone_make_the_weights_that_would_be_sent_whole(dtype: torch.dtype, tmp_path: Path):
    make_tiny_model().save_pretrained(tmp_path)
    sender = AdapterSender(CheckpointModel(str(tmp_path), dtype))
    for seed in (1, 2):
        torch.manual_seed(seed)
        lora = make_lora(base=CheckpointModel(str(tmp_path), dtype)())
        handle = sender.send(Trained(lora), seed)
        sent = len(pickle.dumps(handle))
        expected, got = dict(named_weights(lora)), dict(pickle.loads(pickle.dumps(handle)).weights())
        assert got.keys() == expected.keys() and {weight.dtype for weight in got.values()} == {dtype}
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert sent < sum(weight.nbytes for weight in expected.values())
    unknown = replace(handle, layers=(("model.extra", *handle.layers[0][1:]),))
    with pytest.raises(RuntimeError, match=r"changes 'model\.extra', which is not among the 26 base weights"):
        unknown.weights()


def test_publishing_many_versions_leaks_no_memory_and_no_file(tmp_path: Path):
    weights = {f"layer.{i}": torch.randn(1000, 250) for i in range(4)}  # 4 MB

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), psutil.Process().memory_info().rss

    for sender in (SharedSender(torch.float32), FileSender(tmp_path, torch.float32)):
        for version in range(60):
            held = dict(sender.pack(weights.items(), version).weights())  # a reader has the older one meanwhile
            assert torch.equal(held["layer.3"], weights["layer.3"])
            sender.release(version - 1)
            if version == 10:
                files, memory = used()
        assert used()[0] <= files and used()[1] < memory + 40e6
        sender.release(version)
        assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_the_model_s_are_refused(tiny_model: nn.Module):
    expected = {name: tuple(weight.shape) for name, weight in named_weights(tiny_model)}
    layout = list(expected.items())
    check_layout([(name, list(shape)) for name, shape in reversed(layout)], expected)
    with pytest.raises(RuntimeError, match=r"'model\.extra' is not among the 26 weights"):
        check_layout([*layout, ("model.extra", (1,))], expected)
    with pytest.raises(RuntimeError, match=r"1 of 26 weights are missing .*model\.norm\.weight"):
        check_layout([entry for entry in layout if entry[0] != "model.norm.weight"], expected)
    with pytest.raises(RuntimeError, match="sent twice"):
        check_layout([*layout, layout[0]], expected)
    with pytest.raises(RuntimeError, match=r"has shape \[31\], the engine's model has \[32\]"):
        check_layout([(n, (31,) if n == "model.norm.weight" else s) for n, s in layout], expected)


def test_the_gap_is_rounding_for_equal_weights_and_large_for_others(tiny_model):
    params = SamplingParams(max_new_tokens=12, temperature=0.7)
    prompts = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])]
    with TransformersEngine(make_tiny_model()) as engine:
        mean, largest = sync_mismatch(engine, response_log_probs(tiny_model, 0.7), prompts, params)
        assert 0 <= mean <= largest < 1e-5
        mean, largest = sync_mismatch(engine, response_log_probs(make_tiny_model(1), 0.7), prompts, params)
        assert largest > mean > 0.1


def test_the_mismatch_refuses_scores_of_other_tokens(tiny_model):
    score = response_log_probs(tiny_model)
    with TransformersEngine(make_tiny_model()) as engine, pytest.raises(RuntimeError, match="sampled tokens"):
        sync_mismatch(engine, lambda s, p: [row[1:] for row in score(s, p)], [torch.tensor([5])], SamplingParams(4))
