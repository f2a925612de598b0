"""The tools calculator and python_expression: they walk a syntax tree, never eval, within bounds that need no clock."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

Value = Any  # None, bool, int, float, str, range, slice, and list, tuple, set, dict of these

MAX_CALCULATOR_CHARS, MAX_DIGITS = 500, 1000
MAX_CALCULATOR_BITS = 3322  # of MAX_DIGITS decimal digits
MAX_CODE_CHARS = 2000
MAX_STEPS = 500_000  # nodes visited and parts of values made or read; about a second
MAX_SIZE = 10_000  # parts of one value: characters, items, the items' own parts, 16 numbers of a range
MAX_BITS = 10_000  # of an integer; Python writes 4300 digits at most
MAX_RANGE_END = 2**62  # so that a range holds small numbers
_SIGNS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})  # as people write them
_DECIMAL = re.compile(r"[0-9][0-9_]*|[0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]{1,3})?")
_CALCULATOR_SYNTAX = "+ - * / // % ** and parentheses"
_UNARY: dict[type, Callable] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Invert: lambda value: ~(int(value) if isinstance(value, bool) else value)}
_BINARY: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift}
_COLLECTIONS: dict[type, Callable] = {ast.List: list, ast.Tuple: tuple, ast.Set: set, ast.ListComp: list,
                                      ast.GeneratorExp: list, ast.SetComp: set}
_COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, values: item in values, ast.NotIn: lambda item, values: item not in values}


class Invalid(ValueError):
    """An expression that is refused. The message tells the model why."""


def _parsed(text: object, max_chars: int) -> ast.expr:
    if not isinstance(text, str):
        raise Invalid(f"text is needed, not {type(text).__name__}")
    if len(text) > max_chars:
        raise Invalid(f"too long: {len(text)} characters, at most {max_chars}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:  # ValueError: a null character, a lone surrogate
        raise Invalid(f"no expression: {error.msg if isinstance(error, SyntaxError) else error}") from None


# -- the calculator ----------------------------------------------------------------------------------------------------


def calculator(expression: str) -> str:
    """
    Works out an arithmetic expression. Whole numbers, decimals and fractions are exact.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3 + 4) * 2.5
    """
    try:
        text = expression.translate(_SIGNS).strip() if isinstance(expression, str) else expression
        return _decimal(_exact(_parsed(text, MAX_CALCULATOR_CHARS), text))
    except Invalid as error:
        return f"error: {error}"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return f"error: too large: at most {MAX_DIGITS} digits"
    except (RecursionError, MemoryError):
        return "error: nested too deeply"


def _exact(node: ast.expr, text: str) -> Fraction | float:
    """The value of a node: a Fraction while it is exact, a float after a power that is irrational."""
    match node:
        case ast.Constant(value=int() | float()):
            digits = ast.get_source_segment(text, node) or ""  # 0.1 is one tenth
            if not _DECIMAL.fullmatch(digits):
                raise Invalid(f"only numbers, {_CALCULATOR_SYNTAX} are known here")
            value: Fraction | float = Fraction(digits.replace("_", ""))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign):
            value = _UNARY[type(sign)](_exact(node.operand, text))
        case ast.BinOp(op=ast.Pow()):
            value = _power(_exact(node.left, text), _exact(node.right, text))
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod() as sign):
            value = _BINARY[type(sign)](_exact(node.left, text), _exact(node.right, text))
        case ast.BinOp():
            raise Invalid(f"only {_CALCULATOR_SYNTAX} are known here; a power is **")
        case ast.Tuple():
            raise Invalid("a comma: write numbers without thousands separators, one expression at a time")
        case _:
            raise Invalid(f"only numbers, {_CALCULATOR_SYNTAX} are known here")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
        return value
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_CALCULATOR_BITS:
        raise OverflowError
    return Fraction(value)  # // of fractions is an int


def _power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator != 1:
        value = float(base) ** float(exponent)
        if isinstance(value, complex):
            raise Invalid("no real number")
        return value
    least_bits = (max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1) * abs(exponent)
    if least_bits > MAX_CALCULATOR_BITS:
        raise OverflowError
    return base ** int(exponent)


def _decimal(value: Fraction | float) -> str:
    """3, 2.5, about 1.41421356237; a fraction without a finite decimal form is 1/3 (about 0.3333333333)."""
    if isinstance(value, float):
        return f"about {value:.12g}"
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, 31):
        if 10**places % value.denominator == 0:
            digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    fraction = f"{value.numerator}/{value.denominator}"
    try:
        return f"{fraction} (about {float(value):.10g})"
    except OverflowError:
        return fraction


# -- Python expressions ------------------------------------------------------------------------------------------------


def python_expression(code: str) -> str:
    """
    Works out one Python expression and returns its value as Python writes it.

    Args:
        code: Literals, operators, comparisons, indexing, comprehensions, string methods and calls of functions such as
            len, sum, min, max, sorted, range and round. No statements, no imports, no lambda.
    """
    try:
        return _as_written(_Evaluation().value_of(_parsed(code, MAX_CODE_CHARS), {}))
    except Invalid as error:
        return f"error: {error}"
    except (RecursionError, MemoryError):
        return "error: nested too deeply"
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:  # of the expression, with Python's message
        return f"error: {type(error).__name__}: {str(error.args[0])[:200] if error.args else ''}"


class _Evaluation:
    """Evaluates one expression. The sizes of all nodes' values count as steps, which bounds time and memory."""

    def __init__(self) -> None:
        self._steps = 0

    def value_of(self, node: Any, names: dict[str, Value]) -> Value:
        """The value of a node. names: the variables of the comprehensions around it."""
        value: Value = None
        match node:
            case ast.Constant():
                value = node.value
            case ast.Name(id=name):
                if name not in names:
                    raise Invalid(f"name {name} {'can only be called' if name in FUNCTIONS else 'is not defined'}")
                value = names[name]
            case ast.List(elts=nodes) | ast.Tuple(elts=nodes) | ast.Set(elts=nodes):
                value = _COLLECTIONS[type(node)](self._values(nodes, names))
            case ast.Dict(keys=keys, values=nodes) if None not in keys:
                value = dict(zip(self._values(keys, names), self._values(nodes, names), strict=True))
            case ast.UnaryOp(op=sign, operand=operand):
                value = _UNARY[type(sign)](self.value_of(operand, names))
            case ast.BinOp(op=sign) if type(sign) in _BINARY:
                left, right = self._values([node.left, node.right], names)
                _check_growth(sign, left, right)
                value = _BINARY[type(sign)](left, right)
            case ast.BoolOp(op=sign, values=nodes):
                for operand in nodes:
                    value = self.value_of(operand, names)
                    if bool(value) is not isinstance(sign, ast.And):
                        break
            case ast.Compare():
                value = self._compare(node, names)
            case ast.IfExp(test=test, body=body, orelse=other):
                value = self.value_of(body if self.value_of(test, names) else other, names)
            case ast.Slice(lower=lower, upper=upper, step=step):
                value = slice(*(end and self.value_of(end, names) for end in (lower, upper, step)))
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name in names:
                value = names[name][self.value_of(index, names)]  # its other items are not read, and not charged
            case ast.Subscript(value=owner, slice=index):
                value = self.value_of(owner, names)[self.value_of(index, names)]
            case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item) | ast.SetComp(elt=item):
                value = _COLLECTIONS[type(node)](
                    self.value_of(item, inner) for inner in self._passes(node.generators, names))
            case ast.DictComp(key=key, value=item):
                value = {self.value_of(key, inner): self.value_of(item, inner)
                         for inner in self._passes(node.generators, names)}
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=nodes, keywords=keywords):
                options = {keyword.arg: self.value_of(keyword.value, names) for keyword in keywords}
                value = _call_method(self.value_of(owner, names), name, self._values(nodes, names), options)
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS and name not in names:
                value = self._call_function(name, node, names)
            case ast.Call(func=function):
                raise Invalid(f"{ast.unparse(function)[:40]} cannot be called; there are {', '.join(FUNCTIONS)}")
            case _:
                raise Invalid(f"{type(node).__name__} is not available: one expression of literals, operators, "
                              "comparisons, indexing, comprehensions and known calls")
        self._charge(1 + _size_of(value))
        return value

    def _charge(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise Invalid(f"too much work: at most {MAX_STEPS} steps")

    def _values(self, nodes: list[Any], names: dict[str, Value]) -> list[Value]:
        return [self.value_of(node, names) for node in nodes]

    def _compare(self, node: ast.Compare, names: dict[str, Value]) -> bool:
        left = self.value_of(node.left, names)
        for sign, operand in zip(node.ops, node.comparators, strict=True):
            right = self.value_of(operand, names)
            if isinstance(sign, ast.Is | ast.IsNot) and not any(
                    value is None or isinstance(value, bool) for value in (left, right)):
                raise Invalid("is: only for None, True and False; use ==")
            if not _COMPARE[type(sign)](left, right):
                return False
            left = right
        return True

    def _passes(self, loops: list[ast.comprehension], names: dict[str, Value]) -> Iterator[dict[str, Value]]:
        """The variables of each pass through nested loops."""
        if not loops:
            yield names
            return
        if loops[0].is_async:
            raise Invalid("async is not available")
        for item in _in_order(self.value_of(loops[0].iter, names)):
            self._charge(1)
            inner = names | _bound(loops[0].target, item)
            if all(self.value_of(condition, inner) for condition in loops[0].ifs):
                yield from self._passes(loops[1:], inner)

    def _call_function(self, name: str, node: ast.Call, names: dict[str, Value]) -> Value:
        values = self._values(node.args, names)
        has_key = name in ("max", "min", "sorted")
        options: dict[Any, Value] = {
            each.arg: _key(each.value) if each.arg == "key" and has_key else self.value_of(each.value, names)
            for each in node.keywords}
        num_in_ranges = sum(len(value) for value in values if isinstance(value, range))
        self._charge(num_in_ranges)
        if name in ("enumerate", "list", "reversed", "set", "sorted", "tuple"):
            _check_size(num_in_ranges)
        compares_values = name in ("max", "min") and len(values) > 1
        if name != "str" and not compares_values:
            values = [_in_order(value) for value in values]
        return FUNCTIONS[name](*values, **options)


def _key(node: ast.expr) -> Callable | None:
    """The function that a key= names."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) if name in _KEYS:
            return FUNCTIONS[name]
    raise Invalid(f"key must be one of {', '.join(_KEYS)}")


def _bound(target: ast.expr, value: Value) -> dict[str, Value]:
    """The variables that a loop's target binds to parts of `value`."""
    match target:
        case ast.Name(id=name):
            return {name: value}
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            parts = zip(targets, _in_order(value), strict=True)
            return {name: item for inner, part in parts for name, item in _bound(inner, part).items()}
        case _:
            raise Invalid("a loop's variables must be names")


def _call_method(owner: Value, name: str, values: list[Value], options: dict[Any, Value]) -> Value:
    known = _METHODS.get(type(owner), "").split()
    if name not in known:
        raise Invalid(f"{type(owner).__name__} has no method {name} here; there are {', '.join(known) or 'none'}")
    _check_size(sum(len(value) for value in values if isinstance(value, range)))  # union() makes all of their numbers
    if name == "join":
        values = [_in_order(value) for value in values]
    if name in ("center", "ljust", "rjust", "zfill") and values and isinstance(values[0], int):
        _check_size(values[0])
    value = getattr(owner, name)(*values, **options)
    return list(value) if name in ("items", "keys", "values") else value


def _check_growth(sign: ast.operator, left: Value, right: Value) -> None:
    """Refuse an operation whose result would be far larger than its operands, before it is computed."""
    match sign, left, right:
        case ast.Mod(), str(), _:
            raise Invalid("formatting with % is not available")
        case (ast.Mult(), (str() | list() | tuple()) as values, int(count)) | (
                ast.Mult(), int(count), (str() | list() | tuple()) as values):
            _check_size((_size_of(values) - 1) * count)
        case ast.Pow(), int(), int() if abs(left) > 1:
            _check_bits((abs(left).bit_length() - 1) * right)
        case ast.LShift(), int(), int() if left:
            _check_bits(right)


def _size_of(value: Value) -> int:
    """The parts of a value; an item that is in it twice counts twice. Raises Invalid for one that is too large."""
    match value:
        case None | float() | slice():
            return 1
        case int():
            _check_bits(value.bit_length())
            return 1 + value.bit_length() // 64
        case str():
            size = 1 + len(value)
        case range():
            if max(map(abs, (value.start, value.stop, value.step))) > MAX_RANGE_END:
                raise Invalid("too large: a range's numbers have at most 62 bits")
            size = 1 + len(value) // 16
        case list() | tuple() | set():
            size = 1 + sum(map(_size_of, value))
        case dict():
            size = 1 + sum(_size_of(key) + _size_of(item) for key, item in value.items())
        case _:
            raise Invalid(f"{type(value).__name__} values are not available")
    _check_size(size)
    return size


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise Invalid(f"too large: at most {MAX_SIZE} characters or items")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise Invalid(f"too large: whole numbers have at most {MAX_BITS} bits")


def _in_order(value: Value) -> Value:
    """A set as a list, in an order that does not depend on hashes; any other value as it is."""
    if not isinstance(value, set):
        return value
    by_text = sorted(value, key=repr)  # nan is neither less nor more
    try:
        return sorted(by_text)
    except TypeError:
        return by_text


def _as_written(value: Value) -> str:
    """`value` as Python writes it, sets in order."""
    match value:
        case set():
            return f"{{{', '.join(map(_as_written, _in_order(value)))}}}" if value else "set()"
        case list():
            return f"[{', '.join(map(_as_written, value))}]"
        case tuple():
            return f"({', '.join(map(_as_written, value))}{',' * (len(value) == 1)})"
        case dict():
            return f"{{{', '.join(f'{_as_written(key)}: {_as_written(item)}' for key, item in value.items())}}}"
    return repr(value)


def _text(value: Value = "") -> str:
    return value if isinstance(value, str) else _as_written(value)


def _round(number: Value, ndigits: Value = None) -> Value:
    if isinstance(ndigits, int) and abs(ndigits) > 400:  # for -10**9 Python would work out 10**10**9
        raise Invalid("round: at most 400 digits")
    return round(number, ndigits)


FUNCTIONS: dict[str, Callable] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "chr": chr, "dict": dict, "divmod": divmod,
    "enumerate": lambda values, start=0: list(enumerate(values, start)), "float": float, "int": int, "len": len,
    "list": list, "max": max, "min": min, "ord": ord, "range": range, "reversed": lambda values: list(values)[::-1],
    "round": _round, "set": set, "sorted": sorted, "str": _text, "sum": sum, "tuple": tuple,
    "zip": lambda *values, strict=False: list(zip(*values, strict=strict))}
_KEYS = ("abs", "float", "int", "len", "max", "min", "str", "sum")  # results at most as large as a part of the value
_METHODS: dict[type, str] = {  # those without side effects
    str: "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit islower "
         "isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind "
         "rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill",
    list: "count index", tuple: "count index", dict: "get items keys values",
    set: "difference intersection isdisjoint issubset issuperset symmetric_difference union"}
