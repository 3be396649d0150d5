"""Memory of runs with images: each role's share of the image encoder, and the memory that images
add.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerBase

from tests.support.configs import compose_config
from tests.support.training import peak_of
from tests.support.vision import MAKERS, TEXT
from torchrl_grpo import keys
from torchrl_grpo.assembly.context import Context
from torchrl_grpo.assembly.estimates import Images, encoder_cache_bytes, image_memory
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.extras.doctor import doctor
from torchrl_grpo.extras.hints.memory import savings
from torchrl_grpo.extras.plan.command import main, parse, settings_of
from torchrl_grpo.extras.plan.hardware import GPUS, SHAPES, model_shape
from torchrl_grpo.extras.plan.splits import candidates
from torchrl_grpo.host.out_of_memory import in_words
from torchrl_grpo.images import EncodedImage, ImageFile, ImageSpan, images_of
from torchrl_grpo.images.families import vision_parameters
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import ModelMemory, StepSetup, shard_bytes, step_memory
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

CPU = torch.device("cpu")
IMAGE_TOKENS, IMAGE_ID = 16, 2


def load(path: Path) -> Any:
    return loading.load_model(str(path), dtype=torch.float32, device=CPU)


def count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


@pytest.fixture(scope="module", params=["gemma3", "idefics3", "qwen2_5_vl"])
def path(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param), tokenizer)


def test_a_frozen_encoder_is_whole_on_each_rank_and_has_no_gradients(path: Path) -> None:
    model = load(path)
    shape = loading.shape_of(model)
    everything = count(model.parameters())
    encoder = count(parameter for _, parameter in vision_parameters(model))
    language = everything - encoder
    assert shape.vision is not None and shape.vision.parameters == encoder > 0
    assert shape.parameters == everything and shape.active == language
    setup = StepSetup(100, 4, passes=1, number=4)
    one, two = step_memory(shape, setup), step_memory(shape, replace(setup, ranks=2))
    assert one.parameters == 4 * everything
    assert (one.gradients, one.moments) == (4 * language, 8 * language)
    assert two.parameters == 4 * (language // 2 + encoder)
    assert (two.gradients, two.moments) == (2 * language, 4 * language)
    assert shard_bytes(shape, 2, 2) == language + 2 * encoder
    trains = step_memory(shape, replace(setup, trains_vision=True))
    assert (trains.gradients, trains.moments) == (4 * everything, 8 * everything)


def test_a_trained_encoder_keeps_activations_of_each_patch(path: Path) -> None:
    shape = loading.shape_of(load(path))
    assert shape.vision is not None
    setup = StepSetup(100, 4, passes=1, number=4, images=0.4, trains_vision=True)
    text = step_memory(shape, replace(setup, images=0.0)).activations
    added = step_memory(shape, setup).activations - text
    assert added == step_memory(shape, replace(setup, images=0.8)).activations - text - added > 0
    frozen = replace(setup, trains_vision=False)
    assert step_memory(shape, frozen).activations == text
    saved = savings(shape, setup)
    assert saved["train_model.train_vision=false"] == (
        step_memory(shape, setup).peak - step_memory(shape, frozen).peak
    )
    assert not [name for name in saved if "num_devices" in name or "cpu_offload" in name]


@pytest.mark.slow
def test_adapters_are_counted_on_the_language_model_alone(path: Path) -> None:
    model = load(path)
    adapted = loading.shape_of(model).adapted
    lora = loading.add_lora(model, r=3, alpha=4)
    assert 3 * adapted == count(p for p in lora.parameters() if p.requires_grad)
    assert loading.shape_of(lora).adapted == adapted


def test_the_plan_counts_the_model_of_a_folder_and_of_a_name(path: Path) -> None:
    counted = loading.config_shape(loading.load_config(str(path)))
    assert model_shape("mine", path) == counted
    known = model_shape("Qwen/Qwen2.5-VL-3B-Instruct", Path("Qwen"))
    assert known.vision is not None
    assert known.active == SHAPES["qwen2.5-3b"].parameters
    assert known.parameters == known.active + known.vision.parameters


@pytest.fixture(scope="module")
def context() -> Context:
    return prepare(compose_config(name="grpo_shapes"))


@pytest.mark.slow
def test_all_memory_reports_include_images(context: Context) -> None:
    roles, config = shares(context), context.config
    prompt = max(context.train_env.prompts.first(100), key=len)
    [span] = images_of(prompt)
    features = span.image.num_features
    assert len(prompt) > features > 0
    options = [f"--prompt-tokens={len(prompt)}", f"--response-tokens={config.max_response_tokens}"]
    work = settings_of(config, parse(options)).work
    assert work.shape == context.shape
    assert work.train_memory(1) == roles["train"].memory
    assert ModelMemory(work.reference_memory(1)) == roles["reference"].memory
    problems = context.train_env.num_problems
    assert context.images is not None
    on_hosts = image_memory(config, context.shape, context.images, ranks=1, samplers=1)
    assert on_hosts == {
        "pixels": problems * span.image.nbytes,
        "features": 3 * problems * features * context.shape.hidden * 4,
    }
    rows = {row["resource"]: row["details"] for row in doctor.memory_rows(context)}
    assert in_words(on_hosts) in rows["memory of images"]
    large = replace(context.shape, features=2**30)
    cached = image_memory(config, large, Images(1.0, 2.0**30, 10), ranks=2, samplers=1)
    assert cached == {"pixels": 2**30, "features": 4 * 2**30}


@pytest.mark.slow
def test_vllm_keeps_features_of_a_batch_or_of_the_largest_prompt() -> None:
    shape = SHAPES["qwen3-vl-8b"]
    config = compose_config("inference_model.dtype=bfloat16")
    assert encoder_cache_bytes(config, shape, 100) == 0
    config.inference_model.backend = "vllm"
    assert encoder_cache_bytes(config, shape, 0) == 0
    assert encoder_cache_bytes(config, shape, 100) == 16_384 * 4 * 4096 * 2
    config.inference_model.engine_kwargs = {"max_num_batched_tokens": 512}
    assert encoder_cache_bytes(config, shape, 1000) == 1000 * 4 * 4096 * 2


def test_the_plan_counts_the_work_of_the_encoder_once_per_image() -> None:
    options = ["--config-name=grpo_gsm8k", "model.name=Qwen/Qwen2.5-VL-3B-Instruct"]
    plans = [parse([*options, "--prompt-tokens=300", f"--image-tokens={n}"]) for n in (1, 257)]
    few, many = (settings_of(compose_config(*a.overrides), a).work for a in plans)
    gpu = GPUS["h100"]
    groups = few.groups
    assert few.shape.vision is not None
    added = groups * 256 * 4 * 2 * few.shape.vision.parameters / (0.4 * gpu.rate(few.step.number))
    assert many.train_s(gpu, 1) - few.train_s(gpu, 1) == pytest.approx(added)
    assert many.engine_bytes == few.engine_bytes
    out = io.StringIO()
    with pytest.raises(SystemExit):
        main([*options, "--prompt-tokens=300", "--image-tokens=400"], out)


def test_a_trained_encoder_is_planned_on_one_training_device() -> None:
    options = ["--devices=4", "model.name=Qwen/Qwen2.5-VL-3B-Instruct"]
    plan_options = parse([*options, "train_model.train_vision=true"])
    settings = settings_of(compose_config(*plan_options.overrides), plan_options)
    assert {split.train for split in candidates(settings, 4)} <= {1}
    small = replace(settings, work=replace(settings.work, shape=SHAPES["qwen3-vl-2b"]))
    assert {split.train for split in candidates(small, 4)} == {1}


def make_vision_model(trains: bool) -> Any:
    """Return a random Idefics3 whose activations dominate its memory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    config = Idefics3Config(
        text_config={"model_type": "llama", **TEXT, **sizes},
        vision_config={**sizes, "num_attention_heads": 2, "image_size": 64, "patch_size": 8},
        scale_factor=2,
        image_token_id=IMAGE_ID,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = Idefics3ForConditionalGeneration(config).eval()
    if not trains:
        loading.freeze_vision(model)
    return model


def make_image_batch(groups: int = 8, size: int = 2) -> Any:
    """Return groups whose prompts have an image each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    tokens = torch.full((IMAGE_TOKENS,), IMAGE_ID)
    embeds = torch.ones(IMAGE_TOKENS, dtype=torch.bool)
    for group in range(groups):
        pixels = torch.randn(1, 1, 3, 64, 64, generator=generator)
        image = EncodedImage(ImageFile(b""), str(group), tokens, embeds, {"pixel_values": pixels})
        prompt = torch.cat([tokens, torch.randint(5, 320, (8,), generator=generator)])
        for number in range(size):
            response = torch.randint(5, 320, (40,), generator=generator)
            mask = torch.arange(len(prompt) + 40) >= len(prompt)
            row = {
                keys.FULL: torch.cat([prompt, response]),
                keys.ATTENTION_MASK: torch.ones_like(mask),
                keys.ASSISTANT_MASK: mask,
                keys.LOG_PROBS: -6.0 * mask,
                keys.ADVANTAGE: torch.tensor([(-1.0) ** number]),
                keys.REWARD_VALID: torch.tensor([True]),
                keys.IMAGES: NonTensorData((ImageSpan(0, image),)),
            }
            rows.append(TensorDict(row))
    return lazy_stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [0, 4])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_the_peak_of_a_step_with_images_is_close_to_the_plan(trains: bool, adapters: int) -> None:
    model = make_vision_model(trains)
    if adapters:
        model = loading.add_lora(model, r=adapters, alpha=4)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainer = PolicyTrainer(
        GRPOLoss(TokenScorer(model)),
        model,
        make_optimizer(trained, "adamw", lr=1e-5),
        optim_batch_size=16,
    )
    batch = make_image_batch()
    trainer.train_step(batch)
    measured = peak_of(lambda: trainer.train_step(batch))
    memory = step_memory(loading.shape_of(model), trainer.setup())
    planned = memory.peak - memory.resting
    assert planned / measured == pytest.approx(1.0, abs=0.1)
