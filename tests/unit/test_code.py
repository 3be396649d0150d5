"""``env.reward=code``: the published forms of tests, verdicts, and the sandbox under attack."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.configs import ROOT, compose_config
from tests.support.sandboxes import run_python
from tests.support.scripts import SMALL
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.integrations.graders import code as rewards
from torchrl_grpo.integrations.graders.code import program_in
from torchrl_grpo.integrations.sandbox import Limits, isolation, runner
from torchrl_grpo.tasks.base import Dialog

ADD = "def add(a, b):\n    return a + b\n"
CALL = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
LINES = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
code = partial(rewards.code, sandbox="auto")
apart = pytest.mark.skipif(
    isolation() != "namespaces", reason="the kernel gives no namespaces here"
)


def fenced(program: str) -> str:
    return f"First I add.\n```python\n{program}\n```\nDone."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "more", "program"),
    [
        (["assert add(1, 2) == 3", "assert add(0, 0) == 0"], {}, ADD),  # MBPP
        ("assert add(1, 2) == 3\nassert add(2, 2) == 4", {}, ADD),
        (
            "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            {"entry_point": "add"},
            ADD,
        ),  # HumanEval
        (CALL, {}, ADD),  # APPS
        (
            {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"},
            {},
            ADD,
        ),  # prime_code
        (
            CALL,
            {},
            "class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]:\n        return a + b\n",
        ),
        (json.dumps(CALL), {}, ADD),
        (CALL, {}, "class Solution:\n    def add(self, a, b):\n        return a + b\n"),
        (
            {"inputs": [[[1, 2]]], "outputs": [[[2, 1]]], "fn_name": "turn"},
            {},
            "def turn(x):\n    return x[::-1]\n",
        ),
        (LINES, {}, "a, b = map(int, input().split())\nprint(a + b)"),
        (  # LiveCodeBench
            json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
            {},
            "print(sum(map(int, input().split())))",
        ),
        (
            json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
            {"metadata": '{"func_name": "add"}'},
            ADD,
        ),
        (
            {"style": "rule", "ground_truth": json.dumps(CALL)},
            {},
            ADD,
        ),  # verl's column reward_model
    ],
)
def test_a_correct_program_passes_and_a_wrong_one_fails(
    answer: Any, more: dict[str, str], program: str
) -> None:
    assert code(fenced(program), answer, **more) == 1.0
    assert code(program, answer, **more) == 1.0
    for wrong in (
        program.replace("+", "-").replace("[::-1]", "").replace("sum", "max"),
        "",
        "def (",
        "raise SystemExit(0)",
    ):
        assert code(fenced(wrong), answer, **more) == 0.0, wrong


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_a_fraction_counts_tests_after_one_that_hangs_or_exits() -> None:
    half = "def add(a, b):\n    if a == 3:\n        raise SystemExit\n    return a + b\n"
    assert code(half, CALL) == 0.0
    assert code(half, CALL, metric="fraction") == 0.5
    assert code(ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], metric="fraction") == 0.5
    waits = "a, b = map(int, input().split())\nwhile a == 3: pass\nprint(a + b)"
    assert code(waits, LINES, metric="fraction", seconds=0.5) == 0.5


def test_what_a_test_expects_is_not_in_the_program_s_process() -> None:
    looks = "import gc, sys\nfound = [x for x in gc.get_objects() if isinstance(x, list) and x == [3, 7]]\n"
    program = f"{looks}def add(a, b):\n    return 3 if a == 1 else (7 if found else 0)\n"
    assert code(program, CALL, metric="fraction") == 0.5


UNNAMED = {"input": "1\n2", "output": "3", "testtype": "functional"}


@pytest.mark.parametrize(
    "answer", [None, [], {}, "", 3, {"inputs": [1], "outputs": []}, "{not json", [UNNAMED]]
)
def test_a_problem_without_tests_is_an_error_and_not_a_wrong_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"reward 'code' (needs|must have tests)"):
        code(ADD, answer)


@pytest.mark.parametrize(
    "text", ["", "\ud800", "\x00", "```python\n\ud800\n```", "(" * 100_000, "1" * 1_000_000]
)
@pytest.mark.parametrize(
    "answer", [["assert add(1, 2) == 3"], CALL, LINES], ids=["assert", "call", "stdin"]
)
def test_no_response_raises(text: str, answer: Any) -> None:
    assert code(text, answer) == 0.0


def test_the_last_block_counts() -> None:
    assert program_in("```python\na\n```\nor\n```py\nb\n```") == "b"
    assert program_in("```\nc\n```") == "c"
    assert program_in("```python\nd") == "d"  # cut off
    assert program_in("```python\n```\nor\n```py\ne\n  f\n```\n") == "e\n  f"


def test_blocks_of_other_languages_and_of_output_are_no_programs() -> None:
    assert program_in("```bash\npip install x\n```\nThen:\n```python\na\n```") == "a"
    assert program_in("```python\na\n```\nIt prints:\n```text\n1\n```\nDone.") == "a"
    assert program_in("```python\na\n```\nIt prints:\n```\n1\n```\nDone.") == "a"
    assert program_in("```bash\nls\n```\nThen:\n```\nb\n```") == "b"


SECRET = str(ROOT / "README.md")
ATTACKS = {
    "the run's files": f"print(open({SECRET!r}).read(20))",
    "its folder": f"import os\nprint(os.listdir({str(ROOT)!r}))",
    "the network": "import socket\nprint(socket.create_connection(('127.0.0.1', PORT), 2))",
    "its parent": f"import os\nos.kill({os.getpid()}, 0)\nprint('there')",
    "all processes": "import os\nos.kill(-1, 0)\nprint('there')",
    "a mount": "import ctypes\nprint('done' if ctypes.CDLL(None).umount2(b'/usr', 2) == 0 else '')",
    "another root": "import os\nos.mkdir('/tmp/x')\nos.chroot('/tmp/x')\nprint('done')",
    "a user namespace": "import ctypes\nprint('done' if ctypes.CDLL(None).unshare(0x10000000) == 0 else '')",
    "python itself": "import os\nopen(os.path.join(os.path.dirname(os.__file__), 'x'), 'w')\nprint('done')",
    "its own program": "open('/program/program.py', 'w')\nprint('done')",
    "the environment": "import os\nprint(*set(os.environ) - {'PATH', 'LANG', 'TMPDIR', 'LC_CTYPE'})",
    "the host of a virtual machine": "import socket\nprint(socket.socket(40, socket.SOCK_STREAM))",
    "sockets of the kernel": "import socket\nprint(socket.socket(38, socket.SOCK_SEQPACKET))",
    "calls without a filter": """
