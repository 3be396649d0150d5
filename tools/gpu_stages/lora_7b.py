"""Measure a LoRA step of a model of Qwen2.5-7B's shape in bfloat16, and compare its memory with the
plan's.
"""

from __future__ import annotations

from typing import Any

import torch
from bench_train_step import make_model

from gpu_stages.common import Stage, make_batch, make_trainer
from torchrl_grpo.learner.optimizer import make_optimizer
from torchrl_grpo.models import loading
from torchrl_grpo.models.memory import step_memory


def main() -> None:
    """Run the stage."""
    stage = Stage()
    small = {"groups": 2, "group": 2, "prompt": 8, "responses": (4, 8)}
    large = {"groups": 4, "group": 8, "prompt": 256, "responses": (64, 512)}
    size: dict[str, Any] = small if stage.is_rehearsal else large
    with stage.part("step") as figures:
        base = make_model(
            "tiny" if stage.is_rehearsal else "qwen7",
            str(stage.dtype).removeprefix("torch."),
            device=stage.device,
        )
        model: Any = loading.add_lora(base, r=16, alpha=32, target_modules="all-linear")
        loading.enable_gradient_checkpointing(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        trainer = make_trainer(
            model,
            make_optimizer(trained, lr=1e-6),
            sequences=size["groups"] * size["group"],
            micro_batch_tokens=8192,
        )
        batch = make_batch(base.config.vocab_size, **size)
        figures["step_s"] = stage.seconds(lambda: trainer.train_step(batch), 2)
        figures["peak_gib"] = stage.peak_gib(lambda: trainer.train_step(batch))
        planned = step_memory(loading.shape_of(model), trainer.setup())
        figures["planned_gib"] = planned.peak / 2**30
        figures["resting_gib"] = planned.resting / 2**30
        if not stage.is_rehearsal:
            figures["measured_resting_gib"] = torch.cuda.memory_allocated() / 2**30
    stage.end()


if __name__ == "__main__":
    main()
