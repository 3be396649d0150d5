"""Common code of the stages: command line, figures, and batches to train on."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerator import synchronize
from bench_train_step import ragged
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.generation.base import Completion
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss

ROOT = Path(__file__).resolve().parents[2]
MEAN_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest mean distance from the scorer's log-probs; random weights of another seed give 0.8."""


class Stage:
    """A stage's device, and its figures, which are written to a file whenever one is added.

    Attributes:
        device: ``cuda`` or ``cpu``.
        is_rehearsal: whether to use small shapes, because the device is a CPU.
        dtype: to compute in: bfloat16, which CPUs may lack kernels for, or float32.
    """

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
        parser.add_argument("--out", type=Path, required=True, help="file for the figures")
        args = parser.parse_args()
        self.device: str = args.device
        self.is_rehearsal = self.device == "cpu"
        self.dtype = torch.float32 if self.is_rehearsal else torch.bfloat16
        self._out: Path = args.out
        self._figures: dict[str, Any] = {}
        self._failed = False

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a dict for figures; if the part raises, record the error and continue the stage."""
        figures = self._figures[name] = {}
        start = time.perf_counter()
        try:
            yield figures
        except Exception as error:
            traceback.print_exc()
            figures["error"] = f"{type(error).__name__}: {error}"[:500]
            self._failed = True
        figures["part_seconds"] = round(time.perf_counter() - start, 2)
        print(name, figures)
        self._out.write_text(json.dumps(self._figures))
        if not self.is_rehearsal:
            torch.cuda.empty_cache()

    def seconds(self, function: Callable[[], Any], repeats: int = 5) -> float:
        """Return the median time of a function after a warm-up call."""
        times = []
        for _ in range(repeats + 1):
            synchronize(self.device)
            start = time.perf_counter()
            function()
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def peak_gib(self, function: Callable[[], Any]) -> float | None:
        """Call a function; return the peak memory of the CUDA device during the call."""
        if self.is_rehearsal:
            function()
            return None
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**30

    def benchmark(self, name: str, *arguments: str, out: str) -> dict[str, Any]:
        """Run a benchmark of ``benchmarks/`` and return its JSON.

        Args:
            name: of the file.
            arguments: of its command line.
            out: its option for the JSON's path.

        Raises:
            RuntimeError: it failed and wrote nothing.
        """
        path = self._out.with_name(f"{name}.json")
        path.unlink(missing_ok=True)
        command = [sys.executable, str(ROOT / "benchmarks" / name), "--device", self.device]
        code = subprocess.run([*command, *arguments, out, str(path)]).returncode
        if not path.exists():
            raise RuntimeError(f"{name} {' '.join(arguments)} ended with {code}")
        result: dict[str, Any] = json.loads(path.read_text()) | {"exit_code": code}
        self._failed |= code != 0
        return {
            key: value for key, value in result.items() if key not in ("machine", "environment")
        }

    def end(self) -> None:
        """End the process, with exit code 1 if a part has failed."""
        sys.exit(self._failed)


def log_prob_gaps(
    stage: Stage,
    model: Any,
    prompts: Sequence[Tensor],
    groups: Sequence[Sequence[Completion]],
) -> Tensor:
    """Return the distances of responses' log-probs from those of a model's scorer, [N, T].

    Args:
        stage: its device has the model.
        model: of the scorer.
        prompts: of the same length.
        groups: responses of the same length to each prompt.
    """
    rows = [
        torch.cat([prompt, done.tokens])
        for prompt, group in zip(prompts, groups, strict=True)
        for done in group
    ]
    sampled = torch.stack([done.log_probs for group in groups for done in group])
    new, tokens = sampled.shape[1], torch.stack(rows)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -new:] = True
    scorer, scored = TokenScorer(model), list[Tensor]()
    with torch.no_grad():
        for some, some_mask in zip(tokens.split(16), mask.split(16), strict=True):
            log_probs, _ = scorer.score(some.to(stage.device), some_mask.to(stage.device))
            scored.append(log_probs[:, -new:].float().cpu())
    return (sampled - torch.cat(scored)).abs()


def make_batch(
    vocabulary: int, *, groups: int, group: int, prompt: int, responses: tuple[int, int]
) -> TensorDict:
    """Return groups of random sequences, with advantages and uniform behavior log-probs.

    Args:
        vocabulary: number of tokens.
        groups: number of prompts.
        group: responses to each.
        prompt: tokens of a prompt.
        responses: tokens of the shortest and of the longest response.
    """
    generator = torch.Generator().manual_seed(0)
    rows, longest = groups * group, responses[1]
    prompts = torch.randint(2, vocabulary, (groups, prompt), generator=generator)
    lengths = torch.linspace(responses[0], longest, rows).round().long()
    mask = torch.arange(longest) < lengths[:, None]
    answers = torch.randint(2, vocabulary, (rows, longest), generator=generator)
    batch = {
        "tokens": torch.cat([prompts.repeat_interleave(group, 0), answers], 1),
        "mask": mask,
        "log_probs": torch.full(mask.shape, -math.log(vocabulary)),
        "advantage": torch.randn(rows, generator=generator),
    }
    return ragged(batch, (1,))


def make_trainer(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    sequences: int,
    micro_batch_tokens: int,
    compiles: bool = False,
) -> PolicyTrainer:
    """Return a trainer with the default loss."""
    return PolicyTrainer(
        GRPOLoss(TokenScorer(model)),
        model,
        optimizer,
        optim_batch_size=sequences,
        micro_batch_tokens=micro_batch_tokens,
        compiles=compiles,
    )
