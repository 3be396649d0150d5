"""A fork of a process that has everything imported behaves like a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import forks
from tests.support.processes import alive
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_it_has_the_command_line_files_and_environment_and_ends_as_usual(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "assert __name__ == '__main__' and sys.path[0] == os.path.dirname(__file__)\n"
        "print(sys.argv[1:], os.environ['OF_THE_TEST'], os.getcwd(), os.getppid(), os.getpid() == os.getsid(0))\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    results = []
    for popen in (forks.Popen, subprocess.Popen):
        with popen(
            [sys.executable, str(script), "one", "two words"], cwd=tmp_path, env=os.environ | {"OF_THE_TEST": "x"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            results.append((*process.communicate("given"), process.wait()))
    assert results[0] == results[1]
    assert results[0] == (f"['one', 'two words'] x {tmp_path} {os.getpid()} True\n", "given\n", 7)


def test_it_begins_with_all_imported_and_its_server_ends_with_it() -> None:
    code = "import sys, time; print('torchrl_grpo.assembly.run' in sys.modules, flush=True); time.sleep(600)"
    with forks.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "True\n"
            [server] = psutil.Process(process.pid).children()
            until(lambda: server.name() == forks.SERVER)  # it has its name when it starts
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == -signal.SIGINT
        finally:
            process.kill()
    assert alive([server]) == []


def test_an_error_is_a_traceback_and_a_kill_is_seen() -> None:
    for code, status in (("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)):
        with forks.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
        ) as process:
            _, stderr = process.communicate(timeout=300)
        assert process.returncode == status
        assert ("ZeroDivisionError" in stderr) == (status == 1)


def test_its_own_processes_are_its_children(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        "def child(parent):\n"
        "    sys.exit(5 if os.getppid() == parent and 'torchrl_grpo.assembly.run' in sys.modules else 6)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child, args=(os.getpid(),))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    sys.exit(process.exitcode)\n"
    )
    with forks.Popen([sys.executable, str(script)]) as process:
        assert process.wait(timeout=300) == 5
