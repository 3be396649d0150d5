"""Numbers in text: which one is the answer, and when two of them are equal."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_grpo.rewards import canonical_number, marked_number


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
    ],
)
def test_equal_numbers_have_one_form(text: str, number: str) -> None:
    assert canonical_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "3/4",
        "1e5",
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


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4))
def test_canonical_form_keeps_the_value_and_ignores_how_it_is_written(value: Decimal) -> None:
    written = {f"{value:f}", f"{value:,f}", f"{value:f}00", f"{value:f} apples."}
    forms = {canonical_number(text) for text in written}
    assert len(forms) == 1
    assert Decimal(str(forms.pop())) == value


@given(st.integers(), st.integers())
def test_different_integers_have_different_forms(a: int, b: int) -> None:
    assert (canonical_number(str(a)) == canonical_number(str(b))) == (a == b)


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
    ["9" * 1_000_000, "1," * 500_000, "#" * 1_000_000, "1.1" * 300_000, "0" * 1_000_000, "$ " * 500_000 + "5"],
    ids=["digits", "commas", "markers", "dots", "zeros", "signs"],
)
def test_a_million_characters_take_well_under_a_second(text: str) -> None:
    start = time.perf_counter()
    canonical_number(text)
    marked_number(f"#### {text}")
    assert time.perf_counter() - start < 1.0


def test_huge_numbers_are_compared_exactly() -> None:
    digits = "123" * 10_000
    assert marked_number(f"#### {digits}") == digits
    assert marked_number(f"#### {digits}") != marked_number(f"#### {digits[:-1]}4")
