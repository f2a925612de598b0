"""hybrid-rlhf qualify: check this machine's GPU in ten minutes: right numbers, speed, memory and time as predicted."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from hybrid_rlhf import __version__
from hybrid_rlhf.commands import doctor
from hybrid_rlhf.commands.qualify_numbers import equality
from hybrid_rlhf.commands.qualify_page import CARD, NO_TIME, WRONG, Row, State, Task, page_of, verdict
from hybrid_rlhf.commands.qualify_speed import speed, steps
from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.accelerator import why_no_card
from hybrid_rlhf.core.config import check, command_flags, parse_command
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.startup import quiet_libraries
from hybrid_rlhf.memory_plan.rates import write_calibration

# Bounds of a measured calibration. Memory that torch reserves above them is released before it runs out.
LIBRARIES_BYTES, FRAGMENTATION = (2**28, 2 * 2**30), (0.02, 0.15)
_STATES = {"ok": State.PASSED, "warning": State.NOTE, "missing": State.FAILED}  # doctor's state -> a row's
Launch = Callable[[Task], Iterator[Row]]


def environment(task: Task) -> Iterator[Row]:
    """The card, then doctor's findings, without paths of the user's folders."""
    numbers: dict = {"hybrid_rlhf": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    text = "none; the processor takes its place"
    if task.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(task.device)
        numbers |= {"name": torch.cuda.get_device_name(task.device), "bytes": total, "free": free,
                    "capability": list(torch.cuda.get_device_capability(task.device)),
                    "driver": _nvidia_smi("driver_version") or "unknown", "held_by_others": task.foreign_bytes}
        text = f"{numbers['name']}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free, driver {numbers['driver']}"
    yield task.row(CARD, State.PASSED if task.device.type == "cuda" else State.NOTE, text, **numbers)
    for finding in doctor.examine(compile_kernels=False):
        text = finding.detail.split(" free at ")[0] if finding.name.startswith("disk") else finding.detail
        cure = f" ({finding.cure})" if finding.cure else ""
        yield task.row(finding.name, _STATES[finding.state], text + cure)


class Part(NamedTuple):
    """run: its checks; least: seconds that must be left to begin it; most: seconds after which it is stopped."""

    run: Callable[[Task], Iterator[Row]]
    least: float
    most: float


PARTS = {"environment": Part(environment, 5, 90), "equality": Part(equality, 30, 200), "speed": Part(speed, 30, 120),
         **{name: Part(steps, 60, 240) for name in ("grpo-qlora", "ppo-qlora", "grpo", "ppo")}}


# -- a part in a child process -----------------------------------------------------------------------------------------


def rows_of(task: Task) -> Iterator[Row]:
    """The rows of a part, in this process; an error of the part is its last row."""
    try:
        yield from PARTS[task.name].run(task)
    except Exception as error:  # the other parts continue, whatever this one raises
        yield task.failed("all of it", error)


def in_child(task: Task) -> Iterator[Row]:
    """The rows of a part, run in a child process: a kernel that breaks the CUDA context, or hangs, ends only that part.
    The child's output goes into the log; its timeout or death makes the last row."""
    context, began, count = multiprocessing.get_context("spawn"), time.monotonic(), 0
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_send_rows, args=(task, sending))
    child.start()
    sending.close()
    try:
        while receiving.poll(max(0.0, task.left)):
            yield receiving.recv()
            count += 1
        yield (task.row("the rest of it", State.SKIPPED, NO_TIME) if task.is_last else
               task.row("all of it", State.FAILED, f"stopped: not done after {time.monotonic() - began:.0f} s"))
    except (EOFError, OSError):  # OSError: it died while it sent
        child.join()
        code = child.exitcode or 0
        if code or not count:
            death = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            yield task.row("all of it", State.FAILED, f"its process ended with {death} after {count} rows; the end of "
                                                      "the log says more")
    finally:
        with suppress(ProcessLookupError):  # the group, as the child starts processes too
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()


def _send_rows(task: Task, sending: Connection) -> None:
    os.setsid()
    with task.log.open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    quiet_libraries()
    for row in rows_of(task):
        sending.send(row)


# -- all parts, and their files ----------------------------------------------------------------------------------------


