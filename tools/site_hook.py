"""Hooks of MkDocs and mkdocstrings, so that pages also read well on GitHub, and docstrings in
Python.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"(?<![\w/`])(?<!\]\()(`?)docs/(\w+)\.md\1(?![\w`])")
_EXAMPLE = re.compile(r"`(examples/\w+\.\w+)`")
_SHOWN = re.compile(r'^```\w+ title="(examples/\w+\.\w+)"')
_PAPER = re.compile(r"(?<![\w/.])(\d\d[01]\d\.\d{5})(?![\w.]\w)")
_REFERENCE = re.compile(r"^<!--\n(:::.*?)^-->$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|link rel="?stylesheet"?)[^>]+(?:src|href)="?((?:https?:)?//[^"\s>]+)"""
)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the examples, for readers with the wheel but no clone."""
    for path in sorted((ROOT / "examples").glob("*.*")):
        files.append(
            File(f"examples/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls)
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn names of pages, examples and papers into links, read bars in the code of tables as GitHub
    does, and uncomment the reference's directives, which GitHub must not show. The search lists
    pages of the reference, which name most words most often, below the guides.
    """
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.2}
    parts = _FENCE.split(_REFERENCE.sub(r"\1", markdown))
    up = "../" * page.file.src_uri.count("/")
    for index in range(1, len(parts), 2):
        if shown := _SHOWN.match(parts[index]):
            parts[index] += f"\n\nThe whole file: [{shown[1]}]({up}{shown[1]})"
    return "".join(
        part if index % 2 else _linked(_bars(part), up) for index, part in enumerate(parts)
    )


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """End the build if a page loads anything from another site."""
    if found := _FETCHED.findall(output):
        raise ValueError(
            f"{page.file.src_uri} must be readable offline, and fetches {found}: put it below docs/."
        )


def _linked(text: str, up: str) -> str:
    """Turn `docs/metrics.md` into a link with that page's title, and examples and arXiv numbers into
    links to file and paper.
    """

    def link(match: re.Match[str]) -> str:
        name = match[2]
        title = (
            (DOCS / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        )
        return f"[{title}]({up}{name}.md)"

    text = _EXAMPLE.sub(rf"[`\1`]({up}\1)", _PAGE.sub(link, text))
    return _PAPER.sub(r"[\1](https://arxiv.org/abs/\1)", text)


def _bars(text: str) -> str:
    r"""Replace ``\|`` in a table's code, which Python-Markdown reads as two characters."""
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )


class BareExamples(griffe.Extension):
    """Put examples outside of any section of a docstring into one; there, Markdown reads ``>>>`` as
    a quotation.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of each object that was read."""
        if obj.docstring is not None:
            paragraphs = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value).split("\n\n")
            obj.docstring.value = "\n\n".join(
                "Examples:\n" + indent(text, "    ") if text.startswith(">>> ") else text
                for text in paragraphs
            )
