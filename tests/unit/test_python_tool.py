"""The tool ``python``: a sandboxed process for each dialog, which keeps its variables."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.configs import compose_config
from tests.support.waiting import until
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.integrations.sandbox import Limits, isolation, runner
from torchrl_grpo.integrations.sandbox.python_tool import Python
from torchrl_grpo.integrations.sandbox.session import Session
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.base import Dialog, Task
from torchrl_grpo.tasks.with_environment import WithEnvironment

TOOLS = ("env.tools=[python]", "env.max_turns=4")


@pytest.fixture
def session() -> Iterator[Session]:
    python_session = Session(Limits(seconds=3))
    yield python_session
    python_session.close()


def made_task(*overrides: str) -> Task:
    own = [] if isolation() == "namespaces" else ["env.sandbox=auto"]
    return make_task(compose_config(*TOOLS, *own, *overrides).env)


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def dialog_of(task: Task, episode: str, *texts: str, last: bool = False) -> Dialog:
    problem = task.problems("train")[0]
    raw = texts[-1] if texts else ""
    return Dialog(problem, list(texts), task.messages(problem), raw=raw, last=last, episode=episode)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("x = 20\nx * 2", "40"),
        ("for i in range(2): print(i)", "0\n1"),
        ("", ""),
        ("None", ""),
        (
            "1 / 0",
            'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\nZeroDivisionError: ',
        ),
        ("if", "Traceback (most recent call last):"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os.write(1, b'not an answer\\n')", "14"),
        ("import sys; sys.stderr.write('seen')", "seen4"),
    ],
)
def test_code_prints_what_a_notebook_prints(session: Session, code: str, answer: str) -> None:
    output = session.run(code)
    assert output.startswith(answer) if answer.startswith("Traceback") else output == answer


def test_variables_stay_from_call_to_call(session: Session) -> None:
    session.run("def double(x): return 2 * x\nnumbers = [1, 2]")
    session.run("numbers.append(double(4))")
    assert session.run("numbers") == "[1, 2, 8]"


@pytest.mark.slow
def test_endless_code_ends_in_time_and_takes_its_variables_along(session: Session) -> None:
    session.run("x = 1")
    with pytest.raises(TimeoutError, match="longer than 3 s"):
        session.run("while True: pass")
    assert session.run("'x' in globals()") == "False"


def test_code_that_ends_its_process_is_told(session: Session) -> None:
    with pytest.raises(RuntimeError, match="Python has ended; what it had computed is lost"):
        session.run("import os; os._exit(0)")
    assert session.run("6 * 7") == "42"


in_namespaces = pytest.mark.skipif(isolation() != "namespaces", reason="needs namespaces")


def is_running(pid: bytes) -> bool:
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@in_namespaces
def test_a_sandbox_leaves_nothing_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(Session()) as session:
        flood = "import os\nfor _ in range(100): os.write(2, b'x' * 2**20)\n'written'"
        assert session.run(flood) == "'written'"
        assert list(tmp_path.iterdir()) == []  # so nothing stays if this process is killed


@in_namespaces
def test_a_sandbox_ends_with_the_process_that_started_it() -> None:
    """Even if that process is killed, but not with the thread that asked for it."""
    code = """
import os, threading
from torchrl_grpo.host.processes import descendants
from torchrl_grpo.integrations.sandbox.session import Session
session = Session()
asking = threading.Thread(target=session.run, args=("x = 1",))
asking.start()
asking.join()
print(session.run("x"), *descendants(os.getpid()), flush=True)
session.run("while True: pass")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        value, *pids = process.stdout.readline().split()
        process.kill()
    assert value == b"1" and len(pids) >= 2
    until(lambda: not any(map(is_running, pids)))


def test_long_output_is_cut(session: Session) -> None:
    assert session.run("print('a' * 10 ** 7)") == "a" * 2**16


@pytest.mark.skipif(isolation() != "namespaces", reason="no namespaces here")
def test_code_reaches_neither_files_nor_the_network(session: Session) -> None:
    assert "FileNotFoundError" in session.run("open('/etc/passwd')")
    assert "OSError" in session.run("import socket; socket.create_connection(('127.0.0.1', 1), 1)")


@pytest.mark.slow
def test_each_dialog_has_variables_of_its_own() -> None:
    task = made_task()
    assert isinstance(task, WithEnvironment)
    assert [schema["function"]["name"] for schema in task.tools] == ["python"]
    task.advance([dialog_of(task, "a"), dialog_of(task, "b")])
    first = [dialog_of(task, name, call(f"x = {number}")) for name, number in (("a", 1), ("b", 2))]
    task.advance(first)
    turns = task.advance(
        [dialog_of(task, name, call("x = 0"), call("x + 40")) for name in ("a", "b")]
    )
    assert [turn.messages[0]["content"] for turn in turns] == ["41", "42"]  # type: ignore[union-attr, index]
    for name in ("a", "b"):
        task.close(name)


def test_the_data_sets_own_scorer_judges_the_last_turn() -> None:
    task = made_task()
    problem = task.problems("train")[0]
    task.advance([dialog_of(task, "a")])
    [turn] = task.advance([dialog_of(task, "a", call("1"), f"#### {problem.answer}")])
    assert turn.score is not None and turn.score.correct and turn.messages is None  # type: ignore[union-attr]
    task.close("a")


@pytest.mark.slow
def test_it_runs_in_a_reward_worker_beside_functions() -> None:
    task = made_task("env.tools=[python,examples/my_tools.py:calculator]")
    assert {schema["function"]["name"] for schema in task.tools} == {"python", "calculator"}
    with RewardPool(task, 1, timeout_s=300) as pool:
        pool.submit(dialog_of(task, "a")).result()
        pool.submit(dialog_of(task, "a", call("x = 6"))).result()
        turn = pool.submit(dialog_of(task, "a", call(""), call("x * 7"))).result()
        assert turn.messages[0]["content"] == "42"  # type: ignore[union-attr]
        pool.end("a")


@pytest.mark.slow
def test_code_that_does_not_read_is_given_up_in_time(session: Session) -> None:
    """A thread of the first call holds the interpreter's lock, and the pipe is smaller than the
    second call.
    """
    holds = "import ctypes, threading, time\ndef f():\n  time.sleep(0.3); ctypes.PyDLL(None).sleep(100000)\n"
    session.run(f"{holds}threading.Thread(target=f).start()")
    time.sleep(1)
    with pytest.raises(TimeoutError):
        for _ in range(10_000):  # until the thread has begun
            session.run(f"x = {'a' * 300_000!r}")
    assert session.run("6 * 7") == "42"


@pytest.mark.slow
def test_an_answer_in_drops_is_given_up_in_time(session: Session) -> None:
    """The code itself writes to the pipe of its results."""
    drops = "import os, time\nwhile True:\n  os.write(3, b'x'); time.sleep(0.05)"
    with pytest.raises(TimeoutError):
        session.run(drops)


def test_exit_and_classes_work_as_in_a_notebook(session: Session) -> None:
    assert session.run("exit()") == "SystemExit: None"
    session.run("import pickle\nclass A:\n  x = 6")
    assert session.run("pickle.loads(pickle.dumps(A())).x") == "6"


def test_the_tool_needs_a_sandbox_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_missing_namespaces", lambda: "no room")
    with pytest.raises(ValueError, match=r"env\.sandbox=strict.*no room.*env\.sandbox=auto"):
        make_task(compose_config(*TOOLS).env)
    assert make_task(compose_config(*TOOLS, "env.sandbox=auto").env).tools
    with pytest.raises(RuntimeError, match="no room"):
        Python()