import ctypes
ctypes.CDLL(None, use_errno=True).syscall(425, 0, 0)  # io_uring_setup
print("there" if ctypes.get_errno() != 1 else "")
""",
    "keys of the run": """
import ctypes, os
call = 250 if os.uname().machine == "x86_64" else 219  # keyctl
ctypes.CDLL(None, use_errno=True).syscall(call, 0, -3, 1)  # the session's keyring, which children inherit
print("there" if ctypes.get_errno() != 1 else "")
""",
    "a lower priority": "import os\nprint(os.nice(19))",
    "another's limits": "import resource\nprint(resource.prlimit(1, resource.RLIMIT_AS, (10**6, 10**6)))",
    "the kernel's settings": "print(open('/proc/sys/kernel/core_pattern').read())",
}


@apart
@pytest.mark.parametrize("what", ATTACKS)
def test_a_program_does_not_reach(what: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run_python(ATTACKS[what].replace("PORT", str(server.getsockname()[1])))
    assert outcome.output.strip() == "", outcome


FORKS = """
import os
n = 0
try:
    while True:
        if os.fork() == 0:
            while True: pass
        n += 1
except OSError:
    print(n)
"""
FILES = """
n = 0
try:
    while True:
        open(f"/tmp/{n}", "wb").write(b"x" * 10**6)
        n += 1
