"""The tests themselves: shared code is in tests/support, and names are short."""

from __future__ import annotations

import re

from tests.support.configs import ROOT

FILES = [path for path in (ROOT / "tests").rglob("test_*.py") if "support" not in path.parts]


def test_no_test_module_imports_another() -> None:
    """A script in a string must not do it either."""
    pattern = re.compile(r"^\s*(?:from|import) (tests\.(?!support)\S+)", re.MULTILINE)
    texts = {path.name: path.read_text(encoding="utf-8") for path in FILES}
    assert {
        name: matches for name, text in texts.items() if (matches := pattern.findall(text))
    } == {}


def test_names_of_tests_are_under_70_characters() -> None:
    pattern = re.compile(r"^\s*(?:async )?def (test_\w{65,})\(", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    assert [name for text in texts for name in pattern.findall(text)] == []
