"""Make the pages of ``docs/migrate/`` from the tables of ``torchrl_grpo/extras/peers``.

python tools/make_migrate_docs.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torchrl_grpo.extras.migrate.tables import TRL, Row, Table, read_table

PAGES = Path(__file__).resolve().parents[1] / "docs" / "migrate"
LIBRARIES = {
    "trl": ("TRL", "train_trl.py --devices 8", tuple(reversed(TRL))),
    "verl": ("verl", "run_qwen2-7b_math.sh", ("verl",)),
    "areal": ("AReaL", "gsm8k_grpo.yaml", ("areal",)),
    "prime_rl": ("prime-rl", "rl.toml", ("prime_rl",)),
    "torchrl": ("TorchRL's script", "grpo_gsm8k.yaml", ("torchrl",)),
}
"""For each page: whose keys it has, an example of a command, and its tables."""
HEAD = """# From {title}

<!-- Made by python tools/make_migrate_docs.py from torchrl_grpo/extras/peers/*.toml: edit those. -->

To get the command line of the same run, and what differs:

```bash
python -m torchrl_grpo migrate {arguments}
```

[From another library](../migrate.md) explains the output and lists what differs for every library. A key that is not
here has no equivalent or is ignored. The default in parentheses applies if your file omits the key.
"""
QUANTITIES = {
    "accumulation": "part of `train.optim_batch_size`",
    "advantage_mean": "`policy.advantage_mean`, without `reward_norm`",
    "advantage_std": "`policy.advantage_std`, without `reward_norm`",
    "allocation": "`inference_model.num_devices`, `inference_model.tensor_parallel_size`, `train_model.num_devices`",
    "batch_prompts": "`env.num_envs`",
    "rejections": "`policy.rejection`, the rules",
    "rejection_bounds": "`policy.rejection`, their bounds",
    "dppo_low": "`policy.rejection.dppo_tv`, lower bound, with `policy.clip_epsilon=[1,1e9]`",
    "dppo_high": "`policy.rejection.dppo_tv`, upper bound",
    "behaviour_cap": "`policy.behaviour_cap`, with `policy.behaviour_weight=mask`",
    "batch_sequences": "`env.num_envs`",
    "batches": "`train.total_dialog_turns`",
    "clip_high": "`policy.clip_epsilon`, the second of two",
    "clip_low": "`policy.clip_epsilon`",
    "context": "`env.max_prompt_tokens` + `inference_model.max_new_tokens`",
    "dataset": "`env.dataset`",
    "decode_nodes": "part of `inference_model.num_devices`",
    "decode_replicas": "part of `inference_model.num_devices`",
    "divergence": "`policy.teacher_divergence`: 0 is forward, 1 reverse, between them jsd with `policy.teacher_beta`",
    "devices": "`train_model.num_devices` + `inference_model.num_devices`",
    "engine_allocation": "`inference_model.num_devices`, `inference_model.tensor_parallel_size`",
    "engine_data_parallel": "`inference_model.num_devices`, this x `inference_model.tensor_parallel_size`",
    "engine_devices": "`inference_model.num_devices`",
    "engine_nodes": "`inference_model.num_devices`",
    "engine_replicas": "part of `inference_model.num_devices`",
    "engine_tensor_parallel": "`inference_model.tensor_parallel_size`",
    "environments": "`env.dataset`, `env.reward`",
    "epochs": "`train.total_epochs`",
    "epochs_per_batch": "`train.epochs`",
    "eval_batches": "`evaluation.frequency`",
    "eval_default": "`evaluation.frequency`, without `eval_steps`",
    "eval_epochs": "`evaluation.frequency`, to be set: it counts batches",
    "eval_optimizer_steps": "`evaluation.frequency`",
    "eval_strategy": "`evaluation.frequency`; no is `evaluation.num_prompts=0`",
    "group": "`env.repeats`",
    "keep": "`train.keep_checkpoints=last:N`",
    "kl_in_reward": "`policy.kl_coef`, `policy.kl_in_reward=true`",
    "leave_one_out": "`policy.advantage_mean=leave_one_out`",
    "loggers": "`logging.wandb.mode=online`, if it names wandb",
    "lora_rank": "`train_model.lora.enabled`, `train_model.lora.r`",
    "lowest_lr": "`optimizer.lr_floor`, as a share of `optimizer.lr`",
    "minibatches": "`train.optim_batch_size`",
    "node_devices": "devices of a node, 8 by default",
    "nodes": "as `n_gpus_per_node`",
    "optimizer_steps": "`train.total_dialog_turns`",
    "overlong": "`policy.overlong_buffer`",
    "overlong_tokens": "`policy.overlong_buffer`, as a share of `inference_model.max_new_tokens`",
    "pass_at_k": "`evaluation.k`",
    "per_device": "part of `train.optim_batch_size`",
    "prefill_nodes": "part of `inference_model.num_devices`",
    "prefill_replicas": "part of `inference_model.num_devices`",
    "prompts": "`train.total_dialog_turns`",
    "refresh_optimizer_steps": "`ref_model.refresh_every`, in batches",
    "response": "`inference_model.max_new_tokens`",
    "reward_bias": "`policy.reward_bias`",
    "reward_clip": "`policy.reward_clip=[-X,X]`",
    "reward_mean": "`policy.advantage_mean`",
    "reward_model": "`env.reward=[{fn: reward_model, model: NAME}]`",
    "reward_name": "`env.reward=PATH:NAME`",
    "reward_options": "`env.reward=[{fn: PATH:NAME, OPTION: VALUE}]`",
    "reward_path": "`env.reward=PATH:NAME`",
    "reward_std": "`policy.advantage_std`",
    "reward_weights": "`weight` in `env.reward`",
    "rewards": "`env.reward`",
    "rollout_devices": "`inference_model.num_devices`",
    "rollout_nodes": "part of `inference_model.num_devices`",
    "rows": "`env.num_envs`",
    "save_batches": "`train.checkpoint_frequency`",
    "save_epochs": "`train.checkpoint_frequency`, to be set: it counts batches",
    "save_optimizer_steps": "`train.checkpoint_frequency`",
    "save_strategy": "`train.checkpoint_frequency`",
    "second_moment": "`policy.clip_epsilon`, to be set: there is no M2PO",
    "squared_log_ratio": "`policy.kl_to_behaviour_coef`, `policy.kl_estimator=k2`",
    "staleness": "`train.max_staleness` of `grpo-async.py`; 0 is `grpo.py`",
    "step_batches": "part of `env.num_envs`",
    "step_prompts": "`train.optim_batch_size`",
    "step_sequences": "`train.optim_batch_size`",
    "steps_per_generation": "part of `env.num_envs`",
    "synchronous": "`grpo.py` or `grpo-async.py`",
    "sync_steps": "`train.dialog_turns_per_batch` / `train.optim_batch_size`",
    "teacher": "`teacher.model`",
    "teacher_rate": "1 - `teacher.decay`",
    "reference_rate": "1 - `ref_model.decay`",
    "teacher_weight": "`policy.teacher_coef`, and `policy.reward_coef` is 1 minus this",
    "teacher_revision": "`teacher.model`, after @",
    "test_dataset": "`evaluation.datasets`, where it is another one",
    "test_files": "the split `test` of `env.dataset`, or `evaluation.datasets`",
    "train_allocation": "`train_model.num_devices`",
    "train_devices": "`train_model.num_devices`",
    "train_files": "`env.dataset`, or `env.datasets`",
    "train_nodes": "`train_model.num_devices`",
    "warmup_batches": "`optimizer.warmup_steps`",
    "warmup_optimizer_steps": "`optimizer.warmup_steps`",
    "warmup_share": "`optimizer.warmup_steps`",
}
"""The keys for the tables' quantities that need more than a copy."""


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    return {
        PAGES / f"{name}.md": "\n".join(
            [
                HEAD.format(title=title, arguments=arguments),
                *(part for table in tables for part in _section(read_table(table))),
            ]
        )
        for name, (title, arguments, tables) in LIBRARIES.items()
    }


def _section(table: Table) -> Iterator[str]:
    yield f"## Keys of {table.title}\n"
    always = ", ".join(f"`{key}={_word(value)}`" for key, value in table.always.items())
    yield f"Input: {table.what}. Always set: {always}.\n"
    yield from (f"- {_prose(line)}" for line in table.differs)
    known = read_table(TRL[-1]).rows if table.title.startswith("TRL's") else {}
    if known:
        yield "- Further keys are as for `GRPOConfig`, without groups, rewards and its loss."
    yield ""
    here: dict[str, list[str]] = {}
    for key, row in table.rows.items():
        if known.get(key) == row:
            continue
        if row.values is None and row.ours is None:
            continue
        cell = "the same name" if _ours(row) == f"`{key}`" else _ours(row)
        if differs := _differs(row):
            cell = f"{cell}. {_sentence(differs)}"
        default = "" if row.default is None else f" ({_word(row.default)})"
        here.setdefault(cell, []).append(f"`{key}`{default}")
    yield f"| {table.title} (default) | here, and what differs |\n|---|---|"
    yield from (f"| {', '.join(names)} | {cell} |" for cell, names in here.items())
    yield ""


def _differs(row: Row) -> str:
    """Return the differences in meaning; values with the same text are named together."""
    if row.differs is None or isinstance(row.differs, str):
        return row.differs or ""
    together: dict[str, list[str]] = {}
    for value, text in row.differs.items():
        together.setdefault(text, []).append(value)
    return "; ".join(f"`{'`, `'.join(values)}`: {text}" for text, values in together.items())


def _sentence(text: str) -> str:
    """Return a line of a table as a sentence; names stay in lower case. The page's introduction
    says what our keys count.
    """
    if text.startswith("counts "):
        text = text.partition(";")[0]
    is_name = text.startswith(("verl", "vllm")) or not text[0].isalpha()
    return _prose(text if is_name else text[0].upper() + text[1:])


def _ours(row: Row) -> str:
    if row.values is not None:
        return _choices(row)
    ours = row.ours or ""
    return QUANTITIES[ours[1:]] if ours.startswith("@") else f"`{ours}`"


def _choices(row: Row) -> str:
    """Return the settings of each choice; choices with the same settings are named together."""
    together: dict[str, list[str]] = {}
    for name, value in (row.values or {}).items():
        together.setdefault(_value(row, value), []).append(name)
    if row.ours and all(
        cell == f"`{row.ours}={name}`" for cell, names in together.items() for name in names
    ):
        return f"`{row.ours}`, with the same choices"
    return "; ".join(f"{', '.join(names)}: {cell}" for cell, names in together.items())


def _value(row: Row, value: object) -> str:
    if isinstance(value, dict):
        settings = [
            f"`{key}={_word(one)}`" for key, one in value.items() if not key.startswith("@")
        ]
        return ", ".join(settings) or "nothing to set"
    return f"`{row.ours}={_word(value)}`"


def _word(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.lower() if isinstance(value, bool) else text.replace("'", "").replace(", ", ",")


def _prose(text: str) -> str:
    """Return a line of a table, with backticks around keys and code."""
    parts = text.split("`")
    pattern = (
        r"(?<![\w/])[\w.]*(?:\w[_=]\w|\w\.[a-z]{2})(?:[\w.=\-\[\]:]|,(?=\w))*\w\]?(?:='[^']*')?"
    )
    parts[::2] = [re.sub(pattern, r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts).replace("|", r"\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
