"""GSM8K's scorer: the number in a response, and equality of numbers (arXiv:2110.14168).

Nothing here evaluates model text, and every function is linear in its length, because numbers stay
strings of digits.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from itertools import islice

ANSWER_MARKER = "####"
MODES = ("strict", "lenient", "last_number")

_NUMBER = re.compile(r"[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_FRACTION = re.compile(r"(?:([0-9]{1,40}) +)?([0-9]{1,40}) ?/ ?([0-9]{1,40})")
_MINUS = ("-", "\N{MINUS SIGN}", "\N{EN DASH}")
_CURRENCY = "$€£¥₹"
# What may precede a number: no letters, no digits of another script, no operators or relations
# except a sign.
_BEFORE = re.compile(rf"[\s{_CURRENCY}*_`'\"“”‘’()\[\]{{}}#:=+\-−–\\]*")
# What changes the number: 5 million, 72k, 72x, 2^3, 72², 72+; 72 or 73; two and a half.
_ATTACHED = re.compile(
    r"[kKMBTx](?![^\W_])|[+√]|\s*\^|(?i:\s*(?:hundred|thousand|million|billion|trillion|dozen)s?\b)"
)
_WORDS = "half|third|quarter|one|two|three|four|five|six|seven|eight|nine|ten|[a-z]{2,5}teen|[a-z]{3,5}ty"
_UNCLEAR = re.compile(rf"\bor\b|\band\s+(?:an?\s+)?(?:{_WORDS})\b", re.I)

_WINDOW = 500  # characters of an answer that are read
_BOXED = r"\boxed"
_PHRASE = re.compile(
    r"\banswer[*_ ]{0,4}(?:is|was|equals|would be|[:=])"
    r"(?=[^0-9a-z]{0,12}(?:(?:usd|us|eur|gbp|rs)[^0-9a-z]{0,3}|[dt]?frac\W{0,2}|text\W{0,3}|boxed\W{0,3})?\.?[0-9])",
    re.I,
)
_SENTENCE_END = re.compile(r"\n|[.;!?](?=\s|$)")
_ASIDE = re.compile(
    r",\s+(?![0-9$-])|\s\((?!\s*[0-9$.,]+\s*\))|\s(?:because|since|so|as|which|where|for)\b"
)
_LATEX = (
    (
        re.compile(r"\\[dt]?frac\s*(?:\{(-?[0-9]{1,40})\}\s*\{([0-9]{1,40})\}|([0-9])([0-9]))"),
        r" \1\3/\2\4",
    ),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[,!;: ]|\^\{?\\circ\}?"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[()\[\]]|\\boxed|[{}]"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\b(?:USD|EUR|GBP|INR|Rs\.?|US(?=\$))", re.I), ""),
)
_LAST = re.compile(
    rf"(?:(?<![\w).])[{''.join(_MINUS)}])?[{_CURRENCY}]?(?<![^\W_])(?<![.^/])(?<![0-9]_)"
    rf"(?:(?:[0-9]{{1,40}} +)?[0-9]{{1,40}}/[0-9]{{1,40}}|{_NUMBER.pattern})"
)


def canonical_number(text: str) -> str | None:
    """Return the only number in ``text`` in canonical form, so that equal numbers are equal
    strings.

    The number may have a currency sign, thousands separators, a fraction (``3/4``, ``1 1/2``), a
    trailing full stop, and a unit, such as ``%``. Text with two numbers (``1e5``, ``2 or 3``),
    letters before the number, commas that do not separate thousands, or a word that changes the
    number (``5 million``) has no clear answer.

    Args:
        text: the number, followed by at most a unit.

    Returns:
        Digits without leading zeros, with decimals only if they are not zero; ``p/q`` if no decimal
        number is exact; ``-`` before a negative number. None if the text does not have exactly one
        number.

    >>> canonical_number("$1,234.50"), canonical_number("72.00 clips."), canonical_number("-0"), canonical_number("3/4")
    ('1234.5', '72', '0', '0.75')
    >>> canonical_number("2 or 3") is None
    True
    """
    numbers = list(islice(_NUMBER.finditer(text), 4))
    if not numbers:
        return None
    before = text[: numbers[0].start()]
    written = text[numbers[0].start() : numbers[-1].end()]
    after = text[numbers[-1].end() :]
    if not _BEFORE.fullmatch(before) or sum(before.count(sign) for sign in _MINUS) > 1:
        return None
    if after[:1].isnumeric() or _ATTACHED.match(after) or _UNCLEAR.search(after):
        return None
    value = _decimal(written) if len(numbers) == 1 else _fraction(written)
    negative = before.rstrip(f" {_CURRENCY}(\\").endswith(_MINUS)
    return f"-{value}" if negative and value not in (None, "0") else value


def _decimal(written: str) -> str | None:
    integer, _, decimals = written.partition(".")
    if "," in integer and not _THOUSANDS.fullmatch(integer):
        return None
    integer, decimals = integer.replace(",", "").lstrip("0") or "0", decimals.rstrip("0")
    return f"{integer}.{decimals}" if decimals else integer


def _fraction(written: str) -> str | None:
    match = _FRACTION.fullmatch(written)
    if match is None or int(match[3]) == 0:
        return None
    value = int(match[1] or 0) + Fraction(int(match[2]), int(match[3]))
    places = value.denominator.bit_length()  # sufficient: 2**n and 5**n divide 10**n
    scaled, remainder = divmod(value.numerator * 10**places, value.denominator)
    if remainder:
        return str(value)
    digits = str(scaled).rjust(places + 1, "0")
    return _decimal(f"{digits[:-places]}.{digits[-places:]}")


def marked_number(text: str) -> str | None:
    """Return the number on the line of the last ``####``, GSM8K's answer format.

    Args:
        text: a response or a reference solution.

    Returns:
        The canonical number of the rest of that line; None without a marker or a clear number.

    >>> marked_number("48 + 24 = 72\\n#### 72")
    '72'
    """
    _, marker, rest = text.rpartition(ANSWER_MARKER)
    return canonical_number(rest.strip().partition("\n")[0]) if marker else None


def stated_number(text: str, last_number: bool = False) -> str | None:
    r"""Return the number in the last answer of ``text``, in any form.

    An answer is marked by ``####``, ``\boxed{}``, ``<answer></answer>``, "the answer is" or
    "answer:". Only the last one counts.

    Args:
        text: a response.
        last_number: whether to return the last number of a text without a marked answer.

    >>> stated_number(r"So \boxed{\frac{3}{4}}."), stated_number("The answer is 7 x 8 = $56."), stated_number("56")
    ('0.75', '56', None)
    """
    tagged, content = tagged_answer(text)
    phrase = next(iter(deque(_PHRASE.finditer(text), maxlen=1)), None)
    start, marker = max(
        (text.rfind(ANSWER_MARKER), ANSWER_MARKER),
        (text.rfind(_BOXED), _BOXED),
        (tagged, "<answer>"),
        (phrase.start(), phrase[0]) if phrase else (-1, ""),
    )
    if start < 0:
        return _last_number(text) if last_number else None
    if start != tagged:
        content = text[start + len(marker) :][:_WINDOW].lstrip()
    if marker == _BOXED:
        content = _in_braces(content)
    content = _without_latex(content[:_WINDOW])
    sentence = _SENTENCE_END.split(content.strip(), maxsplit=1)[0]
    if _UNCLEAR.search(sentence):
        return None
    statement = _ASIDE.split(sentence, maxsplit=1)[0]
    return canonical_number(re.split(r"=|:\s", statement)[-1])


def _without_latex(text: str) -> str:
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def tagged_answer(text: str) -> tuple[int, str]:
    """Return the position and the content of the last ``<answer>...</answer>``, or -1 and ``""``.

    >>> tagged_answer("so <answer>72</answer>")
    (3, '72')
    """
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(close, 0))
    return start, text[start + len("<answer>") : close] if start >= 0 else ""


def _in_braces(text: str) -> str:
    """Return the contents of the braces at the start of ``text``; empty if they do not close."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth <= 0:
            return text[1:i]
    return ""