except OSError:
    print(n)
"""


@pytest.mark.slow
def test_what_a_program_may_use_is_limited(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    start = time.monotonic()
    limits = Limits(seconds=1.0, processes=31)  # tells its processes from those of other tests
    assert run_python("import time\ntime.sleep(100)", limits=limits).status is None
    assert run_python("while True: print('x' * 1000)", limits=limits).status is None
    assert "MemoryError" in run_python("x = [0] * 10**9", limits=limits).errors
    assert (
        run_python("import os\nos.write(1, b'x' * 10**5)\nos._exit(3)", limits=limits).status == 3
    )
    assert run_python("open('/tmp/f', 'wb').write(b'x' * 10**8)", limits=limits).status != 0
    if isolation() == "namespaces":
        assert int(run_python(FORKS, limits=limits).output) < limits.processes
        assert int(run_python(FILES, limits=limits).output) <= limits.file // 10**6
    detached = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
    run_python(detached, limits=limits)
    assert time.monotonic() - start < 300
    if isolation() == "limits":
        return
    deadline = time.monotonic() + 300
    while True:
        new = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
        left = [process for process in new if '"NPROC": 31' in str(process.info["cmdline"])]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert left == []


def test_programs_of_runs_with_the_same_seed_have_users_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on processes is per user, so one program could leave another without any."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    scripts = []
    for _ in range(2):
        random.seed(7)
        scripts.append(" ".join(runner._command(tmp_path, Limits(), "namespaces", 1.0)))
    first, second = (re.findall(r"--reuid=(\d+)", script) for script in scripts)
    assert len(first) == len(second) == 1 and first != second


@pytest.mark.slow
def test_without_namespaces_limits_hold_and_strict_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "isolation", lambda: "limits")
    assert code(fenced(ADD), CALL) == 1.0
    assert run_python("import time\ntime.sleep(100)", limits=Limits(seconds=1.0)).status is None
    assert "MemoryError" in run_python("x = [0] * 10**9").errors
    with pytest.raises(RuntimeError, match="sandbox=strict needs namespaces"):
        code(ADD, CALL, sandbox="strict")
    config = compose_config(*SMALL, "env.reward=code")
    with pytest.raises(ValueError, match=r"^env\.sandbox=strict .*env\.sandbox=auto"):
        make_task(config.env)


@pytest.mark.slow
@apart
def test_a_temporary_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a folder with 'quotes'"
    folder.mkdir()
    script = (
        "import tests.support.sandboxes as s\nfrom torchrl_grpo.integrations.sandbox import isolation\n"
        "print(isolation(), s.run_python('print(42)').output)\n"
    )
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["namespaces", "42"], done.stderr


def test_the_error_of_strict_says_what_the_machine_said(monkeypatch: pytest.MonkeyPatch) -> None:
    runner._missing_namespaces.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(runner, "_ROOT", "echo no room >&2; exit 1")
        patched.setattr(runner, "_NAMESPACES", ())
        patched.setattr(runner.shutil, "which", lambda tool, path: tool)
        patched.setattr(runner.sys, "platform", "linux")
        with pytest.raises(RuntimeError, match=r"sandbox=strict .*no room.*sandbox=auto"):
            rewards.code(ADD, CALL)
    runner._missing_namespaces.cache_clear()
    runner.isolation()


@apart
def test_a_sandbox_that_cannot_be_made_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_ROOT", "echo no room >&2; exit 1")
    for tests in (CALL, LINES):
        with pytest.raises(OSError, match=r"sandbox .*: no room"):
            code(fenced(ADD), tests)


KEEPS = """
import ctypes, os, socket
c, held, size = ctypes.CDLL(None, use_errno=True), 0, 2**24
def memfd():
    number = c.memfd_create(b"x", 0)
    return number >= 0 and os.ftruncate(number, size) is None and os.pwrite(number, b"x" * size, 0)
