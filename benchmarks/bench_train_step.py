"""Measure time and memory of a training step: ours against TRL, TorchRL and plain PyTorch, on Linux
CPUs or one CUDA device.

    python benchmarks/bench_train_step.py
    python benchmarks/bench_train_step.py --models qwen05 --dtypes bfloat16 --repeats 5
    python benchmarks/bench_train_step.py --losses sft distill --groups 16
    python benchmarks/bench_train_step.py --device cuda --models qwen05 --dtypes bfloat16 --prompts 256 \
        --sequences 64 --groups 8 --responses 64 512 --at-once 8

A step is forward, loss, backward and zero_grad, without the optimizer's update. All sides have the
same random Qwen2 weights and the same batch: groups of responses of 32 to 128 tokens that share a
prompt of 64 or 512. The loss is clipped GRPO without KL, a mean over the tokens of a sequence and
then over sequences. With ``--losses`` it can also be supervised training, or the reverse KL to a
teacher of the same shape over the whole vocabulary, including the teacher's forward pass; both are
means over all tokens. ``padded`` is our step with padding, and with the prompt computed for each
sequence.

First the loss and gradient of each side are compared with ours, then the sides take turns in
rotating order (on a CUDA device one follows the other). Each side is a process with its own peak
memory: the growth over the resident memory before the first step, of the process or of the CUDA
device. All inherit the same OMP_NUM_THREADS and settings of the allocator (MALLOC_MMAP_THRESHOLD_,
...), which the result records. A missing peer is skipped and named. Other work on the machine
spoils the times, because OpenMP's threads wait for one another by spinning. The CPU time of a step
with OMP_NUM_THREADS=1 suffers least.

The token rate counts the sequences' own tokens, and the model FLOPs utilization the necessary
products, with each prompt once and no padding: any further work of a side lowers both.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import torch
from accelerator import attention_flops, card, matrix_flops, peak_flops, synchronize
from machine import surroundings
from shapes import MODELS
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.loading import shape_of
from torchrl_grpo.models.memory import StepSetup, step_memory
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import DemonstrationLoss, GRPOLoss
from torchrl_grpo.transforms.teacher import TeacherStates

Step = Callable[[], float]
Use = Callable[..., Step]
"""Takes the model, the batch, a folder and, on sides with a limit, ``micro_batch_tokens`` or
``at_once``.
"""
HEADS = {"tiny": 4, "small": 8, "qwen05": 14, "qwen15": 12, "qwen7": 28}
SEQUENCES = {"tiny": 16, "small": 16, "qwen05": 4, "qwen15": 4, "qwen7": 4}
PACKAGES = ("torch", "transformers", "tensordict", "torchrl", "trl")
GROUPS, RESPONSES = 2, (32, 128)
CLIP_EPSILON = 0.2
LOG_RATIOS = torch.tensor([-0.4, -0.05, 0.05, 0.4])
"""Log-ratios of the batch, well inside or well outside the clip range, so that rounding never
decides whether a side clips a token.
"""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}
"""Largest allowed difference: relative for gradients (norm of the difference over norm), absolute
for losses.
"""


def make_model(name: str, dtype: str, seed: int = 0, device: str = "cpu") -> PreTrainedModel:
    """Return a random Qwen2 model, the same in every process on the same device."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "num_key_value_heads": 2,
        "tie_word_embeddings": name != "qwen7",
        "use_cache": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = Qwen2Config(num_attention_heads=HEADS[name], **(settings | MODELS[name]))
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


def response_log_probs(model: PreTrainedModel, tokens: Tensor, width: int) -> Tensor:
    """Return log-probs of the response tokens [B, Tr], the last ``width``, from their full logits,
    in plain PyTorch.
    """
    logits = model(tokens, logits_to_keep=width + 1).logits[:, :-1]
    logits, targets = logits.float().flatten(0, 1), tokens[:, -width:].flatten()
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none").view(
        len(tokens), -1
    )


