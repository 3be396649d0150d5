r"""Mathematical answers, compared by the library math-verify: ``\frac{3}{4}`` is ``0.75``, ``x+1``
is ``1+x``.

math-verify limits its time by ``signal.alarm``, which works only in the main thread, and does not
stop a long integer operation even there. So it runs in a separate process, whose time and memory
the kernel limits: verdicts are the same in every thread and process, and an answer of absurd size
costs nothing but that process.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import logging
import operator
import os
import re
import resource
import signal
import threading
import traceback
from contextlib import suppress
from fractions import Fraction
from functools import reduce
from math import factorial, gcd
from typing import Any

from torchrl_grpo.errors import InvalidRewardError
from torchrl_grpo.host.children import PipedChild, serve_connection
from torchrl_grpo.rewards.gsm8k import tagged_answer

CPU_LIMIT_S = 3.0
"""CPU time limit of a comparison, in seconds. An answer that takes longer has no valid reward."""
MAX_MEMORY_BYTES = 2 * 1024**3
"""Address space of the comparing process, in bytes."""

_MAX_DIGITS = 9999  # of a number that is compared exactly, approximately
_READ = 2000  # characters at the end of a response
_MAX_ATTEMPTS = 2  # if the process ends for other reasons than its time limit
_MAX_WAIT_S = 300.0  # for a process that gets no CPU time

_LATEX = re.compile(r"(?<!\\)(?:\$|\\boxed|\\\(|\\\[)")
_SPAN = re.compile(r"(?<!\\)\$+(.+?)(?<!\\)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_QUANTITY = re.compile(r"[-+0-9.,/ ]*[0-9][0-9.,/ ]*[a-z ]+(?:\^?[23])?", re.I)
_FUNCTIONS = frozenset(
    [
        "and",
        "arccos",
        "arcsin",
        "arctan",
        "cos",
        "deg",
        "det",
        "exp",
        "lim",
        "log",
        "max",
        "min",
        "mod",
        "sec",
        "sin",
        "tan",
    ]
)
"""Words that are plain letters in a formula."""
_ALGEBRA = re.compile(r"[0-9a-z+\-*/^=<>|(). {}_]+", re.I)
# Does not match the unit in "3/4 m".
_VARIABLE = re.compile(r"[a-z] ?[-+*/^=<>]|[0-9a-z)] ?[-+*^=<>] ?[0-9.]*[a-z]", re.I)
_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))
_SPELLINGS = _ZERO_WIDTH | str.maketrans({"\u2212": "-", "\u00d7": "*", "\u00a0": " "})
_MARKS = re.compile(r"(?<![\w)\]}])\*\*([^*\n]+)\*\*(?![\w(\[{])|`([^`\n]+)`")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~)(?=[0-9]{3}(?![0-9]))")
_PERCENT = re.compile(r"(?<=[0-9}]) *\\?%")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=[0-9]) *(?:\\text\{{)? *({'|'.join(_SCALES)})s?\b\}}?")
_MIXED = re.compile(r"(?<![\w./^{])([0-9]{1,9}) +([0-9]{1,9})/([0-9]{1,9})(?![0-9/^]|\.[0-9])")
_NUMBER = r"-?[0-9]+(?:[.,/][0-9]+)?"
_LIST = re.compile(
    rf"(?:{_NUMBER}(?:, +| or | and ))+{_NUMBER}|[\[(]{_NUMBER}(?:, *{_NUMBER})+[\])]"
)
_CONTINUED = re.compile(
    r"[.,]?[0-9]|[kKMBTxyzn](?![^\W_])|e[-+]?[0-9]|\s*[\^*+\u221a]"
    r"|\s*(?:[-\u2013/:]|to\b|or\b|and\b)\s*[0-9]| +[0-9]"
)
"""Text after a number that makes it a part of another number or of an expression."""
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\s*(?:[cdkm]?m|ft|in|yd|mi|k?g|mph|min|s|h)\s*)"
    r"(?:\^\{?[23]\}?)?"
)
_ANSWER_PHRASE = re.compile(r"\banswer\b(?: is)?:?", re.I)
_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9])")
_RATIO = re.compile(r"[0-9]{1,9}:[0-9]{1,9}")


def math(response: str, answer: str) -> bool | None:
    r"""Return whether the last answer of a response equals the reference answer.

    Args:
        response: the response, with its answer preferably in ``\boxed{}``, else after "####", in
            ``$...$`` or after "the answer is". Only the last 2000 characters are read, unless the
            last ``\boxed{}`` is before them.
        answer: the reference, as LaTeX (with or without ``$``) or as a plain expression.

    Returns:
        None if the reference itself cannot be parsed as a whole, such as words, several formulas
        that are not one answer, or a number beside a formula. An answer of which only a part can be
        read is wrong. Numbers without roots or symbols are compared exactly; a decimal number of
        six or more places may be rounded.

    Raises:
        ImportError: math-verify is not installed.
        InvalidRewardError: the comparison took too long, or its process ended.

    >>> math(r"So it is \boxed{0.75}.", r"\frac{3}{4}"), math("The answer is 0.74", r"\frac{3}{4}")
    (True, False)
    """
    judge = _judges.get(os.getpid()) or _judges.setdefault(os.getpid(), _Judge())  # one per fork
    reference = _normalized(str(answer))
    if not _LATEX.search(reference):
        reference = f"${reference}$"
    return judge.verdict(_answer_text(response), _as_one_formula(reference))


def _normalized(text: str) -> str:
    r"""Return a text with its numbers as math-verify reads them completely.

    >>> _normalized(r"**8\,000**, 2 2/3, 50\%, 5 million")
    '8000, 8/3, 50, 5*1000000'
    """
    text = _MARKS.sub(r"\1\2", text.translate(_SPELLINGS))
    text = _PERCENT.sub("", _THOUSANDS.sub("", text))
    text = _SCALE.sub(lambda match: f"*1{'0' * _SCALES[match[1]]}", text)

    def improper(match: re.Match[str]) -> str:
        integer, part, parts = map(int, match.groups())
        return f"{integer * parts + part}/{parts}"

    return _MIXED.sub(improper, text)


def _as_one_formula(reference: str) -> str:
    """Return a reference of a number and one formula, which is its factor or its unit, as one
    formula.
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*\$([^$]+)\$\s*\.?\s*", reference)
    if match is None:
        return reference
    number, formula = match.groups()
    return f"${number}$" if _UNIT.fullmatch(formula) else f"${number} {formula}$"


