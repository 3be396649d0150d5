"""The examples in the package's docstrings print what they show."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "torchrl_grpo"
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_give_what_they_show(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_sections_of_docstrings_stand_on_lines_of_their_own() -> None:
    sections = r"(Args|Keyword Args|Attributes|Returns|Raises|Yields|Examples?)"
    joined = re.compile(rf"^ *{sections}: +\S", re.MULTILINE)
    damaged = [
        f"{path.name}: {match[0].strip()}"
        for path in PACKAGE.rglob("*.py")
        for match in joined.finditer(path.read_text("utf-8"))
    ]
    assert damaged == []
