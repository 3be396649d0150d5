"""Images: prompts, scoring, sampling and a run, with tiny models of each family."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, LargeList, List, Value
from tensordict import lazy_stack
from torch import Tensor
from torchrl.envs.utils import check_env_specs
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase

from tests.support import vision
from tests.support.configs import compose_config, last_of_each
from tests.support.pictures import broken_pictures, picture
from tests.support.runs import SMALL
from tests.support.vision import MAKERS, retie, spread
from torchrl_grpo import keys
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.chat.template import ChatEncoder, TurnTemplate, render_chat
from torchrl_grpo.collectors.demonstrations import ChatWriter, WrittenChat
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.teacher_prompts import TeacherPrompts
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.images import (
    ImageFile,
    Prompt,
    Spans,
    images_of,
    place_images,
    prompt_text,
    tokens_of,
)
from torchrl_grpo.images.families import language_model_of, vision_parameters
from torchrl_grpo.images.features import (
    ImageFeatures,
    bidirectional_masks,
    grid_positions,
    has_grid,
    with_features,
)
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.models import loading
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.tasks.base import Dialog, Problem, Score, Task
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.tasks.drawing import Drawn
from torchrl_grpo.tasks.with_rewards import make_rewards
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.teacher import TeacherScoring
from torchrl_grpo.weights import load_weights, named_weights

CPU = torch.device("cpu")
ONE_FAMILY = pytest.mark.parametrize("kit", ["llava"], indirect=True)
TWO_BY_DAY = pytest.mark.parametrize(
    "kit",
    [
        family
        if family in ("idefics3", "qwen2_5_vl")
        else pytest.param(family, marks=pytest.mark.nightly)
        for family in sorted(MAKERS)
    ],
    indirect=True,
)
"""Without and with positions on a grid: for what hardly depends on the family."""


class Kit(vision.Kit):
    """Model, tokenizer and encoders of a family."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.chats = ChatEncoder(self.tokenizer, {})

    def prompt(self, text: str, files: Sequence[ImageFile]) -> Prompt:
        chat = place_images([{"role": "user", "content": text}], files)
        [ids] = self.chats.encode([self.chats.render(chat, add_generation_prompt=True)])
        prompt = self.encoder.expand(ids, files)
        assert isinstance(prompt, Prompt)
        return prompt

    def logits(self, model: Any, tokens: Tensor, spans: Spans) -> Tensor:
        """Return the logits of the model's own forward over one sequence, [T, V]."""
        names = spans[0].image.inputs if spans else ()
        inputs = {n: torch.cat([span.image.inputs[n] for span in spans], self.axis) for n in names}
        kinds = torch.zeros_like(tokens)
        for span in spans:
            kinds[span.offset : span.end] = span.is_embed
        if self.config.model_type.startswith("qwen"):
            inputs["mm_token_type_ids"] = kinds[None]
        if self.config.model_type == "gemma3":
            inputs["token_type_ids"] = kinds[None]
        return model(input_ids=tokens[None], use_cache=False, **inputs).logits[0]

    @property
    def axis(self) -> int:
        return 1 if self.config.model_type in ("idefics3", "smolvlm") else 0


@pytest.fixture(scope="module", params=sorted(MAKERS))
def kit(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Kit]:
    with pytest.MonkeyPatch.context() as patch:  # a package that only videos need
        patch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
        yield Kit(MAKERS[request.param](tmp_path_factory.mktemp(request.param), tokenizer))


def rows_of(kit: Kit) -> tuple[Tensor, Tensor, list[Spans]]:
    """Return two groups of two with the same text and equal ids, but different images; then a
    prompt with two images, and one with an image that is in both prompts; and a group of text.
    """
    a, b = picture(1), picture(4)
    prompts = [kit.prompt("Count?", [a]), kit.prompt("Count?", [b]), kit.prompt("Both", [b, a])]
    assert torch.equal(prompts[0].tokens, prompts[1].tokens)
    text = torch.tensor(kit.chats.tokens([{"role": "user", "content": "What is it?"}]))
    prompts.append(Prompt(text, ()))
    generator = torch.Generator().manual_seed(3)
    rows, masks, images = [], [], []
    for prompt, length in [(0, 5), (0, 3), (1, 4), (1, 6), (2, 5), (2, 2), (3, 4), (3, 6)]:
        response = torch.randint(5, 261, (length,), generator=generator)
        rows.append(torch.cat([prompts[prompt].tokens, response]))
        masks.append(torch.arange(len(rows[-1])) >= len(prompts[prompt]))
        images.append(prompts[prompt].images)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(masks, batch_first=True), images


def own_scores(kit: Kit, model: Any, tokens: Tensor, mask: Tensor, images: list[Spans]) -> Tensor:
    """Return log-probs of the masked tokens by the model's own forward, one sequence at a time."""
    scores = torch.zeros(tokens.shape)
    for row, spans in enumerate(images):
        end = int(mask[row].nonzero().max()) + 1
        own = tokens[row, :end]
        logits = kit.logits(model, own, spans).float().log_softmax(-1)
        own_row = torch.zeros(tokens.shape[1])
        own_row[1:end] = logits[:-1].gather(-1, own[1:, None])[:, 0]
        scores = scores.index_put((torch.tensor(row),), own_row * mask[row])
    return scores


