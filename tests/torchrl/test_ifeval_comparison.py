"""Our IFEval checks against TorchRL's, on made-up responses; benchmarks/README.md explains each difference."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

for package in ("nltk", "immutabledict", "langdetect"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(
        "compare_ifeval", ROOT / "tools" / "compare_ifeval.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    level = module.torchrl_logger.level  # TorchRL's own logger, which other tests capture
    module.torchrl_logger.setLevel("CRITICAL")
    yield module
    module.torchrl_logger.setLevel(level)


@pytest.mark.slow
def test_500_responses_differ_from_torchrl_only_where_it_is_explained(tool: ModuleType) -> None:
    cases = list(tool.made_up_cases(500, seed=0))
    assert len({response for *_, response in cases}) == 500
    assert {name for name, *_ in cases} == set(tool.CHECKS)
    assert set(tool.compare(cases)) <= set(tool.EXPLAINED)


def test_every_explained_difference_is_in_the_docs(tool: ModuleType) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [
        name
        for name, reason in tool.EXPLAINED.items()
        if f"`{name}`" not in page or reason not in page
    ] == []
