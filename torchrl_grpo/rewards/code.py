"""Code: the share of a problem's tests that the program in a response passes, run in isolation.

Tests are those of MBPP (arXiv:2108.07732), HumanEval (arXiv:2107.03374), APPS and verl's ``prime_code``
(arXiv:2105.09938), and LiveCodeBench (arXiv:2403.07974); see ``read_tests``.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_grpo.sandbox import Limits, require_isolation, run_python

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
_PYTHON = ("python", "py", "python3")
_HARNESS = """\
import io, json, sys
given = json.load(sys.stdin)
sys.stdin = io.StringIO()
scope = {"__name__": "solution"}
if given["function"] is not None:  # the stubs of such problems are annotated, with List and others
    exec("from typing import *", scope)
exec(compile(given["program"], "solution.py", "exec"), scope)

def call(arguments):
    found = scope.get(given["function"])
    if found is None:
        found = getattr(scope["Solution"](), given["function"])
    return found(*arguments)

for test in given["tests"]:
    try:
        if given["function"] is None:
            said = exec(compile(test, "test.py", "exec"), scope)
        else:
            said = json.dumps(call(test), default=list)
    except BaseException as error:
        said = False
    if said is None or said:
        print("\\n" + given["mark"], "passed" if said is None else said, flush=True)
    else:
        print("\\n" + given["mark"], flush=True)
