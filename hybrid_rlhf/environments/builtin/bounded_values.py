"""Values of an expression and what they cost: a budget of steps and a largest size, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_rlhf.environments.builtin.expressions import Refused

Value = Any  # None, bool, int, float, str, range, and list, tuple, set, dict of these

MAX_STEPS = 500_000  # nodes visited and parts of values made or read; about a second
MAX_SIZE = 10_000  # parts of one value, unfolded: characters, items, the items' own parts
MAX_HASHED = 1000  # items of a set or dict: integers can be chosen so that all of them collide
MAX_RANGE = 100_000
MAX_BITS = 10_000  # of an integer; Python writes 4300 digits at most


class Budget:
    """What an expression may still use. Raises Refused when that is gone."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def charge(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise Refused(f"too much work: at most {MAX_STEPS} steps")

    def made(self, value: Value) -> Value:
        """`value`, charged by its size."""
        self.charge(size_of(value))
        return value

    def check_length(self, num_items: int) -> None:
        """Refuses a length before anything of it is made."""
        if num_items > MAX_SIZE:
            raise Refused(f"too large: at most {MAX_SIZE} characters or items")

    def items(self, value: Value) -> Sequence[Value]:
        """What a loop over `value` meets, charged. The order of a set is that of its values, as it is written."""
        if isinstance(value, (set, dict)):
            value = ordered(value) if isinstance(value, set) else list(value)
        elif not isinstance(value, (str, list, tuple, range)):
            raise TypeError(f"{type(value).__name__!r} object is not iterable")
        self.charge(len(value))
        return value

    def set_of(self, values: Iterable[Value]) -> set:
        return set(self.dict_of((value, None) for value in values))

    def dict_of(self, pairs: Iterable[tuple[Value, Value]]) -> dict:
        found: dict[Value, Value] = {}
        for key, value in pairs:
            self.charge(size_of(key))  # it is hashed and compared
            found[key] = value
            if len(found) > MAX_HASHED:
                raise Refused(f"too large: at most {MAX_HASHED} items in a set or dict")
        return found


def size_of(value: Value) -> int:
    """The parts of a value, unfolded: an item that is in it twice counts twice, as where it is compared or written.

    Raises Refused beyond MAX_SIZE and MAX_BITS, and stops counting there.
    """
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        size += 1
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, int):
            if each.bit_length() > MAX_BITS:
                raise Refused(f"too large: whole numbers have at most {MAX_BITS} bits")
            size += each.bit_length() // 64
        elif isinstance(each, range):
            if max(map(abs, (each.start, each.stop, each.step))) > 2**62 or len(each) > MAX_RANGE:
                raise Refused(f"too large: a range has at most {MAX_RANGE} items")
        elif isinstance(each, (list, tuple, set, dict)):
            if isinstance(each, (set, dict)) and len(each) > MAX_HASHED:
                raise Refused(f"too large: at most {MAX_HASHED} items in a set or dict")
            waiting += each
            waiting += each.values() if isinstance(each, dict) else ()
        if size + len(waiting) > MAX_SIZE:
            raise Refused(f"too large: at most {MAX_SIZE} characters or items")
    return size


def ordered(values: set) -> list:
    """A set's values in an order that does not depend on how Python has hashed them in this process."""
    by_text = sorted(values, key=repr)
    try:
        return sorted(by_text)
    except TypeError:
        return by_text


def written(value: Value) -> str:
    """`value` as Python writes it, sets in order."""
    if isinstance(value, set):
        return f"{{{', '.join(map(written, ordered(value)))}}}" if value else "set()"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(written, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{written(k)}: {written(v)}' for k, v in value.items())}}}"
    return repr(value)
