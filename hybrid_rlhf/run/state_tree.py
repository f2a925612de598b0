"""Convert a state (dicts, lists, tensors, numbers, strings) to JSON and named tensors, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from hybrid_rlhf.run.tensor_file import is_storable


class Stored(Mapping):
    """A dict of a checkpoint. A tensor is read at each access, and not cached."""

    def __init__(self, content: dict, tensor: Callable[[str], Tensor]) -> None:
        self._content, self._tensor = content, tensor

    def __getitem__(self, key: str) -> object:
        return _join(self._content[key], self._tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def split(value: object, path: str, tensors: dict[str, Tensor]) -> dict:
    """`value` as JSON, each tensor replaced by {"tensor": its name in `tensors`}; numbers and strings are wrapped too,
    so that no content is mistaken for a reference."""
    if isinstance(value, Tensor) and is_storable(value):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        wrong = [k for k in value if not isinstance(k, str)]
        if wrong:
            raise TypeError(f"state{path} has the key {wrong[0]!r}; keys of a checkpoint are strings")
        # "/" inside a key is escaped as in JSON pointers: a/b must not meet b in a
        return {"dict": {k: split(v, f"{path}/{k.replace('~', '~0').replace('/', '~1')}", tensors)
                         for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list": [split(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no NaN or infinity
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"state{path} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings and lists")


def _join(value: dict, tensor: Callable[[str], Tensor]) -> object:
    (kind, content), = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return Stored(content, tensor)
    if kind == "list":
        return [_join(v, tensor) for v in content]
    return float(content) if kind == "float" else content


def load_all(value: object) -> object:
    """`value` as plain dicts, with all of its tensors read."""
    if isinstance(value, Stored):
        return {k: load_all(v) for k, v in value.items()}
    return [load_all(v) for v in value] if isinstance(value, list) else value
