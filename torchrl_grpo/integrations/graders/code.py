"""Code: the share of a problem's tests that the program in a response passes, run in isolation.

Tests have the forms of MBPP (arXiv:2108.07732), HumanEval (arXiv:2107.03374), APPS and verl's
``prime_code`` (arXiv:2105.09938), and LiveCodeBench (arXiv:2403.07974); see ``read_tests``.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.host.processes import descendants
from torchrl_grpo.integrations.sandbox import Limits, isolation, require_isolation
from torchrl_grpo.integrations.sandbox.runner import START_S, EndedError, start_program

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_PYTHON = ("python", "py", "python3")
_MAX_SLOW = 2
"""Number of timeouts after which a program counts as too slow for the remaining tests."""
_PACKAGES = (
    "matplotlib", (
        "mpmath"
    ), "networkx", "numba", "numpy", "pandas", "requests", "scipy", "sklearn", "sortedcontainers",
    "sympy", "torch",
)  # fmt: skip
"""Packages that a grader's machine may have, but the sandbox lacks. Other missing packages are
assumed to be invented.
"""
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)[^'\n]*'\s*\Z")
_REL, _ABS = 1e-5, 1e-8
"""Tolerance for numbers, as in the graders of APPS and prime_code (numpy.allclose)."""
_INTEGER = re.compile(r"[+-]?\d+")
_MAX_NUMBER_LENGTH = 5000
"""Maximum length of a word that is compared as a number."""
_MIN_MIB = 64
_STARVED = 10
"""Wall-clock time, as a multiple of the CPU time limit, after which the machine is too slow, not
the program.
"""


@dataclass(frozen=True)
class Tests:
    """Tests of a program.

    Attributes:
        kind: ``assert`` (``inputs`` are statements), ``call`` (of a function with arguments) or
            ``stdin``.
        inputs: input of each test.
        outputs: expected output of each test; empty for statements.
        function: name of the function to call.
        exact: whether to compare numbers as decimals, and lines one by one, as LiveCodeBench does.
    """

    kind: Literal["assert", "call", "stdin"]
    inputs: Sequence[Any]
    outputs: Sequence[Any] = ()
    function: str | None = None
    exact: bool = False


def program_in(response: str) -> str:
    """Return the last fenced block marked as Python, else the last one without a language, else the
    whole response.

    >>> program_in("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    blocks = _FENCED.findall(response)
    for languages in (_PYTHON, ("",)):
        programs = [block for info, block in blocks if info.strip().lower() in languages]
        if programs:
            return str(programs[-1]).removesuffix("\n")
    return response


def read_tests(answer: Any, entry_point: str | None = None) -> Tests:
    """Parse the tests in a column.

    Args:
        answer: a list of statements such as ``["assert add(1, 2) == 3"]`` (MBPP's ``test_list``);
            text with statements, or with ``def check(candidate)`` (HumanEval's ``test``);
            ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for calls (APPS; prime_code,
            whose arguments are JSON, one per line); or a list of ``{"input", "output",
            "testtype"}`` (LiveCodeBench's ``public_test_cases``). The last two also as JSON, and
            all in ``{"ground_truth": ...}`` (verl's column ``reward_model``).
        entry_point: name of the tested function, if the tests do not contain it.

    Raises:
        ValueError: it is not one of these.
    """
    if isinstance(answer, Mapping) and "ground_truth" in answer:
        answer = answer["ground_truth"]
    if isinstance(answer, str) and answer.lstrip().startswith(("[", "{")):
        try:
            answer = json.loads(answer)
        except ValueError as error:
            raise ValueError(
                f"reward 'code' must have tests as JSON or as statements: {error}."
            ) from error
    if isinstance(answer, str) and answer.strip():
        calls_check = "def check(" in answer and entry_point
        return Tests("assert", [f"{answer}\ncheck({entry_point})" if calls_check else answer])
    if isinstance(answer, Mapping):
        inputs, outputs = answer.get("inputs") or (), answer.get("outputs") or ()
        function = answer.get("fn_name") or entry_point
        if len(inputs) == len(outputs) > 0:
            if function is None:
                return Tests("stdin", inputs, outputs)
            results = list(map(_result, inputs, outputs))
            return Tests("call", list(map(_arguments, inputs)), results, function)
    elif isinstance(answer, Sequence) and answer:
        if all(isinstance(test, str) for test in answer):
            return Tests("assert", answer)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in answer):
            return _contest_tests(answer, entry_point)
    raise ValueError(
        f"reward 'code' needs tests, but this problem has {answer!r:.80}: put a list of assert "
        'statements, text with them, {"inputs": [...], "outputs": [...]} or a list of '
        '{"input", "output"} in the column of env.columns.answer.'
    )


