"""Store a user's marks on answers as data: pairs for --stage dpo and reward, thumbs for --stage kto.

One JSON lines file per name and kind, below .studio/marks. A new mark on the same answers replaces the old one. A lock
serialises tabs and studios.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.core.own_files import take_lock, write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.studio.run_files import row_of
from hybrid_rlhf.studio.studio import Refused, Route, Studio, own_folder

KINDS = ("pairs", "thumbs")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,79}")
_FILE = re.compile(rf"({_NAME.pattern})\.({'|'.join(KINDS)})\.jsonl")


def routes(studio: Studio) -> list[Route]:
    return [Route("GET", "/api/marks", lambda _query, _body: {"files": listed(studio)}),
            Route("POST", "/api/marks", lambda _query, body: mark(studio, body))]


def listed(studio: Studio) -> list[dict]:
    """The files by name: {"name", "pairs", "thumbs" (counts), "pairs_path", "thumbs_path"}."""
    folder = own_folder(studio, "marks")
    names = {match[1] for name in os.listdir(folder) if (match := _FILE.fullmatch(name))}
    return [counts(folder, name) for name in sorted(names)]


def counts(folder: Path, name: str) -> dict:
    """The number of marks of a name, and the paths of its files."""
    paths = {kind: folder / f"{name}.{kind}.jsonl" for kind in KINDS}
    return {"name": name, **{kind: len(_lines(path)) for kind, path in paths.items()},
            **{f"{kind}_path": str(path) for kind, path in paths.items()}}


def mark(studio: Studio, body: dict) -> dict:
    """{"name", "kind": "pair", "prompt": messages, "chosen", "rejected", "how": "edited" or "compared"} or {"kind":
    "thumb", "prompt", "completion", "is_good": true, false, or null to remove it}: add a mark; returns the counts.

    A pair of the same two answers and a thumb on the same answer are replaced.
    """
    name = body["name"]
    if not _NAME.fullmatch(name) or name != name.strip():
        raise Refused(400, "a name of marks has letters, digits, spaces and . _ - alone, 80 at most", "name")
    kind, row, is_same = _pair(body) if body["kind"] == "pair" else _thumb(body)
    folder = own_folder(studio, "marks")
    path = folder / f"{name}.{kind}.jsonl"
    with take_lock(folder / ".lock"):
        lines = [line for line in _lines(path) if not is_same(row_of(line) or {})]
        added = [] if row.get("label", True) is None else [to_json(row).encode()]
        write_file(path, b"".join(line + b"\n" for line in [*lines, *added]))
        path.chmod(0o600)  # conversations are private
        return counts(folder, name)


def _answer(body: dict, name: str) -> list[dict]:
    """An answer as a message, unchanged."""
    if not body[name].strip():
        raise Refused(400, "an empty answer cannot be an example", name)
    return [{"role": "assistant", "content": body[name]}]


def _pair(body: dict) -> tuple[str, dict, Callable[[dict], bool]]:
    prompt, how, chosen, rejected = body["prompt"], body["how"], _answer(body, "chosen"), _answer(body, "rejected")
    if chosen == rejected:
        raise Refused(400, "the two answers are the same", "chosen")

    def is_same(old: dict) -> bool:
        """Whether `old` has the same two answers, or is an earlier edit of the same rejected answer."""
        is_edit = how == old.get("how") == "edited" and old.get("rejected") == rejected
        is_pair = (old.get("chosen"), old.get("rejected")) in ((chosen, rejected), (rejected, chosen))
        return old.get("prompt") == prompt and (is_edit or is_pair)

    return "pairs", {"prompt": prompt, "chosen": chosen, "rejected": rejected, "how": how}, is_same


def _thumb(body: dict) -> tuple[str, dict, Callable[[dict], bool]]:
    row = {"prompt": body["prompt"], "completion": _answer(body, "completion"), "label": body["is_good"]}
    return "thumbs", row, lambda old: all(old.get(name) == row[name] for name in ("prompt", "completion"))


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.exists() else []
