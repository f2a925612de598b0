"""A capture for processors that behaves as a card's graphs do: operations are recorded with the tensors they read and
wrote, and a replay repeats them on those tensors. No Python of the step runs again, so whatever the host decided while
recording (a position, a width, a shape) stays as it was; an operation that would make the host wait is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.ops import Ops

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal", "lift_fresh")


class Tape(TorchDispatchMode):
    """Records what runs inside it, and afterwards puts every tensor back that was written."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        for tensor in tree_leaves([args[i] for i in written if i < len(args)]):
            storage = tensor.untyped_storage()
            self._before.setdefault(storage._cdata, (storage, storage.clone()))
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            tree_map(_put, out, func(*args, **kwargs))


def _put(old: object, new: object) -> None:
    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
        old.copy_(new)


class TapeCapture:
    """A capture (engine/decode/cuda_graphs.py) by tapes; counts recordings and replays."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        with tape:
            step()
        tape.undo()
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay


OPS = Ops("reference, for tapes", reference.decode_attention, reference.sample)
