"""The real vLLM with images: its log-probs are the trainer's, even after a sync of the image
encoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tests.support.configs import compose_config
from tests.support.pictures import broken_pictures, encoded, noise, picture, task_of
from tests.support.vision import make_idefics3, retie
from torchrl_grpo import keys
from torchrl_grpo.assembly.run import build
from torchrl_grpo.chat.template import ChatEncoder
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Engine, SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.vllm import VLLMEngine
from torchrl_grpo.generation.vllm_async import AsyncVLLMEngine
from torchrl_grpo.images import ImageFile, Prompt, images_of, place_images, tokens_of
from torchrl_grpo.images.families import vision_parameters
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.weights import named_weights

ROUNDING = 1e-5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(make_idefics3(tmp_path_factory.mktemp("model"), tokenizer))


ASYNC = pytest.param(AsyncVLLMEngine, marks=pytest.mark.nightly)


@pytest.fixture(scope="module", params=[VLLMEngine, ASYNC], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, path: str) -> Iterator[Engine]:
    more = {"in_flight": "keep"} if request.param is AsyncVLLMEngine else {}
    engine = request.param(path, max_model_len=640, enforce_eager=True, kv_cache_gib=0.1, **more)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(path: str) -> list[Tensor | Prompt]:
    """Return prompts with two pictures and the same text, one in tiles, both in one prompt, one of
    them twice, and none.
    """
    config = loading.load_config(path)
    tokenizer = loading.load_tokenizer(path)
    encoder = loading.load_image_encoder(path, config, tokenizer)
    chats = ChatEncoder(tokenizer, {})
    a, b, wide = picture(1), picture(4), picture(2, (60, 40))
    prompts = []
    for files in ([a], [b], [wide], [b, a], [a, a], []):
        chat = place_images([{"role": "user", "content": "Count?"}], files)
        [ids] = chats.encode([chats.render(chat, add_generation_prompt=True)])
        prompts.append(encoder.expand(ids, files))
    assert torch.equal(tokens_of(prompts[0]), tokens_of(prompts[1]))
    return prompts


def load_model(path: str) -> Any:
    return loading.load_model(path, dtype=torch.float32, device=torch.device("cpu"))


def gaps(engine: Engine, model: Any, prompts: Sequence[Tensor | Prompt]) -> list[float]:
    """Return the largest difference between the engine's log-probs and the scorer's, for each
    prompt.
    """
    scorer = TokenScorer(model)
    largest = []
    for prompt, group in zip(
        prompts, engine.generate(prompts, 3, SamplingParams(max_new_tokens=12)), strict=True
    ):
        rows = []
        for done in group:
            tokens = torch.cat([tokens_of(prompt), done.tokens])[None]
            mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
            with torch.no_grad():
                scores, _ = scorer.score(tokens, mask, [images_of(prompt)])
            rows.append((scores[mask] - done.log_probs).abs().max().item())
        largest.append(max(rows))
    return largest


def test_log_probs_are_the_trainers_before_and_after_a_sync(
    engine: Engine, path: str, prompts: list[Tensor | Prompt]
) -> None:
    old, new = load_model(path), load_model(path)
    before = gaps(engine, old, prompts)
    with torch.no_grad():
        for _, parameter in vision_parameters(new):
            parameter.mul_(1.3)
    engine.update_weights(named_weights(new), 1)
    after, stale = gaps(engine, new, prompts), gaps(engine, old, prompts[:-1])
    print(f"before {max(before):.1e}, after {max(after):.1e}, old weights {min(stale):.2f}")
    assert max(before + after) < ROUNDING
    assert min(stale) > 0.01


def test_files_are_opened_as_vllm_opens_them() -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    colors = noise(9, 7).convert("RGB")
    clear = colors.copy()
    clear.putalpha(noise(9, 7).transpose(Image.Transpose.ROTATE_180))
    palette = colors.quantize(8)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(clear, "PNG"), encoded(clear.convert("LA"), "PNG")]
    files += [encoded(palette, "PNG", transparency=t) for t in (2, bytes([0, 128, 255, 9]))]
    files += [encoded(colors.convert(mode), "TIFF") for mode in ("CMYK", "YCbCr", "LAB", "F", "1")]
    files += [encoded(colors, kind, exif=exif) for kind in ("PNG", "JPEG", "TIFF", "WEBP")]
    files += [encoded(colors.convert("CMYK"), "JPEG"), encoded(palette, "GIF", transparency=2)]
    files.append(broken_pictures()["undefined orientation"])
    for data in files:
        image = ImageMediaIO().load_bytes(data).media
        assert ImageFile(data).open().tobytes() == image.tobytes()


@pytest.mark.nightly
@pytest.mark.parametrize(("top", "text"), [(True, False), (False, True)])
def test_a_head_is_tied_as_in_the_trainer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, top: bool, text: bool
) -> None:
    path = str(retie(make_idefics3(tmp_path, tokenizer), top, text, has_head=not top))
    engine = VLLMEngine(path, max_model_len=160, enforce_eager=True, kv_cache_gib=0.1)
    try:
        assert max(gaps(engine, load_model(path), [torch.arange(5, 40)])) < ROUNDING
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["tools", "game"])
def test_later_turns_read_images(engine: Engine, path: str, name: str) -> None:
    model = load_model(path)
    engine.update_weights(named_weights(model), engine.policy_version + 1)
    tokenizer = loading.load_tokenizer(path)
    encoder = loading.load_image_encoder(path, loading.load_config(path), tokenizer)
    task, images = task_of(name)
    env = LLMEnv(task, tokenizer, num_envs=4, repeats=2, max_turns=4, image_encoder=encoder)
    params = SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(320)))
    batch = RolloutCollector(env, GenerationPolicy(engine, params)).rollout()
    with torch.no_grad():
        scored = TokenScorer(model)(batch.clone())
    largest = []
    for row, again in zip(batch.unbind(0), scored.unbind(0), strict=True):
        assert bool(row[keys.REWARD_VALID]) and len(row[keys.IMAGES]) == images
        mask = row[keys.ASSISTANT_MASK]
        scores = again[keys.CUR_LOG_PROBS][: len(mask)][mask]
        largest.append((row[keys.LOG_PROBS][mask] - scores).abs().max().item())
    print(f"{name}: largest difference between engine and scorer: {max(largest):.1e}")
    assert max(largest) < ROUNDING


@pytest.mark.nightly
def test_a_run_on_vllm_trains_the_image_encoder(tmp_path: Path) -> None:
    overrides = (
        "inference_model.backend=vllm",
        "train_model.train_vision=true",
        "env.num_envs=16",
        "env.repeats=4",
        "train.total_dialog_turns=32",
        "evaluation.num_prompts=8",
        "logging.tensorboard=false",
    )
    run = build(compose_config(*overrides, name="grpo_shapes"), tmp_path)
    try:
        run.fit()
    finally:
        run.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert rows[-1]["train/kl_k3_to_inference"] < 1e-6
    assert rows[-1]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
