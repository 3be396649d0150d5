"""Published data sets. The project does not ship them: tests that read them are skipped without
them.
"""

from __future__ import annotations

from pathlib import Path


def published(name: str) -> Path:
    """Return the path of a data set: ``shared/data/`` in the checkout, or beside it."""
    root = Path(__file__).resolve().parents[2]
    inside, beside = (folder / "shared" / "data" / name for folder in (root, root.parent))
    return inside if inside.exists() else beside
