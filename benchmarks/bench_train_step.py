"""How long one training step takes, and how much memory: ours against TRL, TorchRL and plain
PyTorch, on Linux CPUs.

    python benchmarks/bench_train_step.py
    python benchmarks/bench_train_step.py --models qwen05 --dtypes bfloat16 --repeats 5
    python benchmarks/bench_train_step.py --losses sft distill --groups 16

A step is forward, loss, backward and zero_grad, without the optimizer's update. All sides have the
same random Qwen2 weights and the same batch: groups of responses of 32 to 128 tokens that share a
prompt of 64 or 512. The loss is clipped GRPO without KL, a mean over the tokens of a sequence and
then over sequences; or (``--losses``) supervised training; or the reverse KL to a teacher of the
same shape over the whole vocabulary, whose forward pass is part of the step; both a mean over all
tokens. ``padded`` is our own step where each sequence is padded and has its prompt computed. First
the loss and gradient of each side are compared with ours, then the sides take turns, in an order
that rotates. Each side is a process of its own, with a peak memory of its own: its growth over what
was resident before the first step. All inherit the same OMP_NUM_THREADS and settings of the
allocator (MALLOC_MMAP_THRESHOLD_, ...), and the result states them. A missing peer is left out and
named. Anything else that runs on the machine spoils the times: OpenMP's threads wait for one
another by spinning. With OMP_NUM_THREADS=1 the CPU time of a step, which is given beside, suffers
least.
"""

from __future__ import annotations

import argparse
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
from machine import surroundings
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo.learner.step import GRPOTrainer
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import DemonstrationLoss, GRPOLoss
from torchrl_grpo.transforms.teacher import TeacherStates

Step = Callable[[], float]
Use = Callable[[PreTrainedModel, dict[str, Tensor], str], Step]
# 0.3M, 30M and Qwen2.5-0.5B's own shape.
MODELS: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
    },
    "small": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    },
    "qwen05": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
    },
}
HEADS = {"tiny": 4, "small": 8, "qwen05": 14}
GROUP_SIZE = {"tiny": 8, "small": 8, "qwen05": 2}
PACKAGES = ("torch", "transformers", "tensordict", "torchrl", "trl")
GROUPS, MIN_RESPONSE, MAX_RESPONSE = 2, 32, 128
CLIP_EPSILON = 0.2
LOG_RATIOS = torch.tensor([-0.4, -0.05, 0.05, 0.4])
"""Log-ratios of the batch, well inside and well outside the clip range: rounding clips no token on
one side alone.
"""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}
"""Largest difference allowed: of gradients, relative (norm of the difference over norm); of losses,
absolute.
"""


def make_model(name: str, dtype: str, seed: int = 0) -> PreTrainedModel:
    """A random Qwen2 model, the same in every process."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "tie_word_embeddings": True,
        "use_cache": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = Qwen2Config(
        **MODELS[name], num_attention_heads=HEADS[name], num_key_value_heads=2, **settings
    )
    return Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


def response_log_probs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Log-probs of the response tokens [B, Tr] from their full logits: plain PyTorch."""
    logits = model(tokens, logits_to_keep=MAX_RESPONSE + 1).logits[:, :-1]
    logits, targets = logits.float().flatten(0, 1), tokens[:, -MAX_RESPONSE:].flatten()
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none").view(
        len(tokens), -1
    )


