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
_SLOW = 2
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

    Attributes: kind: ``assert`` (``inputs`` are statements), ``call`` (of a function with
        arguments) or ``stdin``. inputs: of each test. outputs: what each must give; empty for
        statements. function: name of the function that is called. exact: whether numbers are
        compared as decimals, and lines one by one, as LiveCodeBench does.
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
    blocks = [
        (info.strip().lower(), block.removesuffix("\n"))
        for info, block in _FENCED.findall(response)
    ]
    for languages in (_PYTHON, ("",)):
        if found := [block for language, block in blocks if language in languages]:
            return found[-1]
    return response


def read_tests(answer: Any, entry_point: str | None = None) -> Tests:
    """Parse the tests in a column.

    Args: answer: a list of statements such as ``["assert add(1, 2) == 3"]`` (MBPP's ``test_list``);
        a text with them, or
            with ``def check(candidate)`` (HumanEval's ``test``); ``{"inputs": [...], "outputs":
            [...]}``, with ``fn_name`` for calls (APPS; prime_code, which has JSON in texts, a line
            for each argument); or a list of ``{"input", "output", "testtype"}`` (LiveCodeBench's
            ``public_test_cases``). The last two also as JSON, and all in ``{"ground_truth": ...}``
            (verl's column ``reward_model``).
        entry_point: name of the function that is tested, where the tests do not say it.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(answer, Mapping) and "ground_truth" in answer:
        answer = answer["ground_truth"]
    if isinstance(answer, str) and answer.lstrip()[:1] in ("[", "{"):
        try:
            answer = json.loads(answer)
        except ValueError as error:
            raise ValueError(
                f"reward 'code' must have tests as JSON or as statements: {error}."
            ) from error
    if isinstance(answer, str) and "def check(" in answer and entry_point:
        return Tests("assert", [f"{answer}\ncheck({entry_point})"])
    if isinstance(answer, str) and answer.strip():
        return Tests("assert", [answer])
    if (
        isinstance(answer, Mapping)
        and len(answer.get("inputs") or ()) == len(answer.get("outputs") or ()) > 0
    ):
        function = answer.get("fn_name") or entry_point
        inputs, outputs = answer["inputs"], answer["outputs"]
        if function is None:
            return Tests("stdin", inputs, outputs)
        outputs = [_result(*one) for one in zip(inputs, outputs, strict=True)]
        return Tests("call", [_arguments(one) for one in inputs], outputs, function)
    if isinstance(answer, Sequence) and answer and all(isinstance(one, str) for one in answer):
        return Tests("assert", answer)
    if (
        isinstance(answer, Sequence)
        and answer
        and all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in answer)
    ):
        inputs, outputs = [one["input"] for one in answer], [one["output"] for one in answer]
        if answer[0].get("testtype") == "functional":
            if not entry_point:
                raise ValueError(
                    "reward 'code' must have tests with the name of the function that they call, "
                    "this problem has none: keep the column metadata, whose func_name it is, or "
                    "entry_point."
                )
            outputs = [json.loads(one) for one in outputs]
            return Tests(
                "call", [_arguments(one) for one in inputs], outputs, entry_point, exact=True
            )
        return Tests("stdin", inputs, outputs, exact=True)
    raise ValueError(
        f"reward 'code' must have tests, this problem has {answer!r:.80}: give a list of assert statements, a text "
        'with them, {"inputs": [...], "outputs": [...]} or a list of {"input", "output"} in the column of '
        "env.columns.answer."
    )


def _arguments(given: Any) -> Any:
    """The arguments of a call, which may be JSON in a text, a line for each."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given


def _result(given: Any, expected: Any) -> Any:
    """What a call must return: JSON in a text where the arguments are."""
    if isinstance(given, str) and isinstance(expected, str):
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

    Args: response: with the program in its last fenced block, or nothing but the program. answer:
        the tests, see ``read_tests``. entry_point: column of HumanEval: the function's name.
        metadata: column of LiveCodeBench, also as JSON: its ``func_name`` is the function's name.
        prompt: of the problem: where it is the beginning of the function, the program may go on
        from there. test_imports: column of MBPP: statements that run before the tests.
        test_setup_code: likewise, as one text. metric: ``"all"`` or ``"fraction"``. seconds:
        longest CPU time of each test. After two that exceed it, the rest counts as failed.
        memory_mib: address space of each of the program's processes, in MiB; at least 64. sandbox:
        ``"strict"`` runs nothing where there are limits alone.

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
        given = json.loads(metadata) if isinstance(metadata, str) else metadata
        entry_point = given.get("func_name") if isinstance(given, Mapping) else None
    tests = read_tests(answer, entry_point)
    begins = entry_point and re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", prompt, re.M)
    program = {
        "source": program_in(response),
        "stub": prompt if begins and tests.kind == "assert" else "",
        "setup": "\n".join([*(test_imports or ()), test_setup_code or ""]),
    }
    passed = _passed(program, tests, Limits(seconds, memory_mib * 2**20), metric)
    share = passed / len(tests.inputs)
    return share if metric == "fraction" else float(share == 1)