def _last_number(text: str) -> str | None:
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    line = text[end : end + 40].partition("\n")[0]
    content = _without_latex(text[max(end - _WINDOW, 0) : end] + line)
    starts = [match.start() for match in _LAST.finditer(content)]
    if not starts or (end > _WINDOW and starts[-1] == 0):
        return None
    if re.search(r"[0-9] or \W*$", content[: starts[-1]]):
        return None
    return canonical_number(content[starts[-1] :])


def gsm8k(response: str, answer: str | int | float, mode: str = "strict") -> bool:
    r"""Return whether a response's answer is the correct number.

    Args:
        response: the response.
        answer: the number, or a reference solution that ends with ``#### n``.
        mode: ``strict`` reads only ``#### n``; ``lenient`` also ``\boxed{n}``,
            ``<answer>n</answer>`` and "the answer is n"; ``last_number`` also takes the last number
            of a response without such an answer.

    Raises:
        ValueError: ``answer`` has no number, or there is no such mode.

    >>> gsm8k("48 + 24 = 72\n#### 72", "72"), gsm8k(r"\boxed{72}", "72"), gsm8k(r"\boxed{72}", "72", mode="lenient")
    (True, False, True)
    """
    if mode not in MODES:
        raise ValueError(
            f"mode of the reward gsm8k must be one of {list(MODES)}, got {mode!r}: use 'strict'."
        )
    reference = str(answer)
    expected = (
        marked_number(reference) if ANSWER_MARKER in reference else canonical_number(reference)
    )
    if expected is None:
        raise ValueError(
            "answer of the reward gsm8k must be a number or end with '#### <number>', got "
            f"{reference[-80:]!r}: fix that row of the data."
        )
    if mode == "strict":
        return marked_number(response) == expected
    return stated_number(response, last_number=mode == "last_number") == expected