def _contest_tests(tests: Sequence[Mapping[str, Any]], function: str | None) -> Tests:
    """Return the tests of LiveCodeBench."""
    inputs = [test["input"] for test in tests]
    outputs = [test["output"] for test in tests]
    if tests[0].get("testtype") != "functional":
        return Tests("stdin", inputs, outputs, exact=True)
    if not function:
        raise ValueError(
            "reward 'code' needs the name of the function that the tests call, but this problem "
            "has none: keep the column metadata, with its func_name, or entry_point."
        )
    results = list(map(json.loads, outputs))
    return Tests("call", list(map(_arguments, inputs)), results, function, exact=True)


def _arguments(value: Any) -> Any:
    """Return the arguments of a call, which may be lines of JSON."""
    return list(map(json.loads, value.splitlines())) if isinstance(value, str) else value


def _result(arguments: Any, expected: Any) -> Any:
    """Return the expected result of a call, which may be JSON if the arguments are."""
    if isinstance(arguments, str) and isinstance(expected, str):
        with suppress(ValueError):
            return json.loads(expected)
    return expected


def code(
    response: str,
    answer: Any,
    entry_point: str | None = None,
    metadata: Any = None,
    prompt: str = "",
    test_imports: Sequence[str] | None = None,
    test_setup_code: str | None = None,
    *,
    metric: Literal["all", "fraction"] = "all",
    seconds: float = 6.0,
    memory_mib: int = 512,
    sandbox: Literal["auto", "strict"] = "strict",
) -> float:
    """Return 1.0 for a program that passes all tests, or the share of tests that it passes.

    Tests of standard input and output, or of a call, are compared outside the program, which does
    not see the expected result. Statements run in the program's own process, so a malicious program
    can make them pass.

    A program that exceeds its CPU time or memory, waits, or raises is wrong. If the machine gave it
    no CPU time, killed it, or lacks a package that it imports, the reward is invalid.

    Args:
        response: the response, with the program in its last fenced block, or only the program.
        answer: the tests; see ``read_tests``.
        entry_point: column of HumanEval: the function's name.
        metadata: column of LiveCodeBench, also as JSON: its ``func_name`` is the function's name.
        prompt: prompt of the problem; if it is the beginning of the function, the program may
            continue it.
        test_imports: column of MBPP: statements that run before the tests.
        test_setup_code: the same as one text.
        metric: ``"all"`` or ``"fraction"``.
        seconds: CPU time limit of each test. After two that exceed it, the remaining tests count as
            failed.
        memory_mib: address space of each of the program's processes, in MiB; at least 64.
        sandbox: ``"strict"`` refuses to run programs with only resource limits.

    Raises:
        ValueError: there are no tests, or an option is invalid.
        InvalidRewardError: the program could not be judged.
        OSError: its sandbox could not be created.
        RuntimeError: ``sandbox="strict"``, but this machine has no sandbox.

    >>> code("```python\\ndef double(x):\\n    return 2 * x\\n```", ["assert double(3) == 6"])
    1.0
    """
    if metric not in ("all", "fraction"):
        raise ValueError(
            f"metric={metric} of reward 'code' must be all or fraction: for example, all."
        )
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} of reward 'code' must be above 0: for example, 6.")
    if memory_mib < _MIN_MIB:
        raise ValueError(
            f"memory_mib={memory_mib} of reward 'code' must be at least {_MIN_MIB}: for example, "
            "512."
        )
    require_isolation(sandbox)
    if entry_point is None and metadata:
        fields = json.loads(metadata) if isinstance(metadata, str) else metadata
        entry_point = fields.get("func_name") if isinstance(fields, Mapping) else None
    tests = read_tests(answer, entry_point)
    definition = rf"^(?:async )?def {re.escape(entry_point or '')}\b"
    has_stub = entry_point and tests.kind == "assert" and re.search(definition, prompt, re.M)
    program = {
        "source": program_in(response),
        "stub": prompt if has_stub else "",
        "setup": "\n".join([*(test_imports or ()), test_setup_code or ""]),
    }
    num_passed = _count_passed(program, tests, Limits(seconds, memory_mib * 2**20), metric)
    share = num_passed / len(tests.inputs)
    return share if metric == "fraction" else float(share == 1)


