"""A part in a process of its own: a kernel that breaks the card's context, or hangs, ends one part and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import hybrid_rlhf
from hybrid_rlhf.commands.qualification.findings import FAILED, Part, Row, Task, first_line
from hybrid_rlhf.commands.qualification.parts import PARTS

# By its folder, last on the path, so that a checkout is found from wherever it was started.
_CODE = ("import sys; sys.path.append(sys.argv.pop(1)); "
         "from hybrid_rlhf.commands.qualification.part_process import main; sys.exit(main(*sys.argv[1:]))")
LOOK = 0.2  # seconds between two looks at what the process has found


def rows_of(part: Part, task: Task) -> Iterator[Row]:
    """The rows of a part in this process; an error of its own is its last one."""
    try:
        yield from part(task)
    except Exception as error:  # the other parts go on, whatever this one raises
        with task.log.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        yield task.row("all of it", FAILED, first_line(error))


def in_process(part: str, task: Task) -> Iterator[Row]:
    """The rows of a part by name, here: for tests, and for what a child does."""
    yield from rows_of(PARTS[part].run, task)


def in_child(part: str, task: Task) -> Iterator[Row]:
    """The rows of a part as a child process finds them; what it prints goes into the log. It is stopped when its time
    is over; that, and a death, is its last row."""
    given, found = task.folder / f"{part}.task.json", task.folder / f"{part}.rows.jsonl"
    given.write_text(json.dumps(_stored(task)), encoding="utf-8")
    found.touch()
    with task.log.open("a", encoding="utf-8") as log:
        child = subprocess.Popen([sys.executable, "-c", _CODE, str(Path(hybrid_rlhf.__file__).parents[1]), part,
                                  str(given), str(found)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True)
    began, count = time.monotonic(), 0
    try:
        with found.open(encoding="utf-8") as lines:
            for row in _until(lines.readline, lambda: child.poll() is None and task.left > 0):
                count += 1
                yield row
        if child.poll() is None:
            yield task.row("all of it", FAILED, f"stopped: not done after {time.monotonic() - began:.0f} s")
        elif child.returncode or not count:
            yield task.row("all of it", FAILED, f"its process ended with {_death(child.returncode)} after {count} "
                                                "rows; the end of the log says more")
    finally:
        _stop(child)


def _until(read: Callable[[], str], is_running: Callable[[], bool]) -> Iterator[Row]:
    """Rows as their lines come, to the last one that is there when nothing runs any more."""
    pending = ""
    while True:
        goes_on = is_running()  # before reading, so that what was written last is read
        while line := read():
            pending += line
            if pending.endswith("\n"):
                yield Row(**json.loads(pending))
                pending = ""
        if not goes_on:
            return
        time.sleep(LOOK)


def _death(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _stop(child: subprocess.Popen) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _stored(task: Task) -> dict:
    return asdict(replace(task, known=())) | {"folder": str(task.folder), "log": str(task.log), "left": task.left,
                                              "known": [row.stored() for row in task.known]}


def _restored(stored: dict) -> Task:
    left = stored.pop("left")
    stored |= {"folder": Path(stored["folder"]), "log": Path(stored["log"]), "ends": time.monotonic() + left,
               "known": tuple(Row(**row) for row in stored["known"])}
    return Task(**stored)


def main(part: str, given: str, found: str) -> int:
    """What the child does."""
    from hybrid_rlhf.core.quiet import quiet_libraries

    quiet_libraries()
    task = _restored(json.loads(Path(given).read_text(encoding="utf-8")))
    with open(found, "a", encoding="utf-8") as rows:
        for row in in_process(part, task):
            print(json.dumps(row.stored()), file=rows, flush=True)
    return 0
