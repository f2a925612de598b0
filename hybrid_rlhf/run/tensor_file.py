"""Write and read safetensors files one tensor at a time.

The safetensors package's save_file has every tensor as bytes in memory, and its safe_open keeps the whole file mapped:
both take the memory of a second model. The format is theirs: 8 bytes with the header's length, a JSON header, raw
little-endian numbers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.models.weights import read_header

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
           "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE = 1 << 24  # bytes


def is_storable(tensor: Tensor) -> bool:
    return tensor.dtype in _NAMES


def write(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write `tensors` to a new file, moving one at a time to the CPU; returns the file's sha256. Does not sync."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # widest dtype first: all aligned
    header, end = {}, 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape),
                        "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            file.write(piece)
            digest.update(piece)
        for name in order:
            for piece in pieces(tensors[name]):
                file.write(piece)
                digest.update(piece)
    return digest.hexdigest()


def pieces(tensor: Tensor):  # noqa: ANN201 - buffers
    """The bytes of a tensor, a piece at a time."""
    raw = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return (raw[i : i + _PIECE] for i in range(0, len(raw), _PIECE))


class TensorFile:
    """A safetensors file that `write` has written. Tensors are read by name, each into its own memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start, entries = read_header(path)
        self._entries = {name: (_DTYPES[entry["dtype"]], entry["shape"], *entry["data_offsets"])
                         for name, entry in entries.items()}
        self.names = self._entries.keys()

    def read(self, name: str) -> Tensor:
        dtype, shape, begin, end = self._entries[name]
        raw = torch.empty(end - begin, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self._start + begin)
            if raw.numel() and file.readinto(memoryview(raw.numpy())) != end - begin:
                raise ValueError(f"{self.path} ends within {name}")
        return raw.view(dtype).view(shape)

    def map(self, name: str) -> Tensor:
        """The tensor memory-mapped, copy-on-write: only used parts are read, and the file never changes."""
        dtype, shape, begin, end = self._entries[name]
        if begin == end:
            return self.read(name)
        raw = np.memmap(self.path, np.uint8, "c", self._start + begin, (end - begin,))
        return torch.from_numpy(raw).view(dtype).view(shape)
