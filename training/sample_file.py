"""Append-only file of samples (JSON lines) of a command that may be interrupted; its first line has the settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.strict_json import loads, to_json
from hybrid_rlhf.run.json_lines import Lines


class SampleFile:
    """A file of samples. known: a prompt's number -> its samples, and how many were cut at the longest length."""

    def __init__(self, path: Path, settings: dict) -> None:
        """Continue the file at `path`, or create it. An incomplete last line, of a process that was killed, is removed.
        Raises UserError where the samples were drawn with other settings."""
        self.known: dict[int, tuple[list[str], int]] = {}
        end = self._read(path, settings) if path.exists() else 0
        self._lines = Lines(path, lambda text: print(text, file=sys.stderr), position=end)
        if end == 0:
            self._lines.write(to_json({"settings": settings}))
            self._lines.sync()

    def _read(self, path: Path, settings: dict) -> int:
        """Read the file's samples; returns where its last complete line ends."""
        text, end = path.read_bytes(), 0
        for number, line in enumerate(text.splitlines(keepends=True)):
            try:
                row = loads(line.decode())
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    recorded = row["settings"]
                    wanted = json.loads(to_json(settings))
                    changed = [name for name in wanted if recorded.get(name) != wanted[name]]
                    check(not changed, f"label: {path} holds samples of other settings ({', '.join(changed)}); remove "
                                       "it, or give another --output")
                else:
                    self.known[int(row["number"])] = ([str(text) for text in row["responses"]], int(row["cut"]))
            except (ValueError, LookupError, TypeError, AttributeError):
                break
            end += len(line)
        check(end > 0 or not text.strip() or b"\n" not in text,
              f"label: {path} is not a file of samples; remove it, or give another --output")
        return end

    def add(self, number: int, responses: Sequence[str], cut: int) -> None:
        """Append the samples of one prompt."""
        self.known[number] = (list(responses), cut)
        self._lines.write(to_json({"number": number, "responses": list(responses), "cut": cut}))

    def sync(self) -> None:
        """Flush all lines to the disk. Raises OSError on a full disk."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()
