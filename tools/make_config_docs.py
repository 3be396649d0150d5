"""Make ``docs/config.md`` from the dataclasses of ``torchrl_grpo.config`` and the docstrings of
their fields.

python tools/make_config_docs.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchrl_grpo.config import GRPOConfig, data, devices, engine, rules

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEAD = """# The config's keys

<!-- Made by python tools/make_config_docs.py from the docstrings in torchrl_grpo/config/: edit those. -->

On the command line, set a key with `NODE.KEY=VALUE`, as in `optimizer.lr=1e-5`; `null` unsets it. The tables have the
code's defaults. The files in `config/` change some for their tasks, and the ones in `config/algo/` for the
[algorithms](algorithms.md). `--cfg job` prints a run's values.

The rules of a node are below its keys. A config that breaks one is refused before anything loads, with the key, its
value and the fix. `ROLE` is `train_model`, `inference_model`, `ref_model` or `teacher`, and `KEY` stands for several
keys. Rules of `env` for a data set also hold for each entry of `env.datasets` and `evaluation.datasets`.
"""

RULES_HEAD = "| key | rule | fix |\n|---|---|---|"

PLACEHOLDERS = {
    "switch": "`inference_model.backend=server` or `teacher.address`",
    "env.player": "`env.agent` or `env.task=verifiers:NAME`",
    "divisors": "one of its divisors",
    "choices": "those that the engine has",
    "env.own_task": "CLASS",
    "first": "auto",
    "train_model.dtype": "`train_model.dtype`",
    "name": "KEY",
    "target": "my_tasks.MyTask",
    "reader": "NAME",
}


def page() -> str:
    """Return the text of ``docs/config.md``."""
    nodes = list(_nodes(GRPOConfig()))
    rules = _rules(nodes)
    documented: dict[tuple[str, str], str] = {}
    parts = [
        part
        for name, node in nodes
        for part in (*_keys(node, name, documented), *_rules_table(name, rules.get(name, {})))
    ]
    return "\n".join([HEAD, *parts]).rstrip() + "\n"


def _nodes(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a node and those inside it, with their dotted names."""
    yield name, node
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from _nodes(value, f"{name}.{item.name}".lstrip("."))


def _keys(node: Any, name: str, documented: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield the heading of a node and the table of its keys.

    Args:
        node: a dataclass of the config.
        name: its dotted name.
        documented: the node that documents a key; others refer to it.
    """
    bodies = [ast.parse(inspect.getsource(kind)).body[0] for kind in type(node).__mro__[-2::-1]]
    docs = {
        ast.unparse(item.target): ast.literal_eval(text.value)
        for body in bodies
        if isinstance(body, ast.ClassDef)
        for item, text in pairwise(body.body)
        if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    yield f"## `{name}`\n\n{_prose(type(node).__doc__ or '')}\n" if name else "## At the top\n"
    yield "| key (default) | meaning |\n|---|---|"
    fields = {item: getattr(node, item.name) for item in dataclasses.fields(node)}
    for item, value in fields.items():
        if not dataclasses.is_dataclass(value):
            doc = docs[item.name]
            first = documented.setdefault((item.name, doc), name)
            meaning = (
                f"{_prose(doc)}{_choices(item, doc)}"
                if first == name
                else f"As `{first}.{item.name}`."
            )
            yield f"| `{item.name}` ({_default(value)}) | {meaning} |"
    yield ""


def _rules_table(name: str, rows: dict[str, list[str]]) -> Iterator[str]:
    """Yield a node's rules, if it has any."""
    if rows:
        yield f"### Rules of `{name}`\n" if name else "### Rules at the top\n"
        yield RULES_HEAD
        for text, keys in rows.items():
            yield f"| {', '.join(dict.fromkeys(keys))} | {text} |"
        yield ""


def _rules(nodes: list[tuple[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return, by the node of the key, the keys of all rules that differ only in their key."""
    tables = (
        ("", (*rules.RULES, *engine.ONE_PROCESS_RULES, *rules.UNREAD_RULES), None),
        ("env.", data.DATA_RULES, None),
        ("ROLE.", devices.DEVICE_RULES, "train_model"),
        ("ROLE.", devices.SERVER_RULES, "inference_model"),
    )
    names = sorted((name for name, _ in nodes), key=len, reverse=True)
    keys: dict[str, dict[str, list[str]]] = {}
    for prefix, table, shown_at in tables:
        for rule in table:
            texts = (_template(text.replace("{at}", prefix)) for text in (rule.why, rule.fix))
            # The arguments of engine_kwargs are not keys.
            node, _, argument = rule.key.partition("engine_kwargs.")
            name = (
                f"`{prefix}{node}engine_kwargs` ({argument})"
                if argument
                else f"`{prefix}{rule.key}`"
            )
            key = f"{prefix}{rule.key}"
            at = shown_at or next(node for node in names if not node or key.startswith(f"{node}."))
            keys.setdefault(at, {}).setdefault(" | ".join(texts), []).append(name)
    return keys


def _template(text: str) -> str:
    """Return a rule's text with keys and words in place of placeholders."""
    text = re.sub(r", it is \{[^}]*\}", "", text)
    text = re.sub(r"([\w.]+)=\{(\w+\.[\w.]+)\}", r"`\1` equal to {\2}", text)
    text = re.sub(r"\{([\w.]+)=\}", r"`\1`", text)

    def replacement(match: re.Match[str]) -> str:
        return PLACEHOLDERS.get(match[1], match[1])

    return _prose(re.sub(r"\{([\w.]+)\}", replacement, text))


def _prose(doc: str) -> str:
    """Return a docstring on one line; words that are code (``a_b``, ``a=b``, ``a*``) or a command get
    backticks.
    """
    parts = " ".join(doc.split()).replace("``", "`").split("`")
    parts[::2] = [
        re.sub(r"python -m \w+ \w+|[\w.*=]*(?:\w[_=]\w|[*])[\w.*=]*\w|\b_\w+_\b", r"`\g<0>`", part)
        for part in parts[::2]
    ]
    return "`".join(parts).replace("|", r"\|")


def _choices(item: dataclasses.Field[Any], doc: str) -> str:
    """Return the allowed values of a key, unless its docstring names them all."""
    names = item.metadata.get("choices", ())
    listed = ", ".join(f"`{name}`" for name in names)
    return "" if all(re.search(rf"\b{name}\b", doc) for name in names) else f" One of {listed}."


def _default(value: Any) -> str:
    """Return a default in the form of the command line."""
    plain = json.dumps(value).replace('"', "")
    return f"`{plain}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
