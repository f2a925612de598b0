"""Checkpoints: tensors as safetensors, the rest as JSON, a manifest with checksums, and a rename at the end.

Nothing is pickled. A folder without a fitting manifest does not exist for `latest`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from torch import Tensor

from hybrid_rlhf.config import UserError
from hybrid_rlhf.distributed import barrier, is_main

TENSORS, REST, MANIFEST = "state.safetensors", "state.json", "manifest.json"


def save(folder: str | Path, step: int, state: dict, keep: int = 2) -> Path:
    """Write `state` as folder/step-{step} and keep the `keep` newest steps; returns the new checkpoint's path.

    state: dicts with string keys, lists, tensors, numbers, strings, booleans and None, nested; tuples come back as
    lists. Complete or absent: all is written and synced beside its place, then renamed, and only then are older ones
    removed. Only the main process writes. Raises TypeError for anything else in `state`, UserError if the disk refuses.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    target = folder / f"step-{step:08d}"
    if is_main():
        beside = folder / f".{target.name}.tmp"
        try:
            clear(folder, only_torn=True)
            beside.mkdir(parents=True)
            _write(beside, state)
            shutil.rmtree(target, ignore_errors=True)
            beside.rename(target)
            _sync(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise UserError(f"cannot save a checkpoint in {folder}: {error}") from error
        for old in _steps(folder)[:-keep]:
            shutil.rmtree(old)
    barrier()
    return target


def load(path: str | Path) -> dict:
    """The state in a checkpoint folder, tensors on the CPU. Raises ValueError if it is torn or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not is_complete(path):
        raise ValueError(f"{path} is not a complete checkpoint")
    try:
        return _join(json.loads((path / REST).read_text(encoding="utf-8")), load_file(path / TENSORS))
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint of ours: {error}") from error


def is_complete(path: str | Path) -> bool:
    """Whether every file is there with the size and checksum that the manifest says."""
    path = Path(path)
    try:
        sums = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return all((path / n).stat().st_size == sums[n]["bytes"] and _sha256(path / n) == sums[n]["sha256"]
                   for n in (TENSORS, REST))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None. A damaged one is passed over."""
    return next((p for p in reversed(_steps(Path(folder))) if is_complete(p)), None)


def clear(folder: str | Path, *, only_torn: bool = False) -> None:
    """Remove the checkpoints in `folder` (or only what a crash left half written); other files stay."""
    folder = Path(folder)
    for path in [*folder.glob(".step-*.tmp"), *([] if only_torn else _steps(folder))]:
        shutil.rmtree(path)


def _steps(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    numbered = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(numbered, key=lambda p: int(p.name.removeprefix("step-")))


def _write(folder: Path, state: dict) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_split(state, "", tensors))
    save_file(tensors, folder / TENSORS)
    (folder / REST).write_text(rest, encoding="utf-8")
    sums = {n: {"bytes": (folder / n).stat().st_size, "sha256": _sha256(folder / n)} for n in (TENSORS, REST)}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    for name in (TENSORS, REST, MANIFEST):
        _sync(folder / name)
    _sync(folder)


def _split(value: object, path: str, tensors: dict[str, Tensor]) -> dict:
    """`value` as JSON, each tensor replaced by {"tensor": its name in `tensors`}; numbers and strings are wrapped too,
    so that no content can be taken for a reference."""
    if isinstance(value, Tensor):
        # clone: safetensors refuses tensors that share memory, as tied weights and views do
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        wrong = [k for k in value if not isinstance(k, str)]
        if wrong:
            raise TypeError(f"state{path} has the key {wrong[0]!r}; keys of a checkpoint are strings")
        # "/" inside a key is escaped as in JSON pointers: a/b must not meet b in a
        return {"dict": {k: _split(v, f"{path}/{k.replace('~', '~0').replace('/', '~1')}", tensors)
                         for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list": [_split(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"state{path} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings and lists")


def _join(value: dict, tensors: dict[str, Tensor]) -> object:
    (kind, content), = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: _join(v, tensors) for k, v in content.items()}
    if kind == "list":
        return [_join(v, tensors) for v in content]
    return content


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
