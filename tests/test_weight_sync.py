"""Names, merging, the shared block and the gap, all without vLLM."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.conftest import make_tiny_model
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.weight_sync import SharedWeights, named_weights, sync_gap


def make_lora(**overrides: object) -> nn.Module:
    torch.manual_seed(3)
    settings: dict = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(make_tiny_model(), LoraConfig(**(settings | overrides)))


def response_log_probs(model: nn.Module, temperature: float = 1.0):
    """A ``score_fn`` from plain Hugging Face logits."""

    @torch.no_grad()
    def score(sequences: list[Tensor], prompt_lengths: list[int]) -> list[Tensor]:
        rows = []
        for tokens, start in zip(sequences, prompt_lengths, strict=True):
            log_probs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
            rows.append(log_probs[start - 1 : -1].gather(1, tokens[start:, None])[:, 0])
        return rows

    return score


def test_named_weights_are_the_checkpoint_s_with_a_tied_head_left_out(tiny_model):
    weights = dict(named_weights(tiny_model))
    state = tiny_model.state_dict()
    assert set(weights) == set(state) - {"lm_head.weight"}
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    assert not any(weight.requires_grad for weight in weights.values())


def test_named_weights_hold_an_untied_head():
    assert "lm_head.weight" in dict(named_weights(make_tiny_model(tie_word_embeddings=False)))


def test_named_weights_of_a_lora_model_are_the_merged_ones_and_the_model_stays():
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


def test_named_weights_of_a_lora_model_that_is_already_merged_do_not_add_twice():
    lora = make_lora()
    expected = {name: weight.clone() for name, weight in named_weights(lora)}
    lora.merge_adapter()
    for name, weight in named_weights(lora):
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_named_weights_refuse_an_adapter_that_is_not_added_to_the_weight():
    with pytest.raises(ValueError, match="only plain LoRA"):
        list(named_weights(make_lora(use_dora=True)))


@pytest.fixture
def shared(tiny_model) -> SharedWeights:
    shapes = {name: weight.shape for name, weight in tiny_model.named_parameters()}
    return SharedWeights(shapes, {"lm_head.weight"}, torch.float32)


def test_shared_weights_are_seen_by_every_reader_as_they_change(shared):
    readers = [dict(shared.block.weights()) for _ in range(3)]
    for seed in (5, 6):
        sent = dict(named_weights(make_tiny_model(seed)))
        shared.fill(sent.items())
        for seen in readers:
            assert list(seen) == list(sent)
            assert all(torch.equal(seen[name], sent[name]) for name in sent)


READER = """
import pickle, sys
weights = dict(pickle.loads(bytes.fromhex(sys.argv[1])).weights())
print(weights["norm"].sum().item(), flush=True)
sys.stdin.readline()
print(weights["norm"].sum().item(), flush=True)
"""


def test_another_process_reads_the_weights_and_keeps_them_when_their_maker_is_gone():
    shared = SharedWeights({"embed": (4, 2), "norm": (3,)}, (), torch.float32)
    shared.fill([("norm", torch.full((3,), 2.0)), ("embed", torch.zeros(4, 2))])
    block, before = shared.block, set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", READER, pickle.dumps(block).hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert float(reader.stdout.readline()) == 6.0
        del shared
        gc.collect()
        assert reader.communicate("\n")[0].strip() == "6.0"
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(RuntimeError, match="are gone: the process that made them dropped them"):
        block.weights()


def test_another_file_at_the_same_place_is_not_taken_for_the_weights():
    shared = SharedWeights({"norm": (3,)}, (), torch.float32)
    block = shared.block
    del shared
    others = [SharedWeights({"norm": (3,)}, (), torch.float32) for _ in range(50)]
    assert block.path in [other.block.path for other in others]
    with pytest.raises(RuntimeError, match="are gone"):
        block.weights()


def test_shared_weights_are_cast_to_the_engine_s_dtype(tiny_model):
    weight = tiny_model.model.norm.weight.detach() + torch.linspace(0, 1, 32)
    shared = SharedWeights({"norm": weight.shape}, (), torch.bfloat16)
    shared.fill([("norm", weight)])
    assert torch.equal(dict(shared.block.weights())["norm"], weight.bfloat16())


def test_shared_weights_refuse_unknown_missing_repeated_and_misshapen_weights(shared, tiny_model):
    weights = list(named_weights(tiny_model))
    with pytest.raises(RuntimeError, match=r"'model\.extra' is not among the 26 weights"):
        shared.fill([*weights, ("model.extra", torch.zeros(1))])
    with pytest.raises(RuntimeError, match=r"1 of 26 weights are missing .*model\.norm\.weight"):
        shared.fill((name, weight) for name, weight in weights if name != "model.norm.weight")
    with pytest.raises(RuntimeError, match="sent twice"):
        shared.fill([*weights, weights[0]])
    with pytest.raises(RuntimeError, match=r"has shape \[31\], the engine's model has \[32\]"):
        shared.fill((name, weight[1:] if name == "model.norm.weight" else weight) for name, weight in weights)
    shared.fill([*weights, ("lm_head.weight", weights[0][1])])


def test_the_gap_is_rounding_for_equal_weights_and_large_for_others(tiny_model):
    params = SamplingParams(max_new_tokens=12, temperature=0.7)
    prompts = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])]
    with TransformersEngine(make_tiny_model()) as engine:
        mean, largest = sync_gap(engine, response_log_probs(tiny_model, 0.7), prompts, params)
        assert 0 <= mean <= largest < 1e-5
        mean, largest = sync_gap(engine, response_log_probs(make_tiny_model(1), 0.7), prompts, params)
        assert largest > mean > 0.1


def test_the_gap_refuses_scores_that_do_not_line_up_with_the_sampled_tokens(tiny_model):
    score = response_log_probs(tiny_model)
    with TransformersEngine(make_tiny_model()) as engine, pytest.raises(RuntimeError, match="sampled tokens"):
        sync_gap(engine, lambda s, p: [row[1:] for row in score(s, p)], [torch.tensor([5])], SamplingParams(4))