"""


@dataclass(frozen=True)
class Tests:
    """Tests of a program.

    Attributes:
        kind: ``assert`` (``inputs`` are statements), ``call`` (of a function with arguments) or ``stdin``.
        inputs: of each test.
        outputs: what each must give; empty for statements.
        function: name of the function that is called.
    """

    kind: Literal["assert", "call", "stdin"]
    inputs: Sequence[Any]
    outputs: Sequence[Any] = ()
    function: str | None = None


def program_in(response: str) -> str:
    """Return the last fenced block of Python: one that says so, else one without a language; else the whole response.

    >>> program_in("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    blocks = [(info.strip().lower(), block.removesuffix("\n")) for info, block in _FENCED.findall(response)]
    for languages in (_PYTHON, ("",)):
        if found := [block for language, block in blocks if language in languages]:
            return found[-1]
    return response


def read_tests(answer: Any, entry_point: str | None = None) -> Tests:
    """Parse the tests in a column.

    Args:
        answer: a list of statements such as ``["assert add(1, 2) == 3"]`` (MBPP's ``test_list``); a text with them, or
            with ``def check(candidate)`` (HumanEval's ``test``); ``{"inputs": [...], "outputs": [...]}``, with
            ``fn_name`` for calls (APPS; prime_code, which has JSON in texts, a line for each argument); or a list of
            ``{"input", "output", "testtype"}`` (LiveCodeBench's ``public_test_cases``). The last two also as JSON, and
            all in ``{"ground_truth": ...}`` (verl's column ``reward_model``).
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
            raise ValueError(f"reward 'code' must have tests as JSON or as statements: {error}.") from error
    if isinstance(answer, str) and "def check(" in answer and entry_point:
        return Tests("assert", [f"{answer}\ncheck({entry_point})"])
    if isinstance(answer, str) and answer.strip():
        return Tests("assert", [answer])
    if isinstance(answer, Mapping) and len(answer.get("inputs") or ()) == len(answer.get("outputs") or ()) > 0:
        function = answer.get("fn_name") or entry_point
        inputs = [_arguments(one) for one in answer["inputs"]] if function else answer["inputs"]
        return Tests("call" if function else "stdin", inputs, answer["outputs"], function)
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
                    "reward 'code' must have tests with the name of the function that they call, this problem has "
                    "none: keep the column metadata, whose func_name it is, or entry_point."
                )
            return Tests("call", [_arguments(one) for one in inputs], [json.loads(one) for one in outputs], entry_point)
        return Tests("stdin", inputs, outputs)
    raise ValueError(
        f"reward 'code' must have tests, this problem has {answer!r:.80}: give a list of assert statements, a text "
        'with them, {"inputs": [...], "outputs": [...]} or a list of {"input", "output"} in the column of '
        "env.columns.answer."
    )


def _arguments(given: Any) -> Any:
    """The arguments of a call, which may be JSON in a text, a line for each."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given


def code(
    response: str,
    answer: Any,
    entry_point: str | None = None,
    metadata: Any = None,
    *,
    metric: Literal["all", "fraction"] = "all",
    seconds: float = 10.0,
    sandbox: Literal["auto", "strict"] = "auto",
) -> float:
    """Return 1.0 for a program that passes all tests, or the share of tests that it passes.

    A test of standard input and output, or of a call, is compared outside of the program, which does not see what is
    expected. Statements run in the program's own process: one that sets out to can make them pass.

    Args:
        response: with the program in its last fenced block, or nothing but the program.
        answer: the tests, see ``read_tests``.
        entry_point: column of HumanEval: the function's name.
        metadata: column of LiveCodeBench, also as JSON: its ``func_name`` is the function's name.
        metric: ``"all"`` or ``"fraction"``.
        seconds: longest time for all tests together.
        sandbox: ``"strict"`` runs nothing where there are limits alone.

    Raises:
        ValueError: there are no tests, or an option is none of those that there are.
        RuntimeError: ``sandbox="strict"`` where there is no sandbox.

    >>> code("```python\\ndef double(x):\\n    return 2 * x\\n```", ["assert double(3) == 6"])
    1.0
    """
    if metric not in ("all", "fraction"):
        raise ValueError(f"metric={metric} of reward 'code' must be all or fraction: for example, all.")
    require_isolation(sandbox)
    if entry_point is None and metadata:
        given = json.loads(metadata) if isinstance(metadata, str) else metadata
        entry_point = given.get("func_name") if isinstance(given, Mapping) else None
    tests, program = read_tests(answer, entry_point), program_in(response)
    passed = (
        _passed_by_output(program, tests, seconds, metric)
        if tests.kind == "stdin"
        else _passed(program, tests, seconds)
    )
    share = passed / len(tests.inputs)
    return share if metric == "fraction" else float(share == 1)


def _passed(program: str, tests: Tests, seconds: float) -> int:
    """Count the statements that pass, or calls with the right result, all in one process."""
    mark = secrets.token_hex(16)
    given = {"program": program, "tests": list(tests.inputs), "function": tests.function, "mark": mark}
    outcome = run_python(_HARNESS, json.dumps(given), Limits(seconds=seconds))
    said = [line.removeprefix(mark).strip() for line in outcome.output.splitlines() if line.startswith(mark)]
    if tests.kind == "assert":
        return min(said.count("passed"), len(tests.inputs))
    return sum(_equals(one, expected) for one, expected in zip(said, tests.outputs, strict=False))


def _equals(said: str, expected: Any) -> bool:
    try:
        value = json.loads(said)
    except ValueError:
        return False
    if isinstance(expected, str):
        try:
            return bool(value == expected or value == json.loads(expected))
        except ValueError:
            return False
    return bool(value == expected or [value] == expected)  # APPS puts what a call returns into a list


def _passed_by_output(program: str, tests: Tests, seconds: float, metric: str) -> int:
    """Count the inputs with the right output; with ``all`` stop at the first wrong one."""
    deadline, passed = time.monotonic() + seconds, 0
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        outcome = run_python(program, _text(given), Limits(seconds=left))
        if outcome.status == 0 and _words(outcome.output) == _words(_text(expected)):
            passed += 1
        elif metric == "all":
            break
    return passed


def _text(value: Any) -> str:
    """Standard input or output as text; APPS also stores it as lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _words(text: str) -> list[list[str]]:
    """The words of each line, without empty lines at the end."""
    return [line.split() for line in text.rstrip().splitlines()]