def gradients(model: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("pads", [False, True], ids=["packed", "padded"])
def test_scores_and_gradients_are_those_of_the_models_own_forward(kit: Kit, pads: bool) -> None:
    model = kit.model()
    tokens, mask, images = rows_of(kit)
    weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(5))
    expected = own_scores(kit, model, tokens, mask, images)
    (expected * weights).sum().backward()
    expected_gradients = gradients(model)

    scorer = TokenScorer(model)
    assert scorer.packs(tokens.shape[1])
    assert scorer.packs(tokens.shape[1], images) != (kit.config.model_type == "gemma3")
    if pads:
        model.unpacked_because = "the test says so"
    scores, _ = scorer.score(tokens, mask, images)
    (scores * weights).sum().backward()
    actual_gradients = gradients(model)

    assert expected.abs().max() > 1
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    assert actual_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], gradient, atol=2e-5, rtol=1e-4)


def test_decoding_gives_the_log_probs_of_the_models_own_forward(kit: Kit) -> None:
    model = kit.model()
    model.model.rope_deltas = torch.tensor([[7]])  # stale, from another caller
    engine = TransformersEngine(model)
    engine.seed(0)
    a, b = picture(1), picture(4, (60, 40))
    prompts = [kit.prompt("Count?", [a]), kit.prompt("And these two?", [b, a])]
    text = torch.tensor(kit.chats.tokens([{"role": "user", "content": "Hello"}]))
    answers = engine.generate([*prompts, text], 3, SamplingParams(max_new_tokens=9))
    model.model.rope_deltas = None
    checked = 0
    for prompt, completions in zip(prompts, answers, strict=False):
        for completion in completions:
            if model.config.image_token_id in completion.tokens:
                continue  # the model's own forward would expect another image
            checked += 1
            tokens = torch.cat([prompt.tokens, completion.tokens])
            logits = kit.logits(model, tokens, prompt.images).detach().log_softmax(-1)
            expected = logits[:-1].gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]
            torch.testing.assert_close(completion.log_probs, expected, atol=2e-5, rtol=0)
    assert checked >= 3


@TWO_BY_DAY
def test_a_weight_sync_of_the_image_encoder_makes_new_features(kit: Kit) -> None:
    engine = TransformersEngine(kit.model())
    trained = kit.model()
    prompt = kit.prompt("Count?", [picture(1)])
    params = SamplingParams(max_new_tokens=4)
    engine.generate([prompt], 1, params)
    with torch.no_grad():
        for _, parameter in vision_parameters(trained):
            parameter.mul_(1.5)
    engine.update_weights(named_weights(trained), 1)
    [[completion]] = engine.generate([prompt], 1, params)
    tokens = torch.cat([prompt.tokens, completion.tokens])[None]
    mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
    scores, _ = TokenScorer(trained).score(tokens, mask, [prompt.images])
    torch.testing.assert_close(completion.log_probs, scores[mask].detach(), atol=2e-5, rtol=0)


