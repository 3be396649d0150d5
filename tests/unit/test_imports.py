"""The project's import rules, checked twice: by import-linter's contracts and by parsing the source
files.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.configs import ROOT
from torchrl_grpo import (
    collectors,
    generation,
    learner,
    loop,
    models,
    objectives,
    reporting,
    transforms,
)
from torchrl_grpo.extras.report.report import write_report
from torchrl_grpo.host.extras import EXTRAS, load_extra

PACKAGE = ROOT / "torchrl_grpo"
FILES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))
OWN = {
    "compat/ray.py": "ray",
    "weights/transfer_engine.py": "vllm",
}  # each is imported only if its package is installed
MODULES = [
    ".".join(("torchrl_grpo", *p.with_suffix("").parts)).removesuffix(".__init__")
    for p in FILES
    if p.as_posix() not in OWN
]

# Files that may import a package, and whether only inside a function.
RESTRICTED = {
    "vllm": (
        (
            "generation/vllm.py",
            "generation/vllm_async.py",
            "generation/vllm_images.py",
            "generation/vllm_stops.py",
            "weights/nccl.py",
            "weights/slots.py",
            "weights/worker.py",
        ),
        True,
    ),
    "ray": (("runtime/",), False),
    "hydra": (("config/", "scripts/", "compat/hydra.py"), False),
    "omegaconf": (("config/", "scripts/"), False),
}


def imports(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each top-level package that is imported, also by ``import_module("...")``, and whether
    a function does it.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], in_function
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.partition(".")[0], in_function
        yield from imports(
            node,
            in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
        )


def broken_rules(path: str, source: str) -> list[str]:
    """Return the forbidden imports of a file of the package."""
    broken = []
    for package, in_function in imports(ast.parse(source)):
        if OWN.get(path) == package:
            continue
        allowed, lazily = RESTRICTED.get(package, ((path,), False))
        if not path.startswith(allowed):
            broken.append(f"{path} imports {package}")
        elif lazily and not in_function:
            broken.append(f"{path} imports {package} outside a function")
    return broken


def test_only_the_allowed_files_import_vllm_ray_and_hydra() -> None:
    broken = [
        rule
        for path in FILES
        for rule in broken_rules(path.as_posix(), (PACKAGE / path).read_text(encoding="utf-8"))
    ]
    assert len(FILES) > 100 and broken == []


@pytest.mark.parametrize(
    ("path", "source", "broken"),
    [
        ("models/loading.py", "def f():\n    import vllm", "models/loading.py imports vllm"),
        (
            "models/loading.py",
            "import importlib\nimportlib.import_module('vllm.config')",
            "models/loading.py imports vllm",
        ),
        (
            "generation/vllm.py",
            "from vllm import LLM",
            "generation/vllm.py imports vllm outside a function",
        ),
        (
            "generation/vllm.py",
            "class A:\n    import vllm",
            "generation/vllm.py imports vllm outside a function",
        ),
        ("generation/vllm.py", "def f():\n    from vllm import LLM", None),
        ("learner/step.py", "from omegaconf import OmegaConf", "learner/step.py imports omegaconf"),
        (
            "learner/step.py",
            "def f():\n    if x:\n        from ray.util import state",
            "learner/step.py imports ray",
        ),
        ("runtime/actors.py", "import ray", None),
        ("config/components.py", "import hydra.utils", None),
        ("assembly/run.py", "import hydra.utils", "assembly/run.py imports hydra"),
        ("generation/transformers.py", "from torchrl_grpo.generation.vllm import VLLMEngine", None),
    ],
)
def test_the_check_sees_lazy_and_dynamic_imports(
    path: str, source: str, broken: str | None
) -> None:
    assert broken_rules(path, source) == ([broken] if broken else [])


def imported_modules(module: str) -> set[str]:
    """Return the package's modules that a module imports, also inside functions."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & {*MODULES} or {node.module}
    return names & {*MODULES}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imported_modules(module) for module in MODULES}
    assert sum(map(len, graph.values())) > 1000
    order = [*TopologicalSorter(graph).static_order()]
    assert order.index("torchrl_grpo.errors") < order.index("torchrl_grpo.loop")
    with pytest.raises(CycleError, match=r"loop.*errors|errors.*loop"):
        [*TopologicalSorter(graph | {"torchrl_grpo.errors": {"torchrl_grpo.loop"}}).static_order()]


