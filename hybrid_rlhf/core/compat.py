"""Access to private parts of dependencies, with one error message where a part is missing. Each dependency has one file
that uses them (NAME_compat.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

from hybrid_rlhf.core.errors import UserError

# The newest release of each distribution whose private parts are used here that all tests passed with (`make test`,
# `make test-newest`). The upper bounds in setup.py are the next minor releases.
TESTED = {"torch": "2.15.0", "transformers": "5.24.0", "deepspeed": "0.19.8", "peft": "0.21.2",
          "bitsandbytes": "0.50.2"}


def newer_than_tested(name: str) -> str | None:
    """The installed release of a distribution, where it is newer than the newest tested one; else None."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return None
    return installed if name in TESTED and _numbers(installed) > _numbers(TESTED[name]) else None


def releases_line() -> str | None:
    """One line on the installed releases that are newer than the tested ones; None where there are none."""
    newer = [f"{name} {installed} (tested up to {TESTED[name]})"
             for name in TESTED if (installed := newer_than_tested(name))]
    return f"releases: newer than tested here: {', '.join(newer)}" if newer else None


def _numbers(release: str) -> tuple[int, ...]:
    """5.24.0 of 5.24.0.dev0 and of 5.24.0+cpu."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", release)[0])))


class Dependency(NamedTuple):
    """The distribution `name`, whose private parts are used."""

    name: str

    def module(self, path: str) -> ModuleType:
        """One of its private modules. Raises UserError if it is not there."""
        try:
            return import_module(path)
        except ImportError as error:
            raise self._lacks(path) from error

    def part(self, owner: object, name: str) -> Any:  # of the part's own type
        """The attribute `name` of `owner`. Raises UserError if it is not there."""
        try:
            return getattr(owner, name)
        except AttributeError as error:
            of = owner if isinstance(owner, (type, ModuleType)) else type(owner)
            raise self._lacks(f"{of.__name__}.{name}") from error

    def require(self, owner: object, *names: str) -> None:
        """UserError unless `owner` has all these attributes: before they are written, which would succeed anyway."""
        for name in names:
            self.part(owner, name)

    @contextmanager
    def silenced(self, module: str, name: str) -> Iterator[None]:
        """Within the block the function `name` of one of its private modules does nothing and returns None."""
        owner = self.module(module)
        before = self.part(owner, name)
        setattr(owner, name, lambda *_given, **_named: None)
        try:
            yield
        finally:
            setattr(owner, name, before)

    def _lacks(self, what: str) -> UserError:
        tested = TESTED[self.name]
        return UserError(f"{self.name} {version(self.name)} has no {what}, which hybrid-rlhf needs and {self.name} "
                         f"{tested} has; pip install '{self.name}=={tested}'")
