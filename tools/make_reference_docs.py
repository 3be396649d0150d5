"""Write the tables of ``docs/reference/*.md`` from the docstrings of the package.

A page has an introduction, written by hand, and the directives of the documentation site in a
comment. The table between them documents the objects that the directives name. The table of
``batch.md`` is made from ``torchrl_grpo/keys.py``.

python tools/make_reference_docs.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_grpo import keys

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"
MARK = "<!-- made by tools/make_reference_docs.py from the docstrings, change them there -->"
HEAD = "| name | what it does | arguments | returns |\n|---|---|---|---|"
KEYS_HEAD = "| key | shape, dtype | meaning | written by | read by |\n|---|---|---|---|---|"
_SECTION = re.compile(r"^(Args|Keyword Args|Attributes|Returns|Yields|Raises|Examples?):$")
_DIRECTIVES = re.compile(r"^<!--\n(?=:::)(.*?)^-->$", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"(.*?)\. (.*)\. Written by (.*); read by (.*)\.")


class KeyRow(NamedTuple):
    """Row of the table of the batch's keys."""

    key: str
    shape: str
    meaning: str
    written_by: str
    read_by: str


def page(path: Path) -> str:
    """Return the text of a page with new tables."""
    text = re.sub(
        rf"^{re.escape(MARK)}\n(?:\n|\|.*\n)*", "", path.read_text(encoding="utf-8"), flags=re.M
    )
    if path.name == "batch.md":
        return f"{text.rstrip()}\n\n{MARK}\n\n{keys_table()}\n"
    return _DIRECTIVES.sub(lambda match: f"{MARK}\n\n{_table(match[1])}\n\n{match[0]}", text)


def keys_table() -> str:
    """Return the table of the batch's keys."""
    rows = ("| " + " | ".join(_cell(text) for text in row) + " |" for row in key_rows())
    return "\n".join([KEYS_HEAD, *rows])


def key_rows() -> list[KeyRow]:
    """Return a row for each key of ``torchrl_grpo.keys``, from the docstring under it."""
    rows = []
    for item, doc in pairwise(ast.parse(inspect.getsource(keys)).body):
        if isinstance(item, ast.Assign) and isinstance(doc, ast.Expr):
            key = ast.unparse(item.value).replace("'", '"')
            match = _KEY.fullmatch(" ".join(ast.literal_eval(doc.value).split()))
            assert match is not None, key
            rows.append(KeyRow(f"``{key}``", *match.groups()))
    return rows


def _table(directives: str) -> str:
    """Return the table of the objects that directives name."""
    rows = [HEAD]
    for name in re.findall(r"^::: (\S+)", directives, re.MULTILINE):
        parent, _, last = name.rpartition(".")
        thing = getattr(importlib.import_module(parent), last)
        if inspect.ismodule(thing):
            rows += [_row(item.__name__, item) for item in _functions(thing)]
        else:
            rows.append(_row(last, thing))
        if inspect.isclass(thing):
            rows += [_row(f"{last}.{name}", method) for name, method in _methods(thing)]
    return "\n".join(rows)


def _functions(module: Any) -> Iterator[Any]:
    """Yield the public functions of a module."""
    for name, item in vars(module).items():
        if inspect.isfunction(item) and item.__module__ == module.__name__ and name[0] != "_":
            yield item


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that have a docstring of their own."""
    for name, item in vars(cls).items():
        method = getattr(item, "__func__", item)
        is_method = inspect.isfunction(method) or isinstance(method, property)
        if name[0] != "_" and is_method and method.__doc__:
            yield name, method


def _row(name: str, thing: Any) -> str:
    """Return the row of a class, a function or a method."""
    sections = _sections(thing)
    returns = " ".join(sections.get("Returns", sections.get("Yields", []))) or _result(thing)
    cells = (f"``{name}``", sections[""][0], _arguments(thing, sections), returns)
    return "| " + " | ".join(_cell(_sentence(text)) for text in cells) + " |"


def _sections(thing: Any) -> dict[str, list[str]]:
    """Return the paragraphs of a docstring by section; those before the first under ``""``."""
    sections: dict[str, list[str]] = {"": [""]}
    lines = sections[""]
    for line in (inspect.getdoc(thing) or "").splitlines():
        if match := _SECTION.match(line):
            lines = sections.setdefault(match[1], [])
        elif line.startswith("        ") or (line.startswith("    ") and not lines):
            lines[-1:] = [f"{' '.join(lines[-1:])} {line.strip()}".strip()]
        elif line.startswith("    "):
            lines.append(line.strip())
        elif not line:
            lines.append("")
        else:
            lines[-1:] = [f"{' '.join(lines[-1:])} {line}".strip()]
    return sections


def _arguments(thing: Any, sections: dict[str, list[str]]) -> str:
    """Return the required arguments with their meaning, then the optional ones with their
    defaults.
    """
    texts = [
        *sections.get("Args", sections.get("Attributes", [])),
        *sections.get("Keyword Args", []),
    ]
    meanings = dict(text.split(": ", 1) for text in texts if ": " in text)
    required = []
    optional = []
    for name, parameter in _parameters(thing).items():
        if parameter.kind is parameter.VAR_POSITIONAL or name in ("self", "cls"):
            continue
        if parameter.default is not parameter.empty:
            optional.append(f"``{name}={_default(parameter.default)}``")
        elif name in meanings:
            meaning = _sentence(meanings[name]).removesuffix(".")
            required.append(f"``{name}``: {meaning.partition('; ')[0]}")
        elif parameter.kind is not parameter.VAR_KEYWORD:
            required.append(f"``{name}``")
    return "<br>".join([*required, ", ".join(optional)]).removesuffix("<br>")


def _result(thing: Any) -> str:
    """Return a function's return annotation, if it is not None."""
    function: Any = thing.fget if isinstance(thing, property) else thing
    if inspect.isclass(function):
        return ""
    result = inspect.signature(function).return_annotation
    return "" if result in ("None", inspect.Signature.empty) else f"``{result}``"


def _parameters(thing: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of the initializer of a class."""
    if isinstance(thing, property):
        return {}
    call = thing.__init__ if inspect.isclass(thing) else thing
    is_ours = getattr(call, "__module__", thing.__module__).startswith("torchrl_grpo")
    return dict(inspect.signature(call).parameters) if is_ours else {}


def _default(value: Any) -> str:
    text = repr(value).replace("'", '"')
    return "..." if callable(value) or text.startswith("<") else text


def _sentence(text: str) -> str:
    """Return the first sentence of a text."""
    return re.split(r"(?<=[.])\s+(?=[A-Z`(*])", text)[0]


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", r"\|")


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(page(path), encoding="utf-8")
