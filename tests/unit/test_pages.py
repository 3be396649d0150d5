"""All pages of the docs: code blocks run or are checked, tests that they name exist, and links are
well-formed.

The tutorials' blocks run in ``test_tutorials.py``, those of the page From Python in
``test_python_call.py``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from tests.support.configs import ROOT, compose_config
from tests.support.configs import composed as hydra_config
from tests.support.documentation import DOCS, PAGES, TUTORIALS, blocks, commands
from torchrl_grpo.__main__ import COMMANDS
from torchrl_grpo.config import check_command_line, from_hydra, register, split_command_line
from torchrl_grpo.config.schema import COMPONENTS, FIELDS

ELSEWHERE = {
    "cd": "the shell's",
    "mkdir": "the shell's",
    "git": "there is no network",
    "grpo": "test_packaging.py runs it from the wheel",
    "pip": "test_packaging.py compares the versions",
    "python3": "makes an environment",
    "docker": "there is no Docker here; make lint checks the files",
    "export": "sets a variable",
    "ray": "tests/ray/test_jobs.py and tests/ray/test_hosts.py run symmetric-run, job submit and start",
    "sh": "tools/gpu_wheels.sh, which needs an index",
    "sbatch": "tests/ray/test_jobs.py runs the scripts",
    "source": "the environment that make install made",
    "vllm": "tests/vllm/test_server.py starts the module that it runs",
}
"""Commands that are not ours, by their first word, and what is known of them."""
HOSTS = {"arxiv.org", "download.pytorch.org", "github.com", "ui.perfetto.dev"}
OF_OTHERS = {"localhost", "FIRST_MACHINE"}
NOT_KEYS = {"train.jsonl"}
"""A file."""
README = "../README"
OURS = [README, *(page for page in PAGES if not page.startswith("migrate"))]
"""The pages whose names are ours; the tables of the others are checked in ``test_migrate.py``."""
OPTION = re.compile(r"--[a-z][a-z-]*")


def values(override: Override) -> list[str]:
    """Return the values that a sweep gives an override; an interval is reduced to its lower end."""
    if override.is_interval_sweep():
        return [f"{override.key_or_group}={override.value().start}"]
    if not override.is_sweep_override():
        return [override.input_line or ""]
    return [f"{override.key_or_group}={text}" for text in override.sweep_string_iterator()]


def composed(words: list[str]) -> None:
    """Compose and check the config of a script's command line, or of each job of a sweep."""
    options, overrides = split_command_line(words)
    parsed = get_args_parser().parse_args(options)
    rest = [word for word in overrides if not word.startswith(("hydra.", "hydra/"))]
    jobs: Iterable[Sequence[str]] = [rest]
    if parsed.multirun:
        jobs = product(*map(values, OverridesParser.create().parse_overrides(rest)))
    for job in jobs:
        check_command_line(job)
        name = parsed.config_name or "grpo_gsm8k"
        if parsed.config_dir is None:
            from_hydra(hydra_config(name, tuple(job)))
            continue
        register()
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / parsed.config_dir)):
            from_hydra(compose(name, [*job, f"hydra.searchpath=[file://{ROOT / 'config'}]"]))


def source(script: str) -> str:
    """Return the source of a script of ours, or of the module that runs a command of ours."""
    if script in COMMANDS:
        script = f"torchrl_grpo/extras/{COMMANDS[script][0].replace('.', '/')}.py"
    return (ROOT / script).read_text(encoding="utf-8")


def check(words: list[str]) -> None:
    """Check that a command exists and accepts these options and overrides."""
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in words[1:]:
            pattern = rf"^{word.partition('=')[0]} \?=" if "=" in word else rf"^{word}:"
            assert re.search(pattern, makefile, re.MULTILINE), words
    elif words[0] != "python":
        assert words[0] in ELSEWHERE, words
    elif words[1].startswith("sota/"):
        assert (ROOT / words[1]).is_file()
        composed(words[2:])
    else:
        script, *rest = words[3 if words[1:3] == ["-m", "torchrl_grpo"] else 1 :]
        text = source(script)
        assert {word for word in rest if OPTION.fullmatch(word)} <= set(OPTION.findall(text)), words
        if overrides := [word for word in rest if "=" in word]:
            name = (
                rest[rest.index("--config-name") + 1] if "--config-name" in rest else "grpo_gsm8k"
            )
            compose_config(*overrides, name=name)


@pytest.mark.parametrize("page", [README, *PAGES])
def test_every_block_is_of_a_kind_that_is_checked(page: str) -> None:
    assert {block.language for block in blocks(page)} <= {"bash", "python", "text", "yaml"}


@pytest.mark.parametrize("page", [README, *PAGES])
def test_the_commands_of_a_page_are_ones_that_are_taken(page: str) -> None:
    for block in blocks(page):
        for _, words in commands(block) if block.language == "bash" else ():
            check(words)