def _count_passed(program: Mapping[str, str], tests: Tests, limits: Limits, metric: str) -> int:
    """Count the tests that a program passes; with ``all``, stop at the first failure."""
    num_passed = 0
    num_slow = 0
    settings = {
        "kind": tests.kind,
        "function": tests.function,
        "exact": tests.exact,
        "tests": len(tests.inputs),
    }
    outputs = tests.outputs or [None] * len(tests.inputs)
    with judging(limits, **program, **settings) as run_test:
        for test, expected in zip(tests.inputs, outputs, strict=True):
            end = run_test(_text(test) if tests.kind == "stdin" else test)
            answer = _read_answer(end["output"]) if end["end"] == "answer" else {}
            _require_judged(end, answer.get("error") or end["errors"], limits)
            is_right = _is_right(tests, end, answer, expected)
            num_passed += is_right
            num_slow += end["end"] == "time"
            is_decided = metric == "all" and not is_right
            if is_decided or num_slow == _MAX_SLOW or not end["loaded"]:
                break
    return num_passed


@contextmanager
def judging(limits: Limits, **program: Any) -> Iterator[Callable[[Any], dict[str, Any]]]:
    """Start a sandbox in which a program runs on one test after another.

    Yields a function that runs a test and returns its outcome; see ``Program.test`` in
    ``code_runner.py``.

    Args:
        limits: limits of each test.
        program: see ``Program`` there.

    Raises:
        OSError: the sandbox cannot be created, or died.
    """
    longest = START_S + 20 * limits.seconds
    source = Path(__file__).with_name("code_runner.py").read_text(encoding="utf-8")
    with start_program(source, limits, isolation()) as process:

        def run(test: Any) -> dict[str, Any]:
            before = _times(process.pid)
            end: dict[str, Any] = process.ask(test, longest)
            while end["end"] == "late":
                late = _reason_to_end(before, _times(process.pid), end["wall_s"], limits.seconds)
                end = process.ask(late, longest)
            return end

        try:
            process.ask(program | {"seconds": limits.seconds, "output": limits.output}, longest)
            yield run
        except (EndedError, TimeoutError) as error:
            raise OSError(f"the sandbox of a program died: {error}") from error


def _times(pid: int) -> dict[str, tuple[float, float]]:
    """Return the seconds that each thread below a process has run and has waited for a CPU."""
    times = {}
    for process in descendants(pid):
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(OSError, ValueError):  # it has ended
                run, waited, _ = map(int, path.read_text().split())
                times[path.parent.name] = run / 1e9, waited / 1e9
    return times


