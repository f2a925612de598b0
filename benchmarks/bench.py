"""The CPU set of benchmarks, one after the other, and the page of what they found: `make bench`, under 30 minutes.

    python benchmarks/bench.py [--only sft_step reward_step ...] [--quick] [--take NAME=FILE:ARGUMENTS ...] [--page]

Each script runs in a process of its own, alone, for at most its own limit and what is left of the thirty minutes. What
it wrote by --json goes with its command and date to docs/results/benchmarks.json, and all of that becomes
docs/results/benchmarks.md. A run replaces the rows of its own script and leaves the others; of a script that fails or
is stopped the cases that it had finished count, the others keep their earlier rows, and the next script goes on. A
script whose peer is not installed is left out with a line. A script that never ran has no figures on the page.
--quick tries all of it at tiny sizes in a few minutes and writes to outputs/bench-quick, for its figures say nothing.
--take reads the rows that a script wrote in a run of its own, as in --take "sft_step=rows.json:--cases packed", the
arguments of that run behind the colon, and replaces the cases that are in it; --page only writes the page again.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.process import python_for

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "docs/results/benchmarks.json", ROOT / "docs/results/benchmarks.md"
BUDGET = 30 * 60
LEAST = 20  # seconds that are left for a script that is begun


class Script(NamedTuple):
    """A benchmark of the set: its arguments, the seconds after which it is stopped, its arguments for a quick try, and
    the package without which it has no peer."""

    arguments: str
    limit: int
    quick: str
    peer: str | None = None


TINY = "--shape tiny --repeats 1"
SCRIPTS = {
    "rollout": Script("--cases fixed ragged fixed_batch stories3M llama_cpp --repeats 3", 400,
                      "--cases stories3M --repeats 1"),
    "ppo_step": Script("--cases full lora --repeats 3", 240, f"--cases full lora {TINY}"),
    "grpo_step": Script("--repeats 3", 300, TINY, "trl"),
    "sft_step": Script("--repeats 3 --micro_batch_tokens 768", 300, TINY, "trl"),
    "reward_step": Script("--repeats 3", 150, TINY, "trl"),
    "memory": Script("", 270, "--shape tiny"),
    "startup": Script("--repeats 3", 180, "--cases warm help --repeats 1", "trl"),
    "offline_step": Script("--repeats 3", 180, TINY, "trl"),
    "server": Script("--load_seconds 0 --seconds 10", 150, "--load_seconds 0 --seconds 2", "httpx"),
    "scaling": Script("--repeats 2 --page docs/results", 300, "--quick --repeats 1 --works rollout"),
}


class Target(NamedTuple):
    """What is measured, against whom, and what is asked: at least `ratio`, and at most `floor` times the floor."""

    work: str
    peer: str
    ratio: float | None
    floor: float | None = None


TARGETS = {
    ("rollout", "fixed"): Target("rollout, 134M bf16, equal lengths", "transformers generate", 2.4, 1.4),
    ("rollout", "ragged"): Target("rollout, 134M bf16, ragged", "transformers generate", 6, 1.4),
    ("rollout", "fixed_batch"): Target("rollout, 134M bf16, equal lengths", "transformers generate_batch", 3, 1.4),
    ("rollout", "stories3M"): Target("rollout, 3.1M fp32, 64 at once", "transformers generate", 3, 1.4),
    ("rollout", "llama_cpp"): Target("decode, 134M bf16, 16 streams", "llama.cpp, bf16", 1, 1.4),
    ("rollout", "llama_cpp_prompt"): Target("the same, reading the prompts", "llama.cpp, bf16", None, 1.4),
    ("ppo_step", "full"): Target("PPO step, OPT-125m, all weights", "the plain four-model step", None, 1.3),
    ("ppo_step", "lora"): Target("PPO step, OPT-125m, LoRA", "the plain four-model step", None, 1.3),
    ("grpo_step", "fixed"): Target("GRPO step, 134M, equal lengths", "TRL GRPOTrainer", 2.5, 1.4),
    ("grpo_step", "ragged"): Target("GRPO step, 134M, ragged", "TRL GRPOTrainer", 4, 1.4),
    ("grpo_step", "rloo"): Target("RLOO step, 134M, equal lengths", "TRL RLOOTrainer", None, 1.4),
    ("sft_step", "packed"): Target("SFT, 134M bf16, rows of 32-400", "TRL SFTTrainer, packed to 512", 2, 1.4),
    ("sft_step", "wrapped"): Target("the same, rows cut anywhere", "TRL SFTTrainer, wrapped to 512", 2, 1.4),
    ("sft_step", "memory"): Target("SFT, peak of the process", "TRL SFTTrainer, packed to 512", 1 / 0.7),
    ("reward_step", "pairs"): Target("reward step, 134M bf16, unequal pairs", "TRL RewardTrainer", 2, 1.4),
    ("memory", "generation"): Target("peak while generating", "weights and KV cache", None, None),
    ("memory", "ppo"): Target("PPO's peak, one base", "base, KV cache, a micro-batch", None, None),
    ("memory", "shared"): Target("PPO's peak, one base", "four LoRA bases", 2),
    ("memory", "full"): Target("PPO's peak, one base", "four full models", 4),
    ("offline_step", "dpo"): Target("DPO step, 134M bf16, unequal pairs", "TRL DPOTrainer", None, 1.4),
    ("offline_step", "sft_lora"): Target("SFT step, LoRA, 134M bf16, rows of 32-400", "HF Trainer + peft", None, 1.4),
    ("server", "clients_1"): Target("server, 1 client", "the engine alone", None),
    ("server", "clients_8"): Target("server, 8 clients", "the engine alone", None),
    ("server", "clients_64"): Target("server, 64 clients", "the engine alone", None),
    ("startup", "warm"): Target("command to first optimizer step", "TRL script, same model", 1 / 0.7),
    ("startup", "cold"): Target("the same, kernels to be compiled", "", None),
    ("startup", "help"): Target("--stage sft --help", "", None),
}

HEAD = """# Beside every peer

