"""Checkpoints: tensors as safetensors, the rest as JSON, a manifest with checksums, written atomically by a rename.

Nothing is pickled, and no path is read from a file. `latest` ignores a folder whose files differ from its manifest in
any byte. Each process writes its own state: state.safetensors and state.json, and with several processes state-1.*,
state-2.*, ..., without tensors that equal the first process's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import gather_over_ranks, is_main, rank, world_size
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.run import tensor_file
from hybrid_rlhf.run.tensor_file import TensorFile, is_storable

TENSORS, REST, MANIFEST, BEST = "state.safetensors", "state.json", "manifest.json", "best"
FORMAT = 2


class SaveError(UserError):
    """A checkpoint could not be written; existing ones are untouched."""


def save(folder: str | Path, step: int, state: dict, keep: int = 2, spare: Collection[str] = ()) -> Path:
    """Write `state` as folder/step-{step}; keeps the `keep` newest checkpoints and those named in `spare`, removes
    others; returns the new checkpoint's path.

    state: this process's; nested dicts with string keys, lists, tensors, numbers, strings, booleans and None; tuples
    are loaded as lists. Tensors are written one at a time. Every process calls it. Atomic: all is written and synced in
    a temporary folder, which is then renamed, and only then are older ones removed. Raises TypeError for anything else
    in `state`, and SaveError in every process if the disk refuses a file of any.
    """
    folder = Path(folder)
    target = at(folder, step)
    tensors: dict[str, Tensor] = {}
    rest = split(state, "", tensors)
    tensors = _not_of_the_first(tensors)
    beside = Path(together(folder, lambda: str(_make_room(folder)) if is_main() else None)[0])
    try:
        sums = together(folder, lambda: _write_files(beside, tensors, rest))
        together(folder, lambda: is_main() and _finish(folder, beside, target, sums, keep, spare))
    except SaveError:
        if is_main():
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def load(path: str | Path) -> dict:
    """The state in a checkpoint folder, tensors on the CPU. Raises ValueError if it is incomplete or damaged."""
    path = Path(path)
    wrong = damage(path)
    if wrong:
        raise ValueError(f"{path} is not a complete checkpoint: {wrong}")
    return load_all(read(path))


def read(path: str | Path, of: int | None = None, *, is_mapped: bool = False) -> Stored:
    """The state that this process (or process number `of`) saved in a complete checkpoint folder. A tensor is read at
    each access, into new memory; is_mapped: memory-mapped, so that only used parts are read."""
    path, of = Path(path), rank() if of is None else of
    files = [TensorFile(path / of_rank(TENSORS, r)) for r in dict.fromkeys((of, 0))]

    def tensor(name: str) -> Tensor:
        file = next(f for f in files if name in f.names)
        return file.map(name) if is_mapped else file.read(name)

    return Stored(json.loads((path / of_rank(REST, of)).read_text(encoding="utf-8"))["dict"], tensor)


def num_processes(path: Path) -> int:
    """The number of processes that wrote a complete checkpoint."""
    return int(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["world_size"])


def damage(path: str | Path, *, is_thorough: bool = True) -> str | None:
    """Why a folder is not a complete checkpoint, in words; None for a complete one.

    is_thorough: reads every byte; otherwise checks sizes only.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["sha256"] != _sum_of(manifest) or manifest["format"] != FORMAT:
            return f"{MANIFEST} is damaged, or of another release"
        expected = {of_rank(n, r) for r in range(manifest["world_size"]) for n in (TENSORS, REST)}
        if set(files) != expected:
            return f"{MANIFEST} names other files"
        for name, entry in files.items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if is_thorough and _sha256(path / name) != entry["sha256"]:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def latest(folder: str | Path, warn: Callable[[str], None] = lambda _text: None, *,
           is_thorough: bool = True) -> Path | None:
    """The newest complete checkpoint in `folder`, or None. A damaged one is skipped; `warn` gets a line about it."""
    for path in reversed(steps(folder)):
        wrong = damage(path, is_thorough=is_thorough)
        if wrong is None:
            return path
        warn(f"checkpoint {path} is damaged and is passed over: {wrong}")
    return None


