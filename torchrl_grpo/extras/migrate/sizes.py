"""Settings of ours that depend on several of theirs: batches, lengths, frequencies, devices,
rewards, bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Quantities = Mapping[str, Any]
"""Values of a peer's keys, by the names that its table has for them after ``@``."""
Note = Callable[[str, str], object]
"""Takes a key of ours or theirs, and what there is to say about it."""

_COUNTS = (
    "per_device", "accumulation", "sync_steps", "steps_per_generation", "batch_sequences", "batch_prompts",
    "step_sequences", "step_prompts", "step_batches", "minibatches", "epochs_per_batch", "rows", "devices", "nodes",
    "engine_tensor_parallel", "node_devices",
)  # fmt: skip
_MOST_ROWS = 2**16
_PROMPT = 1024  # tokens, at most, where a limit is that of prompt and response together


@dataclass(frozen=True)
class _Batch:
    """Sequences between two weight syncs, in an optimizer step, in a group, and optimizer steps in
    such a batch.
    """

    size: int
    step: int
    group: int
    steps: int


SIZES = ("train.dialog_turns_per_batch", "train.optim_batch_size", "train.total_dialog_turns")
"""Keys of ours that follow from the size of a batch."""
_DEVICES = (
    "inference_model.num_devices",
    "inference_model.tensor_parallel_size",
    "train_model.num_devices",
)
SETTLES: dict[str, tuple[str, ...]] = {
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
    "divergence": ("policy.teacher_divergence",), **dict.fromkeys(("teacher", "teacher_revision"), ("teacher.model",)),
}  # fmt: skip
"""Our keys that a quantity determines, to be set by hand if the file does not give it."""


def sizes(
    asked: Quantities, chosen: Mapping[str, Any], differs: Note, lacks: Note, unset: Note
) -> dict[str, Any]:
    """Return our keys for a library's quantities.

    Args:
        asked: the quantities.
        chosen: our keys that are settled.
        differs: called with what means something else here.
        lacks: called with what has no counterpart.
        unset: called with a key of ours whose value the file does not tell, and why.

    Raises:
        ValueError: a size is not above 0.
    """
    for name in _COUNTS:
        if asked.get(name, 1) < 1:
            raise ValueError(
                f"{name.replace('_', ' ')}={asked[name]} must be at least 1: mend the file."
            )
    ours: dict[str, Any] = {}
    batch = _batch(asked, chosen["algo"] == "grpo", ours, differs, lacks)
    _length(asked, batch, ours, lacks, unset)
    _frequencies(asked, batch, ours, unset)
    _devices(asked, chosen["algo"] == "sft", ours, differs, unset)
    _clip(asked, chosen, ours, lacks, unset)
    _reward(asked, chosen, ours, lacks)
    _tokens(asked, chosen["algo"] == "sft", ours, differs)
    _teacher(asked, ours)
    if cap := asked.get("behaviour_cap"):
        weight = chosen["policy.behaviour_weight"]
        ours |= {
            "policy.behaviour_cap": cap,
            "policy.behaviour_weight": "mask" if weight == "none" else weight,
        }
    if (
        asked.get("refresh_optimizer_steps")
        and chosen.get("policy.kl_coef")
        and not _has_lora(chosen)
    ):
        ours["ref_model.refresh_every"] = max(
            1, round(asked["refresh_optimizer_steps"] / batch.steps)
        )
    if asked.get("lora_rank"):
        ours |= {"train_model.lora.enabled": True, "train_model.lora.r": asked["lora_rank"]}
    if asked.get("squared_log_ratio"):
        ours |= {
            "policy.kl_to_behaviour_coef": 2 * asked["squared_log_ratio"],
            "policy.kl_estimator": "k2",
        }
    if asked.get("lowest_lr"):
        ours["optimizer.lr_floor"] = asked["lowest_lr"] / chosen["optimizer.lr"]
    if asked.get("staleness") is not None:
        ours["train.max_staleness"] = math.ceil(asked["staleness"]) or None
    if "pass_at_k" in asked:
        ours["evaluation.k"] = asked["pass_at_k"] if asked["pass_at_k"] > 1 else 0
    if "wandb" in str(asked.get("loggers")):
        ours["logging.wandb.mode"] = "online"
    return ours