def make_batch(name: str, dtype: str, path: str, size: dict[str, Any], device: str = "cpu") -> None:
    """Write the batch, padded on the right: tokens [B, T], mask and behavior log-probs [B, Tr],
    advantages [B].

    Args:
        name, dtype: of the model.
        path: of the file.
        size: ``sequences``, different ``prompts`` among them, tokens of a ``prompt``, shortest and
            longest of the ``responses``, and sequences ``at_once`` in a padded forward pass.
        device: to compute on.
    """
    model = make_model(name, dtype, device=device)
    torch.manual_seed(1)
    rows, vocab, (shortest, longest) = (
        size["sequences"],
        MODELS[name]["vocab_size"],
        size["responses"],
    )
    prompts = torch.randint(2, vocab, (size["prompts"], size["prompt"]))
    prompts = prompts.repeat_interleave(rows // size["prompts"], 0)
    lengths = torch.linspace(shortest, longest, rows).round().long()[torch.randperm(rows)]
    mask = torch.arange(longest) < lengths[:, None]
    tokens = torch.cat([prompts, torch.randint(2, vocab, (rows, longest)) * mask], 1)
    with torch.no_grad():
        parts = tokens.to(device).split(size["at_once"])
        log_probs = torch.cat([response_log_probs(model, part, longest).cpu() for part in parts])
        log_probs -= LOG_RATIOS[torch.randint(len(LOG_RATIOS), mask.shape)]
    torch.save(
        {
            "tokens": tokens,
            "mask": mask,
            "log_probs": log_probs * mask,
            "advantage": torch.randn(rows),
        },
        path,
    )


def parts_of(batch: dict[str, Tensor], at_once: int) -> list[dict[str, Tensor]]:
    """Return the batch in parts of this many sequences."""
    columns = [tensor.split(at_once) for tensor in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*columns, strict=True)]


def ragged(batch: dict[str, Tensor], advantage_shape: tuple[int, ...]) -> TensorDict:
    """Return the batch as a collector gives it: a lazy stack of sequences under TorchRL's keys."""
    items, start = [], batch["tokens"].shape[1] - batch["mask"].shape[1]
    for tokens, mask, log_probs, advantage in zip(*batch.values(), strict=True):
        end = start + int(mask.sum())
        sampled = torch.arange(end) >= start
        entries = {
            "tokens": {
                "prompt": tokens[:start],
                "response": tokens[start:end],
                "full": tokens[:end],
            },
            "masks": {
                "all_attention_mask": torch.ones_like(sampled),
                "all_assistant_mask": sampled,
            },
            "log_probs": {"full": torch.cat([torch.zeros(start), log_probs[: end - start]])},
            "advantage": advantage.view(advantage_shape),
            "reward_valid": torch.ones(1, dtype=torch.bool),
        }
        items.append(TensorDict(entries))
    return lazy_stack(items)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer, which the peers require and never use: they get tokens."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def backward(loss: Tensor) -> float:
    """Run backward and return the loss."""
    loss.backward()
    return loss.item()


class Trainer(PolicyTrainer):
    """A trainer that never updates its weights."""

    def optim_step(self, loss: Tensor, **how: Any) -> dict[str, float]:
        return {"loss": float(loss)}


def use_ours(
    model: PreTrainedModel, batch: dict[str, Tensor], folder: str, micro_batch_tokens: int = 16384
) -> Step:
    """Return ``PolicyTrainer.train_step``, with padding, normalization, micro-batches and metrics, but
    without an optimizer step.
    """
    loss = GRPOLoss(TokenScorer(model), clip_epsilon=CLIP_EPSILON)
    return _step(loss, model, batch, micro_batch_tokens=micro_batch_tokens)


def _step(
    loss: GRPOLoss,
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    score: Callable[[TensorDict], TensorDict] = lambda data: data,
    **settings: Any,
) -> Step:
    size = len(batch["tokens"])
    trainer = Trainer(
        loss, model, torch.optim.SGD(model.parameters()), optim_batch_size=size, **settings
    )
    data = ragged({name: tensor.cpu() for name, tensor in batch.items()}, (1,))
    return lambda: trainer.train_step(score(data))["loss"]


