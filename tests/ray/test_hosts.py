"""A run over two hosts, one of which dies. The hosts are network namespaces, which need root
(``benchmarks/hosts.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.configs import ROOT

pytest.importorskip("ray")
pytest.importorskip("psutil")
sys.path.insert(0, str(ROOT / "benchmarks"))
hosts = pytest.importorskip("hosts")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "there can be hosts"),
]
QUICK = {"period": "1000", "timeout": "2000", "initial_delay": "1000"}
"""Milliseconds after which Ray looks for a host: by itself it needs up to a minute to see that one is gone."""


@pytest.mark.nightly
def test_a_run_goes_on_without_a_host_and_loses_no_group(tmp_path: Path) -> None:
    out = tmp_path / "hosts.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "bench_hosts.py"),
        "--only",
        "sampler_killed",
        "--steps",
        "16",
    ]
    quick = {f"RAY_health_check_{name}_ms": value for name, value in QUICK.items()}
    environment = os.environ | quick | {"RAY_health_check_failure_threshold": "3"}
    subprocess.run(
        [*command, "--output", str(out)], check=True, timeout=600, cwd=ROOT, env=environment
    )
    got = json.loads(out.read_text())["sampler_killed"]
    assert got["status"] == 0, got
    assert (
        sum(map(len, got["where"].values())) == 4
    )  # learner, reference and two samplers, none of them on the head node
    assert got["steps"] == 17
    assert got["restarts"] >= 1
    assert (got["groups_missing"], got["groups_twice"]) == (0, 0)
