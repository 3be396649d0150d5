"""The tool starter: it loads, it is small, it can call a tool, and mostly does not."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tools import load_tool
from torchrl_grpo.chat.template import ChatEncoder, TurnTemplate
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.integrations.call_formats import parse_turn, recognize
from torchrl_grpo.models import loading
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.tools import ToolCall, parse_tool_calls, tool_message

NAME = "tool_starter"
TOKENIZER = loading.load_tokenizer(NAME)
TASK = ArithmeticTask(difficulty=4)
END = (TOKENIZER.eos_token_id,)


@pytest.fixture(scope="module")
def model() -> Any:
    return loading.load_model(NAME, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_tool_starter")


def prompt_of(problem: Problem) -> list[int]:
    """Return the prompt's tokens as a run with ``env.tools`` makes them."""
    chats = ChatEncoder(TOKENIZER, {})
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    chat = chats.render(TASK.messages(problem), tools=tools, add_generation_prompt=True)
    return list(chats.encode([chat])[0])


def responses(model: Any, prompts: list[list[int]]) -> list[str]:
    """Return greedy responses."""
    params = SamplingParams(max_new_tokens=96, temperature=0, stop_token_ids=END)
    done = TransformersEngine(model).generate(
        [torch.tensor(prompt) for prompt in prompts], 1, params
    )
    return [TOKENIZER.decode(sequence.tokens) for [sequence] in done]


@pytest.mark.slow
def test_a_call_copies_the_problem_and_is_read_back(model: Any) -> None:
    problems = TASK.problems("test")[:64]
    begin = TOKENIZER("<tool_call>").input_ids
    texts = responses(model, [[*prompt_of(problem), *begin] for problem in problems])
    calls = [parse_tool_calls("<tool_call>" + text) for text in texts]
    assert {len(of_turn) for of_turn in calls} == {1}
    assert {call.name for [call] in calls} == {"calculator"}
    expected = [problem.query.removesuffix("=?") for problem in problems]
    copied = [
        call.arguments == {"expression": e} for [call], e in zip(calls, expected, strict=True)
    ]
    assert sum(copied) / len(copied) > 0.8


@pytest.mark.slow
def test_the_answer_repeats_the_result(model: Any, tool: ModuleType) -> None:
    template, prompts = TurnTemplate(TOKENIZER, {}), []
    problems = TASK.problems("test")[:64]
    for problem in problems:
        call = tool.CALL.replace("?", problem.query.removesuffix("=?"))
        first = [*TOKENIZER(call).input_ids, *END]
        between = template.tokens([tool_message("calculator", problem.answer)], first)
        prompts.append([*prompt_of(problem), *first, *between.tolist()])
    pairs = zip(problems, responses(model, prompts), strict=True)
    right = [text == f"#### {problem.answer}<|end|>" for problem, text in pairs]
    assert sum(right) / len(right) > 0.9


@pytest.mark.slow
def test_about_one_response_in_five_begins_a_call(model: Any) -> None:
    """So most groups of 8 have a call and a response without one, whose rewards differ."""
    prompts = torch.tensor([prompt_of(problem) for problem in TASK.problems("train")[:64]])
    with torch.no_grad():
        first = model(prompts).logits[:, -1].softmax(-1)
    of_call, of_guess = (first[:, TOKENIZER(text).input_ids[0]] for text in "<#")
    assert 0.1 < of_call.mean() < 0.3
    assert (of_call + of_guess).min() > 0.98


def test_the_template_s_calls_are_those_that_the_model_writes(tool: ModuleType) -> None:
    """An agent that sends a call back continues from its tokens; a run checks the round trip."""
    written = tool.CALL.replace("?", "123+456")
    template = TurnTemplate(TOKENIZER, {})
    assert recognize(template.chat_text, None) == "hermes"
    [call] = parse_turn(written, "", "hermes").calls
    assert call == ToolCall("calculator", {"expression": "123+456"})
    function = {"name": call.name, "arguments": call.arguments}
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": "call00000", "function": function}],
    }
    user = {"role": "user", "content": "123+456=? #### n"}
    text = template.chat_text([user, turn, tool_message("calculator", "579")])
    assert f"<|assistant|>{written}<|end|><|tool|>579     <|end|>" in text


