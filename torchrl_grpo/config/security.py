"""Checks of what a config must not carry.

Secrets, because it is written into checkpoints, reports and to W&B; and, where it comes out of a checkpoint, names of
code that the command line does not name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.host.trees import dotted

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
_HEX = re.compile(r"[0-9a-f]{40}")  # a key of W&B, and also a commit


def check_no_secrets(node: Mapping[str, Any]) -> None:
    """Refuses a config, as plain types, in which something looks like a secret.

    Raises:
        ConfigError: something does; the message names the key and not the value.
    """
    for name, value in dotted(node, into_lists=True):
        check_not_secret(name, value)


def check_not_secret(name: str, value: Any) -> None:
    """Refuses the value of a key that looks like a secret, or is called like one.

    Raises:
        ConfigError: it does, or is; the message does not have the value.
    """
    text = "" if value is None else str(value)
    hexadecimal = "revision" not in name and _HEX.fullmatch(text)
    if text and ((_NAME.search(name) and isinstance(value, str)) or _VALUE.search(text) or hexadecimal):
        raise ConfigError(
            f"{name} must not be a key, token or password, because the config is written into the run's files: put it "
            "into an environment variable (HF_TOKEN, WANDB_API_KEY, or the one that api_key_env of the reward judge "
            "names) and leave it out here; it was not written anywhere by this run."
        )


def code_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config, as plain types, runs beside this package's own code: values by their dotted names."""
    return {name: value for name, value in dotted(config, into_lists=True) if _is_code(name, value)}


def _is_code(name: str, value: Any) -> bool:
    if name == "model.trust_remote_code":
        return bool(value)
    if not isinstance(value, str):
        return False
    # Some of vLLM's engine_kwargs name a class, and options of verifiers name packages and functions.
    if name in ("env.agent", "env.task") or name.startswith(("inference_model.engine_kwargs.", "env.dataset_options.")):
        return True
    if name.endswith("_target_"):
        return not value.startswith(("torchrl_grpo.objectives.", "torchrl_grpo.transforms."))
    return ":" in value and any(part in name for part in ("reward", "tool", "environment"))
