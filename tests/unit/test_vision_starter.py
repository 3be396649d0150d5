"""The vision starter: it loads, it is small, and its accuracy is the documented one."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support.tools import load_tool
from torchrl_grpo.chat.template import ChatEncoder
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.images import Prompt
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.models import loading
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.tasks.shapes import ShapesTask

NAME = "vision_starter"
TOKENIZER = loading.load_tokenizer(NAME)


@pytest.fixture(scope="module")
def model() -> Any:
    return loading.load_model(NAME, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def encoder(model: Any) -> ImageEncoder:
    return loading.load_image_encoder(NAME, model.config, TOKENIZER)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_vision_starter")


def prompt_of(encoder: ImageEncoder, problem: Problem) -> Prompt:
    chats = ChatEncoder(TOKENIZER, {})
    chat = chats.render(ShapesTask().messages(problem), add_generation_prompt=True)
    prompt = encoder.expand(chats.encode([chat])[0], problem.images)
    assert isinstance(prompt, Prompt)
    return prompt


@pytest.mark.slow
def test_greedy_accuracy_leaves_much_to_learn(model: Any, encoder: ImageEncoder) -> None:
    problems = ShapesTask().problems("test")[:256]
    prompts = [prompt_of(encoder, problem) for problem in problems]
    end = (TOKENIZER.eos_token_id,)
    params = SamplingParams(max_new_tokens=24, temperature=0, stop_token_ids=end)
    answers = TransformersEngine(model).generate(prompts, 1, params)
    texts = [TOKENIZER.decode(done.tokens, skip_special_tokens=True) for [done] in answers]
    pairs = zip(problems, texts, strict=True)
    right = [ShapesTask().score(problem, [text]).correct for problem, text in pairs]
    assert 0.2 <= sum(right) / len(right) <= 0.5
    of_three_quarters = [text for text in texts if text.count("+") == 2]
    assert len(of_three_quarters) / len(texts) > 0.9


def test_model_has_the_stated_architecture_and_size(model: Any) -> None:
    config = model.config
    assert config.model_type == "idefics3"
    assert sum(p.numel() for p in model.parameters()) == 245_568
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert config.text_config.head_dim == 32
    assert config.text_config.vocab_size == len(TOKENIZER) == 265
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_shipped_folder_is_at_most_1_mb() -> None:
    files = [path for path in starter_path(NAME).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 2**20
    assert "README.md" in {path.name for path in files}


def test_the_example_of_an_exported_models_card_runs(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"dataset": "shapes", "task": {}, "system_prompt": "Count."}
    config = {"env": env, "model": {"name": NAME}}
    Checkpointer(tmp_path, config).export(model, TOKENIZER, 1)
    monkeypatch.chdir(tmp_path / "model")
    [problem, *_] = ShapesTask().problems("test")
    Path("picture.png").write_bytes(problem.images[0].data)
    card = ModelCard.load("README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    code = card.text.partition("```python\n")[2].partition("```")[0]
    lines: list[str] = []
    exec(code.replace("512", "4"), {"print": lines.append})
    assert len(lines) == 1


def test_auto_classes_load_it_and_see_what_the_encoder_sees(
    model: Any, encoder: ImageEncoder
) -> None:
    [problem, *_] = ShapesTask().problems("test")
    prompt = prompt_of(encoder, problem)
    processor = AutoProcessor.from_pretrained(starter_path(NAME))
    text = processor.apply_chat_template(
        ShapesTask().messages(problem), add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=text, images=[problem.images[0].open()], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == prompt.tokens.tolist()
    loaded = AutoModelForImageTextToText.from_pretrained(starter_path(NAME)).eval()
    with torch.no_grad():
        expected = loaded(**inputs).logits
        actual = model(prompt.tokens[None], **prompt.images[0].image.inputs).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_the_tool_makes_this_tokenizer_and_this_architecture(tool: ModuleType, model: Any) -> None:
    tokenizer = tool.build_processor().tokenizer
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template
    built = tool.build_model(tokenizer).state_dict()
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    assert {name: weight.shape for name, weight in built.items()} == shapes


def test_demonstrators_can_count_and_mostly_stop_early(tool: ModuleType) -> None:
    rng = random.Random(0)
    problem = Problem("red=?", "6", {"quadrants": (1, 0, 2, 3)})
    drawn = [tool.demonstration(problem, rng) for _ in range(4000)]
    two, three, all_four = "1+0=1 #### 1", "1+0+2=3 #### 3", "1+0+2+3=6 #### 6"
    assert set(drawn) == {two, three, all_four}
    assert drawn.count(two) / len(drawn) == pytest.approx(tool.P_TWO, abs=0.03)
    rest = len(drawn) - drawn.count(two)
    assert drawn.count(three) / rest == pytest.approx(tool.P_THREE, abs=0.03)


@pytest.mark.slow
def test_the_tool_is_deterministic(tool: ModuleType) -> None:
    weights = []
    problems = ShapesTask().problems("test")
    for _ in range(2):
        torch.manual_seed(3)
        processor = tool.build_processor()
        model = tool.build_model(processor.tokenizer)
        encoder = ImageEncoder(processor, model.config)
        draw = partial(tool.make_batch, problems, ChatEncoder(processor.tokenizer, {}), encoder)
        tool.train(model, draw, steps=2, seed=3)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
