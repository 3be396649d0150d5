"""Record the kernels of one training step, the share of time in which the device was idle, and how
often the host waited for it. The table goes into ``profile.txt``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench_train_step import make_model
from torch.profiler import ProfilerActivity, profile

from gpu_stages.common import Stage, make_batch, make_trainer
from torchrl_grpo.learner.optimizer import make_optimizer

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
    trainer = make_trainer(model, optimizer, sequences=sequences, micro_batch_tokens=16384)
    with stage.part("step") as figures:
        figures["step_s"] = stage.seconds(lambda: trainer.train_step(batch), 2)
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
    stage.end()


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