def encoder_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry at each call of the image encoder."""
    calls = list[int]()
    encode = model.model.get_image_features
    monkeypatch.setattr(
        model.model,
        "get_image_features",
        lambda *args, **kwargs: calls.append(1) or encode(*args, **kwargs),
    )
    return calls


@TWO_BY_DAY
def test_features_are_computed_once_until_the_weights_change(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kit.model()
    loading.freeze_vision(model)
    computed = encoder_calls(model, monkeypatch)
    scorer = TokenScorer(model)
    tokens, mask, images = rows_of(kit)
    scorer.score(tokens, mask, images)
    assert len(computed) == 2  # of six sequences with images, with three prompts
    scorer.score(tokens, mask, images)
    load_weights(model, [(n, w.clone()) for n, w in named_weights(model)])
    scorer.score(tokens, mask, images)
    assert len(computed) == 2
    with torch.no_grad():
        next(iter(vision_parameters(model)))[1].add_(0.1)
    scorer.score(tokens, mask, images)
    assert len(computed) == 4


@TWO_BY_DAY
def test_a_critic_is_no_part_of_a_frozen_image_encoder(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kit.model()
    loading.freeze_vision(model)
    computed = encoder_calls(model, monkeypatch)
    scorer = TokenScorer(model)
    scorer.add_critic()
    rows = Rows.from_padded(*rows_of(kit))
    for _ in range(2):
        scores = scorer.score_rows(scorer.layout(rows), value=True)
        scores["value"].sum().backward()
    assert len(computed) == 2  # of three prompts, two of which have the same image
    assert scorer.critic is not None and scorer.critic.weight.grad.abs().max() > 0


@TWO_BY_DAY
def test_features_follow_an_optimizer_that_counts_no_change(kit: Kit) -> None:
    """A fused optimizer writes new weights without increasing the tensor's version counter."""
    model = kit.model()
    scorer = TokenScorer(model)
    tokens, mask, images = rows_of(kit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    with torch.no_grad():
        scorer.score(tokens, mask, images)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        scores, _ = scorer.score(tokens, mask, images)
        expected, _ = TokenScorer(model).score(tokens, mask, images)
    torch.testing.assert_close(scores, expected)


def test_sampling_the_placeholder_itself_is_harmless(kit: Kit) -> None:
    model = kit.model()
    placeholder = kit.tokenizer.convert_tokens_to_ids(kit.encoder.placeholder)
    engine = TransformersEngine(model)
    with torch.no_grad():
        weight = engine.model.get_output_embeddings().weight
        weight.zero_()
    engine.seed(1)
    prompt = kit.prompt("Count?", [picture(2)])
    answers = engine.generate([prompt], 64, SamplingParams(max_new_tokens=12))[0]
    with_it = next(c for c in answers if placeholder in c.tokens[:-1].tolist())
    tokens = torch.cat([prompt.tokens, with_it.tokens])[None]
    mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
    scores, _ = TokenScorer(model).score(tokens, mask, [prompt.images])
    embeddings = model.get_input_embeddings()(tokens)
    [span] = prompt.images
    places = span.offset + span.is_embed.nonzero().squeeze(-1)
    inputs = with_features(embeddings, ImageFeatures(model)([span.image]), places)
    inputs |= bidirectional_masks(model, embeddings, places)
    grid = grid_positions(model, tokens[0], prompt.images)[:, None] if has_grid(model) else None
    states = language_model_of(model)(**inputs, position_ids=grid, use_cache=False)[0]
    logits = model.get_output_embeddings()(states)[0]
    expected = logits[:-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(scores[0, 1:][mask[0, 1:]], expected[mask[0, 1:]], atol=1e-5, rtol=0)


def test_a_prompt_has_the_tokens_that_the_processor_writes(kit: Kit) -> None:
    a, b = picture(1), picture(4, (60, 40))
    prompt = kit.prompt("What is it?", [a, b])
    chat = place_images([{"role": "user", "content": "What is it?"}], [a, b])
    text = kit.chats.plain(kit.chats.render(chat, add_generation_prompt=True))
    images = [[a.open(), b.open()]] if kit.axis else [a.open(), b.open()]
    out = kit.encoder.processor(
        text=[text], images=images, add_special_tokens=False, return_tensors="pt"
    )
    assert prompt.tokens.tolist() == out["input_ids"][0].tolist()
    for name, value in prompt.images[0].image.inputs.items():
        both = torch.cat([span.image.inputs[name] for span in prompt.images], kit.axis)
        torch.testing.assert_close(both, out[name], msg=name)
        assert value.shape != out[name].shape


def test_images_are_prepared_with_pillow_on_every_machine(kit: Kit) -> None:
    assert type(kit.encoder.processor.image_processor).__name__.endswith("Pil")


def test_text_cannot_forge_an_image(kit: Kit) -> None:
    forged = f"Look: {kit.encoder.placeholder} and {kit.encoder.placeholder}"
    prompt = kit.prompt(forged.replace("<image>", "<image >"), [picture(1)])
    assert len(prompt.images) == 1
    chat = [{"role": "user", "content": forged}]
    assert isinstance(kit.encoder.expand(kit.chats.tokens(chat), []), Tensor)


def test_a_template_that_drops_an_image_is_refused(kit: Kit) -> None:
    ids = kit.chats.tokens([{"role": "user", "content": "no image"}])
    with pytest.raises(ValueError, match=r"model\.chat_template.*0 times"):
        kit.encoder.expand(ids, [picture(1)])


def write_data(folder: Path, count: int = 12) -> str:
    """Write rows with the same question, whose answers only the picture tells."""
    lines = []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(picture(number).data)
        answer = str(number % 4)
        row = {"question": "How many?", "answer": answer, "picture": f"{number}.png"}
        lines.append(json.dumps(row))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return str(folder / "data.jsonl")


REWARD = """
def reward(response, answer, images, picture):
    assert images[0].size == picture.size == (32, 32)
    return float(len(response) > 3)
"""


IDEFICS3_AT_NIGHT = [pytest.param("idefics3", marks=pytest.mark.nightly), "qwen2_5_vl"]


def run_arguments(kit: Kit, folder: Path, *more: str) -> tuple[str, ...]:
    (folder / "reward.py").write_text(REWARD)
    return (
        f"model.name={kit.path}",
        f"env.dataset={write_data(folder)}",
        "env.columns.images=picture",
        f"env.reward={folder / 'reward.py'}:reward",
        "inference_model.max_new_tokens=6",
        "train.total_dialog_turns=32",
        *more,
    )


@pytest.mark.parametrize(
    ("kit", "trains"), [("idefics3", False), ("qwen2_5_vl", True)], indirect=["kit"]
)
def test_a_run_trains_on_images(kit: Kit, tmp_path: Path, trains: bool) -> None:
    arguments = run_arguments(kit, tmp_path, f"train_model.train_vision={str(trains).lower()}")
    with closing(build(compose_config(*SMALL, *arguments), tmp_path / "run")) as training_run:
        training_run.fit()
        model = training_run.learner.trainer.model
    rows = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert [math.isfinite(row["train/loss"]) for row in rows] == [True, True]
    assert rows[0]["train/kl_k3_to_ref"] < 1e-6
    assert max(row["train/kl_k3_to_inference"] for row in rows) < 1e-8
    before = dict(kit.model().named_parameters())
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    of_vision = {name for name, _ in vision_parameters(model)}
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "run/checkpoints/model")
    weights = dict(exported.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    again = Kit(tmp_path / "run/checkpoints/model").prompt("?", [picture(1)])
    assert again.images == kit.prompt("?", [picture(1)]).images
    assert moved - of_vision
    assert bool(moved & of_vision) == trains
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {sample["query"] for sample in samples} == {"<image>How many?"}
    for sample in samples:
        [name] = sample["images"]
        file = ImageFile((tmp_path / f"run/images/{name[:16]}.png").read_bytes())
        assert file.size == (32, 32)


def test_images_of_a_data_set_come_in_every_form(tmp_path: Path) -> None:
    a, b = picture(1), picture(2)
    (tmp_path / "a.png").write_bytes(a.data)
    chat = [{"role": "user", "content": "One <image> and another <image>?"}]
    parts = [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "image"}]
    rows = [
        {"prompt": chat, "image": [{"bytes": a.data, "path": None}, {"bytes": b.data}]},
        {"prompt": [{"role": "user", "content": parts}], "image": [a.open(), b.open()]},
        {"prompt": [{"role": "user", "content": "Look"}], "image": ["a.png"]},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": chat, "image": ["a.png", "a.png"]}))
    task = DatasetTask(str(file), images_column="image", prompt_column="prompt")
    assert task.problems("train")[0].images == (a, a)
    chats = [task.messages(task.make_problem(row)) for row in rows]
    contents = [chat[-1]["content"] for chat in chats]
    kinds = [[part.get("text", "image") for part in content] for content in contents]
    assert kinds == [
        ["One ", "image", " and another ", "image", "?"],
        ["See", "image", "image"],
        ["image", "Look"],
    ]
    for content, expected in zip(contents, ([a, b], [a, b], [a]), strict=True):
        pixels = [part["image"].open().tobytes() for part in content if part["type"] == "image"]
        assert pixels == [file.open().tobytes() for file in expected]


def test_images_of_a_parquet_file_are_not_encoded_again(tmp_path: Path) -> None:
    data = Dataset.from_dict({"question": ["?", "?"], "image": [picture(i).open() for i in (1, 2)]})
    data = data.cast_column("image", Image())
    data.to_parquet(tmp_path / "data.parquet")
    task = DatasetTask(str(tmp_path / "data.parquet"), images_column="image")
    problems = task.problems("train")
    assert [problem.images[0].size for problem in problems] == [(32, 32)] * 2
    assert problems[0].images[0].open().tobytes() == picture(1).open().tobytes()


def test_the_hash_of_the_split_includes_the_images(tmp_path: Path) -> None:
    task = DatasetTask(write_data(tmp_path, 40), images_column="picture", test_fraction=0.4)
    train, test = task.problems("train"), task.problems("test")
    assert len(train) + len(test) == 40 and min(len(train), len(test)) > 4
    assert len({problem.query for problem in train}) == 1


def on_hub(monkeypatch: pytest.MonkeyPatch, data: Dataset) -> DatasetTask:
    """Return a data set on a simulated hub with these rows."""
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: data)
    return DatasetTask("org/pictures", images_column="image")


@pytest.mark.parametrize("form", ["path", "list", "image", "images", "large_list", "escape"])
def test_the_hubs_data_reads_no_files_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (tmp_path / "a.png").write_bytes(picture(1).data)
    (tmp_path / "org" / "pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "org")
    path = str(tmp_path / "a.png")
    file = {"bytes": None, "path": path}
    value, feature = {
        "path": (path, Value("string")),
        "list": ([path], List(Value("string"))),
        "image": (file, Image()),
        "images": ([file], List(Image())),
        "large_list": ([file], LargeList(Image())),
        "escape": ("../../../a.png", Value("string")),
    }[form]
    features = Features({"question": Value("string"), "image": feature})
    data = Dataset.from_dict({"question": ["?"], "image": [value]}, features)
    with pytest.raises(ValueError, match=r"pictures train\[0\].*env\.columns\.images.*a\.png"):
        on_hub(monkeypatch, data).problems("train")


def test_the_hubs_data_has_the_files_that_datasets_has_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "extracted"))
    folders = ("hub/datasets--org--pictures/snapshots/0", "extracted/0", "hub/datasets--a--b")
    rows = []
    for number, name in enumerate(folders):
        (tmp_path / name).mkdir(parents=True)
        path = tmp_path / name / "a.png"
        path.write_bytes(picture(number).data)
        rows.append({"bytes": None, "path": str(path)})
    data = Dataset.from_dict({"question": ["?"] * 3, "image": rows})
    data = data.cast_column("image", Image())
    problems = on_hub(monkeypatch, data.take(2)).problems("train")
    assert [problem.images for problem in problems] == [(picture(0),), (picture(1),)]
    with pytest.raises(ValueError, match=r"train\[2\].*env\.columns\.images"):
        on_hub(monkeypatch, data).problems("train")