def _passed(program: Mapping[str, str], tests: Tests, limits: Limits, metric: str) -> int:
    """Count the tests that a program passes; with ``all`` stop at the first that it does not."""
    passed, slow = 0, 0
    settings = {
        "function": tests.function,
        "statements": tests.kind == "assert",
        "contest": tests.kind != "assert",
        "keys": not tests.exact,
        "tests": len(tests.inputs),
    }
    outputs = tests.outputs or [None] * len(tests.inputs)
    with judging(limits, **program, **settings) as test:
        for given, expected in zip(tests.inputs, outputs, strict=True):
            ended = test(_text(given) if tests.kind == "stdin" else given)
            answer = _read_answer(ended["output"]) if ended["end"] == "answer" else {}
            _require_judged(ended, answer.get("error") or ended["errors"], limits)
            right = _is_right(tests, ended, answer, expected)
            passed += right
            slow += ended["end"] == "time"
            if not ended.get("loaded", True) or slow == _SLOW or (metric == "all" and not right):
                break
    return passed


def _read_answer(line: str) -> dict[str, Any]:
    """What a program's process answered, empty where the program has written something else."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _require_judged(ended: Mapping[str, Any], error: Any, limits: Limits) -> None:
    """Raise where it is not the program's fault that a test ended as it did."""
    if ended["end"] == "starved":
        raise InvalidRewardError(
            f"a program must get {limits.seconds:g} s of CPU time, on this machine it waited ten "
            "times as long for them: use fewer env.reward_workers.",
            "timeout",
        )
    if ended["end"] == "exit" and ended["status"] == -signal.SIGKILL:
        raise InvalidRewardError(
            "a program was killed from outside of its sandbox: look for a lack of memory.", "crash"
        )
    missing = _NO_MODULE.search(error) if isinstance(error, str) else None
    if missing and missing[1] in _PACKAGES and ended["status"] != 0:
        raise InvalidRewardError(
            f"a program must do with the standard library, it imports {missing[1]}: ask for that in the prompt.",
            "import",
        )


def _is_right(
    tests: Tests, ended: Mapping[str, Any], answer: Mapping[str, Any], expected: Any
) -> bool:
    if tests.kind == "stdin":
        right = ended["end"] == "exit" and ended["status"] == 0
        return right and _same_output(ended["output"], _text(expected), tests.exact)
    if ended["end"] != "answer" or not ended.get("loaded", True) or answer.get("error") != "":
        return False
    return tests.kind == "assert" or _equals(answer.get("result"), expected, tests.exact)


def _equals(result: Any, expected: Any, exact: bool) -> bool:
    """Whether a call has returned what it must; APPS puts that into a list."""
    try:
        value = json.loads(result)
        return bool(value == expected or (not exact and [value] == expected))
    except (ValueError, TypeError, RecursionError):
        return False


def _text(value: Any) -> str:
    """Standard input or output as text; APPS also stores it as lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_output(printed: str, expected: str, exact: bool) -> bool:
    """Whether the lines are the same, or have the same numbers.

    Exact is LiveCodeBench's way: each line is the same text or, as decimals, the same numbers.
    Otherwise empty lines do not count, words are compared one by one, and a number may be near
    another that is no integer.
    """
    lines, right = (
        [line.strip() for line in text.strip().split("\n")] for text in (printed, expected)
    )
    if exact:
        return len(lines) == len(right) and all(map(_same_line, lines, right))
    rows, right_rows = ([line.split() for line in part if line] for part in (lines, right))
    return list(map(len, rows)) == list(map(len, right_rows)) and all(
        map(_same_word, chain.from_iterable(rows), chain.from_iterable(right_rows))
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