# Simulates that an optional package is not installed: the path finder does not see it.
HIDE = """
import gc, importlib, sys
gc.disable()  # imports make hardly any garbage
class Hide:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, *args):
        return None if name.partition(".")[0] in {optional!r} else self.finder.find_spec(name, *args)
sys.meta_path = [Hide(finder) for finder in sys.meta_path]
for module in {modules!r}: importlib.import_module(module)
"""


@pytest.mark.slow
def test_every_module_imports_without_the_optional_packages() -> None:
    optional = (
        "vllm",
        "ray",
        "wandb",
        "mlflow",
        "trackio",
        "trl",
        "verifiers",
        "openai",
        "websockets",
    )
    code = HIDE.format(optional=optional, modules=MODULES)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr


def test_a_loop_by_hand_finds_its_parts_in_their_packages() -> None:
    assert {"GenerationPolicy", "SamplingParams", "TransformersEngine"} <= set(generation.__all__)
    assert {"Checkpointer", "PolicyTrainer"} <= set(learner.__all__)
    assert (loop.__all__, reporting.__all__) == (["Observer", "Schedule", "fit"], ["MetricsLogger"])
    for package in (
        collectors,
        generation,
        learner,
        loop,
        models,
        objectives,
        reporting,
        transforms,
    ):
        assert all(hasattr(package, name) for name in package.__all__)


def test_each_extra_that_the_core_loads_exists() -> None:
    sources = [(PACKAGE / path).read_text(encoding="utf-8") for path in FILES]
    loaded = re.findall(r'load_extra\("(\w+)"\)', "".join(sources))
    assert set(loaded) == set(EXTRAS)
    assert load_extra("report") is write_report
    assert all(callable(load_extra(name)) for name in EXTRAS)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from importlinter.cli import lint_imports\nsys.exit(lint_imports(no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_the_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("keys.py", "def f():\n    import torchrl_grpo.loop", "Imports run downward only"),
        (
            "generation/base.py",
            "from torchrl_grpo.models import scoring",
            "Imports run downward only",
        ),
        ("generation/policy.py", "from torchrl_grpo import envs", "Imports run downward only"),
        (
            "config/rules.py",
            "from torchrl_grpo.runtime import cluster",
            "Imports run downward only",
        ),
        (
            "config/rules.py",
            "from torchrl_grpo.generation import base",
            "Imports run downward only",
        ),  # not the table
        ("parts.py", "def f():\n    import torchrl_grpo.assembly.run", "Imports run downward only"),
        (
            "envs.py",
            "from torchrl_grpo.config import GRPOConfig",
            "Only what makes a run knows the config",
        ),
        (
            "surprise.py",
            "",
            "Imports run downward only",
        ),  # a module that the contract does not list
        (
            "tasks/base.py",
            "def f():\n    import vllm",
            "Only the vLLM engines, and what brings weights to them, import vllm",
        ),
        ("tasks/base.py", "def f():\n    import ray", "Only the runtime imports ray"),
        ("tasks/base.py", "import omegaconf", "Only config and the scripts import hydra"),
    ],
)
def test_a_wrong_import_breaks_a_contract(
    tmp_path: Path, path: str, line: str, contract: str
) -> None:
    pytest.importorskip("importlinter")
    shutil.copytree(
        PACKAGE, tmp_path / "torchrl_grpo", ignore=shutil.ignore_patterns("__pycache__", "model")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "torchrl_grpo" / path).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert f"{contract} BROKEN" in result.stdout
