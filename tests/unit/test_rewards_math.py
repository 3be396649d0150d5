r"""The reward ``math``: math-verify's verdicts, the same in every thread and process, and in bounded time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

pytest.importorskip("math_verify")

from tests.support.math_pairs import FEW, PAIRS, MathTask, dialogs, verdicts
from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.integrations.graders import math as math_reward
from torchrl_grpo.integrations.graders.math import MAX_MEMORY_BYTES, math
from torchrl_grpo.reward_pool import Failure, RewardPool

HOSTILE = [
    r"\boxed{10^{10^{10}}}",
    r"\boxed{100000000!}",
    r"\boxed{(x+1)^{10000}}",
    r"\boxed{x^{50}-x^{49}+x^3=7}",
    r"\boxed{" + r"\sin(" * 200 + "x" + ")" * 200 + "}",
    r"$\int_0^1 e^{-x^{x^x}} dx$",
]
AT_NIGHT = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{10^{-10^{9}}}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{((9!)!)!}",
    r"\boxed{\binom{1000000000}{500000000}}",
    r"\boxed{\binom{10^{9}}{10^{8}}}",
    r"\boxed{\gcd(10^{10^{9}}, 6)}",
    r"\boxed{\Gamma(10^{10})}",
    r"\boxed{(x+y+z+w+1)^{99}}",
    r"\boxed{((x+1)^{99}+1)^{99}}",
    r"\boxed{\sin(x)^{5}+\cos(x^{7})=e^{x}}",
    "The answer is 10**10**10",
]


@pytest.mark.slow
def test_pairs_have_the_verdict_that_they_should() -> None:
    assert len(PAIRS) >= 90
    wrong = [
        pair for pair, verdict in zip(PAIRS, verdicts(PAIRS), strict=True) if verdict is not pair[2]
    ]
    assert wrong == []


@pytest.mark.slow
def test_a_thread_gives_the_verdicts_of_the_main_thread() -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(verdicts, [FEW, FEW])  # concurrently
    assert first == second == [verdict for *_, verdict in FEW]


@pytest.mark.slow
def test_a_reward_worker_gives_the_verdicts_of_this_process() -> None:
    with RewardPool(MathTask(), 1, timeout_s=300) as pool:
        turns = [future.result() for future in [pool.submit(dialog) for dialog in dialogs()]]
    scores = [
        None if isinstance(turn, Failure) or turn.score is None else turn.score.reward
        for turn in turns
    ]
    assert scores == [-1.0 if verdict is None else float(verdict) for *_, verdict in FEW]


@pytest.fixture(scope="module")
def short_limit() -> Iterator[list[float]]:
    """Limit a comparison to half a second of processor time. Return the CPU seconds of the judges
    that have ended.
    """
    used: list[float] = []
    end = math_reward._Judge.end

    def measured_end(judge: math_reward._Judge) -> int | None:
        if judge._child is not None:
            process = judge._child.process
            os.kill(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            used.append(usage.ru_utime + usage.ru_stime)
        return end(judge)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_reward, "CPU_LIMIT_S", 0.5)
        patch.setattr(math_reward, "_judges", {})
        patch.setattr(math_reward._Judge, "end", measured_end)
        yield used
        for judge in math_reward._judges.values():
            judge.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "response",
    [*HOSTILE, *(pytest.param(response, marks=pytest.mark.nightly) for response in AT_NIGHT)],
    ids=range(len(HOSTILE) + len(AT_NIGHT)),
)
def test_an_answer_of_absurd_size_is_wrong_or_undecided_within_the_limit(
    response: str, short_limit: list[float]
) -> None:
    before = sum(short_limit)
    assert verdict_or_cause(response) in (False, "timeout")
    assert sum(short_limit) - before < 10


def verdict_or_cause(response: str, reference: str = "10") -> bool | str | None:
    try:
        return math(response, reference)
    except InvalidRewardError as error:
        return error.cause


@pytest.mark.slow
def test_a_comparison_that_takes_too_long_is_invalid_and_not_wrong(
    short_limit: list[float],
) -> None:
    assert verdict_or_cause(r"\boxed{100000000!}") == "timeout"
    assert math(r"\boxed{10}", "10") is True


@pytest.mark.parametrize(
    "reference",
    [
        "", "the mean is larger", "increasing", "no", "2n + 1 for every n", "3 hours and 15 minutes",
        r"x \text{ is even}", r"$\frac{3}{4}$ hours $=45$ min", "$x=1$; $y=2$", "$1$\n$2$",
        r"1;$\frac{11}{20}$", "8;$-2$", r"1, $\sqrt{2}$", r"3 or $\sqrt{2}$",
        r"5000 pens should be produced for a cost of $\$ 200$.", "E = ħω(v+1/2), v=0,1,2",
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_read_as_a_whole_gives_none(reference: str) -> None:
    assert (
        math(rf"\boxed{{{reference.split('$')[-2] if '$' in reference else reference}}}", reference)
        is None
    )


@pytest.mark.slow
def test_large_expressions_in_both_are_compared_as_they_are_written(
    short_limit: list[float],
) -> None:
    tower = "10^{10^{10}}"
    assert math(rf"\boxed{{{tower}}}", tower) is True
    assert verdict_or_cause(r"\boxed{10^{10^{9}}}", tower) in (False, "timeout")


@pytest.mark.slow
def test_a_comparison_that_ends_its_process_ends_no_other(short_limit: list[float]) -> None:
    with ThreadPoolExecutor(3) as pool:
        responses = [r"\boxed{10}", HOSTILE[0], r"\boxed{11}", r"\boxed{20/2}"]
        verdicts = list(pool.map(verdict_or_cause, responses))
    assert verdicts[1] in (False, "timeout") and [verdicts[0], *verdicts[2:]] == [True, False, True]


def resident_bytes() -> int:
    """Return the memory of this process and its descendants."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


@pytest.mark.slow
def test_an_answer_cannot_take_the_memory_of_the_machine() -> None:
    assert math("1", "1") is True
    most = before = resident_bytes()
    with ThreadPoolExecutor(1) as pool:
        comparing = pool.submit(verdict_or_cause, r"\boxed{10^{10^{10}}}")
        while not comparing.done():
            most = max(most, resident_bytes())
            time.sleep(0.05)
    assert comparing.result() in (False, "timeout")
    assert most - before < 2 * MAX_MEMORY_BYTES


def test_without_math_verify_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(math_reward, "_judges", {})
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ImportError, match=r"math-verify, .*: pip install 'torchrl_grpo\[rewards\]'"
    ):
        math("1", "1")
