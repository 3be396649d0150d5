"""The metrics that the docs list, and the code blocks in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.support.configs import ROOT


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return metrics in rows of ``metrics.jsonl`` that are missing in ``docs/metrics.md``.

    There ``{k}``, one letter, is a number, and ``{name}`` any text.
    """
    cells = re.findall(
        r"^\| (`[^|]*) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    pattern = "|".join(
        re.sub(r"\\{\w{2,}\\}", r".+", re.sub(r"\\{\w\\}", r"\\d+", re.escape(name)))
        for name in listed
    )
    return {
        name for row in rows for name in row if name != "step" and not re.fullmatch(pattern, name)
    }


DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
TUTORIALS = [page for page in PAGES if page.startswith("tutorials/")]


class Block(NamedTuple):
    """A fenced block. Its title is the name of the file that it shows, or says which GPUs its
    command needs.
    """

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [
        Block(*match)
        for match in re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S)
    ]


def commands(block: Block) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Return the variables and the words of each command in a bash block."""
    text = block.text.replace("\\\n", " ")
    for line in re.findall(r"(?:'[^']*'|\"[^\"]*\"|#[^\n]*|[^\n'\"#])+", text):
        for part in re.split(r" && ", line):
            words = shlex.split(part, comments=True)
            variables = dict(
                word.split("=", 1) for word in words[:1] if re.match(r"[A-Z_]+=", word)
            )
            if words[len(variables) :]:
                yield variables, words[len(variables) :]


_TEXTS = {".md", ".ipynb", ".py", ".sbatch", ".yaml", ".txt"}
_PLACEHOLDERS = (
    (r"\$\(\([^)]*\)\)", "64"),
    (r"\$\{\w+:-([^}]*)\}", r"\1"),
    (
        r'\$\(\w+\)|"\$@"|"\$\{overrides\[@\]\}"',
        "",
    ),  # placeholders of the user's additions, and defaults of a Slurm script
    (r"\$half\b", "4"),
    (r"\$\w+", "x"),
    (r"\balgo=NAME\b", "algo=dapo"),
)
"""What a shell, make or the reader replaces, and an example of what comes there."""


def script_lines() -> list[tuple[str, str, list[str]]]:
    """Return file, script and arguments of each command line of ``grpo.py`` and ``grpo-async.py``
    in the docs.
    """
    files = [ROOT / name for name in ("README.md", "Makefile", "Dockerfile", "Dockerfile.cpu")]
    for folder in ("docs", "examples", "sota", "config", "tools"):
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in _TEXTS)
    lines = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        text = re.sub(r"\\+\n[#\s]*", " ", text).replace("{sys.executable}", "python")
        matches = re.findall(r"(?:python|\$\(PY\)) sota/grpo/(grpo(?:-async)?)\.py([^`\n]*)", text)
        matches += re.findall(r"^(grpo(?:-async)?)((?: [-a-z_'\"].*)?)$", text, re.MULTILINE)
        if file.name == "README.md":  # a row of its tables is added to a command line
            rows = re.findall(r"^\|[^|]*\| `([^`|]*)`", text, re.MULTILINE)
            matches += [("grpo", row) for row in rows if re.match(r"--|'?[a-z_.]+=", row)]
        for script, rest in matches:
            for pattern, instead in _PLACEHOLDERS:
                rest = re.sub(pattern, instead, rest)
            lines.append(
                (file.relative_to(ROOT).as_posix(), script, shlex.split(rest, comments=True))
            )
    return lines