def _answer_text(response: str) -> str:
    r"""Return the ``\boxed{}`` in the last line that has one, else the last ``<answer>`` or the end
    of the response.
    """
    boxed = response.rfind(r"\boxed")
    if boxed < 0:
        text = tagged_answer(response)[1] or response[-_READ:].rpartition("####")[2]
        return _mark_as_latex(_normalized(text[-_READ:]))
    start = max(response.rfind("\n", 0, boxed) + 1, boxed - _READ // 2)
    line = _normalized(response[start : start + _READ].strip())
    contents = [_in_braces(part) for part in line.split(r"\boxed")[1:]]
    boxes = [rf"\boxed{{{text.rstrip(' .,;')}}}" for text in contents if text is not None]
    return ", ".join(boxes) or line


def _in_braces(text: str) -> str | None:
    """Return the contents of the braces at the start of a text; None if they do not close."""
    depth = 0
    for position, character in enumerate(text):
        escaped = text[position - 1 : position] == "\\"
        depth += 0 if escaped else (character == "{") - (character == "}")
        if depth == 0:
            return text[1:position] if position else None
    return None


def _mark_as_latex(text: str) -> str:
    """Mark algebra, a list of numbers, a time or a ratio in the last line, as in "The answer is
    2x + 2", as LaTeX, unless the text has LaTeX.

    In plain text, math-verify reads only numbers, and no numbers after an escaped dollar.
    """
    if _LATEX.search(text):
        return text
    text = text.replace(r"\$", "")
    last = text.rstrip().rpartition("\n")[2]
    answer = _ANSWER_PHRASE.split(last)[-1].strip().removesuffix(".")
    without_commands = re.sub(r"\\[a-z]+", "", answer, flags=re.I)
    has_variable = without_commands != answer or _VARIABLE.search(answer)
    is_algebra = (
        _ALGEBRA.fullmatch(without_commands or ("x"))
        and has_variable
        and not re.search("[a-z]{2}", without_commands, re.I)
    )
    if _LIST.fullmatch(answer):
        return f"${re.sub(' (?:or|and) ', ', ', answer)}$"
    return f"${answer.replace('**', '^')}$" if is_algebra or _RATIO.fullmatch(answer) else text


class _Judge:
    """math-verify in a process, which is started when needed, and again after a comparison ended
    it.

    Threads share it; it makes one comparison at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: PipedChild | None = None
        atexit.register(self.end)

    def verdict(self, text: str, reference: str) -> bool | None:
        """Return ``_verdict`` of the process.

        Raises:
            ImportError: math-verify cannot be imported.
            InvalidRewardError: the comparison takes too long, or ends its process.
        """
        request = json.dumps([text, reference]).encode()
        with self._lock:
            for _ in range(_MAX_ATTEMPTS):
                connection = (self._child or self._start()).connection
                try:
                    connection.send_bytes(request)
                    if not connection.poll(_MAX_WAIT_S):
                        self.end()
                        raise _undecided_error("no CPU time", "timeout")
                    return json.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    if self.end() == -signal.SIGPROF:
                        reason = f"it took more than {CPU_LIMIT_S:g} s"
                        raise _undecided_error(reason, "timeout") from None
                except BaseException:  # a signal: the next request would get the answer to this one
                    self.end()
                    raise
        raise _undecided_error("its process ended", "crash")

    def _start(self) -> PipedChild:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "reward 'math' needs the package math-verify, but it is missing: pip install "
                "'torchrl_grpo[rewards]'."
            )
        self._child = child = PipedChild(
            "torchrl_grpo.integrations.graders.math:serve", CPU_LIMIT_S
        )
        try:
            refusal = child.receive_refusal()
        except (EOFError, OSError):
            refusal = f"it ended with status {self.end()}"
        if refusal:
            self.end()
            raise ImportError(
                "reward 'math' needs a process that can import math-verify, which failed: "
                f"{refusal}"
            )
        return child

    def end(self) -> int | None:
        """End the process; return its exit status. Can be called more than once."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.connection.close()
        child.process.kill()  # does nothing to a process that has ended
        return child.process.wait()


def _undecided_error(why: str, cause: str) -> InvalidRewardError:
    return InvalidRewardError(
        f"math-verify could not compare the answer ({why}): check the sample's size.", cause
    )


_judges: dict[int, _Judge] = {}


def serve(fd: int, cpu_limit_s: float) -> None:
    """Run the process: compare answers until the pipe closes. A comparison that exceeds the limits
    ends it.

    Args:
        fd: its end of the pipe.
        cpu_limit_s: CPU seconds for one comparison.
    """
    connection = serve_connection(fd)
    with suppress(EOFError, OSError):
        try:
            import math_verify  # noqa: F401

            # It warns that its limits are off.
            logging.getLogger("math_verify").setLevel(logging.ERROR)
        except Exception as error:
            connection.send_bytes(traceback.format_exception_only(error)[-1].encode())
            return
        with suppress(ValueError, OSError):  # macOS, or there is a lower limit
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        connection.send_bytes(b"")
        while True:
            text, reference = json.loads(connection.recv_bytes())
            # The kernel ends the process, even inside C code.
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
            verdict = _verdict(text, reference)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(verdict).encode())


