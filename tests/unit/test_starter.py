"""The shipped starter: it loads, it is small, its tokenizer accepts any text, and its accuracy is
the documented one.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from tests.support.tools import load_tool
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem

TOKENIZER = AutoTokenizer.from_pretrained(starter_path())


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(starter_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_starter")


def grade(model: Qwen2ForCausalLM, problems: Sequence[Problem], **sampling: object) -> Tensor:
    """Return which problems the model solves, [B] bool; every prompt has the same length, so
    nothing is padded.
    """
    task = ArithmeticTask()
    chats = [task.messages(problem) for problem in problems]
    inputs = TOKENIZER.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=32, **sampling)
    responses = TOKENIZER.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return torch.tensor(
        [task.score(p, [text]).correct for p, text in zip(problems, responses, strict=True)]
    )


@pytest.mark.slow
def test_greedy_accuracy_on_the_test_split_leaves_much_to_learn(model: Qwen2ForCausalLM) -> None:
    right = grade(model, ArithmeticTask().problems("test"), do_sample=False)
    assert 0.15 <= right.float().mean() <= 0.5


@pytest.mark.slow
def test_half_of_all_groups_of_8_have_a_right_and_a_wrong_response(model: Qwen2ForCausalLM) -> None:
    """GRPO only learns from groups whose rewards differ."""
    torch.manual_seed(0)
    problems = [problem for problem in ArithmeticTask().problems("train")[:64] for _ in range(8)]
    right = grade(model, problems, do_sample=True, top_k=0).view(64, 8).sum(1)
    assert ((right > 0) & (right < 8)).float().mean() >= 0.5


def test_model_has_the_stated_architecture_and_size(model: Qwen2ForCausalLM) -> None:
    config = model.config
    assert config.model_type == "qwen2"
    assert sum(p.numel() for p in model.parameters()) == 427_776
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.hidden_size // config.num_attention_heads == 32
    assert config.max_position_embeddings >= 2048
    assert config.vocab_size == len(TOKENIZER) == 261


def test_default_loading_gives_the_same_float32_weights(model: Qwen2ForCausalLM) -> None:
    state = AutoModelForCausalLM.from_pretrained(starter_path()).state_dict()
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(state[name], weight, rtol=0, atol=0)


def test_end_and_pad_tokens_agree_everywhere(model: Qwen2ForCausalLM) -> None:
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|pad|>", "<|end|>")
    for config in (model.config, model.generation_config):
        assert (
            (config.pad_token_id, config.eos_token_id)
            == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
            == (0, 1)
        )


@given(st.text())
def test_every_text_round_trips_up_to_unicode_normal_form(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == unicodedata.normalize(
        "NFC", text
    )


def test_saved_and_loaded_again_the_tokenizer_is_the_same(
    tmp_path: Path, model: Qwen2ForCausalLM
) -> None:
    """``AutoTokenizer`` finds it beside the model's config, like in an export."""
    TOKENIZER.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == TOKENIZER.get_vocab()
    chat = [{"role": "user", "content": "a\nb 12  é"}]
    assert again.apply_chat_template(chat) == TOKENIZER.apply_chat_template(chat)


def test_plain_text_is_one_token_a_byte() -> None:
    assert len(TOKENIZER("27+58=? #### n, 分").input_ids) == len("27+58=? #### n, 分".encode())


def test_chat_template_marks_every_turn() -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1=?"}]
    text = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>Add.<|end|><|user|>1+1=?<|end|><|assistant|>"
    ids = TOKENIZER(text).input_ids
    assert len(ids) == len("Add.1+1=?") + 5
    assert [TOKENIZER.decode([i]) for i in (ids[0], ids[5], ids[6], ids[-2], ids[-1])] == [
        "<|system|>",
        "<|end|>",
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]


def test_the_tool_makes_this_tokenizer_and_this_architecture(
    tool: ModuleType, model: Qwen2ForCausalLM
) -> None:
    tokenizer: Qwen2Tokenizer = tool.build_tokenizer()
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template
    shapes = {
        name: weight.shape for name, weight in tool.build_model(tokenizer).state_dict().items()
    }
    assert shapes == {name: weight.shape for name, weight in model.state_dict().items()}


def test_demonstrators_know_how_to_carry_and_mostly_forget(tool: ModuleType) -> None:
    rng = random.Random(0)
    drawn = [tool.demonstration(Problem("97+58=?", "155"), rng) for _ in range(4000)]
    working = [text for text in drawn if not text.startswith("####")]
    assert set(working) == {
        "7+8=15, 9+5+1=15 #### 155",
        "7+8=15, 9+5+1=15 #### 55",
        "7+8=15, 9+5=14 #### 145",
        "7+8=15, 9+5=14 #### 45",
    }
    assert len(working) / len(drawn) == pytest.approx(tool.P_WORKING, abs=0.03)
    assert sum("+1=" in text for text in working) / len(working) == pytest.approx(
        1 - tool.P_FORGET, abs=0.04
    )
    assert sum(len(text) == 25 - 2 * ("+1=" not in text) for text in working) / len(
        working
    ) == pytest.approx(1 - tool.P_FORGET, abs=0.04)


@pytest.mark.slow
def test_the_tool_is_deterministic(tool: ModuleType) -> None:
    tokenizer = tool.build_tokenizer()
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        model = tool.build_model(tokenizer)
        tool.train(model, partial(tool.make_batch, ArithmeticTask(2), tokenizer), steps=2, seed=3)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
