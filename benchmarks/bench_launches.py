"""Count what a step asks of a CUDA device, without one: launches, memory traffic, floating-point
operations and waits of a training step and of a token step of sampling.

    python benchmarks/bench_launches.py
    python benchmarks/bench_launches.py --model tiny --steps step token --sides ours

The code takes the path of a card while its tensors have no values (``meta_cuda.py``). A training step is
that of ``bench_train_step.py``, without the optimizer's update; ``update`` is what ours adds to it: the
gradient norm, AdamW and the measures of the step. A token step is one more token of each response in our
engine and in a Hugging Face model with its ``DynamicCache``, sampling included.

An operation of PyTorch counts as one launch, and as if it read its inputs and wrote its outputs once: a
lower bound, since some are several kernels, and caches are not modeled. What counts is the change from one
commit to the next, and the ratio to the others. TRL is skipped and named if it is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import bench_train_step as train
import torch
from machine import merge
from meta_cuda import DEVICE, MetaCuda
from shapes import MODELS
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.fused_decoder import FusedDecoder
from torchrl_grpo.generation.sampling import sample
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

Run = Callable[[], Any]


def make_model(name: str, dtype: str) -> PreTrainedModel:
    """Return a model without values, which is packed as one that was checked."""
    model = train.make_model(name, dtype, device=str(DEVICE))
    model.unpacked_because = ""
    return model


def make_batch(args: argparse.Namespace) -> dict[str, Tensor]:
    """Return the batch of ``bench_train_step.make_batch`` with other log-probs, on the CPU."""
    torch.manual_seed(1)
    vocab, (shortest, longest) = MODELS[args.model]["vocab_size"], args.responses
    prompts = torch.randint(2, vocab, (args.groups, args.prompt))
    prompts = prompts.repeat_interleave(args.sequences // args.groups, 0)
    lengths = torch.linspace(shortest, longest, args.sequences).round().long()
    mask = torch.arange(longest) < lengths[torch.randperm(args.sequences)][:, None]
    responses = torch.randint(2, vocab, (args.sequences, longest)) * mask
    return {
        "tokens": torch.cat([prompts, responses], 1),
        "mask": mask,
        "log_probs": -torch.ones(mask.shape) * mask,
        "advantage": torch.randn(args.sequences),
    }


def use_step(side: str, args: argparse.Namespace, folder: str) -> Run:
    """Return a training step of a side of ``bench_train_step.py``."""
    model, batch = make_model(args.model, args.dtype), make_batch(args)
    if side == "ours":
        limits = {"micro_batch_tokens": args.micro_batch_tokens}
    else:
        limits = {"at_once": min(args.at_once, args.sequences)}
        batch = {name: values.to(DEVICE) for name, values in batch.items()}
    step = train.SIDES["grpo"][side](model, batch, folder, **limits)

    def run() -> None:
        step()
        model.zero_grad()

    return run


def use_update(side: str, args: argparse.Namespace, folder: str) -> Run:
    """Return our optimizer step, after a training step that is not counted."""
    model = make_model(args.model, args.dtype)
    trainer = PolicyTrainer(
        GRPOLoss(TokenScorer(model)),
        model,
        make_optimizer(list(model.parameters()), lr=1e-6),
        optim_batch_size=args.sequences,
    )

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        trainer.optim_step(torch.zeros((), device=DEVICE), empty=False, why=str)

    return run


def use_token(side: str, args: argparse.Namespace, folder: str) -> Run:
    """Return a token step in the middle of the longest response."""
    model, rows, own = make_model(args.model, args.dtype), args.sequences, args.responses[1] // 2
    prompts = [torch.full((args.prompt,), 3, device=DEVICE) for _ in range(args.groups)]
    tokens = torch.full((rows,), 3, device=DEVICE)
    params = SamplingParams(max_new_tokens=args.responses[1])
    uniform = torch.zeros(rows, dtype=torch.float64, device=DEVICE)

    @torch.no_grad()
    def start() -> Any:
        if side == "ours":
            decoder = FusedDecoder(model)
            decoder.static = True
            batch: Any = decoder.start(args.responses[1])
            batch.add(prompts, rows // args.groups)
            return batch
        ids = torch.stack(prompts).repeat_interleave(rows // args.groups, 0)
        ids = torch.cat([ids, ids.new_full((rows, own), 3)], 1)
        return model(ids, use_cache=True, logits_to_keep=1).past_key_values

    started = start()

    @torch.no_grad()
    def run() -> None:
        if side == "ours":
            started._length = args.prompt + own  # as if so many tokens had been drawn
            sample(started.step(tokens), params, uniform)
        else:
            logits = model(tokens[:, None], past_key_values=started, use_cache=True).logits[:, -1]
            logits.float().softmax(-1).multinomial(1)
            started.crop(-1)

    return run


STEPS: dict[str, tuple[Callable[..., Run], tuple[str, ...]]] = {
    "step": (use_step, ("ours", "trl", "plain")),
    "update": (use_update, ("ours",)),
    "token": (use_token, ("ours", "plain")),
}
"""For each kind of step, what makes it and the sides that have it."""


def count(kind: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the counts of one step, after one that is not counted: the sums, and those of the
    operations with most launches.
    """
    use, _ = STEPS[kind]
    # The number of prompts is read from a batch that has no values.
    prompts = mock.patch.object(train, "count_prompts", lambda _: args.groups)
    with tempfile.TemporaryDirectory() as folder, prompts, MetaCuda() as card:
        run = use(side, args, folder)
        run()
        card.reset()
        run()
    most = {
        name: {"launches": launches, "gigabytes": card.traffic[name] / 1e9}
        for name, launches in card.launches.most_common(args.operations)
    }
    return card.totals() | {"waits_in": dict(card.waits), "operations": most}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen05")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--sides", nargs="+", default=["ours", "trl", "plain"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8, help="different prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--responses", nargs=2, type=int, default=(64, 512), metavar="TOKENS")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="in a pass of ours")
    parser.add_argument("--at-once", type=int, default=8, help="sequences in a pass of the others")
    parser.add_argument("--operations", type=int, default=15, help="to list of each step")
    parser.add_argument("--out", type=Path, help="JSON file, to which steps are added")
    return parser


def main() -> None:
    """Count each step of each side, print the sums, and write the counts."""
    args = parser().parse_args()
    setting = {name: value for name, value in vars(args).items() if name not in ("out", "steps")}
    for kind in args.steps:
        _, sides = STEPS[kind]
        counts: dict[str, Any] = {}
        for side in (side for side in sides if side in args.sides):
            try:
                counts[side] = count(kind, side, args)
            except ImportError as error:
                if side == "ours":
                    raise
                sys.stdout.write(f"{kind:7} {side:6} skipped: {error}\n")
                continue
            sums = (
                "{launches:9,} launches {gigabytes:9,.2f} GB {waits:4} waits {teraflops:8.3f} TFLOP"
            )
            sys.stdout.write(f"{kind:7} {side:6} {sums.format(**counts[side])}\n")
            sys.stdout.flush()
            if args.out is not None:
                merge({kind: {"setting": setting} | counts}, train.PACKAGES, args.out)


if __name__ == "__main__":
    main()
