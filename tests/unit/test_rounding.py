"""Displayed numbers: terminal, report and page round alike, and differences are those of the
displayed figures.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import torchrl_grpo
from tests.support.browsers import MISSING, chromium
from torchrl_grpo.host.text import number, percent, points

DOM_SCRIPT = Path(torchrl_grpo.__file__).parent / "extras" / "view" / "static" / "dom.js"

PERCENTS: dict[float | None, str] = {
    0.9825: "98.3%", 0.33828125: "33.8%", 0.0: "0.0%", 1.0: "100.0%", 1 / 3: "33.3%", 0.0625: "6.3%", 0.1875: "18.8%",
    None: "-", math.nan: "-",
}  # fmt: skip
NUMBERS: dict[float | None, str] = {
    0.5625: "0.563", -0.5625: "-0.563", 2.5: "2.5", 3.0: "3", 0.1 + 0.2: "0.3", 99.96: "100", 12.25: "12.3",
    999.5: "1,000", 999.4: "999", 1234.5: "1,235", 1235.5: "1,236", -1234.5: "-1,235", 640.0: "640", 10240: "10,240",
    0.0001: "0.0001", 0.00012345: "0.000123", 0.000099996: "0.0001", 1e-5: "1e-5", 2.5e-7: "2.5e-7",
    -2.42e-10: "0", 9.9e-9: "0", 1e-8: "1e-8", -0.0: "0", None: "-", math.nan: "-", math.inf: "-",
}  # fmt: skip


def test_numbers_have_three_digits_and_halves_are_rounded_away_from_zero() -> None:
    assert {value: percent(value) for value in PERCENTS} == PERCENTS
    assert {value: number(value) for value in NUMBERS} == NUMBERS
    assert number(10**400) == f"{10**400:,}"


def test_a_difference_is_that_of_the_figures_that_are_shown() -> None:
    assert (percent(0.33828125), percent(0.9825), points(0.33828125, 0.9825)) == (
        "33.8%",
        "98.3%",
        "+64.5 points",
    )
    assert (
        points(0.33749, 0.98251) == "+64.6 points"
    )  # 98.3 - 33.7, although the exact difference is 64.502
    assert (points(0.5, 0.5), points(0.5, 0.25)) == ("+0.0 points", "-25.0 points")


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_page_shows_the_same_digits_as_the_terminal() -> None:
    thousandths = [step / 2000 for step in range(2001)]
    numbers = [value for value in NUMBERS if value is not None and math.isfinite(value)]
    numbers += [value * scale for value in thousandths for scale in (1, -1, 0.01, 700, 1e5)]
    source = re.sub("document.body.dataset.colors", '""', DOM_SCRIPT.read_text(encoding="utf-8"))
    source = source.replace("document.body.dataset.activities", "'{}'")
    script = """async ([source, shares, numbers]) => {
        const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
        const { number, percent } = await import(url);
        return [shares.map(percent), numbers.map(number), [number(null), percent(null), percent(NaN)]];
    }"""
    with chromium() as browser:
        texts = browser.new_page().evaluate(script, [source, thousandths, numbers])
    assert texts == [list(map(percent, thousandths)), list(map(number, numbers)), ["-", "-", "-"]]