def _reason_to_end(
    before: Mapping[str, tuple[float, float]],
    now: Mapping[str, tuple[float, float]],
    wall_s: float,
    seconds: float,
) -> str:
    """Return why a program that has run for this long must end: ``time``, ``starved`` if the
    machine gave it no CPU time, or nothing. Waiting for anything but a CPU is its own fault.

    Args:
        before: ``_times`` at the start of the test.
        now: ``_times``; empty where the kernel does not measure them.
        wall_s: wall-clock time of the test.
        seconds: time limit.
    """
    spent = [
        (run - before.get(thread, (0, 0))[0], waited - before.get(thread, (0, 0))[1])
        for thread, (run, waited) in now.items()
    ]
    own_s = wall_s / _STARVED
    if spent:
        own_s = max(sum(run for run, _ in spent), wall_s - max(waited for _, waited in spent))
    if own_s > seconds:
        return "time"
    return "starved" if wall_s > _STARVED * seconds else ""


def _read_answer(line: str) -> dict[str, Any]:
    """Return the answer of a program's process; empty if the program wrote something else."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _require_judged(end: Mapping[str, Any], error: Any, limits: Limits) -> None:
    """Raise an error if a test's outcome was not caused by the program."""
    if end["end"] == "starved":
        raise InvalidRewardError(
            f"a program must get {limits.seconds:g} s of CPU time, but this machine was busy for "
            f"{_STARVED} times as long: use fewer env.reward_workers.",
            "timeout",
        )
    if end["end"] == "exit" and end["status"] == -signal.SIGKILL:
        raise InvalidRewardError(
            "a program was killed from outside its sandbox: check whether the machine runs out of "
            "memory.",
            "crash",
        )
    missing = _NO_MODULE.search(error) if isinstance(error, str) else None
    # A process that has answered may have exited by now, or not.
    failed = end["end"] == "answer" or end["status"] != 0
    if missing and missing[1] in _PACKAGES and failed:
        raise InvalidRewardError(
            f"a program must use only the standard library, but it imports {missing[1]}: say so in "
            "the prompt.",
            "import",
        )


def _is_right(
    tests: Tests, end: Mapping[str, Any], answer: Mapping[str, Any], expected: Any
) -> bool:
    if tests.kind == "stdin":
        if end["end"] != "exit" or end["status"] != 0:
            return False
        return _same_output(end["output"], _text(expected), tests.exact)
    if not end["loaded"] or answer.get("error") != "":
        return False
    return tests.kind == "assert" or _equals(answer.get("result"), expected, tests.exact)


def _equals(result: Any, expected: Any, exact: bool) -> bool:
    """Return whether a call returned the expected value, which APPS puts into a list."""
    try:
        value = json.loads(result)
        return bool(value == expected or (not exact and [value] == expected))
    except (ValueError, TypeError, RecursionError):
        return False


def _text(value: Any) -> str:
    """Return standard input or output as text; APPS also stores it as lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_output(printed: str, expected: str, exact: bool) -> bool:
    """Return whether the lines are the same, or have the same numbers.

    ``exact`` is LiveCodeBench's rule: each line is the same text or, as decimals, the same numbers.
    Otherwise empty lines are ignored, words are compared one by one, and numbers that are not both
    integers may differ by the tolerance.
    """
    lines = [line.strip() for line in printed.strip().split("\n")]
    expected_lines = [line.strip() for line in expected.strip().split("\n")]
    if exact:
        same_count = len(lines) == len(expected_lines)
        return same_count and all(map(_same_line, lines, expected_lines))
    rows = [line.split() for line in lines if line]
    expected_rows = [line.split() for line in expected_lines if line]
    if list(map(len, rows)) != list(map(len, expected_rows)):
        return False
    return all(map(_same_word, chain(*rows), chain(*expected_rows)))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    try:
        return [Decimal(word) for word in line.split()] == [
            Decimal(word) for word in expected.split()
        ]
    except ArithmeticError:
        return False


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    integers = _INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected)
    if integers or max(len(word), len(expected)) > _MAX_NUMBER_LENGTH:
        return False
    try:
        value, other = float(word), float(expected)
    except ValueError:
        return False
    return abs(value - other) <= _ABS + _REL * abs(other)
