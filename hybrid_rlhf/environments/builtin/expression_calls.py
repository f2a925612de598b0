"""The functions and methods that an expression may call, each on plain values and within the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hybrid_rlhf.environments.builtin.bounded_values import MAX_RANGE, Budget, Value, size_of, written
from hybrid_rlhf.environments.builtin.expressions import Refused

_MAX_DIGITS = 400  # of round(x, n): for n = -10**9 Python would work out 10**10**9


def _text(value: Value = "") -> str:
    return value if isinstance(value, str) else written(value)


def _whole(*given: Value) -> int:
    return int(*given)


def _round(number: Value, ndigits: Value = None) -> Value:
    if isinstance(ndigits, int) and abs(ndigits) > _MAX_DIGITS:
        raise Refused(f"round: at most {_MAX_DIGITS} digits")
    return round(number, ndigits)


def _range(*ends: Value) -> range:
    made = range(*ends)
    if max(map(abs, (made.start, made.stop, made.step))) > 2**62 or len(made) > MAX_RANGE:
        raise Refused(f"too large: a range has at most {MAX_RANGE} items")
    return made


def _sum(values: Value, start: Value = 0) -> Value:
    if not all(isinstance(each, (int, float)) for each in (*values, start)):
        raise TypeError("sum: only numbers can be added up")  # of lists it would take quadratic time
    return sum(values, start)


# Those that loop over what they are given get it as a list.
_PLAIN: dict[str, Callable] = {
    "abs": abs, "bool": bool, "chr": chr, "divmod": divmod, "float": float, "int": _whole, "len": len, "ord": ord,
    "range": _range, "round": _round, "str": _text}
_LOOPS: dict[str, Callable] = {
    "all": all, "any": any, "enumerate": lambda values, start=0: list(enumerate(values, start)), "list": list,
    "max": max, "min": min, "reversed": lambda values: list(values)[::-1], "sorted": sorted, "sum": _sum,
    "tuple": tuple, "zip": lambda *given, strict=False: list(zip(*given, strict=strict))}
FUNCTIONS = (*sorted([*_PLAIN, *_LOOPS, "dict", "set"]),)
_KEYWORDS = {"round": {"ndigits"}, "enumerate": {"start"}, "max": {"key", "default"}, "min": {"key", "default"},
             "sorted": {"key", "reverse"}, "sum": {"start"}, "zip": {"strict"}}
_KEYS: dict[str, Callable] = {"abs": abs, "float": float, "int": int, "len": len, "max": max, "min": min, "str": _text,
                              "sum": _sum}
KEYS = (*_KEYS,)


def call_function(budget: Budget, name: str, given: list[Value], keywords: dict[str, Value]) -> Value:
    """name(*given, **keywords); key= is the name of a function. Raises Refused, or what Python would."""
    for keyword in keywords:
        if keyword not in _KEYWORDS.get(name, ()):
            raise Refused(f"{name} takes no {keyword} here")
    budget.charge(sum(map(size_of, given)))
    if keywords.get("key") is not None:
        keywords["key"] = _KEYS[keywords["key"]]
    if name == "set":
        return budget.set_of(budget.items(given[0]) if _at_most_one(name, given) else ())
    if name == "dict":
        return _dict(budget, given)
    if name in _PLAIN:
        return _PLAIN[name](*given, **keywords)
    if name in ("list", "tuple", "sorted", "reversed", "enumerate"):
        budget.check_length(max(map(_length, given), default=0))
    if name in ("max", "min") and len(given) > 1:
        return _LOOPS[name](*given, **keywords)
    loops = given if name == "zip" else given[:1]
    return _LOOPS[name](*map(budget.items, loops), *given[len(loops):], **keywords)


def _length(value: Value) -> int:
    return len(value) if isinstance(value, (str, range, list, tuple, set, dict)) else 0


def _at_most_one(name: str, given: list[Value]) -> bool:
    if len(given) > 1:
        raise TypeError(f"{name} expected at most 1 argument, got {len(given)}")
    return bool(given)


def _dict(budget: Budget, given: list[Value]) -> dict:
    if not _at_most_one("dict", given):
        return {}
    if isinstance(given[0], dict):
        return dict(given[0])
    pairs = [budget.items(each) for each in budget.items(given[0])]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("dict: every item must be a pair")
    return budget.dict_of((pair[0], pair[1]) for pair in pairs)


def _join(budget: Budget, text: str, values: Value) -> str:
    parts = budget.items(values)
    budget.check_length(sum(len(each) for each in parts if isinstance(each, str)) + len(text) * len(parts))
    return text.join(parts)


def _replace(budget: Budget, text: str, old: str, new: str, *count: int) -> str:
    budget.check_length(len(text) + text.count(old) * len(new))
    return text.replace(old, new, *count)


def _padded(name: str, budget: Budget, text: str, width: int, *fill: str) -> str:
    budget.check_length(width)
    return getattr(text, name)(width, *fill)


def _as_it_is(name: str, _budget: Budget, owner: Value, *given: Value) -> Value:
    return getattr(owner, name)(*given)


def _as_list(name: str, _budget: Budget, owner: dict) -> list:
    return list(getattr(owner, name)())


# By type, methods that change nothing and whose result is at most a few times as large as what they are given.
_SAFE = {
    str: ("capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
          "isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit "
          "rstrip split splitlines startswith strip swapcase title upper"),
    list: "count index", tuple: "count index", dict: "get",
    set: "difference intersection isdisjoint issubset issuperset symmetric_difference union"}
METHODS: dict[type, dict[str, Callable]] = {
    kind: {name: partial(_as_it_is, name) for name in names.split()} for kind, names in _SAFE.items()}
METHODS[str].update(join=_join, replace=_replace)
METHODS[str].update({name: partial(_padded, name) for name in ("center", "ljust", "rjust", "zfill")})
METHODS[dict].update({name: partial(_as_list, name) for name in ("items", "keys", "values")})


def call_method(budget: Budget, owner: Value, name: str, given: list[Value]) -> Value:
    """owner.name(*given) for a method of the table. Raises Refused, or what Python would."""
    known = METHODS.get(type(owner), {})
    if name not in known:
        ending = f"; there are {', '.join(known)}" if known else ""
        raise Refused(f"{type(owner).__name__} has no method {name} here{ending}")
    budget.charge(size_of(owner) + sum(map(size_of, given)))
    if type(owner) is set:
        given = [budget.set_of(budget.items(each)) for each in given]
    return known[name](budget, owner, *given)
