"""What the pages list, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tests.support.configs import ROOT


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """The metrics in rows of ``metrics.jsonl`` that ``docs/metrics.md`` has not.

    There ``{k}``, one letter, is a number, and ``{name}`` any text.
    """
    cells = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    pattern = "|".join(re.sub(r"\\{\w{2,}\\}", r".+", re.sub(r"\\{\w\\}", r"\\d+", re.escape(name))) for name in listed)
    return {name for row in rows for name in row if name != "step" and not re.fullmatch(pattern, name)}


TUTORIALS = ROOT / "docs" / "tutorials"


class Block(NamedTuple):
    """A fenced block; the title is the name of the file that it shows."""

    language: str
    title: str
    text: str


def blocks(tutorial: str) -> list[Block]:
    text = (TUTORIALS / f"{tutorial}.md").read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S)]