def _verdict(text: str, reference: str) -> bool | None:
    """Return whether the answers in a text and a reference are equal, without limits."""
    from math_verify import parse, verify

    gold = parse(reference, parsing_timeout=None)
    if not gold or not _is_read_whole(reference, gold):
        return None
    answer = parse(text, parsing_timeout=None)
    if answer and not _LATEX.search(text) and _is_continued(text, str(answer[-1])):
        return False
    is_same_text = answer[-1:] == gold[-1:]  # the last entry is the text
    if is_same_text or _is_time(str(gold[-1])):
        return is_same_text
    expected, actual = _exact(gold[0]), _exact(answer[0]) if answer else None
    if expected is not None and actual is not None:
        return expected == actual or _is_rounded(actual, expected) or _is_rounded(expected, actual)
    return bool(verify(gold, answer, timeout_seconds=None))


def _is_continued(text: str, number: str) -> bool:
    """Return whether a number that was read in a plain text is a part of something longer."""
    phrases = list(_ANSWER_PHRASE.finditer(text))
    start = text.find(number, phrases[-1].end()) if phrases else text.rfind(number)
    after = text[start + len(number) :] if start >= 0 else ""
    return after[:1].isnumeric() or _CONTINUED.match(after) is not None


def _exact(value: Any) -> Fraction | None:
    """Return the value of an expression of rational numbers; None if it has anything else, or
    would be very long.
    """
    import sympy

    if isinstance(value, sympy.Float | sympy.Rational):
        return Fraction(str(value))
    if not isinstance(value, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial):
        return None
    terms: list[Fraction] = []
    for argument in value.args:
        term = _exact(argument)
        if term is None:
            return None
        terms.append(term)
    if isinstance(value, sympy.Add):
        return sum(terms, Fraction())
    if isinstance(value, sympy.Mul):
        return reduce(operator.mul, terms)
    base = terms[0]
    if isinstance(value, sympy.factorial):
        is_small = base.denominator == 1 and 0 <= base <= _MAX_DIGITS
        return Fraction(factorial(base.numerator)) if is_small else None
    exponent = terms[1]
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (
        exponent.denominator > 1
        or bits * abs(exponent) > 8 * _MAX_DIGITS
        or (not base and exponent < 0)
    ):
        return None
    return base**exponent.numerator


