"""A card that is not there: real values in the processor's memory, and everything else as on a card.

A tensor is on the card if its storage is tagged. A dispatch mode sees every operation: one that mixes devices fails
as on a card, its results get a block of the card's memory, kernel launches and every wait of the host are counted.
What Python asks of tensors (device.py) and of torch.cuda (cuda_api.py) is answered by replaced functions.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.simulated_card import workspaces
from tests.simulated_card.allocator import Allocator
from tests.simulated_card.graphs import Recording

DEVICE = torch.device("cuda", 0)
AMPERE = dict(total=24 << 30, capability=(8, 6), processors=82)  # such as an RTX 3090
HOPPER = dict(total=80 << 30, capability=(9, 0), processors=132)  # such as an H100
_PRODUCT = str(Path(__file__).resolve().parents[2] / "hybrid_rlhf")
# their result's size, or the result itself, is known to the card only
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "_unique", "_unique2",
           "unique_dim", "unique_consecutive", "equal", "bincount"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_COPYING = {"copy_", "_to_copy", "set_", "resize_", "copy"}
_WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
                   "_unsafe_view", "set_", "resize_", "lift_fresh", "lift", "_local_scalar_dense", "_reshape_alias"}


class Wait(RuntimeError):
    """The host waits where it was told not to."""


class Card(TorchDispatchMode):
    """total: bytes of memory; taken: of them by the context; capability: (major, minor); processors: how many.

    waits: (kind, place in our code) -> times. launches: operation -> kernels. reset() sets both back. sync: what a
    wait does besides being counted ("default", or "error"), as torch.cuda.set_sync_debug_mode has it.
    """

    def __init__(self, total: int = 8 << 30, taken: int = 512 << 20, capability: tuple[int, int] = (8, 6),
                 processors: int = 16) -> None:
        super().__init__()
        self.memory, self.capability, self.processors = Allocator(total, taken), capability, processors
        self._for_products: object = None  # the block that the first product takes
        self.waits: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.sync = "default"
        self.recording: Recording | None = None
        self.breaks_captures = False  # whether no capture can be ended
        self.generator = torch.Generator()
        self._blocks: dict[int, object] = {}  # id of a storage on the card -> its block
        self._floating: set[int] = set()  # storages made inside of torch, on the device of whom they meet first
        self._pinned: set[int] = set()
        self._locked: dict[int, int] = {}  # address -> bytes of the processor's memory
        self._here = threading.local()

    def reset(self) -> None:
        self.waits.clear()
        self.launches.clear()

    # -- where a tensor is --------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._blocks

    def holds_storage(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._blocks

    @staticmethod
    def _key(tensor: Tensor) -> int | None:
        try:
            return id(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # inside of vmap, or without a storage
            inner = torch._C._functorch.get_unwrapped(tensor) if torch._C._functorch.is_batchedtensor(tensor) else None
            return None if inner is None else Card._key(inner)

    def put(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose storage is new, on the card from now on."""
        self.put_storage(tensor.untyped_storage())
        return tensor

    def put_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        self._floating.discard(key)
        if key not in self._blocks and not self.is_quiet:
            self._blocks[key] = self.memory.take(storage.nbytes())
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.memory.give_back(block)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage on the card has another size."""
        block = self._blocks[id(storage)]
        if block is not None:
            self.memory.give_back(block)
        self._blocks[id(storage)] = None
        self._blocks[id(storage)] = self.memory.take(storage.nbytes())

    def pin(self, storage: torch.UntypedStorage) -> None:
        self._pinned.add(id(storage))
        weakref.finalize(storage, self._pinned.discard, id(storage))

    def lock(self, start: int, size: int, _flags: int) -> int:
        """cudaHostRegister."""
        self._locked[start] = size
        return 0

    def unlock(self, start: int) -> int:
        self._locked.pop(start, None)
        return 0

    def is_pinned(self, storage: torch.UntypedStorage) -> bool:
        at = storage.data_ptr()
        return id(storage) in self._pinned or any(start <= at < start + n for start, n in self._locked.items())

    def settle(self, tensor: Tensor) -> None:
        """`tensor` was asked for by name of its device, the processor."""
        self._floating.discard(self._key(tensor))

    # -- what is counted ----------------------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        return getattr(self._here, "is_quiet", False)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within the block this thread's operations are the simulation's own: neither counted nor placed."""
        before, self._here.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self._here.is_quiet = before

    def waits_for(self, kind: str) -> None:
        """The host waits for the card: counted, and refused where it must not."""
        if self.is_quiet:
            return
        if self.recording is not None:
            raise Wait(f"CUDA error: operation not permitted when stream is capturing ({kind})")
        if self.sync == "error":
            raise Wait(f"called a synchronizing CUDA operation ({kind})")
        self.waits[kind, place()] += 1

    def launched(self, name: str) -> None:
        if not self.is_quiet:
            self.launches[name] += 1

    def copied(self, source: torch.UntypedStorage, target: torch.UntypedStorage, is_blocking: bool) -> None:
        """Bytes went between the processor and the card, or within it."""
        from_card, to_card = self.holds_storage(source), self.holds_storage(target)
        self.launched("copy")
        if from_card == to_card:
            return
        own = source if to_card else target
        if is_blocking or not self.is_pinned(own):
            how = "" if is_blocking else " of pageable memory"
            self.waits_for(f"copy {'to' if to_card else 'from'} the card{how}")

    # -- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.is_quiet or any(hasattr(t, "fake_mode") or t.is_meta for t in given):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1] if hasattr(func, "_schema") else str(func)
        if not any(self.holds(t) for t in given):
            return self._elsewhere(func, given, args, kwargs)
        self._check_devices(name, given, args)
        self._check_waits(name, args, kwargs)
        with self.memory.beside(workspaces.of_sort(args[0], _dim(func, args, kwargs)) if name == "sort" else 0):
            out = self._ran(func, name, args, kwargs, given)
            before = {self._key(t) for t in given}
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and name != "_local_scalar_dense" and self._key(tensor) not in before:
                    self.put(tensor)
        return out

    def _elsewhere(self, func, given, args, kwargs):
        """An operation of the processor. What is made of nothing, inside of torch, belongs to whom it meets."""
        out = func(*args, **kwargs)
        known = {self._key(t) for t in given}
        if known <= self._floating:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and not tensor.is_meta and (key := self._key(tensor)) not in known:
                    self._floating.add(key)
                    weakref.finalize(tensor.untyped_storage(), self._floating.discard, key)
        return out

    def _check_devices(self, name: str, given: list[Tensor], args: tuple) -> None:
        if name in _COPYING:
            return
        indices = {id(i) for i in args[1] if i is not None} if name in _INDEXING else set()
        for tensor in given:
            key = self._key(tensor)
            if key in self._blocks or tensor.dim() == 0:  # a number of the processor travels with the launch
                continue
            if key in self._floating:
                self.put(tensor)
            elif id(tensor) in indices:
                self.waits_for("copy of an index to the card")
            else:
                raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                                   f"cuda:0 and cpu! (when checking argument for {name})")

    def _check_waits(self, name: str, args: tuple, kwargs: dict) -> None:
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waits_for(name.strip("_"))
        if name in _INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            self.waits_for("index by a mask")
        if name == "copy_":
            source, target = args[1].untyped_storage(), args[0].untyped_storage()
            self.copied(source, target, not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))

    def _ran(self, func, name: str, args: tuple, kwargs: dict, given: list[Tensor]):
        is_view = hasattr(func, "_schema") and any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and any(t.numel() and not t.untyped_storage().nbytes() for t in given):
            raise RuntimeError("CUDA error: an illegal memory access was encountered (the storage has been freed)")
        if not is_view and name not in _WITHOUT_KERNEL and name != "copy_":
            self.launched(name)
        if name in workspaces.PRODUCTS and self._for_products is None:
            self._for_products = self.memory.take(workspaces.of_products(self.capability))
        if name == "histc":  # the processor's takes no integers
            func = _histc
        if self.recording is not None and not is_view:
            with self.quiet():
                return self.recording.run(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return self._drawn(func, args, kwargs)
        return func(*args, **kwargs)

    def _drawn(self, func, args, kwargs):
        """A random operation draws from the card's generator."""
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        before = torch.random.default_generator.get_state()
        torch.random.default_generator.set_state(self.generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(torch.random.default_generator.get_state())
            torch.random.default_generator.set_state(before)


def _dim(func, args: tuple, kwargs: dict) -> int:
    at = [argument.name for argument in func._schema.arguments].index("dim")
    return kwargs.get("dim", args[at] if at < len(args) else -1)


def _histc(x: Tensor, *given: object) -> Tensor:
    return torch.histc(x.float(), *given).to(x.dtype)


def place() -> str:
    """The innermost line of the product that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PRODUCT):
            name = frame.f_code.co_filename[len(_PRODUCT) + 1:]
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
