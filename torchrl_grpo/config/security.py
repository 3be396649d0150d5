"""Checks of what a config must not contain.

Secrets, because the config is written to checkpoints, reports and W&B; and, if it comes from a
checkpoint, code and addresses that the command line does not name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import not_
from typing import Any

from torchrl_grpo.config.schema import ADVANTAGES, LOSSES
from torchrl_grpo.engines import ENGINES
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.trees import dotted, inner_nodes

_NAME = re.compile(
    r"(?:^|[._-])(?:(?:api|access|secret)_?key|auth|(?:(?:api|access|auth|hf|bearer)_?)?token|secret|password|passwd"
    r"|credentials?)$",
    re.I,
)
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{16,}|\b(?:ghp|gho|ghs|github_pat)_[A-Za-z0-9_]{20,}|\bAKIA[A-Z0-9]{16}\b"
    r"|\bwandb_v\d_[A-Za-z0-9_]{20,}|\bxox[abp]-[A-Za-z0-9-]{10,}|\bAIza[A-Za-z0-9_-]{30,}|\bBearer\s+\S{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@"
)
_HEX = re.compile(r"[0-9a-f]{40}")  # an API key of W&B, but also a commit


def check_no_secrets(node: Mapping[str, Any]) -> None:
    """Refuse a config, given as plain types, that contains what looks like a secret.

    Raises:
        ConfigError: it does; the message names the key and not the value.
    """
    for name, value in dotted(node, into_lists=True):
        check_not_secret(name, value)


def check_not_secret(name: str, value: Any) -> None:
    """Refuse a value that looks like a secret, or whose key is named like one.

    Raises:
        ConfigError: it is refused; the message does not contain the value.
    """
    text = "" if value is None else str(value)
    hexadecimal = "revision" not in name and _HEX.fullmatch(text)
    named_like_secret = _NAME.search(name) and isinstance(value, str)
    if text and (named_like_secret or _VALUE.search(text) or hexadecimal):
        raise ConfigError(
            f"{name} must not be a key, token or password, because the config is written to the "
            "run's files: put it into an environment variable (HF_TOKEN, WANDB_API_KEY, or the one "
            "that api_key_env of the reward judge names) and leave it out here. This run has not "
            "written it anywhere."
        )


OWN_REWARDS = {
    "countdown", (
        "format"
    ), "gsm8k", "ifeval", "length", "math", "number", "operations", "reward_model", "structure",
}  # fmt: skip
"""Built-in rewards that use no server and run no program."""


def _is_own_reward(spec: Any) -> bool:
    """Return whether all rewards are in ``OWN_REWARDS``."""
    if isinstance(spec, list):
        return all(map(_is_own_reward, spec))
    name = spec.get("fn") if isinstance(spec, Mapping) else spec
    return name is None or (isinstance(name, str) and name in OWN_REWARDS)


def _is_own_component(classes: Sequence[str], node: Mapping[str, Any]) -> bool:
    """Return whether a node names one of the package's classes, and its arguments instantiate
    nothing.
    """
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    names = (name for name, _ in dotted(arguments, into_lists=True))
    return node.get("_target_") in classes and not any(
        re.search(r"(?:^|\.)_", name) for name in names
    )


def _is_own_data(entries: Sequence[Mapping[str, Any]] | None) -> bool:
    return all(
        _is_own_reward(entry["reward"]) and _has_no_text(entry["dataset_options"])
        for entry in entries or ()
    )


def _has_no_text(options: Any) -> bool:
    """Return whether options contain no text, which could name packages for verifiers."""
    return not any(isinstance(value, str) for _, value in dotted(options, into_lists=True))


FROM_COMMAND_LINE: dict[str, Callable[[Any], bool]] = {
    "model.trust_remote_code": not_,
    # Other names may be kernels on the hub.
    "model.attn_implementation": ("sdpa", "eager", "flash_attention_2", "FA3", "FA4").__contains__,
    "model.chat_template": lambda template: template is None or "{" in template,
    "train_model.model_kwargs": not_,
    # Names, and no expression or number that takes much time or memory.
    "train_model.lora.settings": lambda settings: (
        isinstance(settings, dict | None) and not re.search(r"[*+]|{\d|\d{5}", str(settings))
    ),
    "inference_model.backend": ENGINES.__contains__,  # an installed package's is code
    "inference_model.address": not_,
    "inference_model.weights_folder": not_,
    "inference_model.engine_kwargs": not_,
    "teacher.address": not_,
    "teachers": lambda entries: not any(entry["address"] for entry in entries or ()),
    "teacher.prompt": lambda name: name is None or ":" not in name,
    "env.reward": _is_own_reward,
    "env.dataset_options": _has_no_text,
    "env.datasets": _is_own_data,
    "env.task": lambda node: node == {"_target_": None},
    "env.environment": not_,
    "env.agent": not_,
    "env.tools": not_,
    "env.tool_parser": not_,
    "env.transforms": not_,
    "env.sandbox": lambda sandbox: sandbox == "strict",
    "policy.loss": partial(_is_own_component, LOSSES),
    "policy.advantage": partial(_is_own_component, ADVANTAGES),
    "evaluation.datasets": _is_own_data,
    "logging.wandb.mode": lambda mode: mode != "online",
    "logging.wandb.entity": not_,
    "logging.mlflow.mode": lambda mode: mode != "online",
    "logging.trackio.mode": lambda mode: (
        mode == "disabled"
    ),  # offline writes to a folder of the user
    "ray.address": not_,
    "logging.trackers": not_,
    "logging.prometheus.host": lambda host: host == "127.0.0.1",
}
"""Options that may name code, programs, addresses, environment variables, or other files than
models and data, each with a function that returns whether a value is harmless.
"""


def from_outside(
    saved: Mapping[str, Any], here: Mapping[str, Any], names: Iterable[str] = FROM_COMMAND_LINE
) -> Iterator[tuple[str, Any]]:
    """Yield the options, with values, that a foreign config sets but must not.

    Args:
        saved: the config, as plain types, with a value of its type for each option.
        here: only the config of the command line; a value that is equal in it is allowed.
        names: the options to check.
    """
    before, now = (dict(inner_nodes(config)) for config in (saved, here))
    for name in names:
        if before[name] != now[name] and not FROM_COMMAND_LINE[name](before[name]):
            yield name, before[name]