def test_model_has_the_stated_architecture_and_size(model: Any) -> None:
    assert model.config.model_type == "qwen2"
    assert sum(p.numel() for p in model.parameters()) == 427_776
    assert model.lm_head.weight is model.model.embed_tokens.weight
    starter = AutoTokenizer.from_pretrained(starter_path())
    assert TOKENIZER.get_vocab() == starter.get_vocab()


@pytest.mark.slow
def test_weights_in_float16_load_in_float32_by_default(model: Any) -> None:
    stored = load_file(starter_path(NAME) / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float16}
    state = AutoModelForCausalLM.from_pretrained(starter_path(NAME)).state_dict()
    assert {weight.dtype for weight in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())


def test_shipped_folder_is_at_most_1_mb() -> None:
    files = [path for path in starter_path(NAME).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 2**20
    assert "README.md" in {path.name for path in files}


def test_the_tool_makes_this_tokenizer(tool: ModuleType) -> None:
    tokenizer = tool.build_tokenizer(chat_template=tool.TOOL_TEMPLATE)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template


def test_demonstrators_sometimes_copy_a_digit_wrong(tool: ModuleType) -> None:
    rng, problem = random.Random(0), Problem("222-111=?", "111")
    drawn = [tool.demonstration(problem, rng) for _ in range(2000)]
    assert max(int(result) for _, result in drawn) > 1900  # random, not the difference
    wrong = [expression for expression, _ in drawn if expression != "222-111"]
    # A digit in nine stays the same by chance.
    assert len(wrong) / len(drawn) == pytest.approx(tool.P_MISCOPY * 8 / 9, abs=0.03)
    assert {sum(a != b for a, b in zip(e, "222-111", strict=True)) for e in wrong} == {1}


@pytest.mark.slow
def test_demonstrations_call_or_give_up(tool: ModuleType) -> None:
    rng, rows = random.Random(0), []
    for _ in range(8):
        batch = tool.make_batch(TASK, TOKENIZER, rng)
        rows += list(zip(batch["input_ids"], batch["labels"], strict=True))
    texts = [TOKENIZER.decode(tokens[tokens != TOKENIZER.pad_token_id]) for tokens, _ in rows]
    learned = [TOKENIZER.decode(labels[labels != -100]) for _, labels in rows]
    call = re.escape(tool.CALL).replace(r"\?", "(.*)")
    prompt = r"<\|system\|>tools: calculator<\|end\|><\|user\|>\d+[+-]\d+=\? #### n<\|end\|><\|assistant\|>"
    result = r"<\|tool\|>(\S+) +<\|end\|><\|assistant\|>"
    ending = r"(#### .*<\|end\|>)"
    dialog = re.compile(rf"{prompt}(?:{call}<\|end\|>{result})?{ending}|{result}{ending}")
    first_tokens = {"#": 0, "<": 0}
    for text, lesson in zip(texts, learned, strict=True):
        match = dialog.fullmatch(text)
        assert match is not None
        expression, copied, answer = (
            [*match.groups()[:3]] if match[3] else [None, *match.groups()[3:]]
        )
        assert answer == f"#### {copied or '?'}<|end|>"
        if not text.startswith("<|system|>"):
            assert lesson == answer
            continue
        if lesson[0] in first_tokens:
            first_tokens[lesson[0]] += 1
            assert lesson == answer or lesson.startswith("<tool_call>")
        else:
            assert lesson == f'{expression}"{answer}'
    calls = first_tokens["<"] / sum(first_tokens.values())
    assert calls == pytest.approx(0.2, abs=0.1)


@pytest.mark.slow
def test_the_tool_is_deterministic(tool: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    files = []
    for number in "12":
        monkeypatch.setattr(
            sys, "argv", ["", "--steps=2", "--seed=3", f"--out={tmp_path / number}"]
        )
        tool.main()
        files.append((tmp_path / number / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    assert config["dtype"] == "float32"
