"""Makes the vision starter: a small model that counts shapes in pictures and mostly stops early.

    python tools/make_vision_starter.py --out DIR     # about 4 minutes on a CPU core

It is an Idefics3 model of a quarter of a million parameters with a tokenizer of single bytes. It is
trained from random weights on the *train* split of ``ShapesTask()``. Its demonstrators count the
quarters of a picture one by one and add up (``1+0+2+1=4 #### 4``), and they know how to. But

- in 25 % of cases they stop after two quarters (``1+0=1 #### 1``);
- in 60 % of the others they stop after three.

So the starter has seen whole counts, and what it does most of the time is wrong. Training ends
before it sees everything. That looking at the whole picture pays off, and seeing better, is left
for reinforcement learning.

The same seed gives the same weights on the same machine with the same number of threads. The
shipped weights were made with the defaults and one thread (``OMP_NUM_THREADS=1``).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from make_starter import build_tokenizer, padded, train
from torch import Tensor
from torchrl import torchrl_logger
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from torchrl_grpo.chat.template import ChatEncoder
from torchrl_grpo.images import Prompt
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.base import Problem
from torchrl_grpo.tasks.shapes import SIZE, ShapesTask

IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PATCH = 8
"""Side of a patch in pixels; an image token is 2 x 2 patches, a quarter of a picture."""
P_TWO = 0.25
P_THREE = 0.6
SEEDS = 8
"""Seeds of the task whose problems are drawn: 32,768 pictures."""
STEPS = 1400
BATCH_SIZE = 64
PEAK_LR = 2e-3


def build_processor() -> Idefics3Processor:
    """A processor of whole pictures, without resizing, and of single bytes."""
    tokenizer = build_tokenizer(IMAGE_TOKENS, CHAT_TEMPLATE)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIZE},
        max_image_size={"longest_edge": SIZE},
        do_image_splitting=False,
    )
    tokens = (SIZE // PATCH // 2) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=tokens)


def build_model(tokenizer: Any) -> Idefics3ForConditionalGeneration:
    """A random float32 model; its heads have 32 channels, the smallest size that vLLM's CPU
    attention takes.
    """
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "initializer_range": 0.08,
            **special,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = Idefics3ForConditionalGeneration(config).float()
    # With the usual standard deviation of 0.02 the image encoder of so small a model learns nothing.
    for part in (model.model.vision_model, model.model.connector):
        for name, parameter in part.named_parameters():
            if parameter.ndim > 1:
                std = 0.5 if "position" in name else parameter[0].numel() ** -0.5
                torch.nn.init.normal_(parameter, std=std)
    model.generation_config = GenerationConfig(**special)
    return model


def demonstration(problem: Problem, rng: random.Random) -> str:
    """One demonstrator's response to a picture."""
    counts = problem.extra["quadrants"]
    if rng.random() < P_TWO:
        counts = counts[:2]
    elif rng.random() < P_THREE:
        counts = counts[:3]
    return f"{'+'.join(map(str, counts))}={sum(counts)} #### {sum(counts)}"


def make_batch(
    problems: Sequence[Problem], chats: ChatEncoder, encoder: ImageEncoder, rng: random.Random
) -> dict[str, Tensor]:
    """Draws a batch of demonstrations; see ``padded``."""
    tokenizer = encoder.processor.tokenizer
    task, tokens, labels, pixels = ShapesTask(), [], [], []
    for problem in rng.choices(problems, k=BATCH_SIZE):
        chat = chats.render(task.messages(problem), add_generation_prompt=True)
        prompt = encoder.expand(chats.encode([chat])[0], problem.images)
        assert isinstance(prompt, Prompt)
        text = tokenizer(demonstration(problem, rng)).input_ids
        response = torch.tensor([*text, tokenizer.eos_token_id])
        tokens.append(torch.cat([prompt.tokens, response]))
        labels.append(torch.cat([torch.full_like(prompt.tokens, -100), response]))
        pixels.append(prompt.images[0].image.inputs["pixel_values"])
    return {**padded(tokens, labels, tokenizer), "pixel_values": torch.cat(pixels)}


def main() -> None:
    """Trains the vision starter and saves model, processor and generation config."""
    parser = argparse.ArgumentParser(description="Make the vision starter.")
    parser.add_argument(
        "--out", type=Path, default=starter_path("vision_starter"), help="folder to save to"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    encoder = ImageEncoder(processor, model.config)
    chats = ChatEncoder(processor.tokenizer, {})
    problems = [p for seed in range(SEEDS) for p in ShapesTask(seed=seed).problems("train")]
    draw = partial(make_batch, problems, chats, encoder)
    train(model, draw, args.steps, args.seed, PEAK_LR)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    torchrl_logger.info("%d parameters saved to %s", parameters, args.out)


if __name__ == "__main__":
    main()
