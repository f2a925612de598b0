"""Operators of an expression. What could grow beyond the bounds is refused before it is worked out."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from hybrid_rlhf.environments.builtin.bounded_values import MAX_BITS, Budget, Value, size_of
from hybrid_rlhf.environments.builtin.expressions import Refused

_UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
                                ast.Invert: operator.invert}
_BINARY: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift}
_COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b}
_SEQUENCES = (str, list, tuple)


def unary(op: ast.unaryop, value: Value) -> Value:
    if isinstance(op, ast.Invert) and isinstance(value, bool):
        raise Refused("~ of a truth value is not available; use not")
    return _UNARY[type(op)](value)


def binary(budget: Budget, op: ast.operator, left: Value, right: Value) -> Value:
    """left OP right. Raises Refused, or what Python would."""
    budget.charge(size_of(left) + size_of(right))
    if type(op) not in _BINARY:
        raise Refused(f"the operator {type(op).__name__} is not available")
    if isinstance(op, ast.Mod) and isinstance(left, str):
        raise Refused("formatting with % is not available")
    if isinstance(op, ast.Mult):
        for one, other in ((left, right), (right, left)):
            if isinstance(one, _SEQUENCES) and isinstance(other, int):
                budget.check_length(len(one) * max(other, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(op, left, right)
    value = _BINARY[type(op)](left, right)
    if isinstance(value, complex):
        raise Refused("complex numbers are not available")
    return value


def _check_bits(op: ast.operator, left: int, right: int) -> None:
    """Refuses powers and shifts whose result has too many bits: the least number that it can have is known before."""
    bits = 0
    if isinstance(op, ast.Pow) and abs(left) > 1 and right > 0:
        bits = (abs(left).bit_length() - 1) * right
    elif isinstance(op, ast.LShift) and left:
        bits = right
    if bits > MAX_BITS:
        raise Refused(f"too large: whole numbers have at most {MAX_BITS} bits")


def compare(budget: Budget, op: ast.cmpop, left: Value, right: Value) -> bool:
    """One comparison of a chain. `in` a range is charged by its length: for a float Python walks through it."""
    is_identity = isinstance(op, (ast.Is, ast.IsNot))
    if is_identity and not any(each is None or isinstance(each, bool) for each in (left, right)):
        raise Refused("is: only for None, True and False; use ==")
    budget.charge(size_of(left) + size_of(right) + (len(right) if isinstance(right, range) else 0))
    return _COMPARE[type(op)](left, right)


def subscript(value: Value, index: Value) -> Value:
    """value[index]; index may be a slice."""
    if not isinstance(value, (str, list, tuple, dict, range)):
        raise TypeError(f"{type(value).__name__!r} object is not subscriptable")
    return value[index]
