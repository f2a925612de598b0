"""Read weight files without a model: fingerprints, headers, single tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from hybrid_rlhf.core.config import UserError, check

_PIECE = 4096  # bytes
_MAX_HEADER = 100_000_000  # bytes; safetensors itself takes no larger one


def fingerprint(folder: str | Path) -> str | None:
    """sha256 over every tensor's name, type, shape and the bytes at its beginning, middle and end.

    Equal for equal weights in one file or several; fine-tuning changes each matrix that it trains all over, so a few
    bytes of each distinguish two trainings, at the cost of a few hundred small reads. None where there are no
    safetensors (a hub id). Raises UserError for a damaged file.
    """
    if not (files := _files(folder)):
        return None
    digests: dict[str, str] = {}
    for path in files:
        start, entries = read_header(path)
        with path.open("rb") as file:
            digests |= {name: _digest(file, start, entry) for name, entry in entries.items()}
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def _files(folder: str | Path) -> list[Path]:
    """The safetensors of a folder, without a second copy in Mistral's own layout."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return [f for f in files if not f.name.startswith("consolidated")] or files


def read_header(path: Path) -> tuple[int, dict[str, dict]]:
    """The offset (bytes) of the data of a safetensors file, and for each tensor its dtype, shape and data_offsets.
    Raises UserError for a damaged or truncated file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(min(size, _MAX_HEADER)))
            room = path.stat().st_size - 8 - size
        entries = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        is_whole = all(isinstance(entry["dtype"], str) and min(entry["shape"], default=0) >= 0 <= begin <= end
                       for entry in entries.values() for begin, end in [entry["data_offsets"]])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged; download or export it anew") from error
    check(is_whole, f"{path} is not a safetensors file, or is damaged; download or export it anew")
    check(end <= room, f"{path} is not a safetensors file, or is damaged: {end - room} bytes of its end are missing; "
                       "download or export it anew")
    return 8 + size, entries


def sizes(folder: str | Path) -> list[int]:
    """The number of elements of each tensor in the safetensors of a folder. Raises UserError for a damaged file."""
    return [math.prod(entry["shape"]) for path in _files(folder)
            for entry in read_header(path)[1].values()]


def dtypes(folder: str | Path) -> dict[str, str]:
    """The dtype of each tensor in the safetensors of a folder, as named there. Raises UserError for a damaged file."""
    return {name: entry["dtype"] for path in _files(folder) for name, entry in read_header(path)[1].items()}


def float_dtype(folder: str | Path) -> torch.dtype | None:
    """The most frequent of float32, bfloat16 and float16 in the safetensors of a folder; None where there is none."""
    plain = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    kinds = Counter(kind for kind in dtypes(folder).values() if kind in plain)
    return plain[kinds.most_common(1)[0][0]] if kinds else None


def identity(path: str) -> str:
    """A string that identifies the weights at a folder or hub id: their fingerprint, or the id."""
    return fingerprint(path) or f"hub:{path}"


def _digest(file, start: int, entry: dict) -> str:  # noqa: ANN001
    begin, end = entry["data_offsets"]
    digest = hashlib.sha256(json.dumps([entry["dtype"], entry["shape"]]).encode())
    for offset in dict.fromkeys((begin, max(begin, (begin + end - _PIECE) // 2), max(begin, end - _PIECE))):
        file.seek(start + offset)
        digest.update(file.read(min(_PIECE, end - offset)))
    return digest.hexdigest()


def read_tensor(folder: str | Path, name: str) -> Tensor:
    """One tensor of a model folder. Raises UserError if there is none of that name."""
    from safetensors import safe_open

    folder = Path(folder)
    for path in _files(folder):
        read_header(path)
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - not a dict
                return file.get_tensor(name)
    check(folder.exists(), f"model folder {folder} does not exist; give the folder of a reward run's model")
    raise UserError(f"{folder} holds no {name}; a reward model with a scalar head is needed")
