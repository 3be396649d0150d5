"""Bad input, all of it: every key of the schema with values that it cannot have, and keys that contradict each other.

Each is answered from the config alone, before anything loads: one ``ConfigError`` that names the key and a way out.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from torchrl_grpo.config import ConfigError, from_hydra
from torchrl_grpo.config.schema import FIELDS, GRPOConfig

HUGE = int("9" * 400)
NUMBERS = {int, float}


def kinds(name: str) -> set[Any]:
    """The types that a key may have."""
    node: Any = GRPOConfig
    for part in name.split("."):
        node = typing.get_type_hints(node)[part]
    return set(typing.get_args(node)) if isinstance(node, types.UnionType) else {typing.get_origin(node) or node}


def bad_values(name: str) -> Iterator[tuple[str, Any]]:
    """What a key cannot have, with the kind of mistake."""
    item, kind = FIELDS[name], kinds(name)
    limits = item.metadata.get("limits", {})
    if not kind & {Any, dict}:
        yield "type", {"a": {"b": 1}} if kind & {str} else "nonsense"
    if kind & NUMBERS:
        yield "type", [1]
        yield from (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")))
        yield from (("400 digits", HUGE), ("400 digits", -HUGE))
    if "ge" in limits:
        yield "range", limits["ge"] - (1 if int in kind else 1e-6)
    if "gt" in limits:
        yield from (("range", limits["gt"]), ("range", limits["gt"] - 1))
    if "le" in limits:
        yield "range", limits["le"] + (1 if int in kind else 1e-6)
    if "lt" in limits:
        yield "range", limits["lt"]
    if "choices" in item.metadata:
        yield from (("choice", item.metadata["choices"][0][:-1] + "x"), ("400 digits", HUGE))


def tree(*settings: tuple[str, Any]) -> Any:
    """The arithmetic task with some keys set."""
    made = OmegaConf.create({"env": {"dataset": "arithmetic"}})
    for name, value in settings:
        OmegaConf.update(made, name, value, force_add=True)
    return made


VALUES = [(name, kind, value) for name in FIELDS for kind, value in bad_values(name)]


def test_every_key_refuses_what_it_cannot_have_and_says_so() -> None:
    failed = []
    for name, kind, value in VALUES:
        try:
            from_hydra(tree((name, value)))
            failed.append((name, kind, "accepted"))
        except ConfigError as error:
            now = FIELDS[name].metadata.get("now", name)
            said = str(error)
            if not (now in said or name in said) or "must" not in said or ": " not in said or len(said) > 1000:
                failed.append((name, kind, said[:300]))
        except Exception as error:
            failed.append((name, kind, f"{type(error).__name__}: {error}"[:200]))
    assert failed == []
