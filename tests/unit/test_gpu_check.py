"""The check of a CUDA device, with stages that don't need one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.configs import ROOT
from tests.support.processes import alive
from tools.gpu_check import PYTEST, REPEATS, STAGES, Check, Stage, remaining

ENDS = "import sys; open(sys.argv[1], 'w').write('{\"rate\": 3}'); print('it ran'); sys.exit(%d)"
HANGS = (
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True);"
    "open(sys.argv[1], 'w').write('{\"child\": %d}' % child.pid); time.sleep(600)"
)
TEST = """
import pytest
def test_rate(record_property): record_property('rate', 3)
def test_two(): assert 0
def test_three(): pytest.skip('no card')
"""


def stage(name: str, source: str, limit_s: float = 60) -> Stage:
    return Stage(name, limit_s, ("-c", source, "{figures}"))


def test_each_stage_is_recorded_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    stages = [stage("wrong", ENDS % 3), stage("late", "", 1e6), stage("right", ENDS % 0)]
    assert not Check(tmp_path, "cpu", 600, stages, {"earlier": {"status": "passed"}}).run()
    results = json.loads((tmp_path / "results.json").read_text())["stages"]
    statuses = {name: result["status"] for name, result in results.items()}
    assert statuses == {
        "earlier": "passed", "wrong": "failed", "late": "not started", "right": "passed",
    }  # fmt: skip
    assert results["wrong"]["exit_code"] == 3
    assert results["right"]["figures"] == results["wrong"]["figures"] == {"rate": 3}
    assert (tmp_path / "log.txt").read_text().count("it ran") == 2


@pytest.mark.slow  # a second until the time limit
def test_a_stage_beyond_its_limit_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    stages = [stage("hangs", HANGS, 1), stage("next", ENDS % 0)]
    Check(tmp_path, "cpu", 600, stages, {}).run()
    results = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert results["hangs"]["status"] == "timed out"
    assert results["next"]["status"] == "passed"
    if figures := results["hangs"].get("figures"):  # otherwise it was killed before it had a child
        assert alive([figures["child"]]) == []


@pytest.mark.slow  # starts pytest three times
def test_outcomes_and_figures_of_tests_are_kept(tmp_path: Path) -> None:
    """Those of tests that have ended also if pytest is killed."""
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "test_more.py").write_text("import os\ndef test_four(): os.kill(os.getpid(), 9)")
    (tmp_path / "test_none.py").write_text("import pytest\ndef test_it(): pytest.skip('no card')")
    files = {"one": ["it"], "killed": ["it", "more"], "none": ["none"]}
    options = (*PYTEST, "-n", "0", "-c", "/dev/null")
    stages = [
        Stage(name, 300, (*options, *(str(tmp_path / f"test_{part}.py") for part in parts)))
        for name, parts in files.items()
    ]
    Check(tmp_path, "cpu", 900, stages, {}).run()
    results = json.loads((tmp_path / "results.json").read_text())["stages"]
    for name in ("one", "killed"):
        assert results[name]["status"] == "failed"
        tests = results[name]["tests"]
        assert {test: tests[test]["outcome"] for test in tests} == {
            "test_rate": "passed", "test_two": "failed", "test_three": "skipped",
        }  # fmt: skip
        assert tests["test_rate"]["rate"] == 3
        assert tests["test_two"]["message"].startswith("assert 0")
        assert "no card" in tests["test_three"]["message"]
    assert results["none"]["status"] == "skipped"
    cases = list(ElementTree.parse(tmp_path / "tests.xml").getroot().iter("testcase"))
    assert len(cases) == 4


def test_a_second_call_begins_with_what_has_not_run() -> None:
    first, second, third, fourth = stages = STAGES[:4]
    earlier = {
        first.name: {"status": "passed"},
        second.name: {"status": "timed out"},
        third.name: {"status": "not started"},
    }
    assert remaining(stages, earlier) == [third, fourth, second]
    assert remaining(stages, {}) == list(stages)


def test_logs_and_profile_of_a_stage_are_kept(tmp_path: Path) -> None:
    writes = (
        "import os, pathlib, sys; folder = pathlib.Path(os.environ['TMPDIR']);"
        "(folder / 'run').mkdir();"
        "(folder / 'run/vllm.log').write_text(sys.argv[0] + 'engine\\n');"
        "(folder / 'profile.txt').write_text('kernels')"
    )
    stages = [stage("first", writes), stage("second", writes)]
    assert Check(tmp_path, "cpu", 600, stages, {}).run()
    assert (tmp_path / "vllm.log").read_text().count("engine") == 2
    assert (tmp_path / "profile.txt").read_text() == "kernels"


def test_the_files_of_all_stages_exist() -> None:
    for stage in STAGES + REPEATS:
        _, module, *others = stage.arguments
        files = [text for text in others if text.endswith(".py")]
        if module != "pytest":
            files.append(f"tools/{module.replace('.', '/')}.py")
        assert files
        assert all((ROOT / file).is_file() for file in files)
    assert len({stage.name for stage in STAGES + REPEATS}) == len(STAGES) + len(REPEATS)
    *first, _ = STAGES  # the last one only runs if the others take less than their limits
    assert sum(stage.limit_s for stage in first) < 14 * 60


@pytest.mark.nightly
@pytest.mark.slow  # starts pytest six times
def test_the_expressions_of_the_stages_select_tests() -> None:
    """Each stage of tests must select some, also when their names change."""
    for stage in STAGES + REPEATS:
        if stage.arguments[1] == "pytest":
            chosen = stage.arguments[len(PYTEST) :]
            command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0", *chosen]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (stage.name, done.stdout)
