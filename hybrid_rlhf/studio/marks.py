"""Store a user's marks on answers as data: pairs for --stage dpo and reward, thumbs for --stage kto.

One JSON lines file per name and kind, below .studio/marks. A new mark on the same answers replaces the old one. A lock
serialises tabs and studios.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.core.file_lock import take_lock
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.studio.studio import Refused, Route, Studio, own_folder, refused

KINDS = ("pairs", "thumbs")
MAX_FILE = 2**26  # bytes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,79}")
_FILE = re.compile(rf"({_NAME.pattern})\.({'|'.join(KINDS)})\.jsonl")
_ROLES = ("system", "user", "assistant")
_HOW = ("edited", "compared")


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
    """{"name", "kind": "pair", "prompt": messages, "chosen", "rejected", "how"} or {"kind": "thumb", "prompt",
    "completion", "is_good": true, false, or null to remove it}: add a mark; returns the counts.

    A pair of the same two answers and a thumb on the same answer are replaced.
    """
    name, kind = body.get("name"), body.get("kind")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        raise Refused(400, "a name of marks has letters, digits, spaces and . _ - alone, 80 at most", "name")
    if kind not in ("pair", "thumb"):
        raise Refused(400, f"kind is {str(kind)[:40]!r}; it is pair or thumb", "kind")
    prompt = _prompt(body.get("prompt"))
    row, is_same = _pair(prompt, body) if kind == "pair" else _thumb(prompt, body)
    folder = own_folder(studio, "marks")
    path = folder / f"{name}.{kind}s.jsonl"
    try:
        with take_lock(folder / ".lock"):
            lines = [line for line in _lines(path) if not is_same(_read(line))]
            added = [] if row.get("label", True) is None else [to_json(row)]
            text = "".join(f"{line}\n" for line in [*lines, *added])
            write_file(path, text.encode("utf-8", "surrogateescape"))
            path.chmod(0o600)  # conversations are private
            return counts(folder, name)
    except OSError as error:
        raise refused(error, str(path)) from error


def _prompt(messages: object) -> list[dict]:
    """The messages with only role and content."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "prompt must be a list of messages", "prompt")
    prompt = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise Refused(400, "a message has a role (system, user, assistant) and a content of text", "prompt")
        prompt.append({"role": role, "content": content})
    if prompt[-1]["role"] != "user":
        raise Refused(400, "a prompt ends with what the user said", "prompt")
    return prompt


def _answer(body: dict, name: str) -> list[dict]:
    """An answer as a message, unchanged."""
    text = body.get(name)
    if not isinstance(text, str):
        raise Refused(400, f"{name} must be text", name)
    if not text.strip():
        raise Refused(400, "an empty answer is no example", name)
    return [{"role": "assistant", "content": text}]


def _pair(prompt: list[dict], body: dict) -> tuple[dict, Callable[[dict], bool]]:
    chosen, rejected, how = _answer(body, "chosen"), _answer(body, "rejected"), body.get("how")
    if chosen == rejected:
        raise Refused(400, "the two answers are the same", "chosen")
    if how not in _HOW:
        raise Refused(400, f"how is {' or '.join(_HOW)}", "how")

    def is_same(old: dict) -> bool:
        """Whether `old` has the same two answers, or is an earlier edit of the same rejected answer."""
        is_edit = how == old.get("how") == "edited" and old.get("rejected") == rejected
        is_pair = (old.get("chosen"), old.get("rejected")) in ((chosen, rejected), (rejected, chosen))
        return old.get("prompt") == prompt and (is_edit or is_pair)

    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "how": how}, is_same


def _thumb(prompt: list[dict], body: dict) -> tuple[dict, Callable[[dict], bool]]:
    completion, label = _answer(body, "completion"), body.get("is_good")
    if label is not None and not isinstance(label, bool):
        raise Refused(400, "is_good is true, false, or null to take it back", "is_good")
    row = {"prompt": prompt, "completion": completion, "label": label}
    return row, lambda old: old.get("prompt") == prompt and old.get("completion") == completion


def _lines(path: Path) -> list[str]:
    """The complete lines: a killed process may leave a partial last one. Raises Refused for a file over MAX_FILE."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return []
    if len(text) > MAX_FILE:
        raise Refused(409, f"{path.name} is full; give another name", "name")
    return [line for line in text.split("\n")[:-1] if line.strip()]


def _read(line: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
