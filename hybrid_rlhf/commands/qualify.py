"""hybrid-rlhf qualify: check this machine's card in ten minutes: right numbers, speed, memory and time as predicted."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch

from hybrid_rlhf import __version__
from hybrid_rlhf.commands.qualification import machine, page
from hybrid_rlhf.commands.qualification.findings import NOTE, SKIPPED, WRONG, Row, Task
from hybrid_rlhf.commands.qualification.part_process import in_child
from hybrid_rlhf.commands.qualification.parts import PARTS
from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.accelerator import why_no_card
from hybrid_rlhf.core.config import UserError, check, command_flags, parse_command
from hybrid_rlhf.core.given_paths import expanded
from hybrid_rlhf.core.lasting_streams import lasting_streams
from hybrid_rlhf.core.text_safety import error_line
from hybrid_rlhf.memory_plan import calibration

DIFFERS = 1  # exit code
# Of what a card holds beside tensors, the bounds within which a measurement is believed. What torch keeps above them is
# reserve, which it gives back before it fails.
LIBRARIES_BYTES, FRAGMENTATION = (2**28, 2 * 2**30), (0.02, 0.15)


Launch = Callable[[str, Task], Iterator[Row]]


@dataclass
class Qualification:
    """Rows as they come, and the files that hold them. folder: for qualify.json, qualify.md and qualify.log."""

    folder: Path
    minutes: float
    is_dry: bool

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self._began = time.monotonic()

    @property
    def ends(self) -> float:
        return self._began + 60 * self.minutes

    def run(self, launch: Launch) -> int:
        """All parts for which there is time; returns the exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "qualify.log"
        own_files.write_file(log, "")
        if not self.is_dry:
            calibration.read_calibration()  # which every part would refuse
        others = machine.foreign_bytes() if not self.is_dry else None
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="work-") as work:
            for name, part in PARTS.items():
                left = self.ends - time.monotonic()
                task = Task(name, self.is_dry, Path(work).resolve(), log.resolve(),
                            min(self.ends, time.monotonic() + part.most), tuple(self.rows), others)
                if left < part.least and not self.is_dry:
                    self._add(task.row("all of it", SKIPPED, "no time left; give more --minutes"))
                else:
                    for row in launch(name, task):
                        self._add(self._in_time(row))
                self._save()
        return DIFFERS if any(row.state in WRONG for row in self.rows) else 0

    def _in_time(self, row: Row) -> Row:
        """`row`; or, where a part was stopped because all the time is over, that it was left out."""
        if not row.found.startswith("stopped: ") or time.monotonic() < self.ends:
            return row
        return replace(row, name="the rest of it", state=SKIPPED, found="no time left; give more --minutes")

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{time.monotonic() - self._began:5.0f} s  {row.part}: {row.name}: "
              f"{'' if row.state == 'note' else f'{row.state}, '}{row.found}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        """After every part, for a machine may be taken away. Folders of the user's are not named in what is sent."""
        minutes, when = (time.monotonic() - self._began) / 60, datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
        facts = {"version": __version__, "when": when, "is_dry": self.is_dry, "minutes": minutes,
                 "verdict": page.verdict(self.rows), "rows": [row.stored() for row in self.rows]}
        text = page.page_of(self.rows, is_dry=self.is_dry, minutes=minutes, version=__version__, when=when)
        for name, content in (("qualify.json", json.dumps(facts, indent=1) + "\n"), ("qualify.md", text)):
            for place, short in ((str(self.folder.resolve()), "."), (str(Path.home()), "~")):
                content = content.replace(place, short)
            own_files.write_file(self.folder / name, content)
        if not self.is_dry:
            self._calibrate()

    def _calibrate(self) -> None:
        try:
            calibrate(self.rows)
        except OSError as error:  # a folder that cannot be written; the other parts do not need it
            if not any(row.name == "calibration" for row in self.rows):
                self._add(Row(page.MACHINE, "calibration", NOTE, f"cannot be written: {error.strerror}"))


def calibrate(rows: list[Row]) -> None:
    """Write what was measured of the card where --plan reads it."""
    found = [row.numbers for row in rows if "fragmentation" in row.numbers]
    card = next((row.numbers for row in rows if row.name == machine.CARD), {})
    rates = next((row.numbers["rates"] for row in rows if "rates" in row.numbers), None)
    values: dict = {"device": card.get("name")}
    if found:
        values["fragmentation"] = _within(max(n["fragmentation"] for n in found), *FRAGMENTATION)
    exact = [n["libraries_bytes"] for n in found if n["is_exact"]]
    if exact:  # else it counts what other programs held
        values["libraries_bytes"] = int(_within(max(exact), *LIBRARIES_BYTES))
    if rates:
        values["rates"] = rates
    if len(values) > 1:
        calibration.write_calibration(values)


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; UserError for what cannot be."""
    flags = command_flags("qualify", __doc__)
    flags.add_argument("--minutes", type=float, default=10.0, help="how long it may take (10)")
    flags.add_argument("--output_dir", type=expanded, default="qualify",
                       help="folder for qualify.json, qualify.md and qualify.log")
    flags.add_argument("--dry_run", action="store_true", help="tiny sizes, on whatever device there is")
    options = parse_command(flags, argv)
    check(options.minutes > 0, f"qualify: --minutes {options.minutes:g}; give a number above 0, such as 10")
    return options


@lasting_streams()
def main(argv: list[str] | None = None, launch: Launch = in_child) -> int:
    """The entry point; returns 0 where all passed, 1 where something differed or failed, 2 for bad input."""
    try:
        options = parse(argv)
        check(options.dry_run or torch.cuda.is_available(),
              f"qualify: no card that torch can use: {why_no_card()}; --dry_run tries the command without one")
        done = Qualification(Path(options.output_dir), options.minutes, options.dry_run)
        code = done.run(launch)
    except UserError as error:
        print(error_line(error), file=sys.stderr)
        return 2
    except OSError as error:
        print(error_line(UserError(f"qualify: cannot write to {options.output_dir}: {error.strerror}; choose another "
                                   "--output_dir")), file=sys.stderr)
        return 2
    print(f"{page.verdict(done.rows).replace('*', '')}\npage: {done.folder / 'qualify.md'}\n"
          f"figures: {done.folder / 'qualify.json'}, details: {done.folder / 'qualify.log'}")
    return code
