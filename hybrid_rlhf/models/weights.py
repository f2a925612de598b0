"""Weight files without a model: which weights they are, and single tensors out of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from torch import Tensor

from hybrid_rlhf.core.config import UserError, check

_PIECE = 4096  # bytes
_MAX_HEADER = 100_000_000  # bytes; safetensors itself takes no larger one


def fingerprint(folder: str | Path) -> str | None:
    """sha256 over every tensor's name, type, shape and the bytes at its beginning, middle and end.

    Equal for equal weights in one file or several; fine-tuning in whatever way changes every matrix it touches, so a
    few bytes of each tell two trainings apart, at the cost of a few hundred small reads. None where there are no
    safetensors (a hub id). Raises UserError for a damaged file.
    """
    files = sorted(Path(folder).expanduser().glob("*.safetensors"))
    if not files:
        return None
    found: dict[str, str] = {}
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(size, _MAX_HEADER)))
                for name, entry in header.items():
                    if name != "__metadata__":
                        found[name] = _digest(file, 8 + size, entry)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
                raise UserError(f"{path} is no safetensors file, or is damaged; download or "
                                "export it anew") from error
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def identity(path: str) -> str:
    """What tells the weights at a folder or hub id from others: their fingerprint, or the id."""
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

    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - not a dict
                return file.get_tensor(name)
    check(Path(folder).exists(), f"model folder {folder} does not exist; give the folder of a reward run's model")
    raise UserError(f"{folder} holds no {name}; a reward model with a scalar head is needed")
