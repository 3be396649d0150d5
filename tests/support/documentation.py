"""What the pages list, and the code in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
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


DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
TUTORIALS = [page for page in PAGES if page.startswith("tutorials/")]


class Block(NamedTuple):
    """A fenced block; the title is the name of the file that it shows, or says which GPUs its command needs."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S)]


def commands(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The variables and the words of each command of a block in bash."""
    text = block.text.replace("\\\n", " ")
    for line in re.findall(r"(?:'[^']*'|\"[^\"]*\"|#[^\n]*|[^\n'\"#])+", text):
        for part in re.split(r" && ", line):
            words = shlex.split(part, comments=True)
            variables = dict(word.split("=", 1) for word in words[:1] if re.match(r"[A-Z_]+=", word))
            if words[len(variables) :]:
                yield variables, words[len(variables) :]
