"""Each rule of the config by itself: an input breaks it, its error names a key with its value, and
each fix that the error names heals the input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import yaml
from omegaconf import OmegaConf

from torchrl_grpo.config import ConfigError, check_one_process, validate
from torchrl_grpo.config.data import DATA_RULES, TEST_RULES
from torchrl_grpo.config.devices import DEVICE_RULES, SERVER_RULES
from torchrl_grpo.config.engine import ONE_PROCESS_RULES
from torchrl_grpo.config.fields import written
from torchrl_grpo.config.rule import Rule
from torchrl_grpo.config.rules import RULES, UNREAD_RULES, check_values
from torchrl_grpo.config.schema import FIELDS, DatasetConfig, GRPOConfig
from torchrl_grpo.config.teacher import TeacherEntry

ENTRY = "evaluation.datasets[0]."
SWITCH = "inference_model.backend=server"


class Row(NamedTuple):
    """A rule, and the prefix of the keys of the node that it reads."""

    rule: Rule
    prefix: str

    @property
    def key(self) -> str:
        return self.prefix + self.rule.key

    def error(self, settings: Mapping[str, Any]) -> str | None:
        """Return the rule's error for a config with these settings, or None."""
        config = made(settings)
        if self.prefix == ENTRY:
            config = (config.evaluation.datasets or [DatasetConfig()])[0]
        elif self.prefix:
            config = attrgetter(self.prefix[:-1])(config)
        try:
            self.rule.check(config, self.prefix, switch=SWITCH)
        except ConfigError as error:
            return str(error)
        return None


NEVER = "must be [] with {inference_model.backend=}"  # `inference_model.stop`: all engines have it
ROWS = [
    *(
        Row(rule, "")
        for rule in (*RULES, *UNREAD_RULES, *ONE_PROCESS_RULES)
        if (rule.key, rule.why) != ("inference_model.stop", NEVER)
    ),
    *(Row(rule, "train_model.") for rule in DEVICE_RULES),
    *(Row(rule, "inference_model.") for rule in SERVER_RULES),
    *(Row(rule, "env.") for rule in DATA_RULES),
    *(Row(rule, ENTRY) for rule in TEST_RULES[len(DATA_RULES) :]),
]
LISTS: dict[str, type] = {
    "env.datasets": DatasetConfig,
    "evaluation.datasets": DatasetConfig,
    "teachers": TeacherEntry,
}


def made(settings: Mapping[str, Any]) -> Any:
    """Return a config that was not validated; ``a.b[0].c`` is in the first entry of a list."""
    config: Any = GRPOConfig()
    config.env.dataset = "arithmetic"
    for name, value in settings.items():
        *parents, last = name.replace("[0]", ".0").split(".")
        node = config
        for part in parents:
            if isinstance(node, list):
                node = node[int(part)]
                continue
            child = node.get(part) if isinstance(node, dict) else getattr(node, part)
            if child is None or isinstance(child, str):
                child = {}
                setattr(node, part, child)
            node = child
        if name in LISTS and value is not None:
            value = [LISTS[name](**entry) for entry in value]
        if isinstance(node, dict):
            node[last] = value
        else:
            setattr(node, last, value)
    if config.policy.demonstrations and "env.repeats" not in settings:
        config.env.repeats = 1  # as ``from_hydra`` does
    return config


VALUES: dict[str, Any] = {
    "env.task": "verifiers:a",
    "env.datasets": [{"dataset": "gsm8k"}],
    "env.environment": "a.py:B",
    "env.player": "a.py:play",
    "env.transforms": [{"_target_": "a.B"}],
    "env.tools": ["python"],
    "env.difficulty_filter": [0.1, 0.9],
    "train.keep_checkpoints": "last:3,best:1",
    "train_model.num_devices": 2,
    "inference_model.num_devices": 2,
    "ref_model.num_devices": 2,
    "teacher.num_devices": 2,
    "policy.reward_clip": [0.0, 1.0],
    "teacher.address": ["http://a"],
    "teacher.decay": 0.5,
    "inference_model.devices": [0],
    "ref_model.devices": [0],
    "teacher.devices": [0],
    "train_model.devices": [0],
    "teachers": [{"model": "a", "datasets": ["b"]}, {"model": "c", "datasets": ["d"]}],
    "evaluation.datasets": [{"dataset": "gsm8k"}],
    "train_model.lora.target_modules": ["a"],
}
"""Of keys whose types do not tell one that is not the default."""


