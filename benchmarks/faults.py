"""Faults and bad input, from outside: what is promised for them, tried on tiny models. A few minutes on two cores.

    python benchmarks/faults.py [--cases resumed disk ...] [--quick] [--only TEXT] [--json FILE] [--page FILE]

Each try (fault_tries/) runs in processes of its own, forked from this one, with a limit of time; what it leaves running
counts against it. They are of what the threat model (docs/design.md) defends. The page is written by the whole of it:
`make faults`. Exit code 1 if one was not survived. `--quick` makes the first try of each case.
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
from fault_tries import attempt, inputs, product, rewards, runs
from fault_tries.attempt import Group, Try
from harness import machine, parse, parser_of, table_of, write_rows

CASES: dict[str, Group] = {
    "resumed": runs.RESUMED, "signals": runs.SIGNALS, "disk": runs.DISK, "beside": runs.BESIDE,
    "rewards": rewards.REWARDS, "timeout": rewards.TIMEOUT, "settings": inputs.SETTINGS,
    "models": inputs.MODELS}


def import_everything() -> None:
    """Once, so that no try waits for it. Nothing here may start a thread or run a backward pass: tries are forked."""
    import deepspeed  # noqa: F401
    import matplotlib.font_manager  # noqa: F401 - builds its cache under the home of whoever is first
    import peft  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import hybrid_rlhf.cli
    import hybrid_rlhf.commands.export
    import hybrid_rlhf.inference.chat.session
    import hybrid_rlhf.training.all_stages
    import hybrid_rlhf.training.preferences  # noqa: F401

    get_checkpoint_conversion_mapping("llama")  # kept from the first model on; a third of a second


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[dict]:
    """A row for each case: its tries, and what became of those that were not survived."""
    place, end = scratch / "place", time.monotonic() + 60 * options.minutes
    for name in ("place", "preparation", *options.cases):
        (scratch / name).mkdir()
    for _, outcome in attempt.outcomes([Try("preparation", product.prepare, 400)], place, scratch / "preparation", 1):
        if outcome["fault"]:
            raise SystemExit(f"the tries could not be prepared: {outcome['fault']}\n{outcome['log']}")
    for name in options.cases:
        tries = [each for each in CASES[name].tries if options.only in each.name][: 1 if options.quick else None]
        if tries:
            yield row_of(name, tries, attempt.outcomes(tries, place, scratch / name, options.jobs, end), options)


def row_of(name: str, tries: list[Try], outcomes: Iterator[tuple[Try, dict]], options: argparse.Namespace) -> dict:
    """Make the tries of a case and print what became of them."""
    began, num_tried, failed = time.monotonic(), 0, []
    for each, outcome in outcomes:
        num_tried += 1
        if options.verbose:
            print(f"{name}: {each.name}: {outcome['fault'] or 'survived'}", flush=True)
        if outcome["fault"]:
            failed.append({"name": each.name, "fault": outcome["fault"]})
            print(outcome["log"] if options.verbose else "", end="", flush=True)
    row = {"case": name, "title": CASES[name].title, "survived_means": CASES[name].survived_means, "tried": num_tried,
           "survived": num_tried - len(failed), "left_out": len(tries) - num_tried, "failed": failed,
           "seconds": round(time.monotonic() - began, 1), "machine": machine()}
    left_out = f", {row['left_out']} left out" if row["left_out"] else ""
    print(f"{name:10} {row['survived']:4} of {num_tried:4} survived{left_out}, {row['seconds']:6.1f} s", flush=True)
    for each in failed:
        print(f"           {each['name']}: {each['fault']}", flush=True)
    return row


def page(rows: list[dict], seconds: float) -> str:
    tried, survived, left_out = (sum(row[key] for row in rows) for key in ("tried", "survived", "left_out"))
    failed = [(row["title"], each["name"], each["fault"]) for row in rows for each in row["failed"]]
    text = f"""# Faults and bad input

**{survived} of {tried} tries were survived** ({seconds:.0f} s). `make faults` repeats them,
`python benchmarks/faults.py --cases NAME` some of them. A try is one fault on tiny models, in
processes of its own, against what [we defend](../design.md#what-is-defended). Beside what its row says, "survived" is,
of every try, no traceback, no line of error longer than 1,500 characters, nothing left running, over in 90 s.

"""
    text += table_of(("case", "what is tried", "tries", "survived", "survived means"),
                     [tuple(row[key] for key in ("case", "title", "tried", "survived", "survived_means"))
                      for row in rows])
    if left_out:
        text += f"\n{left_out} tries were left out: the time was up.\n"
    text += "\n## Not survived\n\n"
    text += table_of(("what is tried", "try", "what came of it"), failed) if failed else "None.\n"
    return f"{text}\n`make faults`, {rows[0]['machine']}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--only", default="", help="the tries whose names hold this text")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="tries at once (%(default)s)")
    parser.add_argument("--minutes", type=float, default=9.0, help="after so many no try is begun (%(default)s)")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies all limits of time, on a machine with "
                        "other work (%(default)s)")
    parser.add_argument("--page", help="write the page to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for each try, and the log of what failed")
    options = parse(parser, argv)
    torch.set_num_threads(1)
    attempt.limits.patience = options.patience
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