`make bench` runs what is listed here and writes this page from docs/results/benchmarks.json;
`python benchmarks/bench.py --only NAME` runs one script again. Medians, both sides in turns in one run. `ratio` is how
many times faster, or smaller in memory, ours is than its peer; `floor_ratio` is our time over what the work's products
and bytes alone take at the rates measured in the same run. A line stands here only for a run that happened.

| work | peer | ours | peer's | ratio | asked | floor_ratio | asked | script |
|---|---|---|---|---|---|---|---|---|
"""


def line_of(script: str, row: dict) -> str:
    """One row of the table. What misses its target is bold."""
    target = TARGETS.get((script, row["case"]), Target(f"{script} {row['case']}", "", None))
    ratio, floor = row.get("ratio"), row.get("floor_ratio")
    ours = number(row["ours"], row["unit"])
    cells = [row.get("work", target.work), target.peer, f"**{ours}**" if row.get("is_missed") else ours,
             number(row.get("peer"), row["unit"]),
             marked(ratio, ratio is not None and target.ratio is not None and ratio < target.ratio),
             f">= {target.ratio:.3g}" if target.ratio else row.get("asked", ""),
             marked(floor, floor is not None and target.floor is not None and floor > target.floor),
             f"<= {target.floor:.2g}" if target.floor else "", f"{script} {row['case']}"]
    return "| " + " | ".join(cells) + " |"


def number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def marked(value: float | None, is_missed: bool) -> str:
    if value is None:
        return ""
    return f"**{value:.2f}**" if is_missed else f"{value:.2f}"


def page_of(record: dict[str, dict]) -> str:
    lines = [line_of(name, row) for name in SCRIPTS if name in record for row in record[name]["rows"]]
    runs = [f"- {record[name]['date']}: `{record[name]['command']}`" + seconds_of(record[name])
            + f"; {record[name]['rows'][0]['machine']}" for name in SCRIPTS if name in record]
    missing = [name for name in SCRIPTS if name not in record]
    cases = {name: {row["case"] for row in record[name]["rows"]} for name in record}
    absent = [f"{name} {case}" for name, case in TARGETS if name in record and case not in cases[name]]
    notes = [f"- {name}: {note}" for name in SCRIPTS if name in record for note in record[name].get("notes", [])]
    text = HEAD + "\n".join(lines) + "\n\nBold: the target is missed.\n\n## Runs\n\n" + "\n".join(runs) + "\n"
    if missing:
        text += f"\nNot yet run for this page: {', '.join(missing)}; earlier figures stand in pages of theirs.\n"
    if absent:
        text += f"\nCases without a figure: {', '.join(absent)}.\n"
    return text + ("\n## Where the time goes, and what was missed\n\n" + "\n".join(notes) + "\n" if notes else "")


def seconds_of(entry: dict) -> str:
    said = f", {entry['seconds']:.0f} s" if entry.get("seconds") else ""
    return said + (f", {entry['failed']}" if entry.get("failed") else "")


def entry_of(name: str, rows: list[dict], arguments: str, before: dict, seconds: float | None) -> dict:
    """What the record keeps of a run. Notes are people's and stay."""
    if not rows:
        raise SystemExit(f"{name} wrote no rows")
    command = f"python benchmarks/{name}.py {arguments}".strip()
    entry = {"command": command, "date": datetime.date.today().isoformat(), "seconds": seconds, "rows": rows}
    return entry | ({"notes": before["notes"]} if before.get("notes") else {})


