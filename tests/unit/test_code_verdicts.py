"""``env.reward=code`` and published graders: it agrees with them, and a response that could not be
judged is invalid.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.integrations.graders import code as rewards
from torchrl_grpo.integrations.sandbox import Limits, isolation
from torchrl_grpo.reward_pool import Failure

code = partial(rewards.code, sandbox="auto")
DOUBLE = {"inputs": ["3\n"], "outputs": ["6\n"]}
MANY = {"inputs": [f"{i}\n" for i in range(40)], "outputs": [f"{2 * i}\n" for i in range(40)]}
ADD = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
STUB = 'from typing import List\n\n\ndef total(x: List[int]) -> int:\n    """ Sum of x. """\n'
CHECK = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
NODE = """\
from dataclasses import dataclass
from typing import Optional

@dataclass
class Node:
    val: int
    next: "Optional[Node]" = None

def double(x):
    return Node(2 * x).val
"""
POOL = """\
from multiprocessing import Pool

def double(x):
    return 2 * x

if __name__ == "__main__":
    with Pool(2) as pool:
        print(pool.map(double, [int(input())])[0])
"""


def lines(stdin: str, expected: str) -> dict[str, list[str]]:
    return {"inputs": [stdin], "outputs": [expected]}


def live(stdin: str, expected: str) -> list[dict[str, str]]:
    """Return a test in LiveCodeBench's format."""
    return [{"input": stdin, "output": expected, "testtype": "stdin"}]