def test_a_part_of_text_is_no_place_of_an_image(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "One?", "image": "x"}, {"type": "image", "image": "/etc/x"}]
    chat = [{"role": "user", "content": parts}]
    [message] = place_images(chat, [picture(1)])
    assert [part.get("image") for part in message["content"]] == ["x", picture(1)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"picture": "missing.png"}, r"data\.jsonl:1 .*'picture'.*missing\.png"),
        ({"picture": "data.jsonl"}, r"data\.jsonl:1 .*'picture'"),
        ({"picture": 7}, r"data\.jsonl:1 .*'picture'.*7"),
        (
            {"question": [{"role": "user", "content": [{"text": "?"}]}], "picture": "0.png"},
            r"data\.jsonl:1 .*'question'",
        ),
        ({"question": "<image> <image>", "picture": "0.png"}, r"data\.jsonl:1 .*1 images and 2"),
    ],
)
def test_a_row_with_wrong_images_is_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = Path(write_data(tmp_path, 1))
    path.write_text(json.dumps({"question": "?", "answer": "1", **row}))
    with pytest.raises(ValueError, match=message) as refused:
        DatasetTask(str(path), images_column="picture").problems("train")
    assert "object at" not in str(refused.value)


@ONE_FAMILY
def test_a_broken_image_names_its_row_before_a_model_loads(kit: Kit, tmp_path: Path) -> None:
    arguments = run_arguments(kit, tmp_path, "env.max_image_pixels=1023")
    with pytest.raises(ConfigError, match=r"data\.jsonl:1 .*env\.max_image_pixels=1023.*32 x 32"):
        prepare(compose_config(*SMALL, *arguments))
    (tmp_path / "0.png").write_bytes(broken_pictures()["no pixels"])
    with pytest.raises(ConfigError, match=r"data\.jsonl:1 must be a file"):
        prepare(compose_config(*SMALL, *arguments[:-1]))


