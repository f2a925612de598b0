"""Faults and hostile input, from outside: what is promised for them, tried on tiny models. A few minutes on two cores.

    python benchmarks/faults.py [--cases rows disk ...] [--quick] [--only TEXT] [--json FILE] [--page FILE]

Each try (fault_tries/) runs in processes of its own, forked from this one, with limits of time and memory; what it
leaves running counts against it. The page is written by the whole of it: `make faults`. Exit code 1 if one was not
survived. `--quick` makes the first try of each case, `--sample N` so many, `--only` those whose names hold a text.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from fault_tries import (
    attempt,
    chat,
    checkpoints,
    clients,
    data,
    disk,
    folders,
    models,
    prepared,
    ranks,
    reward_functions,
    reward_service,
    terminal,
)
from fault_tries.attempt import Group, Try
from harness import machine, parse, parser_of, table_of, write_rows

CASES: dict[str, Group] = {
    "rows": checkpoints.ROWS, "inputs": reward_functions.INPUTS, "timeout": reward_functions.TIMEOUT,
    "skipped": checkpoints.SKIPPED, "ranks": ranks.RANKS, "disk": disk.DISK, "terminal": terminal.TERMINAL,
    "effects": reward_functions.EFFECTS, "service": reward_service.SERVICE, "shortage": reward_service.SHORTAGE,
    "exports": folders.EXPORTS, "settings": folders.SETTINGS, "inside": folders.INSIDE, "clients": clients.CLIENTS,
    "memory": data.MEMORY, "models": models.MODELS, "chat": chat.CHAT, "damaged": checkpoints.DAMAGED,
    "files": data.FILES, "paths": data.PATHS}


def import_everything() -> None:
    """Once, so that no try waits for it. Nothing here may start a thread or run a backward pass: tries are forked."""
    import deepspeed  # noqa: F401
    import matplotlib.font_manager  # noqa: F401 - builds its cache under the home of whoever is first
    import peft  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import hybrid_rlhf.cli
    import hybrid_rlhf.commands.export
    import hybrid_rlhf.inference.chat.session
    import hybrid_rlhf.inference.server.app
    import hybrid_rlhf.training.all_stages
    import hybrid_rlhf.training.preferences  # noqa: F401

    get_checkpoint_conversion_mapping("llama")  # kept from the first model on; a third of a second


def chosen(group: Group, options: argparse.Namespace) -> list[Try]:
    """All tries of a case, those that were named, or so many of them at even distances."""
    tries = [each for each in group.tries if not options.only or options.only in each.name]
    return tries[::max(1, -(-len(tries) // options.sample))] if options.sample else tries


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[dict]:
    """A row for each case: its tries, and what became of those that were not survived."""
    place, end = scratch / "place", time.monotonic() + 60 * options.minutes
    place.mkdir()
    for _, found in attempt.outcomes([Try("preparation", prepared.prepare, 400)], place, _made(scratch, "made"), 1):
        if found["said"]:
            raise SystemExit(f"the tries could not be prepared: {found['said']}\n{found['log']}")
    for name in options.cases:
        if tries := chosen(CASES[name], options):
            yield row_of(name, tries, attempt.outcomes(tries, place, _made(scratch, name), options.jobs, end), options)


def row_of(name: str, tries: list[Try], outcomes: Iterator[tuple[Try, dict]], options: argparse.Namespace) -> dict:
    """Make the tries of a case and print what became of them."""
    began, before, made, failed = time.monotonic(), sum(os.times()[2:4]), 0, []
    for each, found in outcomes:
        made += 1
        if options.verbose:
            print(f"{name}: {each.name}: {found['said'] or 'survived'} ({found['seconds']} s)", flush=True)
        if found["said"]:
            failed.append({"name": each.name, "said": found["said"]})
            if options.logs:
                print(found["log"], flush=True)
    row = {"case": name, "title": CASES[name].title, "survived_means": CASES[name].survived_means, "tried": made,
           "survived": made - len(failed), "left_out": len(tries) - made, "failed": failed,
           "seconds": round(time.monotonic() - began, 1),
           "processor_seconds": round(sum(os.times()[2:4]) - before, 1), "machine": machine()}
    left_out = f", {row['left_out']} left out" if row["left_out"] else ""
    print(f"{name:10} {row['survived']:4} of {made:4} survived{left_out}, "
          f"{row['seconds']:6.1f} s ({row['processor_seconds']:.1f} of processors)", flush=True)
    for each in failed:
        print(f"           {each['name']}: {each['said']}", flush=True)
    return row


def _made(scratch: Path, name: str) -> Path:
    (scratch / name).mkdir()
    return scratch / name


def page(found: list[dict], seconds: float) -> str:
    tried, survived, left_out = (sum(row[key] for row in found) for key in ("tried", "survived", "left_out"))
    failed = [(row["title"], each["name"], each["said"]) for row in found for each in row["failed"]]
    text = f"""# Faults and hostile input

**{survived} of {tried} tries were survived** ({seconds:.0f} s). `make faults` repeats them,
`python benchmarks/faults.py --cases NAME` some of them. A try is one fault on tiny models, in processes of its own with
limits of time and memory; plots are drawn only where the disk is full. Beside what its row says, "survived" means of
every try: no traceback, no line of error that is longer than 1,500 characters, nothing left running, over in a minute
unless its row says otherwise, and no process of it grows by more than 1.5 GiB.

"""
    text += table_of(("case", "what is tried", "tries", "survived", "survived means"),
                     [tuple(row[key] for key in ("case", "title", "tried", "survived", "survived_means"))
                      for row in found])
    if left_out:
        text += f"\n{left_out} tries were left out: the time was up.\n"
    text += "\n## Not survived\n\n"
    text += table_of(("what is tried", "try", "what came of it"), failed) if failed else "None.\n"
    return f"{text}\n`make faults`, {found[0]['machine']}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--only", default="", help="the tries whose names hold this text")
    parser.add_argument("--sample", type=int, default=0, help="so many tries of each case at most (all)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="tries at once (%(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after so many no try is begun (%(default)s)")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies all limits of time, on a machine with "
                        "other work (%(default)s)")
    parser.add_argument("--page", help="write the page to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for each try")
    parser.add_argument("--logs", action="store_true", help="print the commands and their words where a try failed")
    options = parse(parser, argv)
    torch.set_num_threads(1)
    attempt.limits.patience = options.patience
    options.sample = 1 if options.quick else options.sample
    import_everything()
    began = time.monotonic()
    scratch = tempfile.mkdtemp(prefix="faults-")  # a TemporaryDirectory would be removed by each forked process too
    try:
        found = write_rows(rows(options, Path(scratch)), options.json)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.page:
        Path(options.page).write_text(page(found, time.monotonic() - began), encoding="utf-8")
    return int(any(row["failed"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