RIGHT: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "exit()": ("print(2 * int(input()))\nexit()", DOUBLE, {}),
    "quit()": ("print(2 * int(input()))\nquit()", DOUBLE, {}),
    "a status, which APPS and LiveCodeBench ignore": ("import sys\nprint(6)\nsys.exit(1)", DOUBLE, {}),
    "main": ("def main():\n    print(6)\nif __name__ == '__main__':\n    main()", DOUBLE, {}),
    "a thread": (
        "import threading\nthreading.stack_size(2**26)\nthreading.Thread(target=lambda: print(6)).start()",
        DOUBLE, {},
    ),
    "atexit": ("import atexit\natexit.register(print, 6)", DOUBLE, {}),
    "pickle of an own class": (
        "import pickle\nclass A:\n    x = 6\nprint(pickle.loads(pickle.dumps(A())).x)", DOUBLE, {},
    ),
    "multiprocessing": (POOL, DOUBLE, {}),
    "annotations as text": (NODE, ["assert double(3) == 6"], {}),
    "annotations of the future": (f"from __future__ import annotations\n{NODE}", ["assert double(3) == 6"], {}),
    "usual imports, stdin": ("print(Counter(stdin.readline().split())['3'] * 6)", DOUBLE, {}),
    "usual imports, call": (
        "class Solution:\n    def add(self, a, b: Optional[int]):\n        return reduce(int.__add__, (a, b))", ADD, {},
    ),
    "deep recursion": ("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(20_000) - 19_994)", DOUBLE, {}),
    "test_imports": ("def f(r):\n    return r", ["assert math.isclose(f(1), 1)"], {"test_imports": ["import math"]}),
    "test_setup_code": (NODE, ["assert root.val == 3"], {"test_setup_code": "root = Node(3)"}),
    "a stub that goes on": ("    return sum(x)\n", CHECK, {"entry_point": "total", "prompt": STUB}),
    "a stub without a newline": ("return sum(x)", CHECK, {"entry_point": "total", "prompt": f"{STUB}    "}),
    "a stub's imports": (
        "def total(x: List[int]):\n    return sum(x)", CHECK, {"entry_point": "total", "prompt": STUB},
    ),
    "a prompt around a stub": (
        "def total(x):\n    return sum(x)", CHECK, {"entry_point": "total", "prompt": f"Complete this:\n{STUB}"},
    ),
    "zeros at the end": ("print('1.00')", lines("", "1.0"), {}),
    "near": ("print(1 / 3)", lines("", "0.3333333"), {}),
    "an empty line": ("print('1\\n\\n2')", lines("", "1\n2\n"), {}),
    "decimals": ("print('1.00', 2)", live("", "1.0  2.0"), {}),
    "a tuple": ("def add(a, b):\n    return a, b", {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"}, {}),
    "numbers as keys": (
        "def look(x):\n    return x[1]", {"inputs": [[{"1": 5}]], "outputs": [5], "fn_name": "look"}, {},
    ),
    "many tests": ("print(int(input()) * 2)", MANY, {"seconds": 0.5}),
    "more memory": ("x = bytearray(7 * 10**8)\nprint(6)", DOUBLE, {"memory_mib": 1024}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_what_the_graders_take_is_right(name: str) -> None:
    program, answer, more = RIGHT[name]
    assert (
        code(f"```python\n{program}\n```" if "stub" not in name else program, answer, **more) == 1.0
    )


BUSY = """\
import time
while True:
    start = time.process_time()
    while time.process_time() - start < 0.002:
        pass
    time.sleep(0.04)
"""
WRONG: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "a set for a list": ("def add(a, b):\n    return {a, b}", ADD | {"outputs": [[1, 2]]}, {}),
    "nothing, which an import would hide": ("", ADD, {}),
    "numbers that differ at the end": ("print(50000000000000001)", lines("", "50000000000000000"), {}),
    "near, where decimals are exact": ("print(1.000000001)", live("", "1.0"), {}),
    "an empty line, where lines are counted": ("print('1\\n\\n2')", live("", "1\n2"), {}),
    "words farther apart, where lines are compared": ("print('a  b')", live("", "a b"), {}),
    "words on another line": ("print('1\\n2')", lines("", "1 2"), {}),
    "a signal for a number": ("print('sNaN')", live("", "1"), {}),
    "nan": ("print('nan')", lines("", "1.0"), {}),
    "deep": (
        "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
        {"inputs": [[1, 2]], "outputs": [[]], "fn_name": "add"}, {},
    ),
    "deep text in the pipe of answers": (
        "import os\ndef add(a, b):\n    for n in range(3, 10):\n        try: os.write(n, b'[' * 100000 + b'\\n')\n"
        "        except OSError: pass",
        ADD, {},
    ),
    "garbage in the pipe of answers, at once": (
        "import os\nfor n in range(3, 10):\n    try: os.write(n, b'7\\n')\n    except OSError: pass", ADD, {},
    ),
    "memory": ("x = bytearray(10**9)\nprint(6)", DOUBLE, {}),
    "waits, but for a few percent": (BUSY, DOUBLE, {"seconds": 0.2}),
    "waits, while its children fill the machine": (
        f"import os\nfor _ in range(8):\n    if os.fork() == 0:\n        while True: pass\n{BUSY}",
        DOUBLE, {"seconds": 0.2},
    ),
    "an exception after the output": ("print(6)\n1 / 0", DOUBLE, {}),
    "an invented package": ("import nothing_like_it\nprint(6)", DOUBLE, {}),
    "endless": ("while True: pass", DOUBLE, {"seconds": 0.5}),
    "endless with a handler": (
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True:\n    try:\n"
        "        while True: pass\n    except BaseException: pass",
        DOUBLE, {"seconds": 0.5},
    ),
    "sleep": ("import time\ntime.sleep(1000)", DOUBLE, {"seconds": 0.5}),
    "sleep in a call": ("import time\ndef add(a, b):\n    time.sleep(1000)", ADD, {"seconds": 0.5}),
    "endless at once": ("while True: pass", ADD, {"seconds": 0.5}),
    "endless output": ("while True: print(6)", DOUBLE, {}),
    "a setup that fails": ("x = 1", ["assert True"], {"test_setup_code": "root = Node(3)"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_the_program_s_own_fault_is_wrong(name: str) -> None:
    program, answer, more = WRONG[name]
    assert code(f"```python\n{program}\n```", answer, **more) == 0.0


INVALID = {
    "import": ("import numpy as np\nprint(6)", DOUBLE, {}),
    "import in a call": (
        "def add(a, b):\n    from numpy.linalg import norm\n    return a + b",
        ADD,
        {},
    ),
    "import at once": ("import numpy\ndef add(a, b):\n    return a + b", ADD, {}),
    "crash": (
        "import os\nos.kill(os.getpid(), 9)",
        DOUBLE,
        {},
    ),  # like the kernel when it is out of memory
}


@pytest.mark.parametrize("name", INVALID)
def test_what_could_not_be_judged_is_invalid_with_its_cause(name: str) -> None:
    program, answer, more = INVALID[name]
    with pytest.raises(InvalidRewardError) as raised:
        code(f"```python\n{program}\n```", answer, **more)
    assert Failure.of(raised.value).cause == name.split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs waitid")
def test_a_missing_package_is_told_however_late_the_answer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program's process, which sent the answer, has exited by then."""
    start_program, loop = rewards.start_program, "            while not end:\n"

    def start(source: str, *settings: Any) -> Any:
        late = f"            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)\n{loop}"
        assert source.count(loop) == 1
        return start_program(source.replace(loop, late), *settings)

    monkeypatch.setattr(rewards, "start_program", start)
    program, answer, _ = INVALID["import at once"]
    with pytest.raises(InvalidRewardError, match="it imports numpy"):
        code(f"```python\n{program}\n```", answer)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and affinities")
def test_a_machine_without_time_for_a_program_makes_it_invalid() -> None:
    """A program that computes is starved. One that waits is not: it would wait on any machine."""
    cpus = os.sched_getaffinity(0)
    starters = [one for one in threading.enumerate() if one.name.startswith("sandboxes")]
    threads = [0, *(starter.native_id or 0 for starter in starters)]
    ends = []
    others: list[subprocess.Popen[bytes]] = []
    for thread in threads:
        os.sched_setaffinity(thread, {min(cpus)})
    try:
        for program in ("while True: pass", "import time\ntime.sleep(1000)"):
            with rewards.judging(Limits(seconds=0.2), source=program) as run_test:
                others = [  # the kernel divides the time among sessions
                    subprocess.Popen(["sh", "-c", "while :; do :; done"], start_new_session=True)
                    for _ in range(30)
                ]
                ends.append(run_test("3\n")["end"])
                while others:
                    others[-1].kill()
                    others.pop().wait()
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, cpus)
        for other in others:
            other.kill()
            other.wait()
    assert ends == ["starved", "time"]


def test_a_program_may_do_without_a_package() -> None:
    assert code("try:\n    import numpy\nexcept ImportError:\n    print(6)", DOUBLE) == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_each_test_has_its_own_time_until_two_have_used_it_up() -> None:
    """After a call that hangs, the program is loaded anew for the next calls."""
    calls = {
        "inputs": [[i, 1] for i in range(6)],
        "outputs": [i + 1 for i in range(6)],
        "fn_name": "add",
    }
    hangs = "def add(a, b):\n    while a in {}: pass\n    return a + b"
    assert code(hangs.format((1,)), calls, metric="fraction", seconds=0.5) == 5 / 6
    assert code(hangs.format((1, 3)), calls, metric="fraction", seconds=0.5) == 2 / 6


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_a_load_of_the_machine_is_not_the_program_s_fault() -> None:
    """All calls together take longer than the time limit of one test."""
    with ThreadPoolExecutor(8) as threads:
        values = list(
            threads.map(lambda _: code("print(int(input()) * 2)", MANY, seconds=0.5), range(8))
        )
    assert values == [1.0] * 8


@pytest.mark.skipif(isolation() != "namespaces", reason="only there all processes are known")
def test_what_a_test_leaves_behind_does_not_outlive_it() -> None:
    """Processes that stay and hold the pipes neither delay a verdict nor take memory from the next
    test.
    """
    forks = "import os, time\nx = input()\ntry:\n    while os.fork(): pass\n    time.sleep(1000)\n"
    forks += "except OSError: print(x)\n"
    assert code(forks, {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}) == 1.0


@pytest.mark.parametrize(
    ("option", "value"), [("seconds", 0), ("memory_mib", 1), ("metric", "some")]
)
def test_an_option_that_makes_no_sense_is_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value} of reward 'code'"):
        code("", DOUBLE, **{option: value})
