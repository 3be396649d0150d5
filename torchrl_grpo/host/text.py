"""Formatting of text and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

NOISE = 1e-8
"""Magnitude below which a metric is rounding noise."""
_ALL_DIGITS = Context(prec=400)
"""Precise enough for any float."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates (halves of a character): JSON can contain them, but no tokenizer accepts them."""
MISSING = "-"
_LATEX = (
    "nabla natural ncong ne nearrow neg neq newline nexists ngeq ngtr nleq nless nmid nonumber not notin nparallel "
    "nprec nrightarrow nsim nsubseteq nsucc nsupseteq nu null nwarrow tan tanh tau tbinom text[a-z]* tfrac therefore "
    "theta thickapprox thicksim tilde times tiny to top triangle[a-z]* tt twoheadrightarrow"
)
_ESCAPE = re.compile(rf"(?<!\\)\\(?!(?:{_LATEX.replace(' ', '|')})(?![a-zA-Z]))([nt])")


def replace_lone_surrogates(text: str) -> str:
    r"""Return a text with its lone surrogates replaced by U+FFFD.

    >>> replace_lone_surrogates("a\ud83d") == "a\ufffd"
    True
    """
    return LONE_SURROGATE.sub("\ufffd", text)


def unescape(text: str) -> str:
    r"""Return a text with its ``\n`` and ``\t`` as newlines and tabs, except in LaTeX commands, such
    as ``\neq``, and after another backslash.

    >>> unescape(r"Solve.\n\nAnswer: \nabla \theta \neq 0, \text{if}")
    'Solve.\n\nAnswer: \\nabla \\theta \\neq 0, \\text{if}'
    """
    return _ESCAPE.sub(lambda match: {"n": "\n", "t": "\t"}[match[1]], text)


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return the text on one line: characters that cannot be printed in an encoding become escapes
    (``\\n``, ``\\x1b``, ``\\u202e``).
    """
    escaped = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def printable_lines(text: str, encoding: str = "utf-8") -> str:
    """Return the text with its newlines; other characters that cannot be printed become escapes."""
    return "\n".join(printable(line, encoding) for line in text.split("\n"))


def clip(text: str, longest: int) -> str:
    """Cut out the middle of a text that is too long, because the answer is at its end."""
    if len(text) <= longest:
        return text
    tail = (longest - 5) // 2
    return f"{text[: longest - 5 - tail]} ... {text[len(text) - tail :]}"


def percent(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{_rounded(100 * value, 1)}%"


def points(before: float, after: float) -> str:
    """Format the difference of two shares as ``percent`` formats them.

    >>> percent(0.33749), percent(0.98251), points(0.33749, 0.98251)
    ('33.7%', '98.3%', '+64.6 points')
    """
    return f"{_rounded(100 * after, 1) - _rounded(100 * before, 1):+} points"


def accuracy(metrics: Mapping[str, Any], name: str, decoding: str = "") -> str:
    """Format an ``eval/pass@*`` or ``eval/avg@*`` metric, its share of invalid rewards, the mean
    reward if it differs, and the interval of an average.

    >>> accuracy({"eval/pass@1": 0.125, "eval/reward_mean": 0.5}, "eval/pass@1")
    '12.5% (mean reward 0.5)'
    >>> metrics = {"eval/pass@1": 1.0, "eval/invalid_fraction": 0.9375, "eval/reward_mean": 1.0}
    >>> accuracy(metrics, "eval/pass@1")
    '100.0% (93.8% invalid)'
    """
    if metrics[name] is None or math.isnan(metrics[name]):
        return "no valid reward"
    k, slash, dataset = name.partition("@")[2].partition("/")
    invalid = metrics.get(f"eval/invalid_fraction{'' if k == '1' else f'@{k}'}{slash}{dataset}")
    reward = metrics.get(f"eval/reward_mean{slash}{dataset}") if k == "1" else None
    notes = [f"{percent(invalid)} invalid"] if invalid else []
    if "/avg@" in name:
        notes.append(
            f"95%: {percent(metrics[name.replace('/', '/ci_low_', 1)])} to "
            f"{percent(metrics[name.replace('/', '/ci_high_', 1)])}"
        )
    if reward is not None and not math.isclose(reward, metrics[name], abs_tol=1e-6):
        notes.append(f"mean reward {number(reward)}")
    words = [percent(metrics[name]), decoding, f"({', '.join(notes)})" if notes else ""]
    return " ".join(filter(None, words))


def decoding(name: str) -> str:
    """Return the decoding of the responses behind an ``eval/pass@*`` metric.

    >>> decoding("eval/pass@1"), decoding("eval/pass@1/gsm8k"), decoding("eval/pass@16")
    ('greedy', 'greedy', 'sampled')
    """
    return "greedy" if name.split("/")[1] == "pass@1" else "sampled"


def number(value: float | None) -> str:
    """Format a number with three digits, and without a fraction from 1,000 on.

    >>> number(0.5625), number(1234.5), number(0.000025), number(-2.42e-10)
    ('0.563', '1,235', '2.5e-5', '0')
    """
    if value is None or not (isinstance(value, int) or math.isfinite(value)):
        return MISSING
    if isinstance(value, int) or value.is_integer():
        return f"{int(value):,}"
    if abs(value) >= 999.5:
        return f"{_rounded(value, 0):,}"
    if abs(value) < NOISE:
        return "0"
    digits = float(_rounded(value, 2 - Decimal(value).adjusted()))
    mantissa, _, exponent = f"{digits:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _rounded(value: float, decimals: int) -> Decimal:
    """Round to a number of decimals, halves away from zero as in JavaScript; Python rounds them to
    even digits.
    """
    return Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP, _ALL_DIGITS)


def size(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def reward_text(row: Mapping[str, Any]) -> str:
    """Format a sample's reward and its turns' rewards; one that crashed or timed out is
    ``invalid``, not 0.
    """
    if "reward" not in row:  # a demonstration
        return MISSING
    if row.get("valid") is False or row["reward"] is None:
        return "invalid"
    turns = row.get("turn_rewards")
    return number(row["reward"]) + (f" (turns: {', '.join(map(number, turns))})" if turns else "")
