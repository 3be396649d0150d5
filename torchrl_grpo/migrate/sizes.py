"""Numbers of ours that depend on several of theirs: batches, lengths, frequencies, devices, rewards, bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Quantities = Mapping[str, Any]
"""What a peer's keys say, by the names that its table has for them after ``@``."""
Note = Callable[[str, str], object]
"""Takes a key of ours or theirs, and what there is to say about it."""

_COUNTS = (
    "per_device", "accumulation", "steps_per_generation", "batch_sequences", "batch_prompts", "step_sequences",
    "step_prompts", "minibatches", "epochs_per_batch", "rows", "devices", "nodes", "engine_tensor_parallel",
)  # fmt: skip
_NODE = 8  # accelerators
_MOST_ROWS = 2**16
_PROMPT = 1024  # tokens, at most, where a limit is that of prompt and response together


@dataclass(frozen=True)
class _Batch:
    """Sequences between two weight syncs, in an optimizer step, in a group, and optimizer steps in such a batch."""

    size: int
    step: int
    group: int
    steps: int


def sizes(asked: Quantities, chosen: Mapping[str, Any], differs: Note, lacks: Note) -> dict[str, Any]:
    """Our keys for what a peer's quantities say.

    Args:
        asked: the quantities.
        chosen: our keys that are settled.
        differs: called with what means something else here.
        lacks: called with what has no counterpart.

    Raises:
        ValueError: a size is not above 0.
    """
    for name in _COUNTS:
        if asked.get(name, 1) < 1:
            raise ValueError(f"{name.replace('_', ' ')}={asked[name]} must be at least 1: mend the file.")
    ours: dict[str, Any] = {}
    batch = _batch(asked, ours, differs, lacks)
    _length(asked, batch, ours, lacks)
    _frequencies(asked, batch, ours)
    _devices(asked, ours, differs)
    _clip(asked, chosen, ours, lacks)
    _reward(asked, chosen, ours, lacks)
    _tokens(asked, ours, differs)
    if asked.get("refresh_optimizer_steps") and chosen.get("policy.kl_coef") and not _has_lora(chosen):
        ours["ref_model.refresh_every"] = max(1, round(asked["refresh_optimizer_steps"] / batch.steps))
    if asked.get("lora_rank"):
        ours |= {"train_model.lora.enabled": True, "train_model.lora.r": asked["lora_rank"]}
    if asked.get("squared_log_ratio"):
        ours |= {"policy.kl_to_behaviour_coef": 2 * asked["squared_log_ratio"], "policy.kl_estimator": "k2"}
    if asked.get("lowest_lr"):
        ours["optimizer.lr_floor"] = asked["lowest_lr"] / chosen["optimizer.lr"]
    if asked.get("staleness") is not None:
        ours["train.max_staleness"] = asked["staleness"] or None
    if "pass_at_k" in asked:
        ours["evaluation.k"] = asked["pass_at_k"] if asked["pass_at_k"] > 1 else 0
    if "wandb" in str(asked.get("loggers")):
        ours["logging.wandb.mode"] = "online"
    return ours


def _has_lora(chosen: Mapping[str, Any]) -> bool:
    return bool(chosen.get("train_model.lora.enabled"))


