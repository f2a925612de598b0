"""What must not run unasked: what somebody else's settings name, and modules in somebody else's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_CODE = ("reward.functions", "environment.tools", "environment.factory")  # builtin:NAME is the library's own
_ADDRESSES = ("reward.judge.url", "reward.url")
_FLAGS = ("trust_remote_code", "trust_pickled_weights")


def module_code(module: str, function: str) -> str:
    """A program for python -c that calls a function of ours, with modules from where they are installed, or PYTHONPATH:
    -m would look in the current folder first, which may be somebody else's."""
    return (f"import sys; sys.path[:] = [path for path in sys.path if path]; from {module} import {function}; "
            f"sys.exit({function}())")


def named_code(settings: object) -> list[str]:
    """Each piece of code, address and permission that the settings (nested, or of dotted names) name, as text."""
    found = []
    for name, value in _leaves(settings):
        is_code = any(name == option or name.startswith(f"{option}.") for option in _CODE)
        is_address = any(name == option or name.startswith(f"{option}.") for option in _ADDRESSES)
        is_flag = name.rpartition(".")[2] in _FLAGS
        if (is_code or is_address or is_flag) and value and not str(value).startswith("builtin:"):
            found.append(f"{name} {value}" if not is_flag else name)
    return found


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value
