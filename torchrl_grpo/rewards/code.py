"""Code: the share of a problem's tests that the program in a response passes, run in isolation.

Tests are those of MBPP (arXiv:2108.07732), HumanEval (arXiv:2107.03374), APPS and verl's
``prime_code`` (arXiv:2105.09938), and LiveCodeBench (arXiv:2403.07974); see ``read_tests``.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any, Literal

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.sandbox import Limits, judging, require_isolation

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_PYTHON = ("python", "py", "python3")
_MAX_SLOW = 2
"""Tests that may reach their time limit; after them a program counts as too slow for the rest."""
_PACKAGES = (
    "matplotlib", "mpmath", "networkx", "numba", "numpy", "pandas", "requests", "scipy", "sklearn", "sortedcontainers",
    "sympy", "torch",
)  # fmt: skip
"""Packages that a grader's machine may have, and the sandbox has not. Another name is taken for an
invented one.
"""
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)[^'\n]*'\s*\Z")
_REL, _ABS = 1e-5, 1e-8
"""How near a number must come, as in APPS' and prime_code's graders (numpy.allclose)."""
_INTEGER = re.compile(r"[+-]?\d+")
_LONGEST_NUMBER = 5000
"""Characters of a number that is read as one."""
_LEAST_MIB = 64


@dataclass(frozen=True)
class Tests:
    """Tests of a program.

    Attributes:
        kind: ``assert`` (``inputs`` are statements), ``call`` (of a function with arguments) or
            ``stdin``.
        inputs: of each test.
        outputs: what each must give; empty for statements.
        function: name of the function that is called.
        exact: whether numbers are compared as decimals, and lines one by one, as LiveCodeBench
            does.
    """

    kind: Literal["assert", "call", "stdin"]
    inputs: Sequence[Any]
    outputs: Sequence[Any] = ()
    function: str | None = None
    exact: bool = False


def program_in(response: str) -> str:
    """Return the last fenced block of Python: one that says so, else one without a language; else
    the whole response.

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
        answer: a list of statements such as ``["assert add(1, 2) == 3"]`` (MBPP's ``test_list``); a
            text with them, or with ``def check(candidate)`` (HumanEval's ``test``);
            ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for calls (APPS; prime_code,
            whose arguments are JSON, one per line); or a list of ``{"input", "output",
            "testtype"}`` (LiveCodeBench's ``public_test_cases``). The last two also as JSON, and
            all in ``{"ground_truth": ...}`` (verl's column ``reward_model``).
        entry_point: name of the tested function, if the tests do not contain it.

    Raises:
        ValueError: it is none of these.
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
        f"reward 'code' must have tests, this problem has {answer!r:.80}: give a list of assert "
        'statements, a text with them, {"inputs": [...], "outputs": [...]} or a list of '
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
            "reward 'code' must have tests with the name of the function that they call, this "
            "problem has none: keep the column metadata, whose func_name it is, or entry_point."
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

    A test of standard input and output, or of a call, is compared outside of the program, which
    does not see what is expected. Statements run in the program's own process: one that sets out to
    can make them pass.

    A program that computes for longer than its time, waits, exceeds its memory or raises is wrong.
    Where the machine did not let it compute, killed it, or lacks a package that it imports, the
    reward is invalid.

    Args:
        response: with the program in its last fenced block, or nothing but the program.
        answer: the tests, see ``read_tests``.
        entry_point: column of HumanEval: the function's name.
        metadata: column of LiveCodeBench, also as JSON: its ``func_name`` is the function's name.
        prompt: of the problem: if it is the beginning of the function, the program may continue it.
        test_imports: column of MBPP: statements that run before the tests.
        test_setup_code: likewise, as one text.
        metric: ``"all"`` or ``"fraction"``.
        seconds: longest CPU time of each test. After two that exceed it, the rest counts as failed.
        memory_mib: address space of each of the program's processes, in MiB; at least 64.
        sandbox: ``"strict"`` refuses to run programs with limits alone.

    Raises:
        ValueError: there are no tests, or an option is none of those that there are.
        InvalidRewardError: the program could not be judged.
        OSError: its sandbox could not be made.
        RuntimeError: ``sandbox="strict"`` where there is no sandbox.

    >>> code("```python\\ndef double(x):\\n    return 2 * x\\n```", ["assert double(3) == 6"])
    1.0
    """
    if metric not in ("all", "fraction"):
        raise ValueError(
            f"metric={metric} of reward 'code' must be all or fraction: for example, all."
        )
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} of reward 'code' must be above 0: for example, 6.")
    if memory_mib < _LEAST_MIB:
        raise ValueError(
            f"memory_mib={memory_mib} of reward 'code' must be at least {_LEAST_MIB}: for example, "
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
    passed = _count_passed(program, tests, Limits(seconds, memory_mib * 2**20), metric)
    share = passed / len(tests.inputs)
    return share if metric == "fraction" else float(share == 1)


def _count_passed(program: Mapping[str, str], tests: Tests, limits: Limits, metric: str) -> int:
    """Count the tests that a program passes; with ``all`` stop at the first that fails."""
    passed, slow = 0, 0
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
            passed += is_right
            slow += end["end"] == "time"
            is_loaded = end["loaded"]
            if not is_loaded or slow == _MAX_SLOW or (metric == "all" and not is_right):
                break
    return passed


def _read_answer(line: str) -> dict[str, Any]:
    """Return the answer of a program's process; empty if the program has written something else."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _require_judged(end: Mapping[str, Any], error: Any, limits: Limits) -> None:
    """Raise if a test did not end as it did because of the program."""
    if end["end"] == "starved":
        raise InvalidRewardError(
            f"a program must get {limits.seconds:g} s of CPU time, on this machine it waited ten "
            "times as long for them: use fewer env.reward_workers.",
            "timeout",
        )
    if end["end"] == "exit" and end["status"] == -signal.SIGKILL:
        raise InvalidRewardError(
            "a program was killed from outside of its sandbox: look for a lack of memory.", "crash"
        )
    missing = _NO_MODULE.search(error) if isinstance(error, str) else None
    if missing and missing[1] in _PACKAGES and end["status"] != 0:
        raise InvalidRewardError(
            f"a program must use the standard library alone, it imports {missing[1]}: ask for that "
            "in the prompt.",
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
    """Return whether a call has returned the expected value, which APPS puts into a list."""
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

    ``exact`` is LiveCodeBench's way: each line is the same text or, as decimals, the same numbers.
    Otherwise empty lines do not count, words are compared one by one, and a number may be near
    another that is no integer.
    """
    lines = [line.strip() for line in printed.strip().split("\n")]
    right = [line.strip() for line in expected.strip().split("\n")]
    if exact:
        return len(lines) == len(right) and all(map(_same_line, lines, right))
    rows = [line.split() for line in lines if line]
    right_rows = [line.split() for line in right if line]
    return list(map(len, rows)) == list(map(len, right_rows)) and all(
        map(_same_word, chain(*rows), chain(*right_rows))
    )


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
    if integers or max(len(word), len(expected)) > _LONGEST_NUMBER:
        return False
    try:
        value, other = float(word), float(expected)
    except ValueError:
        return False
    return abs(value - other) <= _ABS + _REL * abs(other)