def test_a_format_that_starts_a_program_is_refused() -> None:
    file = io.BytesIO()
    picture(1).open().save(file, "EPS")
    with pytest.raises(ValueError, match="PNG"):
        assert ImageFile(file.getvalue()).size


def write_chats(folder: Path) -> str:
    """Whole chats: pictures in the first message and, in every second chat, in a later one too."""
    rows = []
    for number in range(8):
        files = [f"{number}.png", "wide.png"][: 1 + number % 2]
        (folder / files[0]).write_bytes(picture(number).data)
        parts = [{"type": "text", "text": "And here?"}, *[{"type": "image"}] * (number % 2)]
        chat = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Count?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"There are {number}."}]},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "More."},
        ]
        rows.append({"messages": chat, "images": files})
    (folder / "wide.png").write_bytes(picture(3, (60, 40)).data)
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "chats.jsonl")


def chats_of(
    kit: Kit, folder: Path, max_turn_tokens: int = 99, max_tokens: int = 999
) -> list[WrittenChat]:
    """The chats as tokens; ``max_turn_tokens`` and ``max_tokens`` are their limits."""
    task = DatasetTask(write_chats(folder), messages_column="messages", images_column="images")
    writer = ChatWriter(kit.tokenizer, [1], image_encoder=kit.encoder)
    return [
        writer(
            task.messages(problem),
            task.demonstration(problem),
            max_turn_tokens=max_turn_tokens,
            max_tokens=max_tokens,
        )
        for problem in task.problems("train")
    ]


def test_demonstrations_have_the_images_of_every_message(kit: Kit, tmp_path: Path) -> None:
    for number, chat in enumerate(chats_of(kit, tmp_path)):
        assert [span.image.file.size for span in chat.images] == [(32, 32), (60, 40)][
            : 1 + number % 2
        ]
        for span in chat.images:
            assert torch.equal(chat.tokens[span.offset : span.end], span.image.tokens)
        decode = kit.tokenizer.decode
        turns = [decode(chat.tokens[turn.start : turn.stop]) for turn in chat.turns]
        assert turns == [f"There are {number}.<|end|>", "More.<|end|>"]
        assert decode(chat.tokens[chat.learned]) == "".join(turns)
        prompt = Prompt(chat.tokens[: chat.prompt], chat.images[:1])
        text = re.sub(r"<\|vision_\w+\|>", "", prompt_text(prompt, decode))
        assert text == "<|user|><image>Count?<|end|><|assistant|>"


@ONE_FAMILY
def test_a_demonstration_is_never_cut_inside_an_image(kit: Kit, tmp_path: Path) -> None:
    [whole] = chats_of(kit, tmp_path)[1:2]
    late = whole.images[1]
    [cut] = chats_of(kit, tmp_path, max_tokens=late.offset + 2)[1:2]
    assert cut.truncated and len(cut.tokens) == late.offset and cut.images == whole.images[:1]
    assert torch.equal(cut.tokens, whole.tokens[: late.offset])


@pytest.mark.parametrize("kit", ["gemma3"], indirect=True)
def test_tokens_after_an_image_are_found_where_line_breaks_were_joined(kit: Kit) -> None:
    text = f"How many?\n{kit.encoder.placeholder}\nTwo."
    ids = kit.tokenizer.encode(text, add_special_tokens=False)
    files = [picture(2)]
    whole = tokens_of(kit.encoder.expand(ids, files))
    [image] = images_of(kit.encoder.expand(ids, files))
    assert len(whole) < len(ids) - 1 + image.length
    for back in range(1, 4):
        index = kit.encoder.expanded_index(ids, files, len(ids) - back)
        assert index == len(whole) - back and whole[index] == ids[-back]


@pytest.mark.parametrize("kit", IDEFICS3_AT_NIGHT, indirect=True)
def test_supervised_training_learns_from_images(kit: Kit, tmp_path: Path) -> None:
    chats = chats_of(kit, tmp_path)
    arguments = (
        "algo=sft",
        f"model.name={kit.path}",
        f"env.dataset={tmp_path / 'chats.jsonl'}",
        "env.columns.messages=messages",
        "env.columns.images=images",
        "inference_model.max_new_tokens=99",
        "env.num_envs=8",
        "env.repeats=1",
        "train.total_dialog_turns=8",
    )
    with closing(
        build(compose_config(*last_of_each([*SMALL, *arguments])), tmp_path / "run")
    ) as made:
        made.fit()
    model = kit.model()
    scores = list[Tensor]()
    for chat in chats:
        scored = kit.logits(model, chat.tokens, chat.images).log_softmax(-1)[:-1]
        own = scored.gather(-1, chat.tokens[1:, None])[:, 0]
        scores.append(own[chat.learned[1:]].detach())
    [row] = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert row["train/loss"] == pytest.approx(-torch.cat(scores).mean().item(), rel=1e-5)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {len(sample["images"]) for sample in samples} <= {1, 2}
    assert {sample["query"] for sample in samples} == {"<image>Count?"}


