r"""The reward ``math``: math-verify's verdicts, the same in every thread and process, and in bounded time."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")

from torchrl_grpo.rewards.math import math

# Response, reference, verdict.
PAIRS = [
    (r"\boxed{72}", "72", True),
    (r"\boxed{72.0}", "72", True),
    (r"\boxed{73}", "72", False),
    (r"\boxed{-72}", "72", False),
    (r"\boxed{\frac{3}{4}}", "0.75", True),
    (r"\boxed{0.75}", r"\frac{3}{4}", True),
    (r"\boxed{3/4}", r"\frac{3}{4}", True),
    (r"\boxed{\dfrac{6}{8}}", r"\frac{3}{4}", True),
    (r"\boxed{\frac{4}{3}}", r"\frac{3}{4}", False),
    (r"\boxed{1{,}234}", "1234", True),
    (r"\boxed{1,234,567}", "1234567", True),
    (r"\boxed{50\%}", r"50\%", True),
    (r"\boxed{50\%}", "51", False),
    (r"\boxed{\$12.50}", "12.5", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{12\text{ cm}}", "12", True),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True),
    (r"\boxed{\sqrt{6}}", r"2\sqrt{2}", False),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", True),
    (r"\boxed{\pi}", r"\pi", True),
    (r"\boxed{2\pi}", r"\pi", False),
    (r"\boxed{\frac{\pi}{2}}", r"0.5\pi", True),
    (r"\boxed{2^{10}}", "1024", True),
    (r"\boxed{2^{2005}}", "2^{2005}", True),
    (r"\boxed{2\cdot 2^{2004}}", "2^{2005}", True),
    (r"\boxed{2^{2004}}", "2^{2005}", False),
    (r"\boxed{5!}", "120", True),
    (r"\boxed{\binom{5}{2}}", "10", True),
    (r"\boxed{\log_2 8}", "3", True),
    (r"\boxed{e^2}", "e^2", True),
    (r"\boxed{x+1}", "1+x", True),
    (r"\boxed{x-1}", "1+x", False),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
    (r"\boxed{x^2+1}", "(x+1)^2", False),
    (r"\boxed{(x+1)(x-1)}", "x^2-1", True),
    (r"\boxed{\frac{x^2-1}{x-1}}", "x+1", True),
    (r"\boxed{a+b}", "b+a", True),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1", True),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{5}", "x=5", True),
    (r"\boxed{x=6}", "5", False),
    (r"\boxed{y=2x+3}", "y=3+2x", True),
    (r"\boxed{y=2x-3}", "y=3+2x", False),
    (r"\boxed{x>3}", "3<x", True),
    (r"\boxed{x<3}", "x>3", False),
    (r"\boxed{(1,2)}", "(1,2)", True),
    (r"\boxed{(2,1)}", "(1,2)", False),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", True),
    (r"\boxed{\{1,2\}}", r"\{3,2,1\}", False),
    (r"\boxed{[0,1)}", "[0,1)", True),
    (r"\boxed{[0,1]}", "[0,1)", False),
    (r"\boxed{(-\infty,3)}", r"(-\infty,3)", True),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", True),
    (r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False),
    (r"\boxed{3+4i}", "3+4i", True),
    (r"\boxed{3-4i}", "3+4i", False),
    (r"\boxed{\text{even}}", r"\text{even}", True),
    (r"The answer is $\frac{3}{4}$.", "0.75", True),
    ("The answer is 72.", "72", True),
    ("The answer is 72.", "$72$", True),
    (r"First \boxed{5}. No:\n" + "\n" + r"\boxed{72}", "72", True),
    (r"First \boxed{72}. No:" + "\n" + r"\boxed{5}", "72", False),
    (r"\boxed{72}" + "\nThat is what I think. " * 200, "72", True),
    ("no answer at all", "72", False),
    ("", "72", False),
]
# Each of them ran math-verify for more than 15 seconds, or for ever, in the main thread with its own time limit too.
HOSTILE = [
    r"\boxed{10^{10^{10}}}",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{10^{-10^{9}}}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{100000000!}",
    r"\boxed{((9!)!)!}",
    r"\boxed{\binom{1000000000}{500000000}}",
    r"\boxed{\binom{10^{9}}{10^{8}}}",
    r"\boxed{\gcd(10^{10^{9}}, 6)}",
    r"\boxed{\Gamma(10^{10})}",
    r"\boxed{(x+1)^{10000}}",
    r"\boxed{(x+y+z+w+1)^{99}}",
    r"\boxed{((x+1)^{99}+1)^{99}}",
    r"\boxed{x^{50}-x^{49}+x^3=7}",
    r"\boxed{\sin(x)^{5}+\cos(x^{7})=e^{x}}",
    r"\boxed{" + r"\sin(" * 200 + "x" + ")" * 200 + "}",
    r"$\int_0^1 e^{-x^{x^x}} dx$",
    "The answer is 10**10**10",
]


def verdicts(_: object = None) -> list[bool | None]:
    return [math(response, reference) for response, reference, _ in PAIRS]


def test_pairs_have_the_verdict_that_they_should() -> None:
    assert len(PAIRS) >= 60
    wrong = [pair for pair, verdict in zip(PAIRS, verdicts(), strict=True) if verdict is not pair[2]]
    assert wrong == []


def test_a_thread_gives_the_verdicts_of_the_main_thread() -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(verdicts, range(2))  # at the same time
    assert first == second == [verdict for *_, verdict in PAIRS]


def test_another_process_gives_the_verdicts_of_this_one() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map_async(verdicts, [None]).get(timeout=300) == [[verdict for *_, verdict in PAIRS]]


@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_an_answer_of_absurd_size_is_wrong_within_seconds(response: str) -> None:
    start = time.perf_counter()
    assert math(response, "10") is False
    assert time.perf_counter() - start < 10


def test_a_reference_that_cannot_be_read_gives_none() -> None:
    assert math(r"\boxed{72}", "") is None


def test_large_expressions_in_both_are_compared_as_they_are_written() -> None:
    tower = "10^{10^{10}}"
    assert math(rf"\boxed{{{tower}}}", tower) is True
    assert math(r"\boxed{10^{10^{9}}}", tower) is False


def test_without_math_verify_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl_grpo.rewards.math import _library

    _library.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"math-verify, it is missing: pip install 'torchrl_grpo\[rewards\]'"):
        math("1", "1")
    _library.cache_clear()
