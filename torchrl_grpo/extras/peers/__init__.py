"""Keys of other libraries, one file each, and ours that mean the same.

``python -m torchrl_grpo migrate`` translates whole files by these tables; an error about an unknown
key looks it up here.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_FILES = (
    "trl",
    "trl_sampling",
    "trl_common",
    "verl",
    "prime_rl",
    "areal",
    "torchrl",
    "trl_sft",
    "former",
)
"""Tables in which an unknown key is looked up, in this order."""
_STEPS = dict.fromkeys(("batches", "optimizer_steps"), ("train.total_steps",))
_DEVICES = (
    "inference_model.num_devices",
    "inference_model.tensor_parallel_size",
    "train_model.num_devices",
)
DETERMINES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("per_device", "accumulation", "sync_steps", "steps_per_generation"), ("env.num_envs",)),
    **dict.fromkeys(("batch_sequences", "batch_prompts", "step_batches"), ("env.num_envs",)),
    **dict.fromkeys(("step_sequences", "step_prompts", "minibatches"), ("train.optim_batch_size",)),
    **dict.fromkeys(("devices", "nodes", "node_devices", "allocation", "train_allocation",
                     "engine_allocation"), _DEVICES),
    **dict.fromkeys(("engine_devices", "engine_nodes", "engine_data_parallel", "engine_replicas", "prefill_nodes",
                     "decode_nodes", "prefill_replicas", "decode_replicas"), ("inference_model.num_devices",)),
    **dict.fromkeys(("rollout_devices", "rollout_nodes"), ("inference_model.num_devices",)),
    **dict.fromkeys(("train_devices", "train_nodes"), ("train_model.num_devices",)),
    **dict.fromkeys(("batches", "optimizer_steps", "prompts"), ("train.total_dialog_turns",)),
    **dict.fromkeys(("warmup_batches", "warmup_optimizer_steps", "warmup_share"), ("optimizer.warmup_steps",)),
    **dict.fromkeys(("clip_low", "clip_high", "second_moment"), ("policy.clip_epsilon",)),
    **dict.fromkeys(("dppo_low", "dppo_high"), ("+policy.rejection.dppo_tv",)),
    **dict.fromkeys(("rejections", "rejection_bounds"), ()),
    **dict.fromkeys(("reward_mean", "advantage_mean", "leave_one_out"), ("policy.advantage_mean",)),
    **dict.fromkeys(("reward_std", "advantage_std"), ("policy.advantage_std",)),
    **dict.fromkeys(("overlong", "overlong_tokens"), ("policy.overlong_buffer",)),
    **dict.fromkeys(("context", "response"), ("inference_model.max_new_tokens", "env.max_prompt_tokens")),
    **dict.fromkeys(("rewards", "reward_weights", "reward_model"), ("env.reward",)),
    **dict.fromkeys(("reward_path", "reward_name", "reward_options"), ("env.reward",)),
    **dict.fromkeys(("dataset", "train_files", "test_files", "environments"), ("env.dataset",)),
    **dict.fromkeys(("save_batches", "save_optimizer_steps", "save_strategy", "save_epochs"),
                    ("train.checkpoint_frequency",)),
    **dict.fromkeys(("eval_batches", "eval_optimizer_steps", "eval_strategy", "eval_epochs", "eval_default"),
                    ("evaluation.frequency",)),
    "group": ("env.repeats", "env.num_envs"), "engine_tensor_parallel": _DEVICES[:2], "epochs": ("train.total_epochs",),
    "epochs_per_batch": ("train.epochs",), "keep": ("train.keep_checkpoints",), "kl_in_reward": ("policy.kl_coef",),
    "loggers": ("logging.wandb.mode",), "lora_rank": ("train_model.lora.enabled", "train_model.lora.r"),
    "lowest_lr": ("optimizer.lr_floor",), "pass_at_k": ("evaluation.k",), "staleness": ("train.max_staleness",),
    "refresh_optimizer_steps": ("ref_model.refresh_every",), "reward_bias": ("policy.reward_bias",),
    "reward_clip": ("policy.reward_clip",), "squared_log_ratio": ("policy.kl_to_behaviour_coef",),
    "behaviour_cap": ("policy.behaviour_cap",), "rows": ("env.num_envs",), "synchronous": (),
    "test_dataset": ("evaluation.datasets",),
    "teacher_weight": ("policy.reward_coef",), "teacher_rate": ("teacher.decay",),
    "reference_rate": ("ref_model.decay",),
    "divergence": ("policy.teacher_divergence",), **dict.fromkeys(("teacher", "teacher_revision"), ("teacher.model",)),
}  # fmt: skip
"""Our keys that a quantity determines, to be set by hand if the file does not give it."""


@cache
def read_file(name: str) -> dict[str, Any]:
    """Return the contents of a table's file."""
    text = (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def same_as(name: str) -> tuple[str | None, str | None]:
    """Return our key for one that another library has, or why there is none.

    >>> same_as("num_generations"), same_as("policy.beta")[0]
    (('env.repeats', None), 'policy.kl_coef')
    """
    leaf = name.rpartition(".")[2]
    rows = [item for file in _FILES for item in read_file(file)["keys"].items()]
    rows = [(key, row) for key, row in rows if key.rpartition(".")[2] == leaf]
    rows.sort(key=lambda item: (item[0] not in (name, leaf), "none" in item[1]))
    for _, row in rows:
        ours = row.get("ours", "")
        keys = (DETERMINES | _STEPS)[ours[1:]] if ours.startswith("@") else (ours.lstrip("+"),)
        if any(keys):
            return keys[0].lstrip("+"), None
        if "none" in row:
            return None, row["none"]
    return None, None
