"""Save the batch that led to a loss or gradient that is not finite, for inspection."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from torch import Tensor

from hybrid_rlhf.core import own_files
from hybrid_rlhf.run import tensor_file
from hybrid_rlhf.run.state_tree import split

FOLDER = "not_finite"


def keep(output_dir: str | Path, **records: object) -> Path:
    """Write `records` (dataclasses of tensors and lists, such as a batch or a rollout) as tensors.safetensors and
    rest.json in a folder under output_dir; returns the folder. Existing files are replaced. Raises OSError."""
    folder = Path(output_dir) / FOLDER
    tensors: dict[str, Tensor] = {}
    rest = split({name: _plain(record) for name, record in records.items() if record is not None}, "", tensors)
    with own_files.fresh_folder(Path(output_dir)) as beside:
        tensor_file.write(beside / "tensors.safetensors", tensors)
        (beside / "rest.json").write_text(json.dumps(rest, indent=1), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in beside.iterdir():
            path.replace(folder / path.name)
    return folder


def _plain(value: object) -> object:
    """Dataclasses as dicts, and values that a checkpoint cannot hold as their repr."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    is_kept = value is None or isinstance(value, (bool, int, float, str))
    return value if is_kept or (isinstance(value, Tensor) and tensor_file.is_storable(value)) else repr(value)
