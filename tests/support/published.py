"""Data sets as they were published. The project does not have them: a test that reads them is skipped without them."""

from __future__ import annotations

from pathlib import Path


def published(name: str) -> Path:
    """Where a data set would lie: ``shared/data/`` in the checkout, or beside it."""
    root = Path(__file__).resolve().parents[2]
    inside, beside = (folder / "shared" / "data" / name for folder in (root, root.parent))
    return inside if inside.exists() else beside
