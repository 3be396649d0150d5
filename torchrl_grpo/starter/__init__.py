"""The included starter models: ``starter``, a small Qwen2 model that adds two-digit numbers and
mostly forgets to carry; ``tool_starter``, the same model trained to call a calculator, which it
rarely does; and ``vision_starter``, a small Idefics3 model that counts shapes in pictures and
mostly stops early.

``tools/make_starter.py``, ``tools/make_tool_starter.py`` and ``tools/make_vision_starter.py`` made
them; each folder has a model card.
"""

from __future__ import annotations

from pathlib import Path

from torchrl_grpo.checks import STARTERS


def starter_path(name: str = "starter") -> Path:
    """Return the folder of a starter's model and tokenizer, for ``from_pretrained`` and for vLLM.

    Args:
        name: as in ``model.name``.

    >>> starter_path().name
    'model'
    """
    return Path(__file__).resolve().parent / STARTERS[name]