@pytest.mark.parametrize("kit", IDEFICS3_AT_NIGHT, indirect=True)
def test_a_run_learns_from_demonstrations_with_images_too(kit: Kit, tmp_path: Path) -> None:
    more = ("policy.sft_coef=1", "env.columns.completion=demo", "train.total_dialog_turns=16")
    arguments = last_of_each([*SMALL, *run_arguments(kit, tmp_path), *more])
    path = tmp_path / "data.jsonl"
    rows = list(map(json.loads, path.read_text().splitlines()))
    rows = [{**row, "demo": f"There are {row['answer']}."} for row in rows]
    path.write_text("\n".join(map(json.dumps, rows)))
    with closing(build(compose_config(*arguments), tmp_path / "run")) as made:
        env, stops = made.context.train_env, made.context.params.stop_token_ids
        made.fit()
    writer = ChatWriter(kit.tokenizer, stops, image_encoder=kit.encoder)
    model = kit.model()
    scores = dict[str, Tensor]()
    for problem in env.prompts.problems:
        chat = writer(
            env.task.messages(problem), env.task.demonstration(problem), max_turn_tokens=6
        )
        scored = kit.logits(model, chat.tokens, chat.images).log_softmax(-1)[:-1]
        own = scored.gather(-1, chat.tokens[1:, None])[:, 0]
        scores[problem.images[0].hash] = own[chat.learned[1:]].detach()
    [row] = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    of_groups = [scores[name] for name in {sample["images"][0] for sample in samples}]
    assert row["train/loss_sft"] == pytest.approx(-torch.cat(of_groups).mean().item(), rel=1e-5)


HINT = """
def hint(messages, answer):
    last = messages[-1]
    text = {"type": "text", "text": f"It is {answer}."}
    return [*messages[:-1], {**last, "content": [text, *last["content"]]}]
"""


@TWO_BY_DAY
def test_a_teacher_scores_the_images_after_a_prompt_of_its_own(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "hint.py").write_text(HINT)
    task = TwoTurns()
    env = LLMEnv(task, kit.tokenizer, num_envs=4, repeats=2, max_turns=2, image_encoder=kit.encoder)
    params = SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(5, 261)))
    policy = GenerationPolicy(TransformersEngine(kit.model()), params)
    batch = RolloutCollector(env, policy).rollout()
    write = TeacherPrompts(env, f"{tmp_path / 'hint.py'}:hint", 999)
    teacher = spread(kit.model(), seed=1)
    scoring = KLScoring(TokenScorer(teacher), out_key=keys.TEACHER_LOG_PROBS)
    for number, row in enumerate(batch.unbind(0)):
        problem = task.problems("train")[0]
        [span] = row[keys.IMAGES]
        drawn = Drawn(number, 0, replace(problem, images=(span.image.file,)))
        plain = TeacherScoring(scoring)(lazy_stack([row.clone()]))[0]
        write(drawn, [row])
        prompted = TeacherScoring(scoring)(lazy_stack([row]))[0]
        for scored, prompt, spans in (
            (plain, row[keys.FULL][: -len(row[keys.RESPONSE])], row[keys.IMAGES]),
            (prompted, row[keys.TEACHER_PROMPT], row[keys.TEACHER_IMAGES]),
        ):
            tokens = torch.cat([prompt, row[keys.RESPONSE]])
            logits = kit.logits(teacher, tokens, spans).detach().log_softmax(-1)
            expected = logits[:-1].gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]
            mask = row[keys.ASSISTANT_MASK][-len(expected) :]
            found = scored[keys.TEACHER_LOG_PROBS][-len(expected) :]
            torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=0)
        assert prompted[keys.TEACHER_IMAGES][0].offset > span.offset


@pytest.mark.parametrize("kit", ["idefics3"], indirect=True)
@pytest.mark.parametrize(
    "more",
    [
        "teacher.model={path}",
        *(
            pytest.param(f"teacher.model={{path}} {divergence}", marks=pytest.mark.nightly)
            for divergence in (
                "policy.teacher_divergence=reverse",
                "policy.teacher_divergence=jsd policy.teacher_top_k=320",
            )
        ),
        "teacher.model=policy teacher.weights=ema policy.teacher_divergence=jsd "
        "policy.teacher_top_k=320",
    ],
)
def test_a_teacher_with_the_policys_weights_agrees_on_images(
    kit: Kit, tmp_path: Path, more: str
) -> None:
    teacher = more.format(path=kit.path).split()
    arguments = run_arguments(kit, tmp_path, "policy.teacher_coef=0.5", *teacher)
    one_step = [*SMALL, *arguments, "train.total_dialog_turns=16"]
    with closing(build(compose_config(*last_of_each(one_step)), tmp_path / "run")) as made:
        made.fit()
    [row] = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    name = "loss_teacher" if "divergence" in more else "kl_k1_to_teacher"
    assert abs(row[f"train/{name}"]) < 1e-6


def test_images_out_of_place_in_a_demonstration_are_refused(tmp_path: Path) -> None:
    path = Path(write_data(tmp_path, 1))
    image = [{"type": "image"}, {"type": "text", "text": "Look"}]
    for chat in (
        [{"role": "assistant", "content": image}],
        [
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": image},
            {"role": "assistant", "content": "2"},
        ],
    ):
        row = {"question": "?", "answer": "1", "picture": "0.png", "demo": chat}
        path.write_text(json.dumps(row))
        task = DatasetTask(str(path), images_column="picture", completion_column="demo")
        with pytest.raises(ValueError, match=r"data\.jsonl:1 .*'demo'.*env\.columns\.messages"):
            task.problems("train")


