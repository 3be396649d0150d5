"""Two steps with each kind of option on one CUDA device that hosts all roles, without vLLM or Ray.

``GPU_CHECK_DEVICE=cpu`` runs them on a CPU.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from tests.support.configs import SMALL, compose_config
from torchrl_grpo.assembly.run import build
from torchrl_grpo.host.files import read_jsonl

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)

LOSS = "policy.loss._target_=torchrl_grpo.objectives."
FUNCTIONS = "tests/pairs/functions.py"
TEACHER = ("policy.teacher_coef=0.1", "teacher.model=starter")
SHAPES = ("env.repeats=4", "inference_model.max_new_tokens=8")
RUNS: dict[str, tuple[str, ...]] = {
    "kl_cov": ("algo=kl_cov", "train.micro_batch_tokens=80", "policy.kl_coef=0.05"),
    "clip_cov": ("algo=clip_cov", "train.epochs=2", "policy.entropy_coef=0.01"),
    "opo": ("algo=opo", "policy.entropy_coef=0.01", "policy.entropy_target=1.0"),
    "gspo_token": ("algo=gspo_token", "policy.rejection={geometric: 1.5, off_policy: 0.5}"),
    "decoupled_ppo": (
        "algo=decoupled_ppo",
        "policy.proximal=interpolated",
        "policy.behaviour_weight=mask",
        "policy.rejection={token_ratio: 2, dppo_tv: 0.2}",
    ),
    "ppo": ("algo=ppo", "policy.kl_coef=0.05", "train.mixed_precision=bf16"),
    "reinforce_pp": ("algo=reinforce_pp", "policy.kl_coef=0.05", "policy.kl_in_reward=true"),
    "gae": (
        "policy.advantage_level=token",
        "policy.gae_lambda=0.9",
        "policy.advantage_mean=batch",
        "policy.advantage_std=batch",
        "train.mixed_precision=fp16",
    ),
    "score_centering": (
        "policy.score_centering=true",
        "policy.proximal=recomputed",
        "train.optim_batch_size=null",
        "inference_model.top_k=20",
        "inference_model.top_p=0.9",
    ),
    "top_entropy": ("policy.top_entropy_quantile=0.5", "policy.proximal=recomputed"),
    "vespo": (f"{LOSS}VESPOLoss", "train.mixed_precision=bf16"),
    "gmpo": (f"{LOSS}GMPOLoss", "train_model.gradient_checkpointing=true"),
    "lora": ("train_model.lora.enabled=true", "train_model.lora.r=4", "policy.kl_coef=0.05"),
    "qlora": (
        "train_model.lora.enabled=true",
        "train_model.quantization=nf4",
        "policy.kl_coef=0.05",
    ),
    "reference_average": (
        "policy.kl_coef=0.05",
        "ref_model.refresh_every=1",
        "ref_model.decay=0.5",
    ),
    "offload": ("train_model.cpu_offload=true", "policy.kl_coef=0.05"),
    "exact": ("inference_model.exact=true", "optimizer.name=adamw_8bit"),
    "engine_bfloat16": ("inference_model.dtype=bfloat16", "policy.dynamic_sampling=true"),
    "distill": ("algo=distill", "teacher.model=starter"),
    "teacher_reverse": (*TEACHER, "policy.teacher_divergence=reverse", "policy.teacher_clip=2"),
    "teacher_top_k": (*TEACHER, "policy.teacher_divergence=jsd", "policy.teacher_top_k=8"),
    "own_average": ("policy.teacher_coef=0.1", "teacher.model=policy", "teacher.weights=ema"),
    "sft": ("algo=sft", "env.columns.completion=demo", "evaluation.num_prompts=0"),
    "sft_beside": ("policy.sft_coef=0.1", "env.columns.completion=demo"),
    "tools": (
        f"env.tools=[{FUNCTIONS}:calculate]",
        f"env.tool_parser={FUNCTIONS}:parse",
        "env.max_turns=3",
    ),
    "images": SHAPES,
    "images_lora": (*SHAPES, "train_model.lora.enabled=true", "policy.kl_coef=0.05"),
    "images_trained": (*SHAPES, "train_model.train_vision=true", "train.mixed_precision=bf16"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"question": f"{a}+{b}=?", "answer": str(a + b), "demo": f"#### {a + b}"}
        for a in range(10, 20)
        for b in range(10, 20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", RUNS)
def test_two_steps_run_on_the_device(name: str, data: Path, tmp_path: Path) -> None:
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    overrides = [*SMALL, "inference_model.backend=transformers", *RUNS[name]]
    if any("completion" in override for override in overrides):
        overrides += [
            f"env.dataset={data}",
            "env.columns.answer=answer",
            "env.test_fraction=0.2",
            "env.reward=gsm8k",
        ]
    config_name = "grpo_shapes" if name.startswith("images") else "grpo_arithmetic"
    run = build(compose_config(*overrides, name=config_name), tmp_path)
    try:
        run.fit()
    finally:
        run.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows][-1] >= 2
    assert all(math.isfinite(row["train/loss"]) for row in rows[1:])
    assert all(math.isfinite(row["train/grad_norm"]) for row in rows[1:])
