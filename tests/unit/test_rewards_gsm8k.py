"""Numbers in text: finding the answer, and equality of two numbers. The reward ``gsm8k``."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.published import published
from torchrl_grpo.rewards import canonical_number, marked_number
from torchrl_grpo.rewards.gsm8k import MODES, gsm8k, stated_number

REAL_DATA = published("gsm8k")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("72.", "72"),
        ("72.00", "72"),
        ("072", "72"),
        ("72.50", "72.5"),
        (".5", "0.5"),
        ("0.5", "0.5"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("000", "0"),
        ("-7", "-7"),
        ("- 7", "-7"),
        ("\N{MINUS SIGN}7", "-7"),
        ("+7", "7"),
        ("$5", "5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("$1,234.50", "1234.5"),
        ("1,234,567", "1234567"),
        ("72, they say", "72"),
        ("72 clips", "72"),
        ("72%", "72"),
        ("**72**", "72"),
        ("3/4", "0.75"),
        ("1 1/2 cups", "1.5"),
        ("-6/8", "-0.75"),
        ("2/6", "1/3"),
        ("10/5", "2"),
        ("0/7", "0"),
        ("1/1000", "0.001"),
        ("–7", "-7"),
        ("€1.000", "1"),
        ("72m", "72"),
    ],
)
def test_equal_numbers_have_one_form(text: str, number: str) -> None:
    assert canonical_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "1e5",
        "3/0",
        "3/4/5",
        "1.5/2",
        "1,000/2",
        "5 million",
        "3 dozen",
        "72k",
        "72x",
        "72²",
        "72½",
        "72٣",
        "2^3",
        "72 or more",
        "72+",
        "two and 72",
        "72 and a half",
        "12 dollars and fifty cents",
        "--72",
        "~72",
        "< 72",
        "√72",
        "1 234",
        "10 - 5",
        "2 or 3",
        "1.2.3",
        "12,50",
        "1,2345",
        "1234,567",
        "Step 3",
        "x=3",
        "٣",
        "½",
        ".",
    ],
)
def test_text_without_exactly_one_clear_number_has_no_number(text: str) -> None:
    assert canonical_number(text) is None


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4
    )
)
def test_canonical_form_keeps_the_value_and_ignores_how_it_is_written(value: Decimal) -> None:
    written = {f"{value:f}", f"{value:,f}", f"{value:f}00", f"{value:f} apples."}
    forms = {canonical_number(text) for text in written}
    assert len(forms) == 1
    assert Decimal(str(forms.pop())) == value


@given(st.integers(), st.integers())
def test_different_integers_have_different_forms(a: int, b: int) -> None:
    assert (canonical_number(str(a)) == canonical_number(str(b))) == (a == b)


@pytest.mark.slow
@given(st.text())
def test_no_text_makes_the_parser_fail(text: str) -> None:
    canonical_number(text)
    marked_number(text)
    marked_number(f"#### {text}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48 + 24 = 72\n#### 72", "72"),
        ("####72", "72"),
        ("#### 1\nNo.\n#### 2", "2"),
        ("#### 72\nIs 5 right?", "72"),
        ("####\n72\n", "72"),
        ("##### 72", "72"),
        ("72", None),
        ("####", None),
        ("#### 72\n####", None),
        ("#### Answer: 72", None),
        ("### 72", None),
    ],
)
def test_only_the_line_of_the_last_marker_counts(text: str, number: str | None) -> None:
    assert marked_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000,
        "1," * 500_000,
        "#" * 1_000_000,
        "1.1" * 300_000,
        "0" * 1_000_000,
        "$ " * 500_000 + "5",
    ],
    ids=["digits", "commas", "markers", "dots", "zeros", "signs"],
)
def test_a_million_characters_take_linear_time(text: str) -> None:
    start = time.process_time()
    canonical_number(text)
    marked_number(f"#### {text}")
    assert time.process_time() - start < 10


def test_huge_numbers_are_compared_exactly() -> None:
    digits = "123" * 10_000
    assert marked_number(f"#### {digits}") == digits
    assert marked_number(f"#### {digits}") != marked_number(f"#### {digits[:-1]}4")


# Response, answer, and whether it is right in the modes strict, lenient and last_number.
HARD = [
    ("#### 72", "72", "111"),
    ("48 + 24 = 72\n#### 72", "72", "111"),
    ("#### 72\n\n", "72", "111"),
    ("####72", "72", "111"),
    ("#### 72.", "72", "111"),
    ("#### 72.00", "72", "111"),
    ("#### $72", "72", "111"),
    ("#### 72 dollars", "72", "111"),
    ("#### **72**", "72", "111"),
    ("#### 1,234,567", "1234567", "111"),
    ("#### 1234567", "1,234,567", "111"),
    ("#### 0.5", "1/2", "111"),
    ("#### 3/4", "0.75", "111"),
    ("#### 1 1/2", "1.5", "111"),
    ("#### -12", "-12", "111"),
    ("#### -$12", "-12", "111"),
    ("#### 50%", "50", "111"),
    ("#### 2/6", "1/3", "111"),
    ("#### 1\n#### 72", "72", "111"),
    ("<think>#### 5</think>\n#### 72", "72", "111"),
    ("#### Answer: 72", "72", "011"),
    ("#### 48 + 24 = 72", "72", "011"),
    ("#### \\boxed{72}", "72", "011"),
    ("\\boxed{72}", "72", "011"),
    ("$\\boxed{72}$.", "72", "011"),
    ("\\boxed{5}, no: \\boxed{72}", "72", "011"),
    ("\\boxed{\\boxed{72}}", "72", "011"),
    ("\\boxed{72\\text{ clips}}", "72", "011"),
    ("\\boxed{\\$72.00}", "72", "011"),
    ("\\boxed{1{,}234}", "1234", "011"),
    ("\\boxed{1\\,234}", "1234", "011"),
    ("\\boxed{\\frac{3}{4}}", "0.75", "011"),
    ("\\boxed{\\dfrac{-3}{4}}", "-0.75", "011"),
    ("\\boxed{1\\frac{1}{2}}", "1.5", "011"),
    ("\\boxed{x = 72}", "72", "011"),
    ("\\boxed{50\\%}", "50", "011"),
    ("\\boxed{90^\\circ}", "90", "011"),
    ("<answer>72</answer>", "72", "011"),
    ("<answer>\n72\n</answer>", "72", "011"),
    ("<answer>$1,200</answer>", "1200", "011"),
    ("<answer>72 clips</answer> Good luck!", "72", "011"),
    ("<answer>5</answer><answer>72</answer>", "72", "011"),
    ("<answer>\\boxed{72}</answer>", "72", "011"),
    ("The answer is 72.", "72", "011"),
    ("The final answer is: **72**", "72", "011"),
    ("**Answer:** 72", "72", "011"),
    ("Answer: $72.50", "72.5", "011"),
    ("the answer is USD 72", "72", "011"),
    ("The answer is $\\frac{3}{4}$.", "0.75", "011"),
    ("The answer is 72 because 48 + 24 = 72.", "72", "011"),
    ("The answer is 72 (48 + 24).", "72", "011"),
    ("The answer is 72, which is even.", "72", "011"),
    ("The answer is 48 + 24 = 72.", "72", "011"),
    ("The answer is 72.\n\nCheck: 72 - 24 = 48.", "72", "011"),
    ("Answer:\n72", "72", "011"),
    ("The answer is -5 degrees.", "-5", "011"),
    ("So she sold 72 clips.", "72", "001"),
    ("48 + 24 = 72", "72", "001"),
    ("72", "72", "001"),
    ("That makes $1,234.50 in total!", "1234.5", "001"),
    ("It is -24", "-24", "001"),
    ("She has 3/4 of it.", "0.75", "001"),
    ("10-4 leaves (6)", "6", "001"),
    # Wrong answers that look right.
    ("", "72", "000"),
    ("####", "72", "000"),
    ("#### 73", "72", "000"),
    ("#### 72 or 73", "72", "000"),
    ("#### 72 73", "72", "000"),
    ("#### 7 2", "72", "000"),
    ("#### 72\n#### 5", "72", "000"),
    ("#### 72\n####", "72", "000"),
    ("#### 72k", "72", "000"),
    ("#### 5 million", "5", "000"),
    ("#### 72,000", "72", "000"),
    ("#### 72,50", "7250", "000"),
    ("#### 0.72", "72", "000"),
    ("#### 720", "72", "000"),
    ("#### -72", "72", "000"),
    ("#### −72", "72", "000"),
    ("#### –72", "72", "000"),
    ("#### 0.5", "50", "000"),
    ("#### 50%", "0.5", "000"),
    ("#### 0.333", "1/3", "000"),
    ("#### 7.2e1", "72", "000"),
    ("#### 8^2", "8", "000"),
    ("#### 72x", "72", "000"),
    ("#### 72²", "72", "000"),
    ("#### ٧٢", "72", "000"),
    ("#### seventy-two", "72", "000"),
    ("#### 72 and a half", "72", "000"),
    ("#### about 72", "72", "000"),
    ("#### ~72", "72", "000"),
    ("#### 8*9", "72", "000"),
    ("#### __import__('os')", "72", "000"),
    ("#### 44**19**35", "72", "000"),
    ("\\boxed{72", "72", "000"),
    ("\\boxed{}", "72", "000"),
    ("\\boxed{72} or \\boxed{73}", "72", "000"),
    ("\\boxed{72, 73}", "72", "000"),
    ("\\boxed{72} wait, \\boxed{5}", "72", "000"),
    ("\\boxed{\\frac{72}{0}}", "72", "000"),
    ("\\boxed{\\sqrt{72}}", "72", "000"),
    ("\\boxed{72} #### 5", "72", "000"),
    ("<answer>72 or 73</answer>", "72", "000"),
    ("<answer>72</answer><answer>5</answer>", "72", "000"),
    ("The answer is 5. Not 72.", "72", "000"),
    ("The answer is 5, not 72.", "72", "000"),
    ("The answer is 72 or 73.", "72", "000"),
    ("The answer is 72, 73.", "72", "000"),
    ("The answer is 72 (73).", "72", "000"),
    ("The answer is between 70 and 74: 72 x", "74", "000"),
    ("The answer is 72 million.", "72", "000"),
    ("The answer is 3:45.", "45", "000"),
    ("The answer is 72. No, the answer is 5.", "72", "000"),
    ("She sold 72 clips in 3 days.", "72", "000"),
    ("It costs 72 thousand", "72", "000"),
]


def test_the_table_of_hard_cases_is_long_enough() -> None:
    assert len({case[:2] for case in HARD}) == len(HARD) >= 80
    assert sum(verdicts == "000" for *_, verdicts in HARD) >= 40


@pytest.mark.parametrize(("response", "answer", "verdicts"), HARD)
def test_hard_cases_are_judged_rightly_in_each_mode(
    response: str, answer: str, verdicts: str
) -> None:
    assert "".join(str(int(gsm8k(response, answer, mode=mode))) for mode in MODES) == verdicts


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="GSM8K's files are not on this machine")
def test_all_8792_reference_answers_are_right_in_every_mode() -> None:
    right = dict.fromkeys(MODES, 0)
    for split in ("train", "test"):
        for line in (REAL_DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            number = solution.rpartition("####")[2].strip()
            for mode in MODES:
                right[mode] += gsm8k(solution, solution, mode=mode) and gsm8k(
                    solution, number, mode=mode
                )
    assert right == dict.fromkeys(MODES, 8792)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="GSM8K's files are not on this machine")
def test_the_answer_before_the_right_one_is_wrong_for_every_real_problem() -> None:
    """Each real solution is compared with its answer plus one, in every mode."""
    for line in (REAL_DATA / "test.jsonl").read_text(encoding="utf-8").splitlines():
        solution = json.loads(line)["answer"]
        other = str(int(solution.rpartition("####")[2].strip().replace(",", "")) + 1)
        assert not any(gsm8k(solution, other, mode=mode) for mode in MODES)


@pytest.mark.parametrize("answer", [72, 72.0, "72", "72.00", "#### 72", "so\n#### 72"])
def test_the_answer_may_be_a_number_or_a_solution(answer: str | int | float) -> None:
    assert gsm8k("#### 72", answer)


@pytest.mark.parametrize("answer", ["", "seventy-two", "#### ", "72 #### 3 or 4"])
def test_an_answer_without_a_number_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match=r"reward gsm8k .*'#### <number>'"):
        gsm8k("#### 72", answer)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"must be one of \['strict', 'lenient', 'last_number'\], got 'loose'"
    ):
        gsm8k("#### 72", "72", mode="loose")


@given(st.text(), st.text())
def test_no_text_makes_the_lenient_reading_fail(before: str, after: str) -> None:
    for marker in ("####", "\\boxed{", "<answer>", "the answer is 5"):
        stated_number(f"{before}{marker}{after}}}</answer>", last_number=True)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_a_written_fraction_is_read_exactly(numerator: int, denominator: int) -> None:
    value = canonical_number(f"{numerator}/{denominator}")
    assert value is not None
    assert Fraction(value) == Fraction(numerator, denominator)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 2 2/3", "8/3"),
        (r"so $\frac{3}{4}$", "0.75"),
        ("it is 10^3", None),
        ("it is 1e5", None),
        ("it is 3½", None),
        ("so it is __18__", "18"),
        ("it is 18_000", None),
        ("it has 100 m2", None),
        ("it is 5 or 6", None),
        ("1 2 3", "3"),
        ("3+4 = 7 apples", "7"),
    ],
)
def test_the_last_number_is_read_as_a_whole(text: str, number: str | None) -> None:
    assert stated_number(text, last_number=True) == number
