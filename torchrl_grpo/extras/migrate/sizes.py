"""Our settings that depend on several of theirs: batches, lengths, frequencies, devices, rewards,
bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Quantities = Mapping[str, Any]
"""Values of a peer's keys, by their names after ``@`` in its table."""
Note = Callable[[str, str], object]
"""Function of a key (ours or theirs) and a note about it."""

_COUNTS = (
    "per_device", (
        "accumulation"
    ), "sync_steps", "steps_per_generation", "batch_sequences", "batch_prompts",
    ""
    "step_sequences", "step_prompts", "step_batches", "minibatches", "epochs_per_batch", "rows", "devices", "nodes",
    "engine_tensor_parallel", "node_devices",
)  # fmt: skip
_MAX_ROWS = 2**16
_PROMPT = 1024  # maximum tokens of a prompt, if a limit covers prompt and response together


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
"""Our keys that depend on the size of a batch."""


def sizes(
    quantities: Quantities, config: Mapping[str, Any], differs: Note, lacks: Note, unset: Note
) -> dict[str, Any]:
    """Return our keys for a library's quantities.

    Args:
        quantities: the quantities.
        config: our keys with known values.
        differs: called with keys that have a different meaning here.
        lacks: called with keys without an equivalent.
        unset: called with keys of ours whose values the file does not contain, and why.

    Raises:
        ValueError: a size is not above 0.
    """
    for name in _COUNTS:
        if quantities.get(name, 1) < 1:
            raise ValueError(
                f"{name.replace('_', ' ')}={quantities[name]} must be at least 1: fix the file."
            )
    ours: dict[str, Any] = {}
    batch = _batch(quantities, config["algo"] == "grpo", ours, differs, lacks)
    _length(quantities, batch, ours, lacks, unset)
    _frequencies(quantities, batch, ours, unset)
    _devices(quantities, config["algo"] == "sft", ours, differs, unset)
    _clip(quantities, config, ours, lacks, unset)
    _rejection(quantities, ours, lacks)
    _reward(quantities, config, ours, lacks)
    _tokens(quantities, config["algo"] == "sft", ours, differs)
    _teacher(quantities, ours)
    if cap := quantities.get("behaviour_cap"):
        weight = config["policy.behaviour_weight"]
        ours |= {
            "policy.behaviour_cap": cap,
            "policy.behaviour_weight": "mask" if weight == "none" else weight,
        }
    refresh_steps = quantities.get("refresh_optimizer_steps")
    if (
        refresh_steps
        and config.get("policy.kl_coef")
        and not config.get("train_model.lora.enabled")
    ):
        ours["ref_model.refresh_every"] = max(1, round(refresh_steps / batch.steps))
    if quantities.get("lora_rank"):
        ours |= {"train_model.lora.enabled": True, "train_model.lora.r": quantities["lora_rank"]}
    if quantities.get("squared_log_ratio"):
        ours |= {
            "policy.kl_to_behaviour_coef": 2 * quantities["squared_log_ratio"],
            "policy.kl_estimator": "k2",
        }
    if quantities.get("lowest_lr"):
        ours["optimizer.lr_floor"] = quantities["lowest_lr"] / config["optimizer.lr"]
    if quantities.get("staleness") is not None:
        ours["train.max_staleness"] = math.ceil(quantities["staleness"]) or None
    if "pass_at_k" in quantities:
        ours["evaluation.k"] = quantities["pass_at_k"] if quantities["pass_at_k"] > 1 else 0
    if "wandb" in str(quantities.get("loggers")):
        ours["logging.wandb.mode"] = "online"
    return ours


