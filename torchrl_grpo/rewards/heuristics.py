"""Rewards without labels, for first experiments with a new setup. They are in [0, 1] and do not
measure correctness.

They read at most the first and the last 20,000 characters.
"""

from __future__ import annotations

import re
from itertools import islice

from torchrl_grpo.rewards.expressions import evaluate

_READ = 20_000
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_RESULT = re.compile(
    r"\s*(-?)[$€£]?([0-9][0-9,]*+(?:\.[0-9]+)?+(?: ?/ ?[0-9]+)?+)(?! ?[-+*×÷−^] ?[0-9(])"
)
_CALCULATION = re.compile(r"[0-9+\-*/×÷−()., $€£]*\Z")
# List markers, currency signs and thousands separators.
_DECORATION = re.compile(r"^[\s.,]*(?:(?:[-*]|[0-9]+[.)])\s+)?|[$€£]|,(?=[0-9]{3})")
_STEP = re.compile(
    r"^\s{0,8}(?:[-*•] |[0-9]{1,2}[.)] |step\b)|\b(?:first|second|then|next|finally)\b", re.I | re.M
)
_REASON = re.compile(r"\b(?:because|since|so|therefore|thus|hence|means)\b|[^=<>!]=[^=]", re.I)
_ANSWER = re.compile(r"####|\\boxed|<answer>|\banswer\b", re.I)


def format(response: str, prefill: str = "") -> float:
    """Reward think and answer tags: 0.2 for each of the four tags that occurs exactly once, and 0.2
    if the whole response is ``<think>...</think><answer>...</answer>``. ``prefill``, the beginning
    of a thought in the prompt, counts as part of the response.

    >>> format("<think>7 + 8</think> <answer>15</answer>"), format("<answer>15</answer>")
    (1.0, 0.4)
    """
    response = prefill + response
    once = [response.count(tag) == 1 for tag in _TAGS]
    text = response.strip()
    positions = [text.find(tag) for tag in _TAGS]
    between = text[positions[1] + len("</think>") : positions[2]]
    is_complete = (
        text.startswith("<think>") and text.endswith("</answer>") and positions == sorted(positions)
    )
    return (sum(once) + (all(once) and is_complete and not between.strip())) / 5


def length(response: str, low: int = 50, high: int = 2000) -> float:
    """Return 1 from ``low`` to ``high`` characters, decreasing linearly to 0 at no characters and
    at twice ``high``.

    >>> length("x" * 100), length("x" * 25), length("x" * 3000)
    (1.0, 0.5, 0.5)
    """
    if not 0 <= low <= high or high == 0:
        raise ValueError(
            f"low and high of the reward length must be 0 <= low <= high > 0, got {low} and {high}."
        )
    count = len(response.strip())
    if count < low:
        return count / low
    return 1.0 if count <= high else max(0.0, 2 - count / high)


def number(response: str) -> float:
    """Return 1 if the last non-empty line has a number, 0.5 if only an earlier one does.

    >>> number("7 + 8\\nis 15."), number("7 + 8\\nis fifteen."), number("fifteen")
    (1.0, 0.5, 0.0)
    """
    text = response.rstrip()[-_READ:]
    last_line = text[text.rfind("\n") + 1 :]
    return 1.0 if re.search("[0-9]", last_line) else 0.5 * bool(re.search("[0-9]", response))


def operations(response: str) -> float:
    """Return the share of correct calculations (``48 + 24 = 72``) among the first 50; 0 without
    any.

    >>> operations("7 * 8 = 56, so 56 - 6 = 50"), operations("7 x 8 = 54 and 2 + 2 = 4"), operations("56")
    (1.0, 0.5, 0.0)
    """
    correct = []
    text = response[:_READ]
    for equals in islice(re.finditer("=", text), 50):
        left = re.sub(
            r"(?<=[0-9)]) ?x ?(?=[0-9(])", "*", text[max(equals.start() - 80, 0) : equals.start()]
        )
        calculation = _CALCULATION.search(left)
        result = _RESULT.match(text, equals.end())
        expression = _DECORATION.sub("", calculation[0]) if calculation else ""
        if result and re.search(r"[0-9)] *[-+*/×÷−] *[0-9(.]", expression):
            try:
                correct.append(
                    evaluate(expression) == evaluate(result[1] + result[2].replace(",", ""))
                )
            except ValueError:
                continue
    return sum(correct) / len(correct) if correct else 0.0


def structure(response: str) -> float:
    """Return 0.25 for each of: more than one line; steps (a list, or "first", "then"); reasons
    ("because", "so", an equation); a marked answer (``####``, ``\\boxed``, ``<answer>``, "answer")
    near the end.

    >>> structure("First, 7 + 8 = 15.\\nThe answer is 15."), structure("15")
    (1.0, 0.0)
    """
    text = response.strip()
    start = text[:_READ]
    end = text[-200:]
    return (
        ("\n" in start)
        + bool(_STEP.search(start))
        + bool(_REASON.search(start))
        + bool(_ANSWER.search(end))
    ) / 4
