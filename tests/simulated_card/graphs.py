"""CUDA graphs of a simulated card: operations with the addresses that they read and wrote.

A replay runs the operations again on those addresses and none of the step's Python, so whatever the host decided while
recording stays as it was. Memory that was given back or moved since then is an error here, where a card would read what
lies there now. As on a card nothing happens while recording: what was written is put back at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class _Place:
    """Where a tensor lies. number: the recording's own storage, made anew by every replay; None: one from outside."""

    def __init__(self, tensor: Tensor, number: int | None) -> None:
        self.number, self._dtype = number, tensor.dtype
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        storage = tensor.untyped_storage()
        self._storage, self._address = weakref.ref(storage), storage.data_ptr()

    def storage(self, made: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if self.number is not None:
            return made[self.number]
        storage = self._storage()
        if storage is None:
            raise RuntimeError("a graph reads memory that has been given back")
        if storage.data_ptr() != self._address:
            raise RuntimeError("a graph reads an address from which its tensor has moved")
        return storage

    def tensor(self, made: dict[int, torch.UntypedStorage]) -> Tensor:
        return torch.empty(0, dtype=self._dtype).set_(self.storage(made), *self._layout)


class Recording:
    """Operations as they run, for `replay`. holds: whether a tensor is on the card."""

    def __init__(self, holds: Callable[[Tensor], bool]) -> None:
        self._holds = holds
        self._steps: list[tuple[Callable, tuple, dict, list[_Place]]] = []
        self._numbers: dict[int, int] = {}  # id of a storage made while recording, while it lives -> its number
        self._kept: dict[int, weakref.ref] = {}  # number -> a storage that outlives the recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._count = 0

    def run(self, func, args: tuple, kwargs: dict):
        schema = getattr(func, "_schema", None)
        written = [] if schema is None else [
            args[i] for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write and i < len(args)]
        for tensor in tree_leaves(written):
            storage = tensor.untyped_storage()
            if id(storage) not in self._numbers:
                self._before.setdefault(id(storage), (storage, storage.clone()))
        places = tree_map(self._place, (args, kwargs))
        out = func(*args, **kwargs)
        results = [self._place(leaf, is_new=True) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._steps.append((func, *places, results))
        return out

    def _place(self, leaf: object, is_new: bool = False) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if not is_new and not self._holds(leaf):  # a number of the processor, as it is now
            return leaf.clone()
        key = id(leaf.untyped_storage())
        if is_new and key not in self._numbers and key not in self._before:
            self._numbers[key] = self._count
            self._kept[self._count] = weakref.ref(leaf.untyped_storage())
            self._count += 1
            weakref.finalize(leaf.untyped_storage(), self._numbers.pop, key, None)
        return _Place(leaf, self._numbers.get(key))

    def end(self) -> None:
        """Nothing of it has happened. What was made and is still held gets its values at every replay."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        self._kept = {number: kept for number, kept in self._kept.items() if kept() is not None}

    def replay(self) -> None:
        made: dict[int, torch.UntypedStorage] = {}
        for func, args, kwargs, results in self._steps:
            given = tree_map(lambda leaf: leaf.tensor(made) if isinstance(leaf, _Place) else leaf, (args, kwargs))
            out = [leaf for leaf in tree_leaves(func(*given[0], **given[1])) if isinstance(leaf, Tensor)]
            for place, tensor in zip(results, out, strict=True):
                if place.number is None:
                    continue
                kept = self._kept.get(place.number, lambda: None)()
                if kept is not None and place.number not in made:
                    kept.copy_(tensor.untyped_storage())
                made[place.number] = tensor.untyped_storage() if kept is None else kept
