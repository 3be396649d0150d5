r"""Mathematical answers, compared by the library math-verify: ``\frac{3}{4}`` is ``0.75``, ``x+1`` is ``1+x``.

math-verify limits its time by ``signal.alarm``, which exists in the main thread alone and does not stop a long integer
operation there either. Its limits are switched off here, so that a verdict is the same in every thread and process, and
an answer is refused by its size before it is computed. What still takes long (simplifying a tangle of functions) is for
the time limit of ``env.reward_workers``.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from itertools import accumulate, islice
from math import inf, prod
from typing import Any

MAX_BITS = 20_000  # of a number that an answer makes
MAX_NODES = 100  # of an answer's expression
MAX_FUNCTIONS = 6  # of a variable; 1 in an equation, which is solved
MAX_POWER = 10  # of a variable in an equation
MAX_TERMS = 200  # of the powers of sums, were they expanded
MAX_DEPTH = 20  # of brackets

_READ = 2000  # characters at the end of a response
# These are computed while an answer is parsed, so they are refused with a power, a factorial or six digits in them.
_COMPUTED = re.compile(
    r"binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*(?:\^|!|[0-9]{6})|(?:gcd|lcm)[^)]{0,40}(?:\^|!)"
    r"|[0-9]{6}\W{0,3}choose|choose\W{0,3}[0-9]{6}"
)


def math(response: str, answer: str) -> bool | None:
    r"""Whether the last answer that a response gives equals the reference answer.

    Args:
        response: the response; its answer is best in ``\boxed{}``, else in ``$...$`` or after "the answer is". The last
            2000 characters are read, or the last ``\boxed{}`` where it begins before them.
        answer: the reference, as LaTeX (with or without ``$``) or as a plain expression.

    Returns:
        None when the reference itself cannot be read.

    Raises:
        ImportError: math-verify is not installed.

    >>> math(r"So it is \boxed{0.75}.", r"\frac{3}{4}"), math("The answer is 0.74", r"\frac{3}{4}")
    (True, False)
    """
    parse, verify = _library()
    reference = str(answer)
    gold = parse(reference if re.search(r"\$|\\boxed|\\\(|\\\[", reference) else f"${reference}$")
    if not gold:
        return None
    text = _answer_text(response)
    if _COMPUTED.search(text) or _depth(text) > MAX_DEPTH:
        return False
    given = parse(text)
    if given and given[0] == gold[0]:
        return True
    return not any(_is_too_large(part) for part in given + gold) and bool(verify(gold, given))


def _answer_text(response: str) -> str:
    r"""The line of the last ``\boxed{}`` and what follows, else the end of the response."""
    boxed = response.rfind(r"\boxed")
    start = max(response.rfind("\n", 0, max(boxed, 0)) + 1, boxed - _READ // 2)
    return response[start : start + _READ].strip() if boxed >= 0 else response[-_READ:]


def _depth(text: str) -> int:
    return max(accumulate((c in "({[") - (c in ")}]") for c in text), default=0)


@functools.cache
def _library() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    try:
        import math_verify
    except ImportError as error:
        raise ImportError(
            "reward 'math' must have the package math-verify, it is missing: pip install 'torchrl_grpo[rewards]'."
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of switched-off limits, in each process
    return (
        functools.partial(math_verify.parse, parsing_timeout=None),
        functools.partial(math_verify.verify, timeout_seconds=None),
    )


def _is_too_large(expression: Any) -> bool:
    """Whether comparing an expression would compute an absurd number, expand a large power or solve a tangle."""
    from sympy import Basic, Function, preorder_traversal
    from sympy.core.relational import Relational

    if not isinstance(expression, Basic):
        return False
    nodes = list(islice(preorder_traversal(expression), MAX_NODES + 1))
    is_equation = any(isinstance(node, Relational) for node in nodes)
    functions = sum(isinstance(node, Function) and bool(node.free_symbols) for node in nodes)
    powers = [node for node in nodes if node.is_Pow and node.free_symbols and node.exp.is_Number]
    terms = prod(max(abs(node.exp), 1) ** len(node.free_symbols) for node in powers if node.base.is_Add)
    return (
        len(nodes) > MAX_NODES
        or functions > (1 if is_equation else MAX_FUNCTIONS)
        or terms > MAX_TERMS
        or (is_equation and any(abs(node.exp) > MAX_POWER for node in powers))
        or _bits(expression) > MAX_BITS
    )


def _bits(expression: Any) -> float:
    """About how many bits a number takes that an expression is evaluated to; a variable takes a few."""
    from sympy import Float, Integral, Limit, Product, Rational, Sum, gamma
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    if isinstance(expression, Rational):
        return float(max(expression.p.bit_length(), expression.q.bit_length()))
    if isinstance(expression, Float):
        return 64.0 if abs(expression) < 10**300 else inf
    if isinstance(expression, Integral | Limit | Product | Sum):
        return inf
    parts = [_bits(part) for part in expression.args]
    if isinstance(expression, CombinatorialFunction | gamma):
        return sum(parts) * 2.0 ** min(max(parts), 1000)
    if not expression.is_Pow:
        return sum(parts) + 8
    return sum(parts) if expression.base.free_symbols else parts[0] * 2.0 ** min(parts[1], 1000)