def shared():
    number = c.shmget(0, size, 0o1600)
    c.shmat.restype = ctypes.c_void_p
    where = number >= 0 and c.shmat(number, None, 0)
    return where and ctypes.memset(where, 1, size) and size
def queue():
    return c.msgget(0, 0o1600) >= 0 and size
def buffer():
    one, other = socket.socketpair()
    held = c.setsockopt(one.fileno(), 1, 7, ctypes.byref(ctypes.c_int(size)), 4) == 0
    return held and one.getsockopt(1, 7)
def old_table():  # 32-bit system calls have other numbers: memfd_create is 356
    code = bytes([0x53, 0xB8, 0x64, 1, 0, 0, 0xBB, 0, 0, 0, 0, 0x31, 0xC9, 0xCD, 0x80, 0x5B, 0xC3])
    import mmap
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    return call() >= 0 and size
print(sum(MAKE() or 0 for _ in range(8)))
"""


@apart
def test_a_program_cannot_end_its_judge() -> None:
    """Otherwise a program could have its sample excluded instead of being judged wrong."""
    signals = "import os\nfor number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\n"
    assert code(f"{signals}print(sum(map(int, input().split())))", LINES) == 1.0
    assert code(f"{signals}{ADD}", CALL) == 1.0


@apart
@pytest.mark.parametrize("make", ["memfd", "shared", "queue", "buffer", "old_table"])
def test_a_program_has_no_memory_beside_its_address_space(make: str) -> None:
    if make == "old_table" and os.uname().machine != "x86_64":
        pytest.skip("another machine's calls")
    outcome = run_python(KEEPS.replace("MAKE", make))
    assert outcome.output == "0\n" or outcome.status == -signal.SIGSEGV, outcome


@pytest.mark.slow
@apart
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are those of an ordinary user")
def test_an_ordinary_user_has_namespaces_too() -> None:
    """Namespaces of an ordinary user are made inside a user namespace, which root does not need."""
    said = (
        "import tests.support.sandboxes as s\nfrom torchrl_grpo.integrations.sandbox import isolation\n"
        "print(isolation())\n"
    )
    tried = [
        f"print(repr(s.run_python({ATTACKS[what]!r}).output.strip()))\n"
        for what in ("a mount", "its folder")
    ]
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    for python in (sys.executable, "/usr/bin/python3"):
        done = subprocess.run(
            [*user, python, "-B", "-c", said + "".join(tried)],
            capture_output=True,
            text=True,
            cwd="/",
            env={"PYTHONPATH": str(ROOT), "PATH": os.defpath},
        )
        if done.returncode == 0:
            assert done.stdout.split() == ["namespaces", "''", "''"]
            return
    pytest.skip(f"another user can start no Python here: {done.stderr[-200:]}")


@pytest.mark.slow
def test_a_run_scores_programs_of_a_data_set(tmp_path: Path) -> None:
    data = tmp_path / "mbpp.jsonl"
    rows = [
        {"text": f"Write add{i}.", "test_list": [f"assert add{i}(1, 2) == 3"]} for i in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = compose_config(
        *SMALL, f"env.dataset={data}", "env.columns.prompt=text", "env.columns.answer=test_list",
        "env.test_fraction=0.3", "env.reward=[{fn: code, metric: fraction}]", "env.sandbox=auto",
    )  # fmt: skip
    task = make_task(config.env)
    problem = task.problems("train")[0]
    name = problem.query.split()[1].rstrip(".")
    assert task.judge(Dialog(problem, [fenced(f"def {name}(a, b):\n    return a + b")])).correct
    assert task.judge(Dialog(problem, ["no code"])).reward == 0