def keep_best(checkpoint: Path) -> Path:
    """Link the checkpoint's files into best/ beside it (or copy them), in place of the checkpoint there."""
    target = checkpoint.parent / BEST / checkpoint.name
    together(target.parent, lambda: is_main() and _link(checkpoint, target))
    return target


def _link(checkpoint: Path, target: Path) -> None:
    beside = _make_room(target.parent)
    copy_files(checkpoint, beside)
    _sync(beside)
    _replace(beside, target)
    for old in steps(target.parent):
        if old != target:
            own_files.remove_folder(old)


def copy_files(checkpoint: Path, folder: Path) -> None:
    """Hard-link the files of a checkpoint into `folder`, or copy them. OSError where the disk refuses, or where the
    checkpoint is removed meanwhile."""
    for path in checkpoint.iterdir():
        try:
            os.link(path, folder / path.name)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links here, or another file system
            shutil.copyfile(path, folder / path.name)
            _sync(folder / path.name)


def copy_changed(path: Path, folder: Path, changes: Mapping[tuple[str, ...], object]) -> Path:
    """Copy the complete checkpoint of one process in `path` to folder/NAME, tensors by a hard link where that can be,
    with other values of its state; changes: the keys that lead to a value (without tensors) -> the new one. Returns the
    copy. Raises OSError where the disk refuses, KeyError for keys that are not there."""
    rest, manifest = (json.loads((path / name).read_text(encoding="utf-8")) for name in (REST, MANIFEST))
    for keys, value in changes.items():
        place = rest
        for key in keys[:-1]:
            place = place["dict"][key]
        place["dict"][keys[-1]] = split(value, "", {})
    beside, raw = _make_room(folder), json.dumps(rest).encode()
    copy_files(path, beside)
    manifest["files"][REST] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    own_files.write_file(beside / REST, raw)  # a new file: the old one is linked
    own_files.write_file(beside / MANIFEST, json.dumps(manifest | {"sha256": _sum_of(manifest)}, indent=1))
    _sync(beside)
    _replace(beside, folder / path.name)
    return folder / path.name


def clear(folder: str | Path, *, after: int = -1) -> None:
    """Remove the checkpoints in `folder` of steps after `after`; other files stay."""
    for path in steps(folder):
        if number(path) > after:
            own_files.remove_folder(path)
    own_files.clear_unfinished(Path(folder))


def steps(folder: str | Path) -> list[Path]:
    """Checkpoint folders, oldest first, complete or not."""
    return sorted((p for p in Path(folder).glob("step-*") if is_name(p.name)), key=number)


def at(folder: Path, step: int) -> Path:
    """The checkpoint of a step in `folder`."""
    return folder / f"step-{step:08d}"


def is_name(name: str) -> bool:
    """Whether `name` is a checkpoint's."""
    return name.startswith("step-") and name.removeprefix("step-").isdecimal()


def is_checkpoint(path: Path) -> bool:
    """Whether `path` has a checkpoint's name, and a manifest, which is written last."""
    return is_name(path.name) and (path / MANIFEST).is_file()


