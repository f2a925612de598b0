"""Tasks and result rows of the checks of `hybrid-rlhf qualify`, and the page made of the rows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

CARD = "card"  # the row whose numbers describe the card
MAX_LINE = 240  # characters of an error on the page; the log has all of it
NO_TIME = "no time left; give more --minutes"
TITLES = {"environment": "The machine", "equality": "Does it compute the right numbers?", "speed": "How fast is it?",
          "grpo-qlora": "GRPO with QLoRA", "ppo-qlora": "PPO with QLoRA", "grpo": "GRPO, all weights trained",
          "ppo": "PPO, all weights trained"}


class State(StrEnum):
    """Outcome of a check: note: a measurement without a judgement; differs: another result than expected; failed: could
    not be carried out."""

    PASSED = "passed"
    NOTE = "note"
    SKIPPED = "skipped"
    DIFFERS = "differs"
    FAILED = "failed"


WRONG = (State.DIFFERS, State.FAILED)  # make the exit code 1


@dataclass(frozen=True)
class Row:
    """Result of one check. detail: one line. numbers: measurements, for the JSON."""

    part: str
    name: str
    state: State
    detail: str
    numbers: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The work of one part. folder: for its files, shared by all parts; log: for details; ends: its deadline, by
    time.monotonic(); is_last: whether all of --minutes are over then; rates: of the card, if the speed part has
    measured them; foreign_bytes: memory of the card that other programs used at the start (None: unknown)."""

    name: str
    is_dry: bool
    folder: Path
    log: Path
    ends: float
    is_last: bool = False
    rates: dict | None = None
    foreign_bytes: int | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.ends - time.monotonic()

    def row(self, name: str, state: State, text: str, /, **numbers: object) -> Row:
        return Row(self.name, name, state, text, numbers)

    def failed(self, name: str, error: Exception) -> Row:
        """The row of a check that raised; the traceback goes into the log."""
        with self.log.open("a", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
        return self.row(name, State.FAILED, first_line(error))


def first_line(error: Exception) -> str:
    """The first line of an error's message, cut to a readable length; its type where it has no message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "") or type(error).__name__
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


def verdict(rows: Sequence[Row]) -> str:
    """The result of all checks in a sentence."""
    wrong, left_out = sum(r.state in WRONG for r in rows), sum(r.state == State.SKIPPED for r in rows)
    judged = wrong + sum(r.state == State.PASSED for r in rows)
    if not judged:
        return f"**Nothing was checked.** {left_out} were left out."
    text = f"**All {judged} checks passed.**" if not wrong else f"**{wrong} of {judged} checks did not pass.**"
    return text + (f" {left_out} {'was' if left_out == 1 else 'were'} left out." if left_out else "")


def page_of(rows: Sequence[Row], *, is_dry: bool, minutes: float, version: str, when: str) -> str:
    """The page in Markdown: failed checks first, then skipped ones, then all."""
    card = next((row.numbers.get("name") for row in rows if row.name == CARD), None) or "no card"
    lines = [f"# hybrid-rlhf qualify: {card}", "", verdict(rows), ""]
    if is_dry:
        lines += ["This was a dry run: tiny sizes, to see that the command works. It says nothing about a card.", ""]
    for title, states in (("What is wrong", WRONG), ("What was left out", (State.SKIPPED,))):
        lines += _table(title, [(f"{TITLES[row.part]}: {row.name}", row) for row in rows if row.state in states])
    for part, title in TITLES.items():
        shown = [row for row in rows if row.part == part]
        if part == "environment":  # its passed checks share one line
            fine = [row for row in shown if row.state == State.PASSED and row.name != CARD]
            text = "; ".join(f"{row.name} {row.detail}" for row in fine)
            shown = [row for row in shown if row not in fine]
            shown += [Row(part, "as it should be", State.NOTE, text)] if fine else []
        lines += _table(title, [(row.name, row) for row in shown])
    lines += [f"Made by hybrid-rlhf {version} on {when} in {minutes:.1f} minutes. Please send us this page and "
              "qualify.json, which has every figure."]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Sequence[tuple[str, Row]]) -> list[str]:
    if not rows:
        return []
    cells = [f"| {_cell(name)} | {'' if row.state == State.NOTE else row.state} | {_cell(row.detail)} |"
             for name, row in rows]
    return [f"## {title}", "", "| | | found |", "|---|---|---|", *cells, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
