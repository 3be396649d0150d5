"""Exact and safe evaluation of arithmetic in responses: syntax and sizes are limited."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

MAX_CHARACTERS = 256
MAX_BITS = 4096  # of a numerator or denominator, in any intermediate result

_CHARACTERS = re.compile(r"[0-9+\-*/(). ]+")
_SPELLINGS = str.maketrans(
    {"×": "*", "÷": "/", "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "^": "**", "\t": " "}
)


def evaluate(text: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Numbers (with decimals), ``+ - * /`` (also as ``×``, ``÷``, ``−``), powers (``**`` or ``^``),
    signs and brackets are allowed.

    Args:
        text: at most 256 characters.

    Raises:
        ValueError: the text is not such an expression, divides by zero, or an intermediate result
            exceeds 4096 bits.

    >>> evaluate("(3 + 5) × 2 / 6")
    Fraction(8, 3)
    """
    excerpt = ascii(text[:80])
    source = text[: MAX_CHARACTERS + 1].translate(_SPELLINGS).strip()
    if len(text) > MAX_CHARACTERS or not _CHARACTERS.fullmatch(source):
        raise ValueError(
            f"an expression must be at most {MAX_CHARACTERS} characters of numbers, + - * / ** ( "
            f"), got {excerpt}."
        )
    try:
        return _value(ast.parse(source, mode="eval").body)
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"an expression must be finite arithmetic, got {excerpt}: {error}."
        ) from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(str(number))  # the decimal number, not its nearest binary one
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _value(operand) if isinstance(sign, ast.UAdd) else -_value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            value = _apply(operator, _value(left), _value(right))
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed")
    if _bits(value) > MAX_BITS:
        raise ValueError(f"a result has more than {MAX_BITS} bits")
    return value


def _apply(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow():
            if right.denominator != 1 or _bits(left) * abs(right) > MAX_BITS:
                raise ValueError(
                    f"the exponent of {left}**{right} is not an integer, or is too large"
                )
            return left**right.numerator
    raise ValueError(f"{type(operator).__name__} is not allowed")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
