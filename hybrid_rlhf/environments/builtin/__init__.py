"""Environments and tools that come with the library, as builtin:NAME."""

from __future__ import annotations

from collections.abc import Callable

BUILTINS: dict[str, Callable] = {}