def _batch(asked: Quantities, ours: dict[str, Any], differs: Note, lacks: Note) -> _Batch:
    group = asked.get("group", 1)
    if group < 2:
        lacks("env.repeats", f"a group of {group} has nothing to be compared with; 8 is taken")
        group = 8
    step = asked.get("step_sequences")
    if "per_device" in asked:
        devices = asked.get("devices", 1)
        step = asked["per_device"] * asked["accumulation"] * devices
        generated = asked.get("steps_per_generation") or asked["accumulation"]
        size = asked.get("batch_sequences") or asked["per_device"] * devices * generated
    else:
        size = asked["batch_sequences"] if "batch_sequences" in asked else asked["batch_prompts"] * group
    if "step_prompts" in asked:
        step = asked["step_prompts"] * group
    if "minibatches" in asked:
        step = -(-size // asked["minibatches"])
    step, rows = step or size, asked.get("rows")
    unit = group if rows is None else -(-rows // group) * group
    whole = _whole(size, unit, step)
    if whole != size:
        differs("env.num_envs", f"a batch of {size:,} sequences is rounded to {whole:,}: whole groups and whole steps")
    step = step if whole % step == 0 else whole
    rows = unit if rows is not None else max(n for n in range(group, _MOST_ROWS + 1, group) if whole % n == 0)
    epochs = asked.get("epochs_per_batch", 1)
    ours |= {"env.repeats": group, "env.num_envs": rows, "train.epochs": epochs}
    ours["train.dialog_turns_per_batch"] = whole if whole != rows else None
    ours["train.optim_batch_size"] = step if step != whole else None
    return _Batch(whole, step, group, whole // step * epochs)


def _whole(size: int, unit: int, step: int) -> int:
    """The least batch of at least ``size`` that has whole units and, if it is not too large, whole steps."""
    both = math.lcm(unit, step)
    of = both if both <= 2 * max(size, step) else unit
    return -(-size // of) * of


def _length(asked: Quantities, batch: _Batch, ours: dict[str, Any], lacks: Note) -> None:
    """How long the run is, and how long its warm-up."""
    batches = asked.get("batches")
    if "optimizer_steps" in asked:
        batches = -(-asked["optimizer_steps"] // batch.steps)
    if batches:
        ours["train.total_dialog_turns"] = batches * batch.size
    elif "epochs" in asked:
        ours["train.total_epochs"] = math.ceil(asked["epochs"])
        if ours["train.total_epochs"] != asked["epochs"]:
            lacks("train.total_epochs", f"{asked['epochs']} passes over the data are rounded up")
    warmup = asked.get("warmup_optimizer_steps") or batch.steps * asked.get("warmup_batches", 0)
    share = 0 if warmup else asked.get("warmup_share", 0)
    if share and batches:
        warmup = math.ceil(share * batches * batch.steps)
    elif share:
        each = f"{asked.get('epochs', 1):g} x {batch.group} x problems / {batch.step}"
        lacks("optimizer.warmup_steps", f"a share of {share:g} of the run's optimizer steps, which are {each}: give it")
    ours["optimizer.warmup_steps"] = warmup


def _frequencies(asked: Quantities, batch: _Batch, ours: dict[str, Any]) -> None:
    """Steps between checkpoints and evaluations, which are batches here."""
    for ending, key in (("save", "train.checkpoint_frequency"), ("eval", "evaluation.frequency")):
        every = asked.get(f"{ending}_batches", asked.get(f"{ending}_optimizer_steps"))
        every = 0 if asked.get(f"{ending}_strategy", "steps") != "steps" else every
        if every is not None:
            per = batch.steps if f"{ending}_optimizer_steps" in asked else 1
            ours[key] = max(1, round(every / per)) if every > 0 else 0
        elif ending == "save":
            ours[key] = 0
    if asked.get("keep"):
        ours["train.keep_checkpoints"] = f"last:{asked['keep']}"


def _devices(asked: Quantities, ours: dict[str, Any], differs: Note) -> None:
    parallel = asked.get("engine_tensor_parallel", 1)
    train, engine = asked.get("train_devices"), asked.get("engine_devices")
    for role, text in (("train", "train_allocation"), ("engine", "engine_allocation")):
        if text in asked and (found := _allocation(str(asked[text]))):
            train, engine, parallel = (found[0], engine, parallel) if role == "train" else (train, *found)
    if "allocation" in asked:
        first, _, second = str(asked["allocation"]).partition("+")
        if (left := _allocation(first)) and (right := _allocation(second)):
            engine, parallel, train = *left, right[0]
    for role in ("train", "engine"):
        if f"{role}_nodes" in asked:
            train, engine = (
                (asked["train_nodes"] * _NODE, engine) if role == "train" else (train, asked["engine_nodes"] * _NODE)
            )
    shared = asked.get("devices", 1) * asked.get("nodes", 1)
    if "devices" in asked:
        while parallel > max(1, shared // 2):
            parallel //= 2
    if shared > 1:
        engine = max(parallel, shared // 2 // parallel * parallel)
        train = shared - engine
        differs(
            "inference_model.num_devices",
            f"all roles use {shared} devices in turns there; here each has its own, and half of them sample: "
            f"python -m torchrl_grpo.plan --devices {shared} advises how many",
        )
    if engine is not None or parallel > 1:
        ours["inference_model.num_devices"] = -(-(engine or 1) // parallel) * parallel
    if train is not None:
        ours["train_model.num_devices"] = train
    ours["inference_model.tensor_parallel_size"] = parallel


def _allocation(text: str) -> tuple[int, int] | None:
    """Devices, and those of one tensor-parallel group, of AReaL's ``sglang:d4p1t2``."""
    parts = {name: int(number) for name, number in re.findall(r"([dptc])(\d+)", text.rpartition(":")[2])}
    return (math.prod(parts.values()), parts.get("t", 1)) if parts else None


def _clip(asked: Quantities, chosen: Mapping[str, Any], ours: dict[str, Any], lacks: Note) -> None:
    if "clip_low" not in asked:
        return
    low = asked["clip_low"]
    high = asked.get("clip_high", low)
    if str(chosen.get("policy.loss._target_")).endswith("CISPOLoss"):
        if high < 1:
            lacks("policy.clip_epsilon", f"a bound of {high:g} of the ratio is below 1; 1 is taken")
        low, high = 1.0, max(0.0, round(high - 1, 9))
    ours["policy.clip_epsilon"] = low if low == high else [low, high]


def _reward(asked: Quantities, chosen: Mapping[str, Any], ours: dict[str, Any], lacks: Note) -> None:
    if "reward_bias" in asked:
        ours["policy.reward_bias"] = asked["reward_bias"] * chosen["policy.reward_scale"]
    if asked.get("reward_clip"):
        ours["policy.reward_clip"] = [-asked["reward_clip"], asked["reward_clip"]]
    if "kl_in_reward" in asked:
        ours |= {"policy.kl_coef": asked["kl_in_reward"], "policy.kl_in_reward": asked["kl_in_reward"] > 0}
    both = [name for name in ("reward", "advantage") if f"{name}_mean" in asked or f"{name}_std" in asked]
    if both:
        ours["policy.advantage_mean"] = asked.get(f"{both[0]}_mean") or "none"
        ours["policy.advantage_std"] = asked.get(f"{both[0]}_std") or "none"
        if asked.get("leave_one_out"):
            ours["policy.advantage_mean"] = "leave_one_out"
    elif "kl_in_reward" in asked:
        ours |= {"policy.advantage_mean": "none", "policy.advantage_std": "none"}
    if len(both) > 1:
        lacks("actor.adv_norm", "advantages are normalised once, as actor.reward_norm says")
    if asked.get("overlong") and asked.get("overlong_tokens"):
        ours["policy.overlong_buffer"] = round(asked["overlong_tokens"] / chosen["inference_model.max_new_tokens"], 6)


def _tokens(asked: Quantities, ours: dict[str, Any], differs: Note) -> None:
    """The room for prompt and response, of one limit of both."""
    if "context" not in asked:
        return
    context, response = asked["context"], asked.get("response")
    if response is None or response >= context:
        prompt = min(_PROMPT, context // 2)
        response = context - prompt
        differs("inference_model.max_new_tokens", f"{prompt:,} of {context:,} tokens are left to the prompt")
    ours["inference_model.max_new_tokens"] = response
    ours["env.max_prompt_tokens"] = context - response
