"""The embedded starter model: a small Qwen2 model that adds two-digit numbers and mostly forgets to
carry.

``tools/make_starter.py`` made it; its model card is ``model/README.md``.
"""

from __future__ import annotations

from pathlib import Path


def starter_path() -> Path:
    """Return the folder of the saved model and tokenizer, for ``from_pretrained`` and for vLLM.

    >>> starter_path().name
    'model'
    """
    return Path(__file__).resolve().parent / "model"
