"""What the pages list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.configs import ROOT


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """The metrics in rows of ``metrics.jsonl`` that ``docs/metrics.md`` has not.

    There ``{k}``, one letter, is a number, and ``{name}`` any text.
    """
    cells = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    pattern = "|".join(re.sub(r"\\{\w{2,}\\}", r".+", re.sub(r"\\{\w\\}", r"\\d+", re.escape(name))) for name in listed)
    return {name for row in rows for name in row if name != "step" and not re.fullmatch(pattern, name)}
