"""Time the alternatives in a training step: of the LM head, attention, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from bench_train_step import make_model
from torch import Tensor

from gpu_stages.common import Stage, make_batch
from torchrl_grpo import keys
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.models import attention, head
from torchrl_grpo.models.scoring import TokenScorer

CHUNKS = (2**22, 2**23, 2**24, 2**25, 2**26, 2**27)


def main() -> None:
    """Run the stage."""
    stage = Stage()
    name = "tiny" if stage.is_rehearsal else "qwen05"
    model = make_model(name, str(stage.dtype).removeprefix("torch."), device=stage.device)
    scorer = TokenScorer(model)
    small = {"groups": 2, "group": 2, "prompt": 8, "responses": (4, 8)}
    large = {"groups": 4, "group": 8, "prompt": 256, "responses": (64, 512)}
    size: dict[str, Any] = small if stage.is_rehearsal else large
    batch = make_batch(model.config.vocab_size, **size)
    tokens, mask = (
        torch.nn.utils.rnn.pad_sequence([row[key] for row in batch.unbind(0)], batch_first=True)
        for key in (keys.FULL, keys.ASSISTANT_MASK)
    )
    tokens, mask = tokens.to(stage.device), mask.to(stage.device)

    def step() -> None:
        scorer.score(tokens, mask)[0].sum().backward()
        model.zero_grad()

    with stage.part("head_chunks") as figures:
        for elements in CHUNKS:
            with mock.patch.dict(
                head.MAX_CHUNK_ELEMENTS, dict.fromkeys(head.MAX_CHUNK_ELEMENTS, elements)
            ):
                figures[f"{elements} logits, s"] = stage.seconds(step, 3)
                figures[f"{elements} logits, peak GiB"] = stage.peak_gib(step)
    with stage.part("head_elementwise") as figures:
        measure_elementwise(stage, figures)
    with stage.part("attention") as figures:
        figures["packed, s"] = stage.seconds(step, 3)
        with mock.patch.object(attention, "_has_varlen", return_value=False):
            figures["one call per sequence, s"] = stage.seconds(step, 3)
    for optimizer in ("adamw", "adamw_8bit"):
        with stage.part(optimizer) as figures:
            measure_optimizer(stage, model, optimizer, figures)
    stage.end()


def normalize(logits: Tensor, most: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, ...]:
    """Return the elementwise part of a chunk of ``models.head``'s forward pass."""
    new = torch.maximum(most, logits.amax(-1))
    exps = (logits - new[:, None]).exp()
    shrink = (most - new).exp()
    return new, total * shrink + exps.sum(-1), weighted * shrink + (exps * logits).sum(-1)


def measure_elementwise(stage: Stage, figures: dict[str, Any]) -> None:
    """Time ``normalize`` plain and compiled, and compare the results."""
    rows, width = (16, 64) if stage.is_rehearsal else (4096, 8192)
    logits = torch.randn(rows, width, device=stage.device)
    sums = torch.zeros(3, rows, device=stage.device).unbind(0)
    ways: dict[str, Callable[..., Any]] = {"plain": normalize}
    if not stage.is_rehearsal:
        ways["compiled"] = torch.compile(normalize)
    for name, function in ways.items():
        figures[f"{name}, s"] = stage.seconds(partial(function, logits, *sums))
        figures[f"{name}, sum"] = sum(value.sum().item() for value in function(logits, *sums))


def measure_optimizer(stage: Stage, model: Any, name: Any, figures: dict[str, Any]) -> None:
    """Time an update, and record the memory of its moments."""
    if stage.is_rehearsal and name == "adamw_8bit":
        figures["skipped"] = "it is compiled, which takes long on a CPU"
        return
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = make_optimizer(list(model.parameters()), name, lr=1e-6)
    before = 0 if stage.is_rehearsal else torch.cuda.memory_allocated()
    figures["s"] = stage.seconds(optimizer.step, 3)
    if not stage.is_rehearsal:
        figures["moments, GiB"] = (torch.cuda.memory_allocated() - before) / 2**30
    model.zero_grad()


if __name__ == "__main__":
    main()