def test_what_no_script_takes_is_found() -> None:
    for line in (
        "python sota/grpo/grpo.py optimizer.lrr=1",
        "python -m torchrl_grpo samples x --nope",
        "make nothing",
        "rm x",
    ):
        with pytest.raises(Exception, match=r"lrr|--nope|nothing|rm"):
            check(line.split())


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_shows_are_those_that_there_are(page: str) -> None:
    for block in blocks(page):
        if block.title and "GPU" not in block.title:
            assert block.text in (ROOT / block.title).read_text(encoding="utf-8"), block.title


@pytest.mark.parametrize(
    "page", [README, *(page for page in PAGES if page not in (*TUTORIALS, "python"))]
)
def test_the_python_of_a_page_runs(page: str) -> None:
    variables: dict[str, Any] = {}
    for block in blocks(page):
        if block.language == "python":
            exec(block.text, variables)


@pytest.mark.parametrize("page", PAGES)
def test_the_yaml_of_a_page_is_a_config(page: str, tmp_path: Path) -> None:
    register()
    for block in blocks(page):
        if block.language == "yaml":
            assert "defaults" in yaml.safe_load(block.text)
            (tmp_path / "mine.yaml").write_text(block.text)
            with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
                from_hydra(compose("mine", [f"hydra.searchpath=[file://{ROOT / 'config'}]"]))


def test_every_test_that_a_page_names_is_there() -> None:
    """Files of the checkout must exist too, and a test's module is checked if the page names it."""
    there: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^\s*def (\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        there[file.relative_to(ROOT / "tests").as_posix()] = set(names)
    everywhere = set().union(*there.values())
    for page in OURS:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for module, name in re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", text):
            assert name in there[module], (page, name)
        for name in re.findall(r"`(test_\w+_\w+_\w+)`", text):
            assert name in everywhere, (page, name)
        for path in re.findall(
            r"`((?:tests|benchmarks|tools|examples|torchrl_grpo|sota)/[\w./-]+\.\w+)`", text
        ):
            assert (ROOT / path).exists(), (page, path)


def test_every_config_key_that_a_page_names_is_there() -> None:
    groups = "|".join(
        {name.partition(".")[0] for name in FIELDS if "." in name} - {"ray"}
    )  # ray.init is Ray's
    for page in OURS:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for name in re.findall(rf"`\+?((?:{groups})\.[a-z_][a-z_.0-9]*)", text):
            inside = name.startswith(tuple(f"{node}." for node in COMPONENTS))
            if not inside and name not in NOT_KEYS:
                assert any(f"{key}.".startswith(f"{name}.") for key in FIELDS), (page, name)


def test_every_override_that_a_page_names_is_one_that_hydra_reads() -> None:
    """Overrides are parsed as a shell passes them on, with all quotes."""
    parser = OverridesParser.create()
    for page in OURS:
        text = re.sub(
            r"^```.*?^```", "", (DOCS / f"{page}.md").read_text(encoding="utf-8"), flags=re.M | re.S
        )
        for code in re.findall(r"`('?[a-z_]+\.[^`\n]+)`", text):
            for word in shlex.split(code) if "=" in code and "|" not in code else ():
                if word.partition("=")[0] in FIELDS:
                    check_command_line([word])
                    assert not parser.parse_override(word).is_sweep_override(), (page, word)


def test_links_to_other_places_are_well_made_and_to_known_hosts() -> None:
    """Links are not followed, because there may be no network."""
    for page in (README, *PAGES):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for link in re.findall(r"\bhttps?://[^\s)\]\"'`>]+", text):
            host, _, _ = urlsplit(link).netloc.partition(":")
            assert host in OF_OTHERS or (host in HOSTS and link.startswith("https:")), (page, link)
            assert not link.endswith((".", ",")), (page, link)


def written_texts() -> str:
    """Return the texts in the package's code, without docstrings; values in them are NUL."""
    texts = list[str]()
    for path in (ROOT / "torchrl_grpo").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if id(node) not in docstrings and isinstance(node, ast.Constant | ast.JoinedStr):
                values = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
                texts.append("".join(map(str, values)))
    return "\n".join(texts)


def test_messages_quoted_in_troubleshooting_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    _, _, tables = page.partition("## Runs that stall")
    cells = re.findall(r"^\| (`.+?) \|", tables, re.MULTILINE)
    messages = [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]
    phrases = {
        phrase
        for message in messages
        for phrase in re.findall(r"(?<!\w)[A-Za-z][a-z',]*(?: [a-z][a-z',]*){2,}", message)
    }
    code = written_texts()
    assert len(phrases) > 15 and [phrase for phrase in phrases if phrase not in code] == []