def make_batch(name: str, dtype: str, prompt: int, path: str, groups: int = GROUPS) -> None:
    """Writes the batch, padded on the right: tokens [B, T], mask and behaviour log-probs [B, Tr],
    advantages [B].
    """
    model = make_model(name, dtype)
    torch.manual_seed(1)
    size, vocab = GROUPS * GROUP_SIZE[name], MODELS[name]["vocab_size"]
    prompts = torch.randint(2, vocab, (groups, prompt)).repeat_interleave(size // groups, 0)
    lengths = torch.linspace(MIN_RESPONSE, MAX_RESPONSE, size).round().long()[torch.randperm(size)]
    mask = torch.arange(MAX_RESPONSE) < lengths[:, None]
    tokens = torch.cat([prompts, torch.randint(2, vocab, (size, MAX_RESPONSE)) * mask], 1)
    with torch.no_grad():
        log_probs = (
            response_log_probs(model, tokens)
            - LOG_RATIOS[torch.randint(len(LOG_RATIOS), mask.shape)]
        )
    torch.save(
        {
            "tokens": tokens,
            "mask": mask,
            "log_probs": log_probs * mask,
            "advantage": torch.randn(size),
        },
        path,
    )


def ragged(batch: dict[str, Tensor], advantage_shape: tuple[int, ...]) -> TensorDict:
    """The batch as a collector gives it: a lazy stack of sequences under TorchRL's keys."""
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
    """What the peers ask for and never use: they are given tokens."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def backward(loss: Tensor) -> float:
    """Runs backward and gives the loss."""
    loss.backward()
    return loss.item()


class Trainer(GRPOTrainer):
    """A trainer whose optimizer changes nothing."""

    def optim_step(self, loss: Tensor, **how: Any) -> dict[str, float]:
        return {"loss": float(loss)}


def use_ours(
    model: PreTrainedModel, batch: dict[str, Tensor], folder: str, **settings: Any
) -> Step:
    """``GRPOTrainer.train_step``: padding, normalisation, micro-batches and metrics, but no
    optimizer step.
    """
    return _step(GRPOLoss(TokenScorer(model), clip_epsilon=CLIP_EPSILON), model, batch, **settings)


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
    data = ragged(batch, (1,))
    return lambda: trainer.train_step(score(data))["loss"]


def use_our_sft(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """The same step with the loss of algo=sft."""
    batch["advantage"].fill_(1.0)
    return _step(DemonstrationLoss(TokenScorer(model), aggregation="token_mean"), model, batch)


def use_our_distillation(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """The teacher's states, and then the same step with the loss of
    policy.teacher_divergence=reverse alone.
    """
    teacher, scorer = make_teacher(model), TokenScorer(model)
    batch["advantage"].zero_()
    scorer.distill_from(Teacher(1.0, teacher.get_output_embeddings().weight))
    loss = GRPOLoss(scorer, aggregation="token_mean", teacher_coeff=1.0)
    return _step(loss, model, batch, TeacherStates(TokenScorer(teacher)))


def make_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """Another random model of a model's shape, frozen."""
    name = next(
        name for name, shape in MODELS.items() if shape["hidden_size"] == model.config.hidden_size
    )
    return make_model(name, str(model.dtype).removeprefix("torch."), seed=2).requires_grad_(False)


def padded(use: Use) -> Use:
    """A step of ours where each sequence is padded and has its prompt computed."""

    def use_padded(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
        TokenScorer.packs = lambda self, longest: False  # type: ignore[method-assign]
        return use(model, batch, folder)

    return use_padded


def use_trl(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """TRL's ``GRPOTrainer.compute_loss`` and backward, beta 0."""
    import trl
    from datasets import Dataset

    size = len(batch["tokens"])
    settings: dict[str, Any] = PLAIN | {
        "per_device_train_batch_size": size,
        "max_completion_length": MAX_RESPONSE,
    }
    settings |= {
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon": CLIP_EPSILON,
        "num_generations": size // GROUPS,
    }
    data = Dataset.from_dict({"prompt": ["<eos>"] * size})
    trainer = trl.GRPOTrainer(
        model, len, trl.GRPOConfig(folder, **settings), data, processing_class=make_tokenizer()
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()  # as in its own loop; the model has no dropout
    inputs = trl_inputs(batch)
    inputs |= {"old_per_token_logps": batch["log_probs"], "advantages": batch["advantage"]}
    return lambda: backward(trainer.compute_loss(trainer.model, inputs))


PLAIN = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
"""Settings of TRL for a step that does what ours does."""


def trl_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What TRL's trainers that sample give to ``compute_loss``."""
    prompts, responses = batch["tokens"][:, :-MAX_RESPONSE], batch["tokens"][:, -MAX_RESPONSE:]
    inputs = {"prompt_ids": prompts, "completion_ids": responses}
    return inputs | {
        "prompt_mask": torch.ones_like(prompts),
        "completion_mask": batch["mask"].long(),
    }


def use_trl_sft(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """TRL's ``SFTTrainer.compute_loss`` and backward, on the loss of the response alone."""
    import trl
    from datasets import Dataset

    labels = batch["tokens"].clone()
    labels[:, -MAX_RESPONSE:][~batch["mask"]] = -100
    labels[:, :-MAX_RESPONSE] = -100
    attention = torch.cat([torch.ones_like(labels[:, :-MAX_RESPONSE]), batch["mask"].long()], 1)
    rows = {"input_ids": batch["tokens"].tolist(), "labels": labels.tolist()}
    settings: dict[str, Any] = PLAIN | {"dataset_kwargs": {"skip_prepare_dataset": True}}
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
    """TRL's ``DistillationTrainer.compute_loss`` and backward: the reverse KL, in its own chunks of
    the vocabulary.
    """
    import trl
    from datasets import Dataset

    size = len(batch["tokens"])
    settings: dict[str, Any] = PLAIN | {
        "per_device_train_batch_size": size,
        "max_completion_length": MAX_RESPONSE,
    }
    config = trl.DistillationConfig(folder, beta=1.0, **settings)
    data = Dataset.from_dict({"prompt": ["<eos>"] * size})
    teacher, tokenizer = make_teacher(model), make_tokenizer()
    trainer = trl.DistillationTrainer(model, teacher, config, data, processing_class=tokenizer)
    model.train()
    inputs = trl_inputs(batch)
    return lambda: backward(trainer.compute_loss(trainer.model, inputs))


def use_torchrl(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """TorchRL's ``GRPOLoss`` over a ``TransformersWrapper``. Only ``loss_*`` is summed: the rest
    are metrics.
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


def use_plain(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Plain PyTorch: one padded forward, and the full logits of the response alone."""
    mask, advantage = batch["mask"], batch["advantage"][:, None]

    def step() -> float:
        ratio = (response_log_probs(model, batch["tokens"]) - batch["log_probs"]).exp()
        surrogate = torch.minimum(
            ratio * advantage, ratio.clamp(1 - CLIP_EPSILON, 1 + CLIP_EPSILON) * advantage
        )
        return backward(-((surrogate * mask).sum(1) / mask.sum(1)).mean())

    return step


def use_plain_sft(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Plain PyTorch: cross-entropy of the response."""
    mask = batch["mask"]
    return lambda: backward(-(response_log_probs(model, batch["tokens"]) * mask).sum() / mask.sum())


def use_plain_distillation(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """Plain PyTorch: the reverse KL of the full logits of the response."""
    teacher, mask = make_teacher(model), batch["mask"]

    def log_probs(of: PreTrainedModel) -> Tensor:
        logits = of(batch["tokens"], logits_to_keep=MAX_RESPONSE + 1).logits[:, :-1][mask]
        return logits.float().log_softmax(-1)

    def step() -> float:
        with torch.no_grad():
            wanted = log_probs(teacher)
        own = log_probs(model)
        return backward((own.exp() * (own - wanted)).sum() / mask.sum())

    return step


def use_products(model: PreTrainedModel, batch: dict[str, Tensor], folder: str) -> Step:
    """The matrix products of the algorithm alone, with each prompt once and no padding: a limit for
    every side.

    Three for each linear layer (forward, and the gradients of input and weight) and for the head
    over the responses; no attention, nothing between the products, and the head's logits at once.
    """
    sampled = int(batch["mask"].sum())
    rows = sampled + GROUPS * (batch["tokens"].shape[1] - batch["mask"].shape[1])
    products = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            height, weight = sampled if name == "lm_head" else rows, module.weight.detach()
            products.append(
                (weight, *(torch.randn(height, size).to(weight) for size in reversed(weight.shape)))
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
"""By the loss, what prepares the step of a side."""


def peak_mib(reset: bool = False) -> float:
    """This process's peak memory, after setting the kernel's record of it back to what is resident
    now or not.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(side: str, loss_name: str, name: str, dtype: str, folder: str, pipe: Connection) -> None:
    """A side's process: prepares, runs a first step, leaves its gradients in a file, then one step
    for each message.
    """
    try:
        model = make_model(name, dtype)
        step = SIDES[loss_name][side](model, torch.load(f"{folder}/batch.pt"), folder)
    except ImportError as error:
        if side == "ours":
            raise
        return pipe.send(str(error))
    before = peak_mib(reset=True)
    loss, peak = step(), peak_mib()
    torch.save(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        f"{folder}/{side}.pt",
    )
    model.zero_grad()
    peak_mib(reset=True)
    pipe.send(loss)
    while pipe.recv():
        start, cpu = time.perf_counter(), time.process_time()
        step()
        model.zero_grad()
        pipe.send((time.perf_counter() - start, time.process_time() - cpu))
    pipe.send(max(peak, peak_mib()) - before)


def compare(side: str, losses: dict[str, float], folder: str) -> dict[str, float]:
    """Differences of a side's loss (absolute) and gradient (relative, over all weights) from ours."""
    ours, other = (torch.load(f"{folder}/{name}.pt", mmap=True) for name in ("ours", side))
    difference = math.hypot(
        *(float((other[name].float() - grad.float()).norm()) for name, grad in ours.items())
    )
    norm = math.hypot(*(float(grad.float().norm()) for grad in ours.values()))
    return {"loss": abs(losses[side] - losses["ours"]), "gradient": difference / norm}


def measure(
    loss: str, name: str, dtype: str, prompt: int, groups: int, repeats: int, sides: Sequence[str]
) -> dict[str, Any]:
    """One setting: the check, then the times and the memory of all sides."""
    context = multiprocessing.get_context("spawn")
    result: dict[str, Any] = {
        "skipped": {},
        "tolerance": TOLERANCE[dtype],
        "difference_from_ours": {},
    }
    pipes, losses = dict[str, Connection](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        maker = context.Process(
            target=make_batch, args=(name, dtype, prompt, f"{folder}/batch.pt", groups)
        )
        maker.start()  # not in this process: a child's peak begins at its parent's size
        maker.join()
        for side in ("ours", *(side for side in sides if side != "ours")):
            pipe, theirs = context.Pipe()
            context.Process(
                target=work, args=(side, loss, name, dtype, folder, theirs), daemon=True
            ).start()
            theirs.close()
            first = pipe.recv()  # EOFError: the side failed, and has said why
            if isinstance(first, str):
                result["skipped"][side] = first
                continue
            pipes[side], losses[side] = pipe, first
            if side == "products":
                continue
            difference = result["difference_from_ours"][side] = compare(side, losses, folder)
            if not max(difference.values()) <= TOLERANCE[dtype]:
                raise RuntimeError(
                    f"{side} computes something else, {name} {dtype}: {difference}, losses {losses}."
                )
    order, seconds, cpu = (
        list(pipes),
        {side: list[float]() for side in pipes},
        {side: list[float]() for side in pipes},
    )
    for i in range(repeats + 1):
        for side in order[i % len(order) :] + order[: i % len(order)]:
            pipes[side].send(True)
            took = pipes[side].recv()
            if i > 0:  # the first round is a warm-up
                seconds[side].append(took[0])
                cpu[side].append(took[1])
    for pipe in pipes.values():
        pipe.send(False)
    memory = {side: pipe.recv() for side, pipe in pipes.items()}
    medians, cpu_medians = (
        {side: statistics.median(times) for side, times in some.items()} for some in (seconds, cpu)
    )
    return result | {
        "seconds": seconds,
        "median_seconds": medians,
        "median_cpu_seconds": cpu_medians,
        "cpu_over_ours": {side: value / cpu_medians["ours"] for side, value in cpu_medians.items()},
        "peak_growth_mib": memory,
        "seconds_over_ours": {side: value / medians["ours"] for side, value in medians.items()},
        "memory_over_ours": {side: value / memory["ours"] for side, value in memory.items()},
    }


def main() -> None:
    """Measures each setting, writes its JSON and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", choices=SIDES, default=["grpo"])
    parser.add_argument(
        "--groups", type=int, default=GROUPS, help="different prompts among the sequences"
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
        "--repeats", type=int, default=5, help="timed steps of each side, after two others"
    )
    parser.add_argument(
        "--output",
        default=str(Path(__file__).parent / "results/train_step_{model}_{dtype}_{prompt}.json"),
        help="{loss} and {groups} have a place in it too",
    )
    args = parser.parse_args()
    for loss, name, dtype, prompt in itertools.product(
        args.losses, args.models, args.dtypes, args.prompts
    ):
        setting = MODELS[name] | {
            "model": name,
            "dtype": dtype,
            "repeats": args.repeats,
            "groups": args.groups,
        }
        size = GROUPS * GROUP_SIZE[name] // args.groups
        setting |= {
            "group_size": size,
            "prompt": prompt,
            "responses": [MIN_RESPONSE, MAX_RESPONSE],
            "loss": loss,
        }
        result = surroundings(PACKAGES) | {"setting": setting}
        sides = [side for side in args.sides if side in SIDES[loss]]
        result |= measure(loss, name, dtype, prompt, args.groups, args.repeats, sides)
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
        sys.stdout.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
