"""Settings of scripts, which are read and never run: Python that makes a ``GRPOConfig``, a shell that starts verl."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_CALLS = ("GRPOConfig", "LoraConfig", "GRPOTrainer", "load_dataset")
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
_ARITHMETIC: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_OVERRIDE = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_USE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(([^'\"\n]*?)\)\)(?=[\s\"'}]|$)")
_BLOCKS = {"if": 1, "case": 1, "fi": -1, "esac": -1}

UNKNOWN = "$?"
"""Stands for a value that only running the script would tell."""


def read_python(text: str) -> dict[str, Any]:
    """TRL's keys, of the calls of ``GRPOConfig`` and of what goes with it; none where it is not called.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(text)
    known = _constants(tree)
    found: dict[str, Any] = {}
    has_config = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name not in _CALLS:
            continue
        given = {item.arg: _value(item.value, known) for item in node.keywords if item.arg}
        if name == "GRPOConfig":
            has_config = True
            found |= given
        elif name == "LoraConfig":
            defaults = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
            found |= {**defaults, **{_LORA.get(key, key): value for key, value in given.items()}, "use_peft": True}
        elif name == "GRPOTrainer":
            found |= _trainer(node, given, tree)
        else:
            names = ("dataset_name", "dataset_config")
            places = {key: _value(item, known) for key, item in zip(names, node.args, strict=False)}
            split = {"dataset_train_split": given["split"]} if isinstance(given.get("split"), str) else {}
            found = {**places, **split, **found}
    return {key: value for key, value in found.items() if value is not None} if has_config else {}


def _trainer(node: ast.Call, given: Mapping[str, Any], tree: ast.Module) -> dict[str, Any]:
    """What the trainer is given: the model, rewards by their names, tools."""
    made = {"model_name_or_path": given.get("model")}
    imported = {
        alias.asname or alias.name: f"{item.module}:{alias.name}"
        for item in ast.walk(tree)
        if isinstance(item, ast.ImportFrom)
        for alias in item.names
    }
    for item in node.keywords:
        if item.arg == "reward_funcs":
            several = item.value.elts if isinstance(item.value, ast.List | ast.Tuple) else [item.value]
            names = [one.id if isinstance(one, ast.Name) else UNKNOWN for one in several]
            made["reward_funcs"] = [imported.get(name, name) for name in names]
        elif item.arg in ("tools", "environment_factory", "rollout_func"):
            made[item.arg] = ast.unparse(item.value)
    return {key: value for key, value in made.items() if value not in (None, UNKNOWN)}


def _constants(tree: ast.Module) -> dict[str, Any]:
    """The values of names that are assigned once."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            known[name] = UNKNOWN if name in known else _value(node.value, known)
    return known


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """What an expression is, of literals, names of constants and arithmetic on numbers."""
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value(node.left, known), _value(node.right, known)
        if not all(isinstance(side, int | float) for side in (left, right)) or not right:
            return UNKNOWN
        return _ARITHMETIC[type(node.op)](left, right)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return UNKNOWN


def read_shell(text: str) -> dict[str, Any]:
    """The ``key.key=value`` of a shell script, wherever they stand, with the script's variables put in.

    Raises:
        ValueError: quotes or parentheses are left open.
    """
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = _SUM.sub(lambda found: f"$(({found[1].replace(' ', '')}))", text)
    text = re.sub(r"(?<!\S)(\w+=\()", r"\1 ", text)  # an array
    variables: dict[str, str] = {}
    found: dict[str, Any] = {}
    depth = 0
    for word in shlex.split(text, comments=True):
        word = word.removesuffix(";")
        word = word.removesuffix(")") if word.count(")") > word.count("(") else word
        depth = max(0, depth + _BLOCKS.get(word, 0))
        if override := _OVERRIDE.fullmatch(word):
            found[override[1]] = _yaml(_expanded(override[2].strip("\"'"), variables))
        elif (variable := _VARIABLE.fullmatch(word)) and not depth:
            variables[variable[1]] = _expanded(variable[2], variables)
    return found


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """A word with its variables and sums put in; ``$HOME`` and others that the script does not set stay."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, f"${name}" if found[2] is None else found[2])

    for _ in range(4):
        new = _USE.sub(value, text)
        if new == text:
            break
        text = new
    sums = re.compile(r"\$\(\((.*?)\)\)(?!\))")
    return sums.sub(lambda found: str(next(_computed(found[1], variables), found[0])), text)


def _computed(text: str, variables: Mapping[str, str]) -> Iterator[int]:
    """The value of a shell's sum, if it is one of whole numbers."""
    numbers = {name: _yaml(value) for name, value in variables.items()}
    try:
        value = _value(ast.parse(text.replace("/", "//"), mode="eval").body, numbers)
    except SyntaxError:
        return
    if isinstance(value, int):
        yield value


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text