def taken(name: str, given: str, before: dict | None) -> dict:
    """The record with the rows of `given`, FILE or FILE:ARGUMENTS, in place of those of the same cases."""
    path, _, arguments = given.partition(":")
    entry = entry_of(name, json.loads(Path(path).read_text(encoding="utf-8")), arguments, before or {}, None)
    return beside(entry, before or {})


def beside(entry: dict, before: dict) -> dict:
    """`entry` and the rows of cases that only `before` has."""
    cases = {row["case"] for row in entry["rows"]}
    kept = [row for row in before.get("rows", []) if row["case"] not in cases]
    if not kept:
        return entry
    return entry | {"command": f"{before['command']}; {entry['command']}", "rows": kept + entry["rows"],
                    "seconds": before.get("seconds")}


def run(name: str, arguments: str, limit: float, before: dict) -> tuple[dict | None, str]:
    """Run a script of the set; its entry, None if it has no rows, and what went wrong, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, f"benchmarks/{name}.py", *arguments.split(), "--json", str(out)]
        print(f"\n{' '.join(command[1:])} (at most {limit:.0f} s)", flush=True)
        began = time.perf_counter()
        fault = within(command, limit)
        rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    if not rows:
        return None, fault or "wrote no rows"
    entry = entry_of(name, rows, arguments, before, time.perf_counter() - began)
    return (beside(entry | {"failed": fault}, before) if fault else entry), fault


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


def run_all(names: list[str], record: dict[str, dict], is_quick: bool, keep: Callable[[], None]) -> list[str]:
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
            entry, fault = run(name, script.quick if is_quick else script.arguments, min(script.limit, left),
                               record.get(name, {}))
        if fault:
            faults.append(f"{name} {fault}")
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
        if entry:
            record[name] = entry
            keep()
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), help="these scripts")
    parser.add_argument("--take", nargs="+", default=[], metavar="NAME=FILE:ARGUMENTS",
                        help="rows of runs that happened")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page again")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, into outputs/bench-quick")
    options = parser.parse_args()
    path, page = RECORD, PAGE
    if options.quick:
        (ROOT / "outputs/bench-quick").mkdir(parents=True, exist_ok=True)
        path, page = (ROOT / "outputs/bench-quick" / found.name for found in (RECORD, PAGE))
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not options.quick else {}
    for given in options.take:
        name, _, found = given.partition("=")
        if name not in SCRIPTS:
            parser.error(f"--take {name}: choose {', '.join(SCRIPTS)}")
        record[name] = taken(name, found, record.get(name))
    names = [] if options.page or options.take else options.only or list(SCRIPTS)

    def keep() -> None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        page.write_text(page_of(record), encoding="utf-8")

    faults = run_all(names, record, options.quick, keep)
    keep()
    print(f"\nwrote {page.relative_to(ROOT)}" + (f"; failed: {', '.join(faults)}" if faults else ""))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