def other(key: str) -> Any:
    """Return a value of a key that is not its default."""
    if key in VALUES:
        return deepcopy(VALUES[key])
    item = FIELDS[key]
    if choices := item.metadata.get("choices"):
        return next(choice for choice in choices if choice != item.default)
    if isinstance(item.default, bool):
        return not item.default
    if limits := item.metadata.get("limits"):
        low, high = limits.get("ge", limits.get("gt", 0)), limits.get("le", limits.get("lt"))
        if item.default is not None:
            return item.default + 1 if high is None else (item.default + low) / 2 or high / 2
        return low + 1 if high is None else (low + high) / 2
    return "x.py:y"


TEACHER = {"policy.teacher_coef": 1.0, "teacher.model": "starter"}
SELF = {"policy.teacher_coef": 1.0, "teacher.model": "policy"}
DIVERGES = {"policy.teacher_divergence": "reverse"}
SFT = {"policy.demonstrations": True}
VLLM = {"inference_model.backend": "vllm"}
EXACT = {"inference_model.exact": True}
INPUTS: list[dict[str, Any]] = [
    {"env.chat_template_kwargs": 3},
    {"env.task": "a.B"},
    {"env.task": {"_target_": None, "a": 1}},
    {"env.environments_at_a_time": 3},
    {"env.environment": 3},
    {"env.environment": {"easy": "a.py:B"}, "env.dataset": None},
    {
        "env.environment": "a.py:B",
        "env.datasets": [{"dataset": "gsm8k"}],
        "env.datasets[0].reward": "math",
    },
    {"env.dataset_options": 3},
    {"env.test_split": "train"},
    {"env.environment": "a.py:B", "env.dataset": None, "env.train_split": "x"},
    {"env.task": "verifiers:a", "env.dataset": None, "env.reward": "math"},
    {"env.task._target_": "a.B", "env.dataset": None, "env.train_split": "x"},
    {"env.datasets": [{"dataset": "gsm8k"}], "env.dataset": None, "env.train_split": "x"},
    {"env.datasets": []},
    {"env.tools": ["python"]},
    {"env.retry_prompt": "Again."},
    {"env.tool_parser": "a.py:b"},
    {"env.agent": "a.py:play", "env.task": "verifiers:a"},
    {"env.difficulty_filter": [0.9, 0.1]},
    {"train_model.compile": "yes"},
    {"train.optim_batch_size": 48, "train.dialog_turns_per_batch": 64},
    {"logging.profile_steps": [0]},
    {"logging.sample_rows": 0},
    {"evaluation.k": 1},
    {"policy.entropy_target": 0.5, "policy.entropy_coef": 2.0},
    SFT | TEACHER | {"policy.teacher_divergence": "sampled"},
    SFT | {"policy.loss._target_": "torchrl_grpo.objectives.SAPOLoss"},
    TEACHER | DIVERGES | {"policy.sft_coef": 0.1},
    TEACHER
    | {"policy.reward_coef": 0.0, "policy.value_coef": 0.5, "policy.advantage_level": "token"},
    TEACHER | DIVERGES | {"teacher.address": ["http://a"]},
    {"teacher.model": "starter"},
    {"teacher.address": ["http://a"], "inference_model.temperature": 0.5},
    {"teachers": [{"model": "a"}], "policy.teacher_coef": 1.0},
    {"policy.teacher_coef": 1.0, "teachers": VALUES["teachers"]} | DIVERGES,
    {"policy.reward_coef": 0.5},
    SELF | {"teacher.decay": 0.5},
    SELF | {"teacher.num_devices": 2},
    SELF | {"teacher.devices": [0]},
    SELF | {"teacher.address": ["http://a"]},
    SELF,
    SELF | DIVERGES,
    {"ref_model.refresh_every": 3},
    {"ref_model.refresh_every": 3, "train_model.lora.enabled": True, "policy.kl_coef": 0.1},
    {"ref_model.decay": 0.9},
    {"ref_model.decay": 0.9, "policy.kl_coef": 0.1, "train_model.dtype": "bfloat16"},
    {"train_model.dtype": "bfloat16"},
    {"model.name": "starter", "model.revision": "main"},
    {"train_model.model_kwargs": 3},
    {"inference_model.stop": [""]},
    VLLM | {"inference_model.engine_kwargs.pipeline_parallel_size": 0},
    {"inference_model.engine_kwargs": 3},
    {"inference_model.backend": "server", "inference_model.top_k": 9},
    {"inference_model.in_flight": "keep"},
    {"inference_model.tensor_parallel_size": 2},
    TEACHER | DIVERGES | {"inference_model.top_k": 9},
    {"inference_model.engine_kwargs": {"max_num_seqs": 9}},
    {"inference_model.address": ["http://a"]},
    {"inference_model.weights_folder": "a"},
    {"inference_model.backend": "server", "inference_model.weight_transfer": "broadcast"},
    {"train.keep_checkpoints": "last:3,best:1", "evaluation.num_prompts": 0},
    {"train.total_dialog_turns": 0, "evaluation.num_prompts": 0},
    {"train.total_dialog_turns": 0, "train.resume": "auto", "inference_model.backend": "server"},
    SFT | {"inference_model.temperature": 0.5},
    SFT | {"env.repeats": 8},
    {"env.reward_combination": "gdpo", "policy.dynamic_sampling": True},
    EXACT | VLLM,
    EXACT | {"inference_model.dtype": "bfloat16"},
    EXACT | {"env.max_turns": 2},
    EXACT | {"train_model.lora.enabled": True},
    *(
        {"train_model.lora.enabled": True, "train_model.lora.path": "a", key: value}
        for key, value in (
            ("train_model.lora.r", 2),
            ("train_model.lora.alpha", 2),
            ("train_model.lora.target_modules", ["a"]),
        )
    ),
    {"train_model.lora.enabled": True, "train_model.lora.settings": {"r": 2}},
    EXACT | {"train_model.num_devices": 2},
    EXACT | {"train_model.devices": [0, 1]},
    EXACT | {"train_model.tensor_parallel_size": 2},
    {"evaluation.k": 0, "evaluation.temperature": 0.5},
    {"evaluation.k": 0, "evaluation.top_p": 0.5},
    {"evaluation.k": 0, "evaluation.top_k": 5},
    {"evaluation.k": 0, "evaluation.min_p": 0.5},
    {"evaluation.num_prompts": 0, "evaluation.datasets": [{"dataset": "gsm8k"}]},
    {"train_model.num_devices": 0},
    {"train_model.devices": [0, 0]},
    {"inference_model.address": []},
    {"inference_model.address": ["a"]},
    {"inference_model.address": ["http://a", "http://a/"]},
    {"env.dataset": None},
    {"env.train_split": "x"},
    {"env.dataset_path": "a", "env.dataset_config": "b"},
    {"env.dataset_path": "a", "env.revision": "b"},
    {"evaluation.datasets": [{"dataset": "gsm8k"}], f"{ENTRY}weight": 2.0},
]
"""One for each rule that is not about one key, or about two that exclude each other."""


