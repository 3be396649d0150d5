"""Scripts of ``tools/``, imported."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.configs import ROOT

TOOLS = ROOT / "tools"


def load_tool(name: str) -> ModuleType:
    """Import a script of ``tools/``, which may import others of that folder."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(TOOLS))
    try:
        spec.loader.exec_module(tool)
    finally:
        sys.path.remove(str(TOOLS))
    return tool
