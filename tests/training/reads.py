"""Which options a run reads: every access to a field of a settings class, but for those that only check or copy it."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hybrid_rlhf.training.registry import STAGES

# Who looks at every field whatever it is for: checks of values, copies, comparisons, records, and these tests.
ONLOOKERS = {"__post_init__", "_check_role", "_check_method", "given", "refuse", "_lines", "leaves", "asdict",
             "_asdict_inner", "replace", "__eq__", "__repr__", "_get", "_with", "value_of"}


def leaves(config: object, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(dotted option, the part that holds it, its name there) of nested settings; a list is one option."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", config, field.name


def config_of(stage: str) -> object:
    return importlib.import_module(STAGES[stage].module).Config()


@contextmanager
def recorded(stage: str) -> Iterator[set[str]]:
    """The options of `stage` that are read within the block.

    A part is known by its class, and where two parts are of one class (roles.ref and roles.reward) by `roles`, which
    hands them out.
    """
    parts: dict[type, set[str]] = {}
    for option, part, name in leaves(config_of(stage)):
        parts.setdefault(type(part), set()).add(option.removesuffix(name))
    seen, owners = set(), {}

    def spy(kind: type):  # noqa: ANN202
        names = {f.name for f in dataclasses.fields(kind)}

        def read(self, name: str):  # noqa: ANN001, ANN202
            value = object.__getattribute__(self, name)
            if dataclasses.is_dataclass(value) and len(parts.get(type(value), ())) > 1:
                owners[id(value)] = (value, f"roles.{name}.")
            if name in names and sys._getframe(1).f_code.co_name not in ONLOOKERS:
                own = parts[kind] if len(parts[kind]) == 1 else {owners.get(id(self), (None, "?"))[1]}
                seen.update(prefix + name for prefix in own)
            return value

        return read

    with pytest.MonkeyPatch.context() as patch:
        for kind in parts:
            patch.setattr(kind, "__getattribute__", spy(kind), raising=False)
        yield seen
