"""A calculator as a tool: exact, and bounded whatever it is asked."""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction

from hybrid_rlhf.environments.builtin.expressions import Refused, parsed

MAX_CHARS, MAX_DIGITS = 500, 1000
MAX_BITS = 3322  # of MAX_DIGITS decimal digits
_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})  # as people write them
_DECIMAL = re.compile(r"[0-9][0-9_]*|[0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]{1,3})?")
_WRITTEN = "+ - * / // % ** and parentheses"


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression. Whole numbers, decimals and fractions are exact.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3 + 4) * 2.5
    """
    try:
        text = expression.translate(_SIGNS).strip() if isinstance(expression, str) else expression
        return written(value_of(parsed(text, MAX_CHARS), text))
    except Refused as error:
        return f"error: {error}"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return f"error: too large: at most {MAX_DIGITS} digits"


def value_of(node: ast.expr, text: str) -> Fraction | float:
    """The value of a tree: a Fraction where it is exact, a float after a power that is not."""
    if isinstance(node, ast.Constant):
        return _number(node, text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = value_of(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _bounded(_operation(node.op, value_of(node.left, text), value_of(node.right, text)))
    if isinstance(node, ast.Tuple):
        raise Refused("a comma: write numbers without thousands separators, one expression at a time")
    raise Refused(f"only numbers, {_WRITTEN} are known here")


def _number(node: ast.Constant, text: str) -> Fraction:
    """A literal, exactly as it is written: 0.1 is one tenth."""
    digits = ast.get_source_segment(text, node) or ""
    if type(node.value) not in (int, float) or not _DECIMAL.fullmatch(digits):
        raise Refused(f"only numbers, {_WRITTEN} are known here")
    exact = Fraction(digits.replace("_", ""))
    return Fraction(_bounded(exact))


def _operation(operator: ast.operator, left: Fraction | float, right: Fraction | float) -> Fraction | float:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div):
        return left / right
    if isinstance(operator, ast.FloorDiv):
        quotient = left // right
        return Fraction(quotient) if isinstance(quotient, int) else quotient
    if isinstance(operator, ast.Mod):
        return left % right
    if isinstance(operator, ast.Pow):
        return _power(left, right)
    raise Refused(f"only {_WRITTEN} are known here; a power is **")


def _power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator != 1:
        value = float(base) ** float(exponent)
        if isinstance(value, complex):
            raise Refused("no real number")
        return value
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > MAX_BITS:  # of the least that the result can have, before it is worked out
        raise OverflowError
    return base ** int(exponent)


def _bounded(value: Fraction | float) -> Fraction | float:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
    elif max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError
    return value


def written(value: Fraction | float) -> str:
    """A value as people write it: 3, 2.5; a fraction that ends in no decimal place is 1/3 (about 0.3333333333)."""
    if isinstance(value, float):
        return f"about {value:.12g}"
    if value.denominator == 1:
        return str(value.numerator)
    places = _decimal_places(value.denominator)
    if places is not None and places <= 30:
        digits = str(abs(value.numerator) * (10**places // value.denominator)).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    try:
        return f"{value.numerator}/{value.denominator} (about {float(value):.10g})"
    except OverflowError:
        return f"{value.numerator}/{value.denominator}"


def _decimal_places(denominator: int) -> int | None:
    """How many decimal places n / denominator (in lowest terms) has; None where it never ends."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None