def number(path: Path) -> int:
    """The step of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def of_rank(name: str, number_of_rank: int) -> str:
    """state.json, state-1.json, ..."""
    stem, suffix = name.split(".")
    return name if number_of_rank == 0 else f"{stem}-{number_of_rank}.{suffix}"


def together(folder: Path, act: Callable[[], object]) -> list:
    """Call `act` in every process; returns all results. SaveError in all processes if any has failed."""
    result, error = None, None
    try:
        result = act()
    except OSError as caught:
        error = refusal(caught) or f"{caught.strerror or caught}; make the folder one that can be written to"
    outcomes = gather_over_ranks([result, error])
    if refused := next((e for _, e in outcomes if e), None):
        raise SaveError(f"cannot save a checkpoint in {folder}: {refused}")
    return [each for each, _ in outcomes]


def _make_room(folder: Path) -> Path:
    """A new empty folder in `folder`; removes what a crash has left half written or half removed."""
    folder.mkdir(parents=True, exist_ok=True)
    own_files.clear_unfinished(folder)
    beside = own_files.fresh_path(folder)
    beside.mkdir()
    return beside


def _write_files(beside: Path, tensors: dict[str, Tensor], rest: dict) -> dict:
    """This process's two files; returns their entries in the manifest."""
    names = of_rank(TENSORS, rank()), of_rank(REST, rank())
    raw = json.dumps(rest).encode()
    with (beside / names[1]).open("xb") as file:
        file.write(raw)
    sums = {names[0]: tensor_file.write(beside / names[0], tensors),
            names[1]: hashlib.sha256(raw).hexdigest()}
    for name in names:
        _sync(beside / name)
    return {name: {"bytes": (beside / name).stat().st_size, "sha256": sums[name]} for name in names}


def _not_of_the_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, without those that the first process has under the same name with the same bits."""
    if world_size() == 1:
        return tensors
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    first = gather_over_ranks(digests if is_main() else None)[0]
    return tensors if is_main() else {n: t for n, t in tensors.items() if first.get(n) != digests[n]}


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for piece in tensor_file.pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


def _finish(folder: Path, beside: Path, target: Path, sums: list[dict], keep: int, spare: Collection[str]) -> None:
    manifest = {"format": FORMAT, "world_size": len(sums), "files": {k: v for each in sums for k, v in each.items()}}
    (beside / MANIFEST).write_text(json.dumps(manifest | {"sha256": _sum_of(manifest)}, indent=1), encoding="utf-8")
    _sync(beside / MANIFEST)
    _sync(beside)
    _replace(beside, target)
    for old in [p for p in steps(folder) if p.name not in spare][:-keep]:
        own_files.remove_folder(old)


def _replace(beside: Path, target: Path) -> None:
    """Rename `beside` to `target`; an existing target is missing only between two renames."""
    own_files.put(beside, target)
    _sync(target.parent)
    _sync(target.parent.parent)


def _sum_of(manifest: dict) -> str:
    content = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- a state as JSON and named tensors ---------------------------------------------------------------------------------


class Stored(Mapping):
    """A dict of a checkpoint. A tensor is read at each access, and not cached."""

    def __init__(self, content: dict, tensor: Callable[[str], Tensor]) -> None:
        self._content, self._tensor = content, tensor

    def __getitem__(self, key: str) -> object:
        return _join(self._content[key], self._tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def split(value: object, path: str, tensors: dict[str, Tensor]) -> dict:
    """`value` as JSON, each tensor replaced by {"tensor": its name in `tensors`}; numbers and strings are wrapped too,
    so that no content is mistaken for a reference."""
    if isinstance(value, Tensor) and is_storable(value):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        wrong = [k for k in value if not isinstance(k, str)]
        if wrong:
            raise TypeError(f"state{path} has the key {wrong[0]!r}; keys of a checkpoint are strings")
        # "/" inside a key is escaped as in JSON pointers: a/b must not meet b in a
        return {"dict": {k: split(v, f"{path}/{k.replace('~', '~0').replace('/', '~1')}", tensors)
                         for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list": [split(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no NaN or infinity
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"state{path} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings and lists")


def _join(value: dict, tensor: Callable[[str], Tensor]) -> object:
    (kind, content), = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return Stored(content, tensor)
    if kind == "list":
        return [_join(v, tensor) for v in content]
    return float(content) if kind == "float" else content


def load_all(value: object) -> object:
    """`value` as plain dicts, with all of its tensors read."""
    if isinstance(value, Stored):
        return {k: load_all(v) for k, v in value.items()}
    return [load_all(v) for v in value] if isinstance(value, list) else value
