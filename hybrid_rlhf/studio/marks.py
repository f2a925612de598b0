"""What a person thought of answers, as data: pairs that --stage dpo and reward read, thumbs that --stage kto reads.

One file of each kind under a name, below .studio/marks: JSON lines, appended and synced whole. A mark that contradicts
one on the same answers takes its place. Two tabs, or two studios, take turns.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.core.own_files import no_link, write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.studio import file_lock
from hybrid_rlhf.studio.studio import Refused, Route, Studio
from hybrid_rlhf.studio.studio_files import own_folder, refused

KINDS = ("pairs", "thumbs")
MAX_FILE, MAX_MESSAGES = 2**26, 4096  # bytes of a file, messages of a prompt
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,79}")
_FILE = re.compile(rf"({_NAME.pattern})\.({'|'.join(KINDS)})\.jsonl")
_ROLES = ("system", "user", "assistant")
_HOW = ("edited", "compared")


def routes(studio: Studio) -> list[Route]:
    return [Route("GET", "/api/marks", lambda _query, _body: {"files": listed(studio)}),
            Route("POST", "/api/marks", lambda _query, body: mark(studio, body))]


def listed(studio: Studio) -> list[dict]:
    """The files by name: {"name", "pairs", "thumbs" (how many), "pairs_path", "thumbs_path"}."""
    folder = own_folder(studio, "marks")
    names = {found[1] for entry in os.scandir(folder) if (found := _FILE.fullmatch(entry.name))}
    return [counts(folder, name) for name in sorted(names)]


def counts(folder: Path, name: str) -> dict:
    """How many marks a name has, and where."""
    paths = {kind: _path(folder, name, kind) for kind in KINDS}
    return {"name": name, **{kind: len(_lines(path)) for kind, path in paths.items()},
            **{f"{kind}_path": str(path) for kind, path in paths.items()}}


def mark(studio: Studio, body: dict) -> dict:
    """{"name", "kind": "pair", "prompt": messages, "chosen", "rejected", "how"} or {"kind": "thumb", "prompt",
    "completion", "is_good": true, false, or null to take it back}: the counts.

    A pair of the same two answers and a thumb on the same answer are replaced.
    """
    name, kind = body.get("name"), body.get("kind")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        raise Refused(400, "a name of marks has letters, digits, spaces and . _ - alone, 80 at most", "name")
    prompt = _prompt(body.get("prompt"))
    if kind == "pair":
        row, is_same = _pair(prompt, body)
    elif kind == "thumb":
        row, is_same = _thumb(prompt, body)
    else:
        raise Refused(400, f"kind is {str(kind)[:40]!r}; it is pair or thumb", "kind")
    folder = own_folder(studio, "marks")
    path = _path(folder, name, f"{kind}s")
    try:
        with file_lock.alone(folder / ".lock"):
            _put(path, None if row.get("label", True) is None else row, is_same)
            return counts(folder, name)
    except OSError as error:
        raise refused(error, str(path)) from error


def _prompt(given: object) -> list[dict]:
    """The messages, of which only role and content are kept."""
    if not isinstance(given, list) or not given or len(given) > MAX_MESSAGES:
        raise Refused(400, "prompt must be a list of messages", "prompt")
    messages = []
    for each in given:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if role not in _ROLES or not isinstance(content, str):
            raise Refused(400, "a message has a role (system, user, assistant) and a content of text", "prompt")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise Refused(400, "a prompt ends with what the user said", "prompt")
    return messages


def _answer(body: dict, name: str) -> list[dict]:
    """As it was written, spaces at its ends too."""
    text = body.get(name)
    if not isinstance(text, str):
        raise Refused(400, f"{name} must be text", name)
    if not text.strip():
        raise Refused(400, "an empty answer is no example", name)
    return [{"role": "assistant", "content": text}]


def _pair(prompt: list[dict], body: dict) -> tuple[dict, Callable[[dict], bool]]:
    chosen, rejected = _answer(body, "chosen"), _answer(body, "rejected")
    if chosen == rejected:
        raise Refused(400, "the two answers are the same", "chosen")
    if body.get("how") not in _HOW:
        raise Refused(400, f"how is {' or '.join(_HOW)}", "how")
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "how": body["how"]}

    def is_same(old: dict) -> bool:
        """The same two answers; and better words for the same answer, which were better before."""
        is_edit = body["how"] == old.get("how") == "edited" and old.get("rejected") == rejected
        return old.get("prompt") == prompt and (is_edit or [old.get("chosen"), old.get("rejected")] in (
            [chosen, rejected], [rejected, chosen]))

    return row, is_same


def _thumb(prompt: list[dict], body: dict) -> tuple[dict, Callable[[dict], bool]]:
    completion, label = _answer(body, "completion"), body.get("is_good")
    if label is not None and not isinstance(label, bool):
        raise Refused(400, "is_good is true, false, or null to take it back", "is_good")
    row = {"prompt": prompt, "completion": completion, "label": label}
    return row, lambda old: old.get("prompt") == prompt and old.get("completion") == completion


def _path(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{name}.{kind}.jsonl"


def _lines(path: Path) -> list[str]:
    """Whole lines alone: what a process that was killed left of one is none. Refused for a link and for a giant."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n", opener=no_link) as file:
            text = file.read(MAX_FILE + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(error, str(path)) from error
    if len(text) > MAX_FILE:
        raise Refused(409, f"{path.name} is full; give another name", "name")
    return [line for line in text.split("\n")[:-1] if line.strip()]


def _put(path: Path, row: dict | None, is_same: Callable[[dict], bool]) -> None:
    """`row` in the file, instead of those that it replaces (None: nothing instead). Lines of another kind stay."""
    lines = _lines(path)
    kept = [line for line in lines if not is_same(_read(line))]
    added = [] if row is None else [to_json(row)]
    if kept != lines or _is_torn(path):
        write_file(path, "".join(f"{line}\n" for line in [*kept, *added]).encode("utf-8", "surrogateescape"))
    elif added:
        with open(path, "ab", opener=_made) as file:
            file.write(f"{added[0]}\n".encode())
            file.flush()
            os.fsync(file.fileno())


def _read(line: str) -> dict:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end."""
    try:
        with open(path, "rb", opener=no_link) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return size > 0 and file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _made(path: str, flags: int) -> int:
    """For this user alone: conversations are nobody else's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
