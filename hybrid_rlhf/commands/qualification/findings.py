"""What the parts of qualify are given, and the rows that they yield."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

PASSED, NOTE, SKIPPED, DIFFERS, FAILED = "passed", "note", "skipped", "differs", "failed"
MAX_LINE = 240  # characters of an error on the page; all of it is in the log
WRONG = (DIFFERS, FAILED)  # what makes the exit code 1


@dataclass(frozen=True)
class Row:
    """One check. state: passed; note (nothing to judge, or worth knowing); skipped; differs (a result that is not the
    expected one); failed (it could not be carried out). found: one line. numbers: what was measured, for the JSON."""

    part: str
    name: str
    state: str
    found: str
    numbers: dict = field(default_factory=dict)

    def stored(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """What a part works with. name: the part's; is_dry: tiny sizes; folder: for its files, shared by all parts; log:
    where details go; ends: the time.monotonic() at which its time is over; known: the rows of the parts before it;
    foreign_bytes: of the card's memory that other programs held before (None: nobody knows)."""

    name: str
    is_dry: bool
    folder: Path
    log: Path
    ends: float
    known: tuple[Row, ...] = ()
    foreign_bytes: int | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def numbers(self, name: str) -> dict:
        """What an earlier part measured under that name; empty where it did not."""
        return next((row.numbers for row in self.known if row.name == name), {})

    def row(self, name: str, state: str, found: str, /, **numbers: object) -> Row:
        return Row(self.name, name, state, found, numbers)


Part = Callable[[Task], Iterator[Row]]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to a readable length, or its kind."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "") or type(error).__name__
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