def use_our_sft(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return the same step with the loss of algo=sft."""
    batch["advantage"].fill_(1.0)
    return _step(DemonstrationLoss(TokenScorer(model), aggregation="token_mean"), model, batch)


def use_our_distillation(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return a step that computes the teacher's states and then the loss of
    policy.teacher_divergence=reverse alone.
    """
    teacher, scorer = make_teacher(model), TokenScorer(model)
    batch["advantage"].zero_()
    scorer.distill_from(Teacher(1.0, teacher.get_output_embeddings().weight))
    loss = GRPOLoss(scorer, aggregation="token_mean", teacher_coeff=1.0)
    return _step(loss, model, batch, TeacherStates(TokenScorer(teacher)))


def make_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """Return another random model of a model's shape, frozen."""
    name = next(
        name for name, shape in MODELS.items() if shape["hidden_size"] == model.config.hidden_size
    )
    dtype = str(model.dtype).removeprefix("torch.")
    return make_model(name, dtype, seed=2, device=str(model.device)).requires_grad_(False)


def padded(use: Use) -> Use:
    """Return our step with padding, and with the prompt computed for each sequence."""

    @functools.wraps(use)
    def use_padded(*args: Any, **limit: int) -> Step:
        TokenScorer.packs = lambda self, *_: False  # type: ignore[method-assign]
        return use(*args, **limit)

    return use_padded


def use_trl(
    model: PreTrainedModel, batch: dict[str, Tensor], folder: str, at_once: int = 16
) -> Step:
    """Return TRL's ``GRPOTrainer.compute_loss`` and backward, with beta 0."""
    import trl
    from datasets import Dataset

    size, parts = len(batch["tokens"]), parts_of(batch, at_once)
    settings = trl_settings(model, batch) | {"per_device_train_batch_size": size}
    settings |= {
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon": CLIP_EPSILON,
        "num_generations": size // count_prompts(batch),
    }
    data = Dataset.from_dict({"prompt": ["<eos>"] * size})
    trainer = trl.GRPOTrainer(
        model, len, trl.GRPOConfig(folder, **settings), data, processing_class=make_tokenizer()
    )
    trainer.current_gradient_accumulation_steps = len(parts)
    model.train()  # as in its own loop; the model has no dropout
    inputs = [
        trl_inputs(part)
        | {"old_per_token_logps": part["log_probs"], "advantages": part["advantage"]}
        for part in parts
    ]
    return lambda: sum(backward(trainer.compute_loss(trainer.model, part)) for part in inputs)


def count_prompts(batch: dict[str, Tensor]) -> int:
    """Return the number of different prompts in a batch."""
    return len(batch["tokens"][:, : -batch["mask"].shape[1]].unique(dim=0))


def trl_settings(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return settings of TRL's sampling trainers for a step equivalent to ours."""
    return plain_settings(model) | {"max_completion_length": batch["mask"].shape[1]}


def plain_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return settings that all of TRL's trainers need for such a step."""
    return {
        "use_cpu": model.device.type == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
    }


def trl_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that TRL's sampling trainers pass to ``compute_loss``."""
    width = batch["mask"].shape[1]
    prompts, responses = batch["tokens"][:, :-width], batch["tokens"][:, -width:]
    inputs = {"prompt_ids": prompts, "completion_ids": responses}
    return inputs | {
        "prompt_mask": torch.ones_like(prompts),
        "completion_mask": batch["mask"].long(),
    }


def use_trl_sft(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return TRL's ``SFTTrainer.compute_loss`` and backward, with the loss of the response only."""
    import trl
    from datasets import Dataset

    labels, width = batch["tokens"].clone(), batch["mask"].shape[1]
    labels[:, -width:][~batch["mask"]] = -100
    labels[:, :-width] = -100
    attention = torch.cat([torch.ones_like(labels[:, :-width]), batch["mask"].long()], 1)
    rows = {"input_ids": batch["tokens"].tolist(), "labels": labels.tolist()}
    settings = plain_settings(model) | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    config = trl.SFTConfig(folder, per_device_train_batch_size=len(labels), **settings)
    data = Dataset.from_dict(rows)
    trainer = trl.SFTTrainer(
        model, args=config, train_dataset=data, processing_class=make_tokenizer()
    )
    model.train()
    inputs = {"input_ids": batch["tokens"], "attention_mask": attention, "labels": labels}
    return lambda: backward(
        trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=batch["mask"].sum())
    )


def use_trl_distillation(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return TRL's ``DistillationTrainer.compute_loss`` and backward: the reverse KL, in TRL's own
    chunks of the vocabulary.
    """
    import trl
    from datasets import Dataset

    size = len(batch["tokens"])
    settings = trl_settings(model, batch) | {"per_device_train_batch_size": size}
    config = trl.DistillationConfig(folder, beta=1.0, **settings)
    data = Dataset.from_dict({"prompt": ["<eos>"] * size})
    teacher, tokenizer = make_teacher(model), make_tokenizer()
    trainer = trl.DistillationTrainer(model, teacher, config, data, processing_class=tokenizer)
    model.train()
    inputs = trl_inputs(batch)
    return lambda: backward(trainer.compute_loss(trainer.model, inputs))


def use_torchrl(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return TorchRL's ``GRPOLoss`` over a ``TransformersWrapper``. Only ``loss_*`` entries are
    summed, as the others are metrics.
    """
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives import llm

    options = {
        "input_mode": "tokens",
        "generate": False,
        "pad_model_input": True,
    }  # packing is not causal in 0.14
    policy = TransformersWrapper(model, tokenizer=make_tokenizer(), **options)
    settings = {"aggregation": "prompt_mean", "masking_strategy": "rlhf", "entropy_bonus": False}
    loss = llm.GRPOLoss(policy, clip_epsilon=CLIP_EPSILON, **settings)
    data = ragged(batch, (1, 1))
    return lambda: backward(
        sum(value for name, value in loss(data).items() if name.startswith("loss_")).sum()
    )


def use_plain(
    model: PreTrainedModel, batch: dict[str, Tensor], folder: str, at_once: int = 16
) -> Step:
    """Return plain PyTorch: padded forward passes, and full logits of the response only."""
    size, parts = len(batch["tokens"]), parts_of(batch, at_once)

    def part_step(part: dict[str, Tensor]) -> float:
        mask, advantage = part["mask"], part["advantage"][:, None]
        log_probs = response_log_probs(model, part["tokens"], mask.shape[1])
        ratio = (log_probs - part["log_probs"]).exp()
        surrogate = torch.minimum(
            ratio * advantage, ratio.clamp(1 - CLIP_EPSILON, 1 + CLIP_EPSILON) * advantage
        )
        return backward(-((surrogate * mask).sum(1) / mask.sum(1)).sum() / size)

    return lambda: sum(map(part_step, parts))


def use_plain_sft(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return plain PyTorch: cross-entropy of the response."""
    tokens, mask = batch["tokens"], batch["mask"]

    def step() -> float:
        log_probs = response_log_probs(model, tokens, mask.shape[1])
        return backward(-(log_probs * mask).sum() / mask.sum())

    return step


def use_plain_distillation(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return plain PyTorch: the reverse KL of the response's full logits."""
    teacher, mask = make_teacher(model), batch["mask"]

    def log_probs(of: PreTrainedModel) -> Tensor:
        logits = of(batch["tokens"], logits_to_keep=mask.shape[1] + 1).logits[:, :-1][mask]
        return logits.float().log_softmax(-1)

    def step() -> float:
        with torch.no_grad():
            target = log_probs(teacher)
        own = log_probs(model)
        return backward((own.exp() * (own - target)).sum() / mask.sum())

    return step


def use_products(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Return a step of nothing but the algorithm's matrix products, with each prompt once and no
    padding: a lower bound for every side.

    There are three for each linear layer (forward, and the gradients of input and weight) and for
    the head over the responses; no attention, nothing between the products, and all logits at once.
    """
    sampled = int(batch["mask"].sum())
    rows = sampled + count_prompts(batch) * (batch["tokens"].shape[1] - batch["mask"].shape[1])
    products = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            height, weight = sampled if name == "lm_head" else rows, module.weight.detach()
            products.append(
                (
                    weight,
                    *(weight.new_empty(height, size).normal_() for size in reversed(weight.shape)),
                )
            )

    def step() -> float:
        for weight, inputs, gradient in products:
            inputs @ weight.T, gradient @ weight, gradient.T @ inputs
        return math.nan

    return step


SIDES: dict[str, dict[str, Use]] = {
    "grpo": {
        "ours": use_ours, "padded": padded(use_ours), "trl": use_trl, "torchrl": use_torchrl, "plain": use_plain,
        "products": use_products,
    },
    "sft": {"ours": use_our_sft, "padded": padded(use_our_sft), "trl": use_trl_sft, "plain": use_plain_sft},
    "distill": {
        "ours": use_our_distillation, "padded": padded(use_our_distillation), "trl": use_trl_distillation,
        "plain": use_plain_distillation,
    },
}  # fmt: skip
"""For each loss, the functions that prepare a side's step."""


def peak_mib(reset: bool = False, device: str = "cpu") -> float:
    """Return the peak memory of this process, or of a CUDA device, after an optional reset of the
    peak.
    """
    if device != "cpu":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(
    side: str,
    loss_name: str,
    name: str,
    dtype: str,
    folder: str,
    limits: dict[str, int],
    device: str,
    pipe: Connection,
) -> None:
    """Run a side in this process: prepare, run a first step, write its gradients to a file, then
    run a step for each message.
    """
    use = SIDES[loss_name][side]
    try:
        model = make_model(name, dtype, device=device)
        batch = torch.load(f"{folder}/batch.pt", map_location=device)
        parameters = inspect.signature(use).parameters
        step = use(
            model, batch, folder, **{key: limits[key] for key in limits if key in parameters}
        )
    except ImportError as error:
        if side == "ours":
            raise
        return pipe.send(str(error))
    before = peak_mib(True, device)
    loss = step()
    synchronize(device)
    peak = peak_mib(False, device)
    gradients = {
        name: None if parameter.grad is None else parameter.grad.cpu()
        for name, parameter in model.named_parameters()
    }
    torch.save(gradients, f"{folder}/{side}.pt")
    del gradients
    model.zero_grad()
    peak_mib(True, device)
    pipe.send(loss)
    while pipe.recv():
        start, cpu = time.perf_counter(), time.process_time()
        step()
        model.zero_grad()
        synchronize(device)
        pipe.send((time.perf_counter() - start, time.process_time() - cpu))
    pipe.send(max(peak, peak_mib(False, device)) - before)


def compare(side: str, losses: dict[str, float], folder: str) -> dict[str, float]:
    """Return the differences of a side's loss (absolute) and gradient (relative, over all weights)
    from ours.
    """
    ours, other = (torch.load(f"{folder}/{name}.pt", mmap=True) for name in ("ours", side))
    difference = math.hypot(
        *(float((other[name].float() - grad.float()).norm()) for name, grad in ours.items())
    )
    norm = math.hypot(*(float(grad.float().norm()) for grad in ours.values()))
    return {"loss": abs(losses[side] - losses["ours"]), "gradient": difference / norm}


class Measurement:
    """A setting's sides, and their results.

    Args:
        loss, name, dtype: the loss, the model and its dtype.
        size: of the batch and of a side's passes (``make_batch``).
        device: to compute on.
        folder: for the batch and the gradients.
    """

    def __init__(
        self, loss: str, name: str, dtype: str, size: dict[str, Any], device: str, folder: str
    ) -> None:
        self._loss, self._model, self._size = loss, (name, dtype), size
        self._device, self._folder = device, folder
        self._context = multiprocessing.get_context("spawn")
        self._losses: dict[str, float] = {}
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        self.peak_growth_mib: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.failed: list[str] = []
        self.differences: dict[str, dict[str, float]] = {}
        # Not in this process: a child's peak begins at its parent's size.
        arguments = (*self._model, f"{folder}/batch.pt", size, device)
        maker = self._context.Process(target=make_batch, args=arguments)
        maker.start()
        maker.join()

    def run(self, sides: Sequence[str], repeats: int) -> None:
        """Start some sides, compare their first steps with ours, and time them in turn."""
        started = {side: self._start(side) for side in sides}
        pipes = {side: pipe for side, (_, pipe) in started.items() if self._checked(side, pipe)}
        order = list(pipes)
        self.seconds |= {side: [] for side in order}
        self.cpu_seconds |= {side: [] for side in order}
        for i in range(repeats + 1):
            first = i % max(1, len(order))
            for side in order[first:] + order[:first]:
                pipes[side].send(True)
                took = pipes[side].recv()
                if i > 0:  # the first round is a warm-up
                    self.seconds[side].append(took[0])
                    self.cpu_seconds[side].append(took[1])
        for side, pipe in pipes.items():
            pipe.send(False)
            self.peak_growth_mib[side] = pipe.recv()
        for process, _ in started.values():
            process.join()

    def _start(self, side: str) -> tuple[Any, Connection]:
        pipe, theirs = self._context.Pipe()
        limits = {name: self._size[name] for name in ("at_once", "micro_batch_tokens")}
        arguments = (side, self._loss, *self._model, self._folder, limits, self._device, theirs)
        process = self._context.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, pipe

    def _checked(self, side: str, pipe: Connection) -> bool:
        """Return whether a side has made its first step; record its difference from ours."""
        try:
            first = pipe.recv()
        except EOFError:  # it has said why
            self.failed.append(side)
            return False
        if isinstance(first, str):
            self.skipped[side] = first
            return False
        self._losses[side] = first
        if side != "products" and "ours" in self._losses:
            difference = compare(side, self._losses, self._folder)
            self.differences[side] = difference
            if not max(difference.values()) <= TOLERANCE[self._model[1]]:
                self.failed.append(side)
        return True


def work_of(name: str, size: dict[str, Any]) -> dict[str, float]:
    """Return the number of tokens in the batch, of those that must be computed (each prompt once,
    no padding), and the floating-point operations of a step with these.
    """
    rows, prompts, prompt = size["sequences"], size["prompts"], size["prompt"]
    shortest, longest = size["responses"]
    lengths = [int(length) for length in torch.linspace(shortest, longest, rows).round()]
    computed = prompts * prompt + sum(lengths)
    keys = prompts * prompt * (prompt + 1) // 2
    keys += sum(length * prompt + length * (length + 1) // 2 for length in lengths)
    shape = MODELS[name]
    kv_share = shape.get("num_key_value_heads", 2) / HEADS[name]
    flops = matrix_flops(shape, kv_share, computed, sum(lengths)) + attention_flops(shape, keys)
    return {"tokens": rows * prompt + sum(lengths), "computed_tokens": computed, "flops": flops}


def planned_growth_mib(name: str, dtype: str, size: dict[str, Any], tokens: float) -> float:
    """Return the memory plan's prediction for our step, beyond the weights, without optimizer."""
    number = getattr(torch, dtype).itemsize
    shape = shape_of(make_model(name, dtype, device="meta"))
    setup = StepSetup(size["micro_batch_tokens"], 1, 1, number=number, master=number)
    memory = step_memory(shape, setup.of_batch(tokens, size["prompt"] + size["responses"][1]))
    return (memory.peak - memory.resting) / 2**20


def measure(
    loss: str,
    name: str,
    dtype: str,
    size: dict[str, Any],
    repeats: int,
    sides: Sequence[str],
    device: str = "cpu",
) -> dict[str, Any]:
    """Check one setting, then measure the times and the memory of all sides.

    On a CPU the sides take turns; on a CUDA device, which does not have room for all at once, one
    follows the other.
    """
    everyone = ["ours", *(side for side in sides if side != "ours")]
    turns = [everyone] if device == "cpu" else [[side] for side in everyone]
    with tempfile.TemporaryDirectory() as folder:
        measured = Measurement(loss, name, dtype, size, device, folder)
        for some in turns:
            measured.run(some, repeats)
    medians, cpu_medians = (
        {side: statistics.median(times) for side, times in some.items()}
        for some in (measured.seconds, measured.cpu_seconds)
    )
    memory = measured.peak_growth_mib
    result: dict[str, Any] = {
        "skipped": measured.skipped,
        "failed": measured.failed,
        "tolerance": TOLERANCE[dtype],
        "difference_from_ours": measured.differences,
        "seconds": measured.seconds,
        "median_seconds": medians,
        "median_cpu_seconds": cpu_medians,
        "peak_growth_mib": memory,
    }
    for ratio, figures in (
        ("cpu_over_ours", cpu_medians),
        ("seconds_over_ours", medians),
        ("memory_over_ours", memory),
    ):
        result[ratio] = {side: value / figures["ours"] for side, value in figures.items()}
    if loss != "grpo":
        return result
    needed = work_of(name, size)
    rates = {side: needed["tokens"] / value for side, value in medians.items()}
    peak = peak_flops(device)
    mfu = {side: peak and needed["flops"] / value / peak for side, value in medians.items()}
    planned = planned_growth_mib(name, dtype, size, needed["computed_tokens"])
    return result | needed | {
        "tokens_per_second": rates,
        "model_flops_utilization": mfu,
        "planned_growth_mib": planned,
    }  # fmt: skip


def main() -> None:
    """Measure each setting, write its JSON and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", choices=SIDES, default=["grpo"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--groups", type=int, default=GROUPS, help="different prompts among the sequences"
    )
    parser.add_argument("--sequences", type=int, help="by default 16, or 4 with a large model")
    parser.add_argument("--responses", nargs=2, type=int, default=RESPONSES, metavar="TOKENS",
                        help="tokens of the shortest and of the longest response")  # fmt: skip
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="in a pass of ours")
    parser.add_argument(
        "--at-once", type=int, default=16, help="sequences in a pass of the other sides"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "small"])
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=["float32", "bfloat16"])
    parser.add_argument(
        "--prompts", nargs="+", type=int, default=[64, 512], help="tokens of a prompt"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES["grpo"], default=list(SIDES["grpo"]), help="beside ours"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed steps of each side, after two warm-up steps"
    )
    parser.add_argument(
        "--output",
        default=str(Path(__file__).parent / "results/train_step_{model}_{dtype}_{prompt}.json"),
        help="{loss} and {groups} have a place in it too",
    )
    args = parser.parse_args()
    failed: list[str] = []
    for loss, name, dtype, prompt in itertools.product(
        args.losses, args.models, args.dtypes, args.prompts
    ):
        sequences = args.sequences or SEQUENCES[name]
        size = {
            "sequences": sequences,
            "prompts": args.groups,
            "prompt": prompt,
            "responses": list(args.responses),
            "at_once": min(args.at_once, sequences),
            "micro_batch_tokens": args.micro_batch_tokens,
        }
        setting = MODELS[name] | size | {
            "loss": loss,
            "model": name,
            "dtype": dtype,
            "repeats": args.repeats,
            "groups": args.groups,
            "group_size": sequences // args.groups,
        }  # fmt: skip
        result = surroundings(PACKAGES) | card(args.device) | {"setting": setting}
        sides = [side for side in args.sides if side in SIDES[loss]]
        result |= measure(loss, name, dtype, size, args.repeats, sides, args.device)
        path = Path(
            args.output.format(
                model=name, dtype=dtype, prompt=prompt, loss=loss, groups=args.groups
            )
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        lines = [f"{loss} {name} {dtype}, {args.groups} prompts of {prompt} ({path})"]
        lines.append("          seconds  x ours    CPU s  x ours      MiB  x ours")
        columns = [f"median_{unit}" for unit in ("seconds", "cpu_seconds")] + ["peak_growth_mib"]
        ratios = ["seconds_over_ours", "cpu_over_ours", "memory_over_ours"]
        columns = [name for pair in zip(columns, ratios, strict=True) for name in pair]
        for side, *row in zip(
            result["seconds"], *(result[column].values() for column in columns), strict=True
        ):
            lines.append("{:8} {:9.4f} {:7.2f} {:8.4f} {:7.2f} {:8.0f} {:7.2f}".format(side, *row))
        lines += [f"{side:8} skipped: {reason}" for side, reason in result["skipped"].items()]
        lines += [f"{side:8} failed, or computes something else" for side in result["failed"]]
        sys.stdout.write("\n".join(lines) + "\n\n")
        failed += result["failed"]
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