def inputs(row: Row) -> Iterator[dict[str, Any]]:
    """Yield settings that may break a rule."""
    if row.key in FIELDS or row.key in VALUES:
        one = {row.key: other(row.key)}
        if isinstance(row.rule.broken, str):
            if row.prefix + row.rule.broken in FIELDS or row.rule.broken in VALUES:
                switch = row.prefix + row.rule.broken
                switch_value = other(switch)
                switch = "env.agent" if switch == "env.player" else switch
                yield one | {switch: switch_value}
        elif not row.rule.bad:
            yield one
    yield from INPUTS


LEAVE_OUT = (
    "it is for responses that the policy sampled",
    "a group whose rewards are all equal still has a signal there",
    "it is for data on the hub",
    "weights are for env.datasets",
    "lower it",
    "use env.reward",
    "its options are env.dataset_options",
    "set it for each data set",
    "give more addresses",
    "use one advantage for each trajectory",
    "leave it out",
    "set only one of them",
    "leave out the duplicates",
    "leave python out",
    "for an argument of your class",
)
"""What a fix says where the key at fault is to be left out."""
MEANS = {
    "algo=distill teacher.model=NAME": "policy.teacher_coef=1.0 teacher.model=starter",
    "algo=sft": "policy.loss._target_=torchrl_grpo.objectives.DemonstrationLoss "
    "policy.demonstrations=true policy.advantage_mean=none policy.advantage_std=none",
    "add ref_model.decay": "add ref_model.decay=0.9",
    "give env.dataset": "env.dataset=rows.jsonl",
    "to give the environment rows of data, set env.dataset": "env.dataset=rows.jsonl",
    "leave env.columns.prompt and completion out": "env.columns.prompt=null "
    "env.columns.completion=null",
    "give only the number, to have the devices chosen": "train_model.devices=null",
    "give only the devices": "train_model.num_devices=null",
    ", or use sota/grpo/grpo-async.py": "",
    "policy.proximal=recomputed, which": "inference_model.exact=false policy.proximal=recomputed",
    "use another backend": "inference_model.backend=vllm",
    "use evaluation.temperature": "inference_model.temperature=1.0",
    "use train.mixed_precision=bf16": "train.mixed_precision=bf16 train_model.dtype=float32",
}
PAIR = re.compile(r"(?<![\w.])((?:[a-z_]+\.)+[\w.]+)=(\[[^\]]*\]|\{[^}]*\}|[^\s;']+)")


