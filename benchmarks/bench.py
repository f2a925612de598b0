"""The CPU set of benchmarks, one after the other, and the page of what they found: `make bench`, under 30 minutes.

    python benchmarks/bench.py [--only sft_step reward_step ...] [--quick] [--page]

Each script runs in a process of its own, alone, for at most its own limit and what is left of the thirty minutes. What
it wrote by --json goes with its command and date to docs/results/benchmarks.json, and the tables of
docs/results/benchmarks.md are made of all that. A run replaces the rows of its own script and leaves the others; of a
script that fails or is stopped the cases that it had finished count, the others keep their earlier rows, and the next
script goes on. A script whose peer is not installed is left out with a line. --quick tries all of it at tiny sizes in a
few minutes and writes to outputs/bench-quick, for its figures say nothing; --page only writes the tables again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import ROOT, table_of, write_tables
from peers.process import python_for

RECORD, PAGE = ROOT / "docs/results/benchmarks.json", ROOT / "docs/results/benchmarks.md"
BUDGET = 30 * 60
LEAST = 20  # seconds that are left for a script that is begun


class Script(NamedTuple):
    """A benchmark of the set: its arguments, the seconds after which it is stopped, and the package without which it
    has no peer."""

    arguments: str
    limit: int
    peer: str | None = None


SCRIPTS = {
    "rollout": Script("--cases fixed ragged fixed_batch stories3M llama_cpp --repeats 3", 400),
    "ppo_step": Script("--cases full lora --repeats 3", 240),
    "grpo_step": Script("--repeats 3", 300, "trl"),
    "sft_step": Script("--repeats 3 --micro_batch_tokens 768", 300, "trl"),
    "reward_step": Script("--repeats 3", 150, "trl"),
    "memory": Script("", 270),
    "startup": Script("--repeats 3", 180, "trl"),
    "offline_step": Script("--repeats 3", 180, "trl"),
    "episodes": Script("--repeats 3 --works ragged even", 150, "trl"),
    "server": Script("--load_seconds 0 --seconds 10", 150, "httpx"),
}


# -- the page ----------------------------------------------------------------------------------------------------------


def tables_of(record: dict[str, dict]) -> list[str]:
    """The rows, in bold what misses its target, and the runs that they are from."""
    columns = "work", "peer", "ours", "peer's", "ratio", "asked", "floor_ratio", "asked", "script"
    runs = [(name, entry["date"], f"`{entry['command']}`" + (f", {entry['failed']}" if entry.get("failed") else ""),
             f"{entry['seconds']:.0f}" if entry["seconds"] else "", entry["rows"][0]["machine"])
            if (entry := record.get(name)) else (name, "not yet", "", "", "") for name in SCRIPTS]
    return [table_of(columns, [cells_of(name, row) for name in SCRIPTS if name in record
                               for row in record[name]["rows"]]),
            table_of(("script", "run", "command", "seconds", "machine"), runs)]


def cells_of(script: str, row: dict) -> list[str]:
    ours, peer = (figure(row[key], f" {row['unit']}", key in row["missed"]) for key in ("ours", "peer"))
    ratio, floor_ratio = (figure(row[key], "", key in row["missed"]) for key in ("ratio", "floor_ratio"))
    return [row["work"], row["beside"], ours, peer, ratio, row["asked"], floor_ratio, row["floor_asked"],
            f"{script} {row['case']}"]


def figure(value: float | None, unit: str, is_missed: bool) -> str:
    if value is None:
        return ""
    text = f"{value:.0f}{unit}" if value >= 100 else f"{value:.2f}{unit}"
    return f"**{text}**" if is_missed else text


# -- the runs ----------------------------------------------------------------------------------------------------------


def run(name: str, arguments: str, limit: float, before: dict) -> tuple[dict | None, str]:
    """Run a script of the set; its entry of the record, None if it has no rows, and what went wrong, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, f"benchmarks/{name}.py", *arguments.split(), "--json", str(out)]
        print(f"\n{' '.join(command[1:])} (at most {limit:.0f} s)", flush=True)
        began = time.perf_counter()
        fault = within(command, limit)
        rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    if not rows:
        return None, fault or "wrote no rows"
    entry = {"command": f"python benchmarks/{name}.py {arguments}".strip(), "date": datetime.date.today().isoformat(),
             "seconds": time.perf_counter() - began, "rows": rows}
    return (with_earlier(entry | {"failed": fault}, before) if fault else entry), fault


def with_earlier(entry: dict, before: dict) -> dict:
    """`entry` and the rows of cases that only `before` has."""
    cases = {row["case"] for row in entry["rows"]}
    kept = [row for row in before.get("rows", []) if row["case"] not in cases]
    both = {"command": f"{before['command']}; {entry['command']}", "rows": kept + entry["rows"]} if kept else {}
    return entry | both


def within(command: list[str], limit: float) -> str:
    """Run a command and end it, with every process that it started, at the limit; what went wrong, if anything."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(limit)
        return f"ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(names: Sequence[str], record: dict[str, dict], is_quick: bool, keep: Callable[[], None]) -> list[str]:
    """Run the scripts one after the other, whatever becomes of each; what went wrong. keep: writes the record down."""
    faults, end = [], time.monotonic() + BUDGET
    for name in names:
        script, left = SCRIPTS[name], end - time.monotonic()
        if script.peer and python_for(script.peer) is None:
            print(f"\n{name}: left out, its peer {script.peer} is not installed (make bench-peers)", flush=True)
            continue
        if left < LEAST:
            entry, fault = None, "no time left"
        else:
            entry, fault = run(name, "--quick" if is_quick else script.arguments, min(script.limit, left),
                               record.get(name, {}))
        if fault:
            faults.append(f"{name} {fault}")
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
        if entry:
            record[name] = entry
            keep()
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="these scripts")
    parser.add_argument("--page", action="store_true", help="run nothing, write the tables again")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, into outputs/bench-quick")
    options = parser.parse_args(argv)
    path, page, record = RECORD, PAGE, {}
    if options.quick:
        path, page = (ROOT / "outputs/bench-quick" / file.name for file in (RECORD, PAGE))
        path.parent.mkdir(parents=True, exist_ok=True)
        page.unlink(missing_ok=True)
    elif path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))

    def keep() -> None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_tables(page, *tables_of(record))

    faults = [] if options.page else run_all(options.only, record, options.quick, keep)
    keep()
    print(f"\nwrote {page.relative_to(ROOT)}" + (f"; failed: {', '.join(faults)}" if faults else ""))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
