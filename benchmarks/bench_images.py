"""Measure time and memory of a training step with images: ours against TRL and plain PyTorch, on
CPUs.

    OMP_NUM_THREADS=2 python benchmarks/bench_images.py
    OMP_NUM_THREADS=2 python benchmarks/bench_images.py --train-vision

A step is forward, loss, backward and zero_grad, without the optimizer's update: clipped GRPO without
KL over 2 groups of 8 responses of 32 to 128 tokens. Each group has a prompt of 64 tokens with one
image of 224 x 224 pixels (49 more tokens). All sides have the same random Idefics3 weights: a
language model of 30M parameters and an image encoder of 12M, which is frozen or trained. Ours
encodes each image once for a group. While the encoder is frozen a run keeps the features of images,
so ``ours`` gets new images in each step, and ``again`` the same ones.

Losses and gradients are compared first, then the sides take turns, each in a process of its own
(see ``bench_train_step.py``). A missing TRL is skipped and named.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_train_step import (
    CLIP_EPSILON,
    LOG_RATIOS,
    PACKAGES,
    Step,
    Trainer,
    backward,
    make_tokenizer,
    peak_mib,
    ragged,
    trl_inputs,
    trl_settings,
)
from machine import report, surroundings
from shapes import MODELS
from tensordict import NonTensorData
from torch import Tensor
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from torchrl_grpo import keys
from torchrl_grpo.images import EncodedImage, ImageFile, ImageSpan
from torchrl_grpo.models.loading import freeze_vision, shape_of
from torchrl_grpo.models.memory import step_memory
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

GROUPS, REPEATS, PROMPT, RESPONSES = 2, 8, 64, (32, 128)
SIZE, PATCH, SCALE = 224, 16, 2
IMAGE_TOKENS = (SIZE // PATCH // SCALE) ** 2
IMAGE_ID = 2
TOLERANCE = 1e-4


def make_model(train_vision: bool) -> Idefics3ForConditionalGeneration:
    """Return a random model, the same in every process."""
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            **MODELS["small"],
        },
        vision_config={
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "image_size": SIZE,
            "patch_size": PATCH,
        },
        scale_factor=SCALE,
        image_token_id=IMAGE_ID,
        pad_token_id=0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Idefics3ForConditionalGeneration(config).float().eval()
    if not train_vision:
        freeze_vision(model)
    return model


def make_batch(path: str) -> None:
    """Write the batch: as in ``bench_train_step``, and an image for each sequence."""
    torch.manual_seed(1)
    rows, (shortest, longest) = GROUPS * REPEATS, RESPONSES
    prompts = torch.randint(3, MODELS["small"]["vocab_size"], (GROUPS, PROMPT + IMAGE_TOKENS))
    prompts[:, 1 : 1 + IMAGE_TOKENS] = IMAGE_ID
    lengths = torch.linspace(shortest, longest, rows).round().long()[torch.randperm(rows)]
    mask = torch.arange(longest) < lengths[:, None]
    responses = torch.randint(3, MODELS["small"]["vocab_size"], (rows, longest)) * mask
    batch = {
        "tokens": torch.cat([prompts.repeat_interleave(REPEATS, 0), responses], 1),
        "mask": mask,
        "pixels": torch.randn(GROUPS, 1, 3, SIZE, SIZE).repeat_interleave(REPEATS, 0),
    }
    with torch.no_grad():
        log_probs = plain_log_probs(make_model(False), batch)
    log_probs -= LOG_RATIOS[torch.randint(len(LOG_RATIOS), mask.shape)]
    torch.save({**batch, "log_probs": log_probs * mask, "advantage": torch.randn(rows)}, path)


def plain_log_probs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return log-probs of the responses from their full logits, with an image for each sequence."""
    tokens, width = batch["tokens"], batch["mask"].shape[1]
    logits = model(tokens, pixel_values=batch["pixels"], logits_to_keep=width + 1).logits
    logits, targets = logits[:, :-1].flatten(0, 1), tokens[:, -width:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return -losses.view(len(tokens), -1)


planned: dict[str, float] = {}
"""The memory plan's prediction for our latest step, beyond the weights, without optimizer."""


def use_ours(model: Any, batch: dict[str, Tensor], again: bool = False) -> Step:
    """Return ``PolicyTrainer.train_step`` without an optimizer step."""
    scorer = TokenScorer(model)
    trainer = Trainer(
        GRPOLoss(scorer, clip_epsilon=CLIP_EPSILON),
        model,
        torch.optim.SGD(model.parameters()),
        optim_batch_size=len(batch["tokens"]),
        micro_batch_tokens=16384,
    )
    columns = {name: value for name, value in batch.items() if name != "pixels"}
    data = ragged(columns, (1,))
    pixels, turns = batch["pixels"][::REPEATS], itertools.count()
    tokens = torch.full((IMAGE_TOKENS,), IMAGE_ID)
    is_embed = torch.ones(IMAGE_TOKENS, dtype=torch.bool)

    def step() -> float:
        turn = 0 if again else next(turns)
        for group in range(GROUPS):
            inputs = {"pixel_values": pixels[group][None]}
            image = EncodedImage(ImageFile(b""), f"{turn} {group}", tokens, is_embed, inputs)
            for row in range(group * REPEATS, (group + 1) * REPEATS):
                data.tensordicts[row].set(keys.IMAGES, NonTensorData((ImageSpan(1, image),)))
        loss = trainer.train_step(data)["loss"]
        memory = step_memory(shape_of(model), trainer.setup())
        planned["mib"] = (memory.peak - memory.resting) / 2**20
        return loss

    return step


def use_ours_again(model: Any, batch: dict[str, Tensor]) -> Step:
    """Return our step with the images of the first step."""
    return use_ours(model, batch, again=True)


def use_trl(model: Any, batch: dict[str, Tensor]) -> Step:
    """Return TRL's ``GRPOTrainer.compute_loss`` and backward, with beta 0."""
    import trl
    from datasets import Dataset

    size = len(batch["tokens"])
    settings = trl_settings(model, batch) | {
        "per_device_train_batch_size": size,
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon": CLIP_EPSILON,
        "num_generations": REPEATS,
    }
    data = Dataset.from_dict({"prompt": ["<eos>"] * size})
    trainer = trl.GRPOTrainer(
        model,
        len,
        trl.GRPOConfig(tempfile.mkdtemp(), **settings),
        data,
        processing_class=make_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    inputs = trl_inputs(batch) | {
        "old_per_token_logps": batch["log_probs"],
        "advantages": batch["advantage"],
        "pixel_values": batch["pixels"],
        "num_images": [1] * size,
    }
    return lambda: backward(trainer.compute_loss(trainer.model, dict(inputs)))


def use_plain(model: Any, batch: dict[str, Tensor]) -> Step:
    """Return plain PyTorch: one padded forward pass, an image for each sequence."""
    mask, advantage = batch["mask"], batch["advantage"][:, None]

    def step() -> float:
        ratio = (plain_log_probs(model, batch) - batch["log_probs"]).exp()
        clipped = ratio.clamp(1 - CLIP_EPSILON, 1 + CLIP_EPSILON)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        return backward(-((surrogate * mask).sum(1) / mask.sum(1)).mean())

    return step


SIDES = {"ours": use_ours, "again": use_ours_again, "trl": use_trl, "plain": use_plain}


def work(side: str, train_vision: bool, folder: str, pipe: Connection) -> None:
    """Run a side in this process: a first step, and then one for each message."""
    model, batch = make_model(train_vision), torch.load(f"{folder}/batch.pt")
    try:
        step = SIDES[side](model, batch)
    except ImportError as error:
        return pipe.send(str(error))
    before = peak_mib(True)
    loss = step()
    peak = peak_mib()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, f"{folder}/{side}.pt")
    pipe.send(loss)
    del gradients
    model.zero_grad()
    peak_mib(True)
    while pipe.recv():
        start, cpu = time.perf_counter(), time.process_time()
        step()
        model.zero_grad()
        pipe.send((time.perf_counter() - start, time.process_time() - cpu))
    pipe.send((max(peak, peak_mib()) - before, planned.get("mib")))


def compare(side: str, folder: str) -> float:
    """Return the relative difference of a side's gradient from ours."""
    ours, other = (torch.load(f"{folder}/{name}.pt") for name in ("ours", side))
    difference = math.hypot(*(float((other[n] - gradient).norm()) for n, gradient in ours.items()))
    return difference / math.hypot(*(float(gradient.norm()) for gradient in ours.values()))


def measure(train_vision: bool, repeats: int) -> dict[str, Any]:
    """Compare all sides, then measure their time and memory in turns."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    result: dict[str, Any] = {"losses": {}, "gradient_difference": {}, "skipped": {}}
    with tempfile.TemporaryDirectory() as folder:
        maker = context.Process(target=make_batch, args=(f"{folder}/batch.pt",))
        maker.start()
        maker.join()
        for side in SIDES:
            pipe, theirs = context.Pipe()
            context.Process(
                target=work, args=(side, train_vision, folder, theirs), daemon=True
            ).start()
            theirs.close()
            first = pipe.recv()
            if isinstance(first, str):
                result["skipped"][side] = first
                continue
            pipes[side] = pipe
            result["losses"][side] = first
            result["gradient_difference"][side] = difference = compare(side, folder)
            if not difference <= TOLERANCE:
                raise RuntimeError(f"the gradient of {side} differs by {difference:.1e}.")
        seconds: dict[str, list[float]] = {side: [] for side in pipes}
        cpu_seconds: dict[str, list[float]] = {side: [] for side in pipes}
        order = itertools.cycle(pipes)
        for turn in range(repeats + 1):
            for side in [next(order) for _ in pipes]:
                pipes[side].send(True)
                took, cpu = pipes[side].recv()
                if turn:  # the first round is a warm-up
                    seconds[side].append(took)
                    cpu_seconds[side].append(cpu)
            next(order)
        for pipe in pipes.values():
            pipe.send(False)
        memory = {side: pipe.recv() for side, pipe in pipes.items()}
    result["peak_growth_mib"] = {side: mib for side, (mib, _) in memory.items()}
    result["planned_growth_mib"] = memory["ours"][1]
    for name, times in (("s", seconds), ("cpu_s", cpu_seconds)):
        medians = {side: statistics.median(values) for side, values in times.items()}
        result[f"median_{name}"] = medians
        result[f"{name}_over_ours"] = {side: t / medians["ours"] for side, t in medians.items()}
    return result | {"seconds": seconds, "cpu_seconds": cpu_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train-vision", action="store_true", help="train the image encoder too")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each side")
    parser.add_argument("--out", type=Path, help="file to write the JSON to")
    options = parser.parse_args()
    result = surroundings(PACKAGES) | {
        "train_vision": options.train_vision,
        **measure(options.train_vision, options.repeats),
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
