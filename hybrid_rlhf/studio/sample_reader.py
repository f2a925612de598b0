"""What models said: samples.jsonl and answers.jsonl, by step, without the whole of a large file in memory."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path

from hybrid_rlhf.studio.run_files import ANSWERS, SAMPLES, GrowingLines, Unreadable, last_rows, read_at, row_of
from hybrid_rlhf.studio.studio import Refused

MAX_STEPS, MAX_INDEXES, MAX_LIMIT, MAX_ANSWERS = 20_000, 16, 100, 200
MAX_TEXT = 20_000  # characters of a prompt or an answer that are sent
MAX_READ, MAX_STEP_BYTES = 512 * 2**20, 16 * 2**20  # of one look at a file; of the samples of one step
_STEP = re.compile(rb'\{"step": ?(\d{1,15})[,}]')  # how our rows begin; others are read as JSON
_TURN = re.compile(r"^\[([^\[\]\n]{1,64})\] ", re.MULTILINE)  # how episodes are written (rollout/episode_record.py)


class SampleIndex:
    """Where in a samples.jsonl the samples of each step begin."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SAMPLES
        self._lines = GrowingLines(self._path)
        self._start_over()

    def _start_over(self) -> None:
        self.steps: list[int] = []
        self._places: list[int] = []

    def update(self) -> None:
        """Raises Unreadable."""
        self._lines.update(self._start_over, self._take, MAX_READ)

    def read(self, step: int | None, most: int) -> list[dict]:
        """The first `most` samples of a step, of the newest where none is named; none of one that has none."""
        if not self.steps or (step is not None and step not in self.steps):
            return []
        step = self.steps[-1] if step is None else step
        place = self.steps.index(step)
        text = read_at(self._path, self._places[place], MAX_STEP_BYTES)
        found: list[dict] = []
        for line in text.split(b"\n"):
            row = row_of(line)
            if row is None or len(found) == most or row.get("step") != step:
                break
            found.append(shown(row))
        return found

    def _take(self, place: int, line: bytes) -> None:
        begun = _STEP.match(line)
        row = None if begun else row_of(line)
        step = int(begun.group(1)) if begun else row.get("step") if row else None
        if type(step) is not int or step < 0 or (self.steps and step <= self.steps[-1]):
            return
        self.steps.append(step)
        self._places.append(place)
        if len(self.steps) >= MAX_STEPS:  # every second one, and always the newest
            self.steps, self._places = self.steps[1::2], self._places[1::2]


class Samples:
    """The indexes of the runs that were asked for last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, SampleIndex] = OrderedDict()
        self._lock = threading.Lock()

    def told(self, folder: Path, query: dict[str, str]) -> dict:
        """GET /api/samples: those of a step or of the newest one, and the answers to the fixed prompts."""
        try:
            step = int(query["step"]) if query.get("step") else None
            most = min(max(int(query.get("limit") or 20), 1), MAX_LIMIT)
        except ValueError:
            raise Refused(400, "step and limit must be numbers") from None
        steps, found, notes = [], [], []
        with self._lock:
            try:
                index = self._known.setdefault(folder, SampleIndex(folder))
                self._known.move_to_end(folder)
                while len(self._known) > MAX_INDEXES:
                    self._known.popitem(last=False)
                index.update()
                steps, found = list(index.steps), index.read(step, most)
            except FileNotFoundError:
                pass  # it has gone this moment
            except Unreadable as error:
                notes.append(str(error))
        try:
            said = answers(folder)
        except Unreadable as error:
            said = []
            notes.append(str(error))
        return {"steps": steps, "samples": found, "answers": said, "notes": notes}


def answers(folder: Path) -> list[dict]:
    """The newest answers to the fixed prompts, oldest first. Raises Unreadable."""
    return [shown(row) for row in last_rows(folder / ANSWERS, 2**20) if type(row.get("step")) is int][-MAX_ANSWERS:]


def newest_answers(folder: Path) -> list[dict]:
    """Those of the last step. Raises Unreadable."""
    found = answers(folder)
    last = max((row["step"] for row in found), default=None)
    return [row for row in found if row["step"] == last]


def shown(row: dict) -> dict:
    """A sample as it is sent: texts of a bounded length, numbers, and what each source gave; without what is for
    machines. An episode's text, too, as "turns": [{"who", "text"}]; a line of an answer that looks like the beginning
    of a turn is taken for one."""
    found: dict = {}
    for name, value in list(row.items())[:50]:
        if name == "scores":
            parts = list(value.items())[:50] if isinstance(value, dict) else []
            found[name] = {k: v for k, v in parts if isinstance(v, (int, float))}
        elif isinstance(value, str) and name not in ("score", "ended"):
            found[name] = cut(value)
        elif value is None or (isinstance(value, (bool, int, float)) and name not in ("prompt", "completion")):
            found[name] = value
    if "ended_by" in row and isinstance(row.get("completion"), str):
        found["turns"] = turns(found["completion"])
    return found


def cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"


def turns(text: str) -> list[dict]:
    """Who said what in an episode."""
    found = list(_TURN.finditer(text))
    ends = [each.start() for each in found[1:]] + [len(text)]
    before = [{"who": "", "text": text[: found[0].start()].strip()}] if found and found[0].start() else []
    return before + [{"who": each.group(1), "text": text[each.end():end].rstrip("\n")}
                     for each, end in zip(found, ends, strict=False)]
