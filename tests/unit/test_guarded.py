"""A pytest run of this suite that is killed leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.configs import ROOT
from tests.support.processes import alive

FORKS = "import os, time; os.fork(); os.write(1, f'started {os.getpid()}\\n'.encode()); time.sleep(1000)"


def start_processes() -> None:
    """Start processes; this is the test that the killed pytest runs."""
    subprocess.Popen([sys.executable, "-c", FORKS], start_new_session=True).wait()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the guard is Linux's")
def test_a_killed_pytest_leaves_no_process() -> None:
    command = [sys.executable, "-m", "pytest", "-s", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"
    }
    with subprocess.Popen(
        [*command, "-o", f"python_functions={start_processes.__name__}"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    ) as killed:  # fmt: skip
        assert killed.stdout is not None
        lines = (line.partition("started ")[2] for line in killed.stdout)
        pids = (int(pid) for pid in lines if pid)
        started = [next(pids), next(pids)]
        killed.send_signal(signal.SIGKILL)
        assert alive(started) == []


def test_a_guarded_process_ends_with_its_own_status() -> None:
    code = (
        "import sys; from tests.support.guarded import go_on_guarded; go_on_guarded(); sys.exit(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 3
