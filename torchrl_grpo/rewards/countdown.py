"""The countdown game: an expression that uses each number once and equals the target.

The columns ``nums`` and ``target`` are named as in the data set Jiayi-Pan/Countdown-Tasks-3to4
(TinyZero).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchrl_grpo.rewards.expressions import MAX_CHARACTERS, evaluate
from torchrl_grpo.rewards.gsm8k import ANSWER_MARKER, tagged_answer

_NUMBER = re.compile(r"[0-9]+")
_OTHER = re.compile(r"\*\s*\*|/\s*/")
_ALLOWED = re.compile(r"[0-9+\-*/×÷−() \t]+")


def stated_expression(text: str) -> str:
    """Return a response's answer: the last ``<answer></answer>``, else the line after the last
    ``####``, else an empty text.

    Of an equation, the left side counts: ``(3+5)*2`` for ``(3+5)*2 = 16``.
    """
    start, stated = tagged_answer(text)
    if start < 0:
        _, _, stated = text.rpartition(ANSWER_MARKER)
        stated = stated.strip().partition("\n")[0] if ANSWER_MARKER in text else ""
    return stated.partition("=")[0].strip()


def countdown(response: str, nums: Sequence[int], target: int, format_score: float = 0.0) -> float:
    """Return 1.0 for an expression of ``+ - * /`` and brackets that uses each of ``nums`` exactly
    once and equals ``target``.

    Args:
        response: the response, with its expression in ``<answer></answer>`` or after ``####``.
        nums: integers that are not negative.
        target: the number to reach.
        format_score: reward for an expression that uses the numbers correctly but has another
            value.

    >>> countdown("<answer>(3 + 5) * 2</answer>", [2, 3, 5], 16), countdown("#### 3 * 5", [2, 3, 5], 15)
    (1.0, 0.0)
    """
    expression = stated_expression(response)
    # Without ".", "**" and "//": 3.5 would use 3 and 5, and powers are not part of the game.
    if len(expression) > MAX_CHARACTERS or _OTHER.search(expression):
        return 0.0
    if not _ALLOWED.fullmatch(expression):
        return 0.0
    if sorted(_NUMBER.findall(expression)) != sorted(str(int(number)) for number in nums):
        return 0.0
    try:
        return 1.0 if evaluate(expression) == target else format_score
    except ValueError:
        return 0.0