def test_reward_functions_get_the_images_in_each_form() -> None:
    seen: list[Any] = []

    def own(response, images):
        seen.append(images[0].size)
        return 1.0

    def trl(completions, images, **kwargs):
        seen.append([image.size for image in images[0]])
        return [1.0]

    problem = Problem("?", "1", images=(picture(1), picture(2)))
    make_rewards([{"fn": own, "name": "own"}, {"fn": trl, "name": "trl"}])(Dialog(problem, ["a"]))
    assert seen == [(32, 32), [(32, 32), (32, 32)]]
    with pytest.raises(ValueError, match=r"env\.columns\.images"):
        make_rewards({"fn": own, "name": "own"}).check(Problem("?", "1"))
    make_rewards({"fn": own, "name": "own"}).check(problem)


def retied(kit: Kit, folder: Path, top: bool, text: bool, *, has_head: bool) -> str:
    copy = shutil.copytree(kit.path, folder / "model")
    return str(retie(copy, top, text, has_head=has_head))


@TWO_BY_DAY
def test_a_head_is_tied_where_the_whole_models_config_says_so(kit: Kit, tmp_path: Path) -> None:
    path = retied(kit, tmp_path, True, False, has_head=False)
    model = loading.load_model(path, dtype=torch.float32, device=CPU)
    export_model(model, kit.tokenizer, tmp_path / "export", "")
    config = loading.load_config(str(tmp_path / "export"))
    assert config.tie_word_embeddings and config.get_text_config().tie_word_embeddings  # for vLLM
    prompt = kit.prompt("Count?", [picture(1)])
    scores = [
        kit.logits(one, prompt.tokens, prompt.images).log_softmax(-1)
        for one in (
            model,
            AutoModelForImageTextToText.from_pretrained(path),
            AutoModelForImageTextToText.from_pretrained(tmp_path / "export"),
        )
    ]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


@TWO_BY_DAY
@pytest.mark.parametrize(
    ("top", "has_head", "fix"), [(True, True, "=false"), (False, False, "lm_head")]
)
def test_a_head_that_is_not_what_the_config_says_is_refused(
    kit: Kit, tmp_path: Path, top: bool, has_head: bool, fix: str
) -> None:
    path = retied(kit, tmp_path, top, top, has_head=has_head)
    with pytest.raises(ValueError, match=rf"model\.name=.*{fix}"):
        loading.load_model(path, dtype=torch.float32, device=CPU)


def test_lora_adapts_the_language_model_alone(kit: Kit) -> None:
    model = loading.add_lora(kit.model(), r=2, alpha=4)
    vision = {name for name, _ in vision_parameters(loading.base_model_of(model))}
    adapted = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert len(adapted) == 2 * 7 and not [name for name in vision if "lora" in name]


@ONE_FAMILY
@pytest.mark.parametrize(
    ("override", "key"),
    [
        (
            "inference_model.backend=server inference_model.address=[http://localhost:1]",
            "inference_model.backend=server",
        ),
        ("train_model.cpu_offload=true", "train_model.cpu_offload"),
        ("train_model.num_devices=2 train_model.train_vision=true", "train_model.train_vision"),
        (
            "train_model.num_devices=2 train_model.tensor_parallel_size=2",
            "train_model.tensor_parallel_size",
        ),
        ("policy.teacher_coef=1 teacher.model=starter", "teacher.model=starter"),
        ("policy.teacher_coef=1 teacher.model={other}", "teacher.model"),
        (
            "policy.teacher_coef=1 teacher.model={path} teacher.address=[http://localhost:1]",
            "teacher.address",
        ),
    ],
)
def test_what_images_do_not_work_with_is_refused(
    kit: Kit, tmp_path: Path, override: str, key: str
) -> None:
    other = Path(shutil.copytree(kit.path, tmp_path / "other"))
    for file in other.glob("*processor_config.json"):
        file.write_text(file.read_text().replace('"image_std": [\n', '"image_std": [\n1'))
    override = override.format(path=kit.path, other=other)
    arguments = run_arguments(kit, tmp_path, *override.split())
    with pytest.raises(ConfigError, match=re.escape(key)):
        prepare(compose_config(*SMALL, *arguments))


@ONE_FAMILY
def test_a_model_that_reads_text_alone_is_refused(kit: Kit, tmp_path: Path) -> None:
    arguments = (*run_arguments(kit, tmp_path), "model.name=starter")
    with pytest.raises(ConfigError, match=r"model\.name=starter.*env\.columns\.images"):
        prepare(compose_config(*SMALL, *last_of_each(arguments)))


OWN_TASK = """
from tests.support.pictures import broken_pictures, picture
from torchrl_grpo.tasks.base import Problem, Score, Task

class Mixed(Task):
    name = "mixed"
    def __init__(self, pictures):
        self.pictures = pictures

    @property
    def multi_turn(self):
        return "replies" in self.pictures

    def problems(self, split):
        files = [() if i < 5 or split not in self.pictures else (picture(i),) for i in range(8)]
        return [Problem(f"{split} {i}?", str(i), images=own) for i, own in enumerate(files)]

    def score(self, problem, responses):
        return Score(float(len(responses[-1]) > 3), True)
"""


