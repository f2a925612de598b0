"""Private parts of dependencies. Each dependency has one file that reaches into them (NAME_compat.py), and all say in
one way that a part is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from hybrid_rlhf.core.errors import UserError


class Dependency(NamedTuple):
    """name: of the distribution; checked: the release that the use of its private parts was tested with."""

    name: str
    checked: str

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
        return UserError(f"{self.name} {version(self.name)} has no {what}, which hybrid-rlhf needs and {self.name} "
                         f"{self.checked} has; pip install '{self.name}=={self.checked}'")
