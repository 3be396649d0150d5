"""What several tasks share when they score text: finding the final number of a response, and comparing numbers exactly.

Nothing here evaluates model text, and every function takes time linear in its length: a number stays a string of
digits, so that a response of a million digits costs no more than any other response of its size.
"""

from __future__ import annotations

import re
from itertools import islice

ANSWER_MARKER = "####"

_NUMBER = re.compile(r"[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_LETTER = re.compile(r"[^\W\d_]")
_MINUS = ("-", "\N{MINUS SIGN}")


def canonical_number(text: str) -> str | None:
    """The one number in ``text``, written so that equal numbers are equal strings.

    A currency sign, thousands separators, a trailing full stop and a unit are understood. Text with two numbers
    (``3/4``, ``1e5``, ``2 or 3``), with letters before the number, or with commas that are no thousands separators
    has no clear answer.

    Args:
        text: the number with at most a unit behind it.

    Returns:
        digits without leading zeros, a fraction only where it is not zero, ``-`` in front of a negative number; None
        when the text does not hold exactly one number.

    >>> canonical_number("$1,234.50"), canonical_number("72.00 clips."), canonical_number("-0")
    ('1234.5', '72', '0')
    >>> canonical_number("3/4") is None
    True
    """
    numbers = list(islice(_NUMBER.finditer(text), 2))
    if len(numbers) != 1:
        return None
    before = text[: numbers[0].start()]
    whole, _, fraction = numbers[0].group().partition(".")
    if _LETTER.search(before) or ("," in whole and not _THOUSANDS.fullmatch(whole)):
        return None
    whole = whole.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    negative = before.rstrip(" $").endswith(_MINUS) and value != "0"
    return f"-{value}" if negative else value


def marked_number(text: str) -> str | None:
    """The number on the line of the last ``####``, GSM8K's answer format (arXiv:2110.14168).

    Args:
        text: a response or a reference solution.

    Returns:
        what ``canonical_number`` makes of the rest of that line, None when there is no marker or no clear number.

    >>> marked_number("48 + 24 = 72\\n#### 72")
    '72'
    """
    _, marker, rest = text.rpartition(ANSWER_MARKER)
    return canonical_number(rest.strip().partition("\n")[0]) if marker else None