def own_task_arguments(kit: Kit, folder: Path, splits: str) -> tuple[str, ...]:
    (folder / "mixed.py").write_text(OWN_TASK)
    return (
        f"model.name={kit.path}",
        "env.dataset=null",
        f"env.task._target_={folder / 'mixed.py'}:Mixed",
        f"+env.task.pictures={splits}",
        "inference_model.max_new_tokens=6",
        "train.total_dialog_turns=32",
    )


@ONE_FAMILY
def test_images_of_later_problems_of_a_task_are_read(kit: Kit, tmp_path: Path) -> None:
    arguments = own_task_arguments(kit, tmp_path, "[train]")
    checked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torchrl_grpo.assembly.roles.check_images",
            lambda scorer, prompt: checked.append(len(prompt.images)),
        )
        training_run = build(compose_config(*SMALL, *arguments), tmp_path / "run")
    try:
        training_run.fit()
    finally:
        training_run.close()
    assert checked == [1]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {sample["query"].startswith("<image>") for sample in samples} == {True, False}


@ONE_FAMILY
@pytest.mark.parametrize("pictures", ["[replies]", "[test]", "[]"])
def test_replies_and_test_problems_may_have_the_only_images(
    kit: Kit, tmp_path: Path, pictures: str
) -> None:
    arguments = own_task_arguments(kit, tmp_path, pictures)
    config = compose_config(*last_of_each([*SMALL, *arguments, "evaluation.num_prompts=4"]))
    assert prepare(config).train_env.has_images == (pictures != "[]")


@ONE_FAMILY
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_text_model_is_refused_for_images_of_later_problems(
    kit: Kit, tmp_path: Path, split: str
) -> None:
    arguments = (*own_task_arguments(kit, tmp_path, f"[{split}]"), "model.name=starter")
    config = compose_config(*last_of_each([*SMALL, *arguments, "evaluation.num_prompts=4"]))
    with pytest.raises(ConfigError, match=r"model\.name=starter.*images"):
        prepare(config)


@ONE_FAMILY
@pytest.mark.parametrize("lacks", ["processor", "support"])
def test_text_with_tools_runs_where_images_cannot(kit: Kit, tmp_path: Path, lacks: str) -> None:
    folder = Path(shutil.copytree(kit.path, tmp_path / "model"))
    arguments = [
        f"model.name={folder}",
        "env.tools=[tests/pairs/functions.py:calculate]",
        "env.tool_parser=tests/pairs/functions.py:parse",
        "env.max_turns=2",
    ]
    if lacks == "processor":
        for path in folder.glob("*processor_config.json"):
            path.unlink()
    else:
        arguments.append("train_model.cpu_offload=true")
    assert prepare(compose_config(*SMALL, *arguments)).image_encoder is None


@ONE_FAMILY
def test_the_pixels_that_are_kept_have_a_bound(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    size = kit.encoder.encode(picture(20)).nbytes
    monkeypatch.setattr("torchrl_grpo.images.encoder.MOST_BYTES", 3 * size)
    encoder = deepcopy(kit.encoder)  # with an empty cache
    first = [encoder.encode(picture(i)) for i in range(6)]
    again = [encoder.encode(picture(i)) for i in range(6)]
    assert [a is b for a, b in zip(first, again, strict=True)] == [False] * 6
    assert again == first and encoder.encode(picture(5)) is again[5]


@ONE_FAMILY
def test_images_of_a_further_test_set_are_encoded(kit: Kit, tmp_path: Path) -> None:
    options = "test_fraction: 0.5, reward: gsm8k, columns: {images: picture}"
    config = compose_config(
        *SMALL[:-2],
        f"model.name={kit.path}",
        "inference_model.max_new_tokens=6",
        "evaluation.num_prompts=4",
        f"evaluation.datasets=[{{dataset: {write_data(tmp_path, 20)}, {options}}}]",
    )
    tests = prepare(config).tests
    assert tests is not None
    env = tests.greedy
    sums, question = (env.prompts.usable[i] for i in (0, -1))  # further test sets come last
    problems = env.prompts.problems
    assert isinstance(env.prompts.of_problem(question, problems[question]), Prompt)
    assert isinstance(env.prompts.of_problem(sums, problems[sums]), Tensor)


@ONE_FAMILY
def test_a_template_that_writes_parts_alone_gets_parts(kit: Kit) -> None:
    tokenizer = deepcopy(kit.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert render_chat(tokenizer, [{"role": "user", "content": "Hello"}]) == "<|user|>Hello"
    text = TurnTemplate(tokenizer, {}).text([{"role": "user", "content": "More"}])
    assert text == "<|user|>More"


class TwoTurns(Task):
    """A task that replies once, whatever the response is."""

    name = "two_turns"

    def problems(self, split: str) -> list[Problem]:
        return [Problem("Count?", "1", images=(picture(i),)) for i in range(4)]

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        return "And again?" if len(responses) == 1 else None

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score(1.0, True)


@TWO_BY_DAY
def test_later_turns_read_the_images_of_the_prompt(kit: Kit) -> None:
    env = LLMEnv(
        TwoTurns(), kit.tokenizer, num_envs=4, repeats=2, max_turns=2, image_encoder=kit.encoder
    )
    model = kit.model()
    params = SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(5, 261)))
    batch = RolloutCollector(env, GenerationPolicy(TransformersEngine(model), params)).rollout()
    check_env_specs(env, break_when_any_done="both")
    vision.check_scores(model, batch)
    for row in batch.unbind(0):
        mask = row[keys.ASSISTANT_MASK]
        assert mask.sum() >= 2 and (~mask)[int(mask.nonzero()[0]) :].sum() > 5
        assert len(row[keys.IMAGES]) == 1
