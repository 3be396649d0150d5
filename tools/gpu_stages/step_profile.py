"""Record the seconds of a training step's phases with one CPU thread and with all of them, and of a
step without compiled functions; a step's kernels, the share of time in which the device was idle,
and how often the host waited for it; and a step with compiled layers. The table of kernels goes into
``profile.txt``.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerator import synchronize
from bench_train_step import make_model
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from gpu_stages.common import Stage, make_batch, make_trainer
from torchrl_grpo.learner import step as step_module
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models import compiled, head
from torchrl_grpo.models.compiled import Compiled
from torchrl_grpo.models.passes import Pass, make_passes

ROWS = 30
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item")


def main() -> None:
    """Run the stage."""
    stage = Stage()
    name = "tiny" if stage.is_rehearsal else "qwen05"
    model = make_model(name, str(stage.dtype).removeprefix("torch."), device=stage.device)
    small = {"groups": 2, "group": 2, "prompt": 8, "responses": (4, 8)}
    large = {"groups": 8, "group": 8, "prompt": 256, "responses": (64, 512)}
    size: dict[str, Any] = small if stage.is_rehearsal else large
    batch = make_batch(model.config.vocab_size, **size)
    optimizer = make_optimizer(list(model.parameters()), lr=1e-6)
    sequences = size["groups"] * size["group"]
    limits = {"sequences": sequences, "micro_batch_tokens": 16384}
    trainer = make_trainer(model, optimizer, **limits)
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        with stage.part(f"threads: {count}") as figures:
            start = time.perf_counter()
            trainer.train_step(batch)
            synchronize(stage.device)
            figures["first_step_s"] = time.perf_counter() - start
            figures["step_s"] = stage.seconds(lambda: trainer.train_step(batch), 3)
            start = time.process_time()
            trainer.train_step(batch)
            synchronize(stage.device)
            figures["host's CPU seconds"] = time.process_time() - start
            with phases(trainer, stage.device) as seconds:
                trainer.train_step(batch)
            figures |= {f"{phase}_s": value for phase, value in seconds.items()}
    torch.set_num_threads(1)
    with stage.part("eager head") as figures, mock.patch.object(compiled, "DEVICES", ()):
        figures["step_s"] = stage.seconds(lambda: trainer.train_step(batch), 3)
    with stage.part("step") as figures:
        activities = [ProfilerActivity.CPU]
        if not stage.is_rehearsal:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            figures["profiled_step_s"] = stage.seconds(lambda: trainer.train_step(batch), 1)
        averages = profiler.key_averages()
        order = "self_cpu_time_total" if stage.is_rehearsal else "self_device_time_total"
        table = averages.table(sort_by=order, row_limit=ROWS)
        Path(os.environ["TMPDIR"], "profile.txt").write_text(table)
        waits = dict.fromkeys(WAITS, 0)
        waits |= {event.key: event.count for event in averages if event.key in WAITS}
        figures["waits_in_two_steps"] = waits
        if not stage.is_rehearsal:
            figures |= idle_share(profiler)
    # The last part, because the layers stay compiled. A rehearsal runs the graphs as they are.
    backend = "aot_eager" if stage.is_rehearsal else "inductor"
    compiler = mock.patch.object(
        torch, "compile", functools.partial(torch.compile, backend=backend)
    )
    with stage.part("compiled layers") as figures, compiler:
        figures["plain_step_s"] = stage.seconds(lambda: trainer.train_step(batch), 3)
        plain = gradient(trainer, batch)
        again = (gradient(trainer, batch) - plain).norm() / plain.norm()
        trainer = make_trainer(model, optimizer, **limits, compiles=True)
        start = time.perf_counter()
        difference = (gradient(trainer, batch) - plain).norm() / plain.norm()
        figures["first_gradient_s"] = time.perf_counter() - start
        figures["gradient's relative difference"] = difference.item()
        figures["of two plain ones"] = again.item()
        figures["step_s"] = stage.seconds(lambda: trainer.train_step(batch), 3)
        figures["graphs"] = counters["stats"]["unique_graphs"]
        layers = (
            m.forward for m in model.modules() if isinstance(vars(m).get("forward"), Compiled)
        )
        parts = (next(layers), head._add_chunk, head._chunk_gradient)
        if problems := [problem for part in parts for problem in part.problems]:
            raise RuntimeError(problems[0])
        if not difference < (1e-4 if stage.is_rehearsal else 0.1):
            raise RuntimeError(f"compiled layers have another gradient: {figures}")
    stage.end()


def gradient(trainer: PolicyTrainer, batch: Any) -> torch.Tensor:
    """Return the gradient of a step in float32, on the CPU, without an update of the weights."""
    rows = trainer._prepare(batch)
    passes = make_passes(
        trainer.loss.actor_network,
        rows,
        trainer.micro_batch_tokens,
        trainer.rank,
        trainer.world_size,
    )
    trainer._accumulate_gradients(passes, batch)
    gradients = [p.grad.flatten().float().cpu() for p in trainer.parameters if p.grad is not None]
    trainer.optimizer.zero_grad()
    return torch.cat(gradients)


@contextmanager
def phases(trainer: PolicyTrainer, device: str) -> Iterator[dict[str, float]]:
    """Context with the seconds of each phase of the steps in it. The device finishes each phase
    before the next begins, so their sum is more than the time of a step.
    """
    seconds = defaultdict[str, float](float)

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(device)
                seconds[phase] += time.perf_counter() - start

        return call

    def lay_out(each: Pass) -> None:
        assert each.rows is not None and each.layout is not None  # both are made when asked for

    forward_backward = PolicyTrainer.forward_backward

    def pass_in_phases(trainer: PolicyTrainer, each: Pass, batch: Any) -> Any:
        timed("layout", lay_out)(each)
        return forward_backward(trainer, each, batch)

    loss = type(trainer.loss)
    owners: tuple[tuple[Any, str, str], ...] = (
        (PolicyTrainer, "_prepare", "prepare"),
        (step_module, "make_passes", "passes"),
        (loss, "score", "forward"),
        (loss, "of_rows", "loss"),
        (torch.Tensor, "backward", "backward"),
        (PolicyTrainer, "optim_step", "optimizer"),
    )
    with ExitStack() as stack:
        for owner, name, phase in owners:
            function = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, timed(phase, function)))
        stack.enter_context(mock.patch.object(PolicyTrainer, "forward_backward", pass_in_phases))
        yield seconds


def idle_share(profiler: Any) -> dict[str, float]:
    """Return the seconds from the first kernel to the last, and the share without a kernel."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    return {"kernels_s": busy / 1e6, "device_s": whole / 1e6, "idle_share": 1 - busy / whole}


if __name__ == "__main__":
    main()
