"""A judge's replies by the content of what was asked, in memory and, where a folder is given, in a file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.strict_json import to_json

KEPT = 20_000  # replies in memory, where no folder is given


def key_of(*content: object) -> str:
    """The name of a question: whoever changes model, rubric, template or response asks another one."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:40]


class AnswerCache:
    """Replies that could be read, by `key_of` the question. folder: where they are kept in `judge.jsonl`, one a line,
    which several processes may append to; None: the newest KEPT of them last while the process does."""

    def __init__(self, folder: str | None = None) -> None:
        self._known: OrderedDict[str, object] = OrderedDict()
        self._file: Path | None = None
        self.num_unreadable = 0
        if folder is None:
            return
        self._file = Path(folder) / "judge.jsonl"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._read(self._file)
        except OSError as error:
            raise UserError(f"reward.judge.cache {folder} cannot be used ({error.strerror}); give another folder"
                            ) from error

    def get(self, key: str) -> object | None:
        """The reply, or None."""
        return self._known.get(key)

    def put(self, key: str, reply: str | Sequence[float]) -> None:
        self._known[key] = reply
        if self._file is None:
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            return
        line = to_json({"key": key, "reply": reply}) + "\n"
        handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line.encode())  # one write: lines of several processes do not mix
        except OSError as error:
            raise UserError(f"reward.judge.cache: {self._file} cannot be written ({error.strerror}); make room, or "
                            "give another folder") from error
        finally:
            os.close(handle)

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        text = path.read_bytes()
        for line in text.splitlines():
            try:
                row = json.loads(line)
                self._known[row["key"]] = row["reply"]
            except (ValueError, KeyError, TypeError, RecursionError):
                self.num_unreadable += 1  # the last one of a process that was killed, or someone's edit
        if text and not text.endswith(b"\n"):
            with open(path, "ab") as file:
                file.write(b"\n")
        if self.num_unreadable and is_main():
            print(f"reward.judge.cache: {self.num_unreadable} lines of {path} cannot be read and are asked anew",
                  file=sys.stderr)