def _batch(
    quantities: Quantities, compares: bool, ours: dict[str, Any], differs: Note, lacks: Note
) -> _Batch:
    group = quantities.get("group", 1)
    if group < 2 and compares:
        lacks("env.repeats", f"a group of {group} cannot be compared; 8 is used")
        group = 8
    step = quantities.get("step_sequences")
    if "per_device" in quantities:
        devices = quantities.get("devices", 1)
        step = quantities["per_device"] * quantities["accumulation"] * devices
        generated = quantities.get("steps_per_generation") or quantities[
            "accumulation"
        ] * quantities.get("sync_steps", 1)
        size = quantities.get("batch_sequences") or quantities["per_device"] * devices * generated
    elif "batch_prompts" in quantities:
        size = quantities["batch_prompts"] * group
    elif "step_prompts" in quantities:
        size = (
            quantities["step_prompts"]
            * quantities.get("step_batches", 1)
            * quantities.get("sync_steps", 1)
            * group
        )
    else:
        size = quantities["batch_sequences"]
    if "step_prompts" in quantities:
        step = quantities["step_prompts"] * group
    if "minibatches" in quantities:
        step = -(-size // quantities["minibatches"])
    step = step or size
    rows = quantities.get("rows")
    unit = group if rows is None else -(-rows // group) * group
    rounded_size = _round_up(size, unit, step)
    if rounded_size != size:
        differs(
            "env.num_envs",
            f"a batch of {size:,} sequences is rounded to {rounded_size:,}: whole groups and whole "
            "steps",
        )
    step = step if rounded_size % step == 0 else rounded_size
    rows = (
        unit
        if rows is not None
        else max(n for n in range(group, _MAX_ROWS + 1, group) if rounded_size % n == 0)
    )
    epochs = quantities.get("epochs_per_batch", 1)
    ours |= {"env.repeats": group, "env.num_envs": rows, "train.epochs": epochs}
    ours["train.dialog_turns_per_batch"] = rounded_size if rounded_size != rows else None
    ours["train.optim_batch_size"] = step if step != rounded_size else None
    return _Batch(rounded_size, step, group, rounded_size // step * epochs)


def _round_up(size: int, unit: int, step: int) -> int:
    """Return the smallest batch of at least ``size`` with whole units and, if it is not too large,
    whole steps.

    Our batches have at least 2 sequences.
    """
    both = math.lcm(unit, step)
    of = both if both <= 2 * max(size, step) else unit
    return max(2, -(-size // of) * of)


def _length(
    quantities: Quantities, batch: _Batch, ours: dict[str, Any], lacks: Note, unset: Note
) -> None:
    """Set the length of the run and of its warm-up."""
    batches = quantities.get("batches")
    if "optimizer_steps" in quantities:
        batches = -(-quantities["optimizer_steps"] // batch.steps)
    if "prompts" in quantities:
        batches = -(-quantities["prompts"] * batch.group // batch.size)
    if batches:
        ours["train.total_dialog_turns"] = batches * batch.size
    elif "epochs" in quantities:
        ours["train.total_epochs"] = math.ceil(quantities["epochs"])
        if ours["train.total_epochs"] != quantities["epochs"]:
            lacks(
                "train.total_epochs", f"{quantities['epochs']} passes over the data are rounded up"
            )
    steps = quantities.get("warmup_optimizer_steps", 0)
    share = 0 if steps >= 1 else steps or quantities.get("warmup_share", 0)
    warmup = steps if steps >= 1 else batch.steps * quantities.get("warmup_batches", 0)
    if share and not warmup and batches:
        warmup = math.ceil(share * batches * batch.steps)
    elif share and not warmup:
        unset(
            "optimizer.warmup_steps",
            f"{share:g} of the run's optimizer steps, which are {_whole_run(quantities, batch)}",
        )
    ours["optimizer.warmup_steps"] = warmup


def _whole_run(quantities: Quantities, batch: _Batch) -> str:
    """Return the number of optimizer steps of the run, in words."""
    return f"{quantities.get('epochs', 1):g} x {batch.group} x problems / {batch.step}"


def _frequencies(quantities: Quantities, batch: _Batch, ours: dict[str, Any], unset: Note) -> None:
    """Set the steps between checkpoints and evaluations, which are batches here."""
    for ending, key in (("save", "train.checkpoint_frequency"), ("eval", "evaluation.frequency")):
        every = quantities.get(
            f"{ending}_batches",
            quantities.get(f"{ending}_optimizer_steps", quantities.get(f"{ending}_default")),
        )
        strategy = quantities.get(f"{ending}_strategy", "steps")
        epochs = 1 if strategy in ("epoch", "best") else quantities.get(f"{ending}_epochs")
        if strategy in ("no", False):  # a yaml's no is false
            ours[key if ending == "save" else "evaluation.num_prompts"] = 0
        elif strategy == "steps" and every is not None:
            per = 1 if f"{ending}_batches" in quantities else batch.steps
            if isinstance(every, float) and 0 < every < 1:
                if (total := quantities.get("optimizer_steps")) is None:
                    unset(
                        key,
                        f"{every:g} of the run's optimizer steps, which are "
                        f"{_whole_run(quantities, batch)}",
                    )
                    continue
                every = math.ceil(every * total)
            ours[key] = max(1, round(every / per)) if every > 0 else 0
        elif epochs is not None:
            unset(
                key,
                f"once in {epochs:g} epochs there; an epoch is {batch.group} x problems / "
                f"{batch.size} batches",
            )
        elif ending == "save":
            ours[key] = 0
    if quantities.get("keep"):
        ours["train.keep_checkpoints"] = f"last:{quantities['keep']}"


def _devices(
    quantities: Quantities, samples_nothing: bool, ours: dict[str, Any], differs: Note, unset: Note
) -> None:
    parallel = quantities.get("engine_tensor_parallel", 1)
    train, engine = quantities.get("train_devices"), quantities.get("engine_devices")
    for role, text in (("train", "train_allocation"), ("engine", "engine_allocation")):
        if text in quantities and (allocation := _allocation(str(quantities[text]))):
            train, engine, parallel = (
                (allocation[0], engine, parallel) if role == "train" else (train, *allocation)
            )
    if "allocation" in quantities:
        first, _, second = str(quantities["allocation"]).partition("+")
        if (engine_side := _allocation(first)) and (train_side := _allocation(second)):
            engine, parallel, train = *engine_side, train_side[0]
    node, nodes = quantities.get("node_devices", 8), quantities.get("engine_nodes")
    if nodes is None:
        kinds = [kind for kind in ("prefill", "decode") if f"{kind}_nodes" in quantities]
        nodes = sum(
            quantities[(f"{kind}_nodes")] * quantities.get(f"{kind}_replicas", 1) for kind in kinds
        )
    if "train_nodes" in quantities:
        train = quantities["train_nodes"] * node
        engine = nodes * node * quantities.get("engine_replicas", 1)
        if not nodes:
            unset(
                "inference_model.num_devices",
                "the file does not contain the number of sampler nodes",
            )
    shared = quantities.get("devices", 1) * quantities.get("nodes", 1)
    if "rollout_devices" in quantities:
        train, engine = shared, quantities["rollout_devices"] * quantities.get("rollout_nodes", 1)
    are_separate = train is not None or engine is not None
    if "devices" in quantities and not are_separate:
        while parallel > max(1, shared // 2):
            parallel //= 2
    if shared > 1 and samples_nothing:
        ours |= {"train_model.num_devices": "all", "inference_model.num_devices": "all"}
    elif shared > 1 and not are_separate:
        engine = max(parallel, shared // 2 // parallel * parallel)
        train = shared - engine
        differs(
            "inference_model.num_devices",
            f"there the roles take turns on {shared} devices; here each role has its own, and half "
            f"of them sample: python -m torchrl_grpo plan --devices {shared} suggests a split",
        )
    if "engine_data_parallel" in quantities:
        engine = max(engine or 1, parallel * quantities["engine_data_parallel"])
    if engine is not None or parallel > 1:
        ours["inference_model.num_devices"] = -(-(engine or 1) // parallel) * parallel
    if train is not None:
        ours["train_model.num_devices"] = train
    ours["inference_model.tensor_parallel_size"] = parallel


def _allocation(text: str) -> tuple[int, int] | None:
    """Return the numbers of devices, in all and per tensor-parallel group, of AReaL's
    ``sglang:d4p1t2``.
    """
    parts = {
        name: int(number) for name, number in re.findall(r"([dptc])(\d+)", text.rpartition(":")[2])
    }
    return (math.prod(parts.values()), parts.get("t", 1)) if parts else None


def _clip(
    quantities: Quantities,
    config: Mapping[str, Any],
    ours: dict[str, Any],
    lacks: Note,
    unset: Note,
) -> None:
    if bound := quantities.get("second_moment"):
        unset(
            "policy.clip_epsilon",
            f"M2PO bounds the second moment of the log-ratio, by {bound}, in place of a clip",
        )
    if "clip_low" not in quantities:
        return
    high = quantities.get("clip_high", quantities["clip_low"])
    low = min(quantities["clip_low"], 1.0)  # a ratio is never below 0
    if quantities.get("clip_is_bound"):
        if high < 1:
            lacks("policy.clip_epsilon", f"the bound {high:g} of the ratio is below 1; 1 is used")
        low, high = 1.0, max(0.0, round(high - 1, 9))
    ours["policy.clip_epsilon"] = low if low == high else [low, high]


def _rejection(quantities: Quantities, ours: dict[str, Any], lacks: Note) -> None:
    if "dppo_low" in quantities:
        bounds = [quantities["dppo_low"], quantities["dppo_high"]]
        ours |= {"+policy.rejection.dppo_tv": bounds, "policy.clip_epsilon": [1.0, 1e9]}
    rules = str(quantities.get("rejections") or "").replace(" ", "").split(",")
    bounds_of_verl = str(quantities.get("rejection_bounds", "")).replace(" ", "").split(",")
    for number, rule in enumerate(filter(None, rules)):
        bound = bounds_of_verl[number % len(bounds_of_verl)]
        low, _, high = bound.rpartition("_")
        if rule not in _REJECTIONS_OF_VERL or not bound:
            lacks(f"policy.rejection of {rule}", f"there is {', '.join(_REJECTIONS_OF_VERL)}")
            continue
        value: Any = float(high)
        if rule.endswith("k1"):  # verl bounds the inverse ratio
            value = [round(1 / value, 9), round(1 / float(low), 9) if low else value]
        ours[f"+policy.rejection.{_REJECTIONS_OF_VERL[rule]}"] = value


_REJECTIONS_OF_VERL = {
    "token_k1": "token_ratio",
    "token_k3": "token_k3",
    "seq_sum_k1": "sequence_ratio",
    "seq_mean_k1": "geometric",
    "seq_mean_k3": "sequence_k3",
}


def _reward(
    quantities: Quantities, config: Mapping[str, Any], ours: dict[str, Any], lacks: Note
) -> None:
    if "reward_bias" in quantities:
        ours["policy.reward_bias"] = quantities["reward_bias"] * config["policy.reward_scale"]
    if quantities.get("reward_clip"):
        ours["policy.reward_clip"] = [-quantities["reward_clip"], quantities["reward_clip"]]
    if "kl_in_reward" in quantities:
        ours |= {
            "policy.kl_coef": quantities["kl_in_reward"],
            "policy.kl_in_reward": quantities["kl_in_reward"] > 0,
        }
    both = [
        name
        for name in ("reward", "advantage")
        if f"{name}_mean" in quantities or f"{name}_std" in quantities
    ]
    if both:
        ours["policy.advantage_mean"] = quantities.get(f"{both[0]}_mean") or "none"
        ours["policy.advantage_std"] = quantities.get(f"{both[0]}_std") or "none"
        if quantities.get("leave_one_out"):
            ours["policy.advantage_mean"] = "leave_one_out"
    elif "kl_in_reward" in quantities:
        ours |= {"policy.advantage_mean": "none", "policy.advantage_std": "none"}
    if len(both) > 1:
        ours["policy.advantage_whiten"] = True
        if {quantities.get("advantage_mean"), quantities.get("advantage_std")} != {"batch"}:
            lacks(
                "actor.adv_norm",
                "the second normalization is by mean and standard deviation of the batch",
            )
    if quantities.get("overlong") and quantities.get("overlong_tokens"):
        ours["policy.overlong_buffer"] = round(
            quantities["overlong_tokens"] / config["inference_model.max_new_tokens"], 6
        )


_ROLES = {"teacher": "teacher", "reference": "ref_model"}


def _teacher(quantities: Quantities, ours: dict[str, Any]) -> None:
    """Set the teacher's name, weights and share, and the divergence for a beta."""
    if (weight := quantities.get("teacher_weight")) is not None:
        ours |= {"policy.teacher_coef": weight, "policy.reward_coef": round(1 - weight, 12)}
    for role in ("teacher", "reference"):
        if (rate := quantities.get(f"{role}_rate")) is not None:
            ours[f"{_ROLES[role]}.decay"] = round(1 - rate, 12)
    if quantities.get("teacher"):
        revision = quantities.get("teacher_revision")
        ours[("teacher.model")] = (
            f"{quantities['teacher']}@{revision}" if revision else quantities["teacher"]
        )
    if (beta := quantities.get("divergence")) is not None:
        ours["policy.teacher_divergence"] = {0: "forward", 1: "reverse"}.get(beta, "jsd")
        ours["policy.teacher_beta"] = beta if 0 < beta < 1 else 0.5


def _tokens(
    quantities: Quantities, samples_nothing: bool, ours: dict[str, Any], differs: Note
) -> None:
    """Divide one limit for prompt and response between them."""
    if "context" not in quantities:
        return
    context = quantities["context"]
    if samples_nothing:
        differs(
            "inference_model.max_new_tokens",
            "a response is cut there, without its prompt; long prompts are dropped",
        )
        ours |= {"inference_model.max_new_tokens": context, "env.max_prompt_tokens": None}
        return
    response = quantities.get("response")
    if response is None or response >= context:
        prompt = min(_PROMPT, context // 2)
        response = context - prompt
        differs(
            "inference_model.max_new_tokens",
            f"{prompt:,} of {context:,} tokens are left to the prompt",
        )
    ours["inference_model.max_new_tokens"] = response
    ours["env.max_prompt_tokens"] = context - response