PROSE = re.compile(
    r"for example$|one class$|\d+$|\{|set one of them$|raise policy\.entropy_coef_max$|neither$|change optimizer\.lr$"
    r"|server$|vllm$|a (file|name)\b|start the server|leave policy\.reward_scale, .* out$"
)
"""Alternatives that name no value of a key."""
LEFT_OUT = object()
TYPES = OmegaConf.structured(GRPOConfig)


def fixes(row: Row, message: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each alternative in an error's fix."""
    key = re.match(r"([\w.\[\]]+)=", message)
    assert key, message
    start = row.rule.fix.partition("{")[0]
    text = message[message.rindex(start) :].removesuffix(".")
    for short, long in MEANS.items():
        text = text.replace(short, long)
    if "use that" in text:  # what the rule needs
        text = text.replace("use that", " ".join(f"{k}={v}" for k, v in PAIR.findall(message)[1:2]))
    for part in re.split(r",? or |, (?=[a-z_.]+=)", text):
        pairs = [(name, value.rstrip(",")) for name, value in PAIR.findall(part)]
        if pairs:
            yield {name: yaml.safe_load(value) for name, value in pairs}
        elif out := re.search(r"leave ([\w.]+\.\w+) out", part):
            yield {out[1]: LEFT_OUT}
        elif any(part.startswith(phrase) for phrase in LEAVE_OUT):
            yield {key[1]: LEFT_OUT}
        elif match := re.match(r"(?:use|for example,) (.+?)(?:, for example)?$", part):
            yield {key[1]: yaml.safe_load(match[1])}
        else:
            assert PROSE.match(part), f"not understood: {part}"


def names(message: str, settings: Mapping[str, Any]) -> bool:
    """Return whether an error begins with one of the settings."""
    for name, value in settings.items():
        texts = [""] if name in LISTS else [f"{written(value)} ", f"{value} "]
        if any(message.startswith(f"{name}={text}") for text in texts):
            return True
    return False


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.key} {row.rule.why[:40]}")
def test_a_broken_rule_names_its_key_and_each_fix_works(row: Row) -> None:
    tried = ((settings, row.error(settings)) for settings in inputs(row))
    broken = ((one, error) for one, error in tried if error is not None and names(error, one))
    settings, message = next(broken, ({}, ""))
    assert message, "no input breaks this rule and is named"
    if row.prefix + str(row.rule.broken) in (*FIELDS, *VALUES):
        assert all(name.rpartition(".")[2] in message for name in settings), message
    served = {"inference_model.backend": "server"} if row.prefix == "inference_model." else {}
    with pytest.raises(ConfigError):
        validate(made(settings | served))
        check_one_process(made(settings))
    healed = [settings | fix for fix in fixes(row, message)]
    assert healed, f"no fix is understood: {message}"
    for fixed in healed:
        fixed = {name: value for name, value in fixed.items() if value is not LEFT_OUT}
        assert row.error(fixed) is None, (message, fixed)
        for name, value in fixed.items():
            if (
                name in FIELDS and settings.get(name) != value
            ):  # of its type, its choices and its range
                OmegaConf.update(TYPES, name, value)
                check_values(made({name: value}))