def qualify(folder: Path, minutes: float, is_dry: bool, launch: Launch) -> list[Row]:
    """The rows of all parts for which there is time, written to `folder` after each part."""
    folder.mkdir(parents=True, exist_ok=True)
    log, rows, began = folder / "qualify.log", list[Row](), time.monotonic()
    own_files.write_file(log, "")
    memory = None if is_dry else _nvidia_smi("memory.used")  # before this command's own processes use the card
    foreign_bytes = int(memory) * 2**20 if memory and memory.isdigit() else None
    ends = began + 60 * minutes
    with tempfile.TemporaryDirectory(dir=folder, prefix="work-") as work:
        for name, part in PARTS.items():
            limit = min(ends, time.monotonic() + part.most)
            task = Task(name, is_dry, Path(work).resolve(), log.resolve(), limit, limit == ends, _rates(rows),
                        foreign_bytes)
            has_time = is_dry or task.left >= part.least
            for row in launch(task) if has_time else [task.row("all of it", State.SKIPPED, NO_TIME)]:
                rows.append(row)
                state = "" if row.state == State.NOTE else f"{row.state}, "
                print(f"{time.monotonic() - began:5.0f} s  {row.part}: {row.name}: {state}{row.detail}",
                      file=sys.stderr, flush=True)
            _save(folder, rows, is_dry, (time.monotonic() - began) / 60)
            if not is_dry:
                calibrate(rows)
    return rows


def _save(folder: Path, rows: list[Row], is_dry: bool, minutes: float) -> None:
    """Write qualify.json and qualify.md, which users send to us: without paths of the user's folders."""
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    facts = {"version": __version__, "when": when, "is_dry": is_dry, "minutes": minutes, "verdict": verdict(rows),
             "rows": [asdict(row) for row in rows]}
    page = page_of(rows, is_dry=is_dry, minutes=minutes, version=__version__, when=when)
    for name, text in (("qualify.json", json.dumps(facts, indent=1) + "\n"), ("qualify.md", page)):
        text = text.replace(str(folder.resolve()), ".").replace(str(Path.home()), "~")
        own_files.write_file(folder / name, text)


def calibrate(rows: list[Row]) -> None:
    """Write the card's measurements to the file that --plan reads."""
    measured = [row.numbers for row in rows if "fragmentation" in row.numbers]
    values: dict = {"device": next((row.numbers.get("name") for row in rows if row.name == CARD), None)}
    if measured:
        low, high = FRAGMENTATION
        values["fragmentation"] = min(max(low, *(n["fragmentation"] for n in measured)), high)
    if exact := [n["libraries_bytes"] for n in measured if n["is_exact"]]:  # else other programs' memory counts
        low, high = LIBRARIES_BYTES
        values["libraries_bytes"] = min(max(low, *exact), high)
    if rates := _rates(rows):
        values["rates"] = rates
    if len(values) > 1:
        write_calibration(values)


def _rates(rows: list[Row]) -> dict | None:
    return next((row.numbers["rates"] for row in rows if "rates" in row.numbers), None)


def _nvidia_smi(query: str) -> str | None:
    """nvidia-smi's value for the first card that this process sees; None without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", visible],
                              capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0].strip() if done.stdout.strip() else None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; UserError for values that are out of range."""
    flags = command_flags("qualify", __doc__)
    flags.add_argument("--minutes", type=float, default=10.0, help="how long it may take (10)")
    flags.add_argument("--output_dir", type=expanded, default="qualify",
                       help="folder for qualify.json, qualify.md and qualify.log")
    flags.add_argument("--dry_run", action="store_true", help="tiny sizes, on whatever device there is")
    options = parse_command(flags, argv)
    check(options.minutes > 0, f"qualify: --minutes {options.minutes:g}; give a number above 0, such as 10")
    return options


def main(argv: list[str] | None = None, launch: Launch = in_child) -> int:
    """The entry point; returns 0 where all passed, 1 where something differed or failed. Raises UserError."""
    options = parse(argv)
    check(options.dry_run or torch.cuda.is_available(),
          f"qualify: no card that torch can use: {why_no_card()}; --dry_run tries the command without one")
    folder = Path(options.output_dir)
    rows = qualify(folder, options.minutes, options.dry_run, launch)
    print(f"{verdict(rows).replace('*', '')}\npage: {folder / 'qualify.md'}\n"
          f"figures: {folder / 'qualify.json'}, details: {folder / 'qualify.log'}")
    return int(any(row.state in WRONG for row in rows))