def _has_lora(chosen: Mapping[str, Any]) -> bool:
    return bool(chosen.get("train_model.lora.enabled"))


def _batch(
    asked: Quantities, compares: bool, ours: dict[str, Any], differs: Note, lacks: Note
) -> _Batch:
    group = asked.get("group", 1)
    if group < 2 and compares:
        lacks("env.repeats", f"a group of {group} has nothing to be compared with; 8 is taken")
        group = 8
    step = asked.get("step_sequences")
    if "per_device" in asked:
        devices = asked.get("devices", 1)
        step = asked["per_device"] * asked["accumulation"] * devices
        generated = asked.get("steps_per_generation") or asked["accumulation"] * asked.get(
            "sync_steps", 1
        )
        size = asked.get("batch_sequences") or asked["per_device"] * devices * generated
    elif "batch_prompts" in asked:
        size = asked["batch_prompts"] * group
    elif "step_prompts" in asked:
        size = (
            asked["step_prompts"]
            * asked.get("step_batches", 1)
            * asked.get("sync_steps", 1)
            * group
        )
    else:
        size = asked["batch_sequences"]
    if "step_prompts" in asked:
        step = asked["step_prompts"] * group
    if "minibatches" in asked:
        step = -(-size // asked["minibatches"])
    step, rows = step or size, asked.get("rows")
    unit = group if rows is None else -(-rows // group) * group
    whole = _whole(size, unit, step)
    if whole != size:
        differs(
            "env.num_envs",
            f"a batch of {size:,} sequences is rounded to {whole:,}: whole groups and whole steps",
        )
    step = step if whole % step == 0 else whole
    rows = (
        unit
        if rows is not None
        else max(n for n in range(group, _MOST_ROWS + 1, group) if whole % n == 0)
    )
    epochs = asked.get("epochs_per_batch", 1)
    ours |= {"env.repeats": group, "env.num_envs": rows, "train.epochs": epochs}
    ours["train.dialog_turns_per_batch"] = whole if whole != rows else None
    ours["train.optim_batch_size"] = step if step != whole else None
    return _Batch(whole, step, group, whole // step * epochs)


def _whole(size: int, unit: int, step: int) -> int:
    """The least batch of at least ``size`` that has whole units and, if it is not too large, whole
    steps.

    There are at least 2 sequences in a batch of ours.
    """
    both = math.lcm(unit, step)
    of = both if both <= 2 * max(size, step) else unit
    return max(2, -(-size // of) * of)


def _length(
    asked: Quantities, batch: _Batch, ours: dict[str, Any], lacks: Note, unset: Note
) -> None:
    """Length of the run, and of its warm-up."""
    batches = asked.get("batches")
    if "optimizer_steps" in asked:
        batches = -(-asked["optimizer_steps"] // batch.steps)
    if "prompts" in asked:
        batches = -(-asked["prompts"] * batch.group // batch.size)
    if batches:
        ours["train.total_dialog_turns"] = batches * batch.size
    elif "epochs" in asked:
        ours["train.total_epochs"] = math.ceil(asked["epochs"])
        if ours["train.total_epochs"] != asked["epochs"]:
            lacks("train.total_epochs", f"{asked['epochs']} passes over the data are rounded up")
    steps = asked.get("warmup_optimizer_steps", 0)
    share = 0 if steps >= 1 else steps or asked.get("warmup_share", 0)
    warmup = steps if steps >= 1 else batch.steps * asked.get("warmup_batches", 0)
    if share and not warmup and batches:
        warmup = math.ceil(share * batches * batch.steps)
    elif share and not warmup:
        unset(
            "optimizer.warmup_steps",
            f"{share:g} of the run's optimizer steps, which are {_whole_run(asked, batch)}",
        )
    ours["optimizer.warmup_steps"] = warmup


def _whole_run(asked: Quantities, batch: _Batch) -> str:
    """Return the number of optimizer steps of the run, in words."""
    return f"{asked.get('epochs', 1):g} x {batch.group} x problems / {batch.step}"


def _frequencies(asked: Quantities, batch: _Batch, ours: dict[str, Any], unset: Note) -> None:
    """Steps between checkpoints and evaluations, which are batches here."""
    for ending, key in (("save", "train.checkpoint_frequency"), ("eval", "evaluation.frequency")):
        every = asked.get(
            f"{ending}_batches",
            asked.get(f"{ending}_optimizer_steps", asked.get(f"{ending}_default")),
        )
        strategy = asked.get(f"{ending}_strategy", "steps")
        epochs = 1 if strategy in ("epoch", "best") else asked.get(f"{ending}_epochs")
        if strategy in ("no", False):  # a yaml's no is false
            ours[key if ending == "save" else "evaluation.num_prompts"] = 0
        elif strategy == "steps" and every is not None:
            per = 1 if f"{ending}_batches" in asked else batch.steps
            if isinstance(every, float) and 0 < every < 1:
                if (total := asked.get("optimizer_steps")) is None:
                    unset(
                        key,
                        f"{every:g} of the run's optimizer steps, which are {_whole_run(asked, batch)}",
                    )
                    continue
                every = math.ceil(every * total)
            ours[key] = max(1, round(every / per)) if every > 0 else 0
        elif epochs is not None:
            unset(
                key,
                f"once in {epochs:g} epochs there; an epoch is {batch.group} x problems / {batch.size} batches",
            )
        elif ending == "save":
            ours[key] = 0
    if asked.get("keep"):
        ours["train.keep_checkpoints"] = f"last:{asked['keep']}"


def _devices(
    asked: Quantities, samples_nothing: bool, ours: dict[str, Any], differs: Note, unset: Note
) -> None:
    parallel = asked.get("engine_tensor_parallel", 1)
    train, engine = asked.get("train_devices"), asked.get("engine_devices")
    for role, text in (("train", "train_allocation"), ("engine", "engine_allocation")):
        if text in asked and (found := _allocation(str(asked[text]))):
            train, engine, parallel = (
                (found[0], engine, parallel) if role == "train" else (train, *found)
            )
    if "allocation" in asked:
        first, _, second = str(asked["allocation"]).partition("+")
        if (left := _allocation(first)) and (right := _allocation(second)):
            engine, parallel, train = *left, right[0]
    node, nodes = asked.get("node_devices", 8), asked.get("engine_nodes")
    if nodes is None:
        kinds = [kind for kind in ("prefill", "decode") if f"{kind}_nodes" in asked]
        nodes = sum(asked[f"{kind}_nodes"] * asked.get(f"{kind}_replicas", 1) for kind in kinds)
    if "train_nodes" in asked:
        train = asked["train_nodes"] * node
        engine = nodes * node * asked.get("engine_replicas", 1)
        if not nodes:
            unset(
                "inference_model.num_devices",
                "the file does not tell on how many nodes samplers run",
            )
    shared = asked.get("devices", 1) * asked.get("nodes", 1)
    if "rollout_devices" in asked:
        train, engine = shared, asked["rollout_devices"] * asked.get("rollout_nodes", 1)
    apart = train is not None or engine is not None
    if "devices" in asked and not apart:
        while parallel > max(1, shared // 2):
            parallel //= 2
    if shared > 1 and samples_nothing:
        ours |= {"train_model.num_devices": "all", "inference_model.num_devices": "all"}
    elif shared > 1 and not apart:
        engine = max(parallel, shared // 2 // parallel * parallel)
        train = shared - engine
        differs(
            "inference_model.num_devices",
            f"there the roles take turns on {shared} devices; here each role has its own, and half "
            f"of them sample: python -m torchrl_grpo.plan --devices {shared} suggests a split",
        )
    if "engine_data_parallel" in asked:
        engine = max(engine or 1, parallel * asked["engine_data_parallel"])
    if engine is not None or parallel > 1:
        ours["inference_model.num_devices"] = -(-(engine or 1) // parallel) * parallel
    if train is not None:
        ours["train_model.num_devices"] = train
    ours["inference_model.tensor_parallel_size"] = parallel


def _allocation(text: str) -> tuple[int, int] | None:
    """Devices, and those of one tensor-parallel group, of AReaL's ``sglang:d4p1t2``."""
    parts = {
        name: int(number) for name, number in re.findall(r"([dptc])(\d+)", text.rpartition(":")[2])
    }
    return (math.prod(parts.values()), parts.get("t", 1)) if parts else None


def _clip(
    asked: Quantities, chosen: Mapping[str, Any], ours: dict[str, Any], lacks: Note, unset: Note
) -> None:
    if bound := asked.get("second_moment"):
        unset(
            "policy.clip_epsilon",
            f"M2PO bounds the second moment of the log-ratio, by {bound}, in place of a clip",
        )
    if "clip_low" not in asked:
        return
    high = asked.get("clip_high", asked["clip_low"])
    low = min(asked["clip_low"], 1.0)  # a ratio is never below 0
    if asked.get("clip_is_bound"):
        if high < 1:
            lacks("policy.clip_epsilon", f"a bound of {high:g} of the ratio is below 1; 1 is taken")
        low, high = 1.0, max(0.0, round(high - 1, 9))
    ours["policy.clip_epsilon"] = low if low == high else [low, high]


def _reward(
    asked: Quantities, chosen: Mapping[str, Any], ours: dict[str, Any], lacks: Note
) -> None:
    if "reward_bias" in asked:
        ours["policy.reward_bias"] = asked["reward_bias"] * chosen["policy.reward_scale"]
    if asked.get("reward_clip"):
        ours["policy.reward_clip"] = [-asked["reward_clip"], asked["reward_clip"]]
    if "kl_in_reward" in asked:
        ours |= {
            "policy.kl_coef": asked["kl_in_reward"],
            "policy.kl_in_reward": asked["kl_in_reward"] > 0,
        }
    both = [
        name
        for name in ("reward", "advantage")
        if f"{name}_mean" in asked or f"{name}_std" in asked
    ]
    if both:
        ours["policy.advantage_mean"] = asked.get(f"{both[0]}_mean") or "none"
        ours["policy.advantage_std"] = asked.get(f"{both[0]}_std") or "none"
        if asked.get("leave_one_out"):
            ours["policy.advantage_mean"] = "leave_one_out"
    elif "kl_in_reward" in asked:
        ours |= {"policy.advantage_mean": "none", "policy.advantage_std": "none"}
    if len(both) > 1:
        ours["policy.advantage_whiten"] = True
        if {asked.get("advantage_mean"), asked.get("advantage_std")} != {"batch"}:
            lacks(
                "actor.adv_norm",
                "the second normalization is by mean and standard deviation of the batch",
            )
    if asked.get("overlong") and asked.get("overlong_tokens"):
        ours["policy.overlong_buffer"] = round(
            asked["overlong_tokens"] / chosen["inference_model.max_new_tokens"], 6
        )


def _teacher(asked: Quantities, ours: dict[str, Any]) -> None:
    """The teacher's name, and the divergence of a beta."""
    if asked.get("teacher"):
        revision = asked.get("teacher_revision")
        ours["teacher.model"] = f"{asked['teacher']}@{revision}" if revision else asked["teacher"]
    if (beta := asked.get("divergence")) is not None:
        ours["policy.teacher_divergence"] = {0: "forward", 1: "reverse"}.get(beta, "jsd")
        ours["policy.teacher_beta"] = beta if 0 < beta < 1 else 0.5


def _tokens(asked: Quantities, samples_nothing: bool, ours: dict[str, Any], differs: Note) -> None:
    """Room for prompt and response, from one limit for both."""
    if "context" not in asked:
        return
    context = asked["context"]
    if samples_nothing:
        differs(
            "inference_model.max_new_tokens",
            "a response is cut there, without its prompt; long prompts are dropped",
        )
        ours |= {"inference_model.max_new_tokens": context, "env.max_prompt_tokens": None}
        return
    response = asked.get("response")
    if response is None or response >= context:
        prompt = min(_PROMPT, context // 2)
        response = context - prompt
        differs(
            "inference_model.max_new_tokens",
            f"{prompt:,} of {context:,} tokens are left to the prompt",
        )
    ours["inference_model.max_new_tokens"] = response
    ours["env.max_prompt_tokens"] = context - response