def _is_rounded(decimal: Fraction, value: Fraction) -> bool:
    """Return whether a decimal is a value that was rounded to six or more decimal places."""
    places = next((n for n in range(6, 20) if decimal * 10**n % 1 == 0), None)
    if places is None or abs(decimal) * 10**places < 1000:
        return False
    return value * 10**places % 1 != 0 and round(value * 10**places) == decimal * 10**places


def _is_read_whole(reference: str, gold: list[Any]) -> bool:
    """Return whether a reference was parsed completely, and no words as products."""
    spans = [next(filter(None, span)) for span in _SPAN.findall(reference)]
    if spans and r"\boxed" not in reference and re.search("[0-9]", _SPAN.sub("", reference)):
        return False
    if str(gold[-1]).count(" and ") < len(spans) - 1:
        return False
    text = " ".join(spans).strip() or reference
    if _TEXT.fullmatch(text):  # compared as text
        return True
    bare = re.sub(
        r"\\(?:begin|end)\{[a-z]+\*?\}|\\[a-z]+", " ", _TEXT.sub(r" \1 ", text), flags=re.I
    ).strip()
    if _QUANTITY.fullmatch(bare):
        return True
    words = [word for word in re.findall("[a-z]{2,}", bare.lower()) if re.search("[aeiou]", word)]
    if re.fullmatch("[a-z ]*", bare, re.I):
        return not words
    unknown_words = [word for word in words if len(word) > 2 and word not in _FUNCTIONS]
    if any(list(word) != sorted(set(word)) for word in unknown_words):
        return False
    variables = _VARIABLE.search(re.sub("[ei]", "", bare, flags=re.I))
    return not (variables and getattr(gold[0], "is_number", False))


def _is_time(text: str) -> bool:
    """Return whether a text is a time such as 4:00 or 1:05. (A ratio would be in lowest terms.)"""
    match = _TIME.fullmatch(text.strip())
    return match is not None and (match[2].startswith("0") or gcd(*map(int, match.groups())) > 1)
