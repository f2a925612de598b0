"""Costs of operations before a device runs them: multiplications and additions, bytes moved, and how often.

Products and attention are counted by torch.utils.flop_counter's formulas; of everything else the bytes count.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hybrid_rlhf.core.torch_compat import leaves_of

PRODUCT, ATTENTION, PASS, FUSED = "product", "attention", "pass", "fused"
_FREE = ("empty", "new_empty", "detach", "alias", "lift_fresh", "resize", "set_", "_local_scalar_dense", "is_", "sym_",
         "_unsafe_view")
_LOOKUPS = ("embedding", "index", "index_select", "gather", "slice_scatter")  # they read as much as they return
_BACKWARD = 2.5  # products of attention's backward over those of its forward (2307.08691, section 4.1)


class Operation(NamedTuple):
    """kind: PRODUCT, ATTENTION, PASS (over memory) or FUSED (one of ours, over memory). least: of a product, its
    shortest side. count: multiplications and additions; bytes: read and written, except for `packed` weights, which are
    read in as many bits as they are stored in."""

    kind: str
    dtype: torch.dtype
    least: int = 0
    count: float = 0
    bytes: float = 0
    packed: float = 0


Tally = Counter[Operation]


@dataclass(frozen=True)
class Work:
    """Operations of a model, extrapolated from one or two shallower ones with the same code: `tallies` at `depths`."""

    layers: int = 0
    depths: tuple[int, ...] = ()
    tallies: tuple[Tally, ...] = field(default=())

    def total(self, cost: Callable[[Operation], float]) -> float:
        """The sum of `cost` over all operations at all layers."""
        sums = [sum(cost(o) * n for o, n in tally.items()) for tally in self.tallies]
        if len(sums) < 2:
            return sums[0] if sums else 0.0
        (low, high), (first, second) = self.depths, sums
        return second + (second - first) / (high - low) * (self.layers - high)


class Recorder:
    """Tallies operations: aten's, and ours by name. packed: weights that are stored in fewer bits. is_fused: whether a
    product reads them as they are; else in its own dtype, in which they were written just before.
    """

    def __init__(self, packed: Sequence[Tensor] = (), is_fused: bool = False) -> None:
        self.tally: Tally = Counter()
        self._packed, self._is_fused = {id(p.untyped_storage()) for p in packed}, is_fused
        self._unpacked: set[int] = set()  # ids of living storages: references would change what is counted

    def record(self, func: object, arguments: tuple, named: dict, out: object) -> None:
        """An aten operation, with its inputs and outputs."""
        name, inputs, made = str(func).split(".")[1], _tensors((arguments, named)), _tensors(out)
        if name == "empty_like" and inputs and id(inputs[0].untyped_storage()) in self._packed:
            self._unpack(inputs[0], made[0])
        if name.startswith(_FREE) or not made or _is_view(name, inputs, made):
            return
        formula = _formula(name)
        if name.startswith("_scaled_dot_product") and not formula:
            self._attention(name, inputs, made)
        elif formula:
            kind = ATTENTION if "attention" in name else PRODUCT
            self._product(kind, formula(*arguments, **named, out_val=out), inputs, made)
        else:
            read = made if name in _LOOKUPS else inputs
            self._add(Operation(PASS, made[0].dtype, bytes=_bytes(read) + _bytes(made)))

    def record_ours(self, name: str, inputs: Sequence[object], out: object) -> None:
        """An operation of ours (kernels/reference.py)."""
        read, made = _tensors(list(inputs)), _tensors(out)
        if "attention" in name:
            self._attention(name, read[1:] if "backward" in name else read, made)
        else:
            self._add(Operation(FUSED, made[0].dtype, bytes=_bytes(read) + _bytes(made)))

    def _attention(self, name: str, inputs: list[Tensor], made: list[Tensor]) -> None:
        """In causal attention each query sees half of the keys on average."""
        query, key = inputs[1:3] if "backward" in name and name.startswith("_scaled") else inputs[:2]
        batch, heads, length, width = query.shape
        count = 2.0 * batch * heads * length * key.shape[-2] * width * (_BACKWARD if "backward" in name else 1)
        self._add(Operation(ATTENTION, query.dtype, count=count, bytes=_bytes(inputs) + _bytes(made)))

    def _product(self, kind: str, count: float, inputs: list[Tensor], made: list[Tensor]) -> None:
        sides = [*inputs[-2].shape[-2:], inputs[-1].shape[-1]]
        unpacked = [t for t in inputs if id(t.untyped_storage()) in self._unpacked] if self._is_fused else []
        read = [t for t in inputs if not any(t is u for u in unpacked)]
        self._add(Operation(kind, made[0].dtype, min(sides), count, _bytes(read) + _bytes(made),
                            sum(t.numel() for t in unpacked)))

    def _unpack(self, weight: Tensor, made: Tensor) -> None:
        storage = made.untyped_storage()
        self._unpacked.add(id(storage))
        weakref.finalize(storage, self._unpacked.discard, id(storage))
        if not self._is_fused:
            self._add(Operation(PASS, made.dtype, bytes=_bytes([made]), packed=weight.numel()))

    def _add(self, operation: Operation) -> None:
        self.tally[operation] += 1


def _formula(name: str) -> Callable | None:
    """torch's count of an aten operation's multiplications and additions; the same for its in-place form."""
    return flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _is_view(name: str, inputs: list[Tensor], made: list[Tensor]) -> bool:
    """Whether nothing is read or written: the outputs are parts of the inputs, not changed in place."""
    if name.endswith("_") and not name.endswith("__"):
        return False
    storages = {id(t.untyped_storage()) for t in inputs}
    return bool(storages) and all(id(t.untyped_storage()) in storages for t in made)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors; of expanded ones, those of their storage."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
