"""What the benchmarks share: the command line, alternating measurements, one row per case, and tables in Markdown.

Each script lists its cases and says how one is measured, and runs alone:

    python benchmarks/NAME.py [--cases ...] [--quick] [--json FILE]

Importing this puts the checkout on the path, so it comes before hybrid_rlhf.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from peers.process import ENVIRONMENT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))


class Case(NamedTuple):
    """One row of the results: what is measured, beside whom, and what is asked for.

    min_ratio: how many times better than the peer, at least. max_floor_ratio: how many times the floor, at most.
    prepare, open_peer: how the two sides are made, where steps.py measures the case.
    """

    work: str
    beside: str = ""
    min_ratio: float | None = None
    max_floor_ratio: float | None = None
    prepare: Callable | None = None
    open_peer: Callable | None = None


# -- the command line --------------------------------------------------------------------------------------------------


def parser_of(doc: str, cases: Iterable[str] = (), repeats: int | None = None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names := list(cases):
        parser.add_argument("--cases", nargs="+", choices=names, default=names)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats,
                            help="measured runs of each side; the median counts")
    parser.add_argument("--quick", action="store_true", help="a dry run at tiny sizes, whose figures say nothing")
    parser.add_argument("--json", help="write the rows to this file")
    return parser


def add_clock(parser: argparse.ArgumentParser, threads: int | None = 2) -> argparse.ArgumentParser:
    """The options of what is measured in this process. threads: torch's own choice if None."""
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--cpu-time", action="store_true", help="one thread's processor time in place of the wall's, "
                        "on a machine that others use too")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, applied to torch and to the clock. A quick run measures once, on one thread."""
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats, options.threads, measuring.block = 1, 1, 2**20
    if getattr(options, "cpu_time", False):
        measuring.clock, options.threads = time.process_time, 1
    if getattr(options, "threads", None):
        torch.set_num_threads(options.threads)
    return options


def sizes_of(options: argparse.Namespace, *sizes: int) -> list[int]:
    """The sizes, or a quarter of each in a quick run."""
    return [-(-size // 4) for size in sizes] if options.quick else list(sizes)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of several runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> Times:
        return cls(statistics.median(runs), min(runs), max(runs))


# What tells seconds, what waits for a device to end its work, and bytes that no cache holds.
measuring = SimpleNamespace(clock=time.perf_counter, wait=lambda: None, block=2**29)


def seconds(act: Callable[[], object]) -> float:
    measuring.wait()
    start = measuring.clock()
    act()
    measuring.wait()
    return measuring.clock() - start


def alternate(repeats: int, *sides: Callable[[], object]) -> list[Times]:
    """Seconds of each side, taken in turns after an unmeasured round."""
    return in_turns(repeats, *(partial(seconds, side) for side in sides))


def in_turns(repeats: int, *sides: Callable[[], float]) -> list[Times]:
    """As `alternate`, of sides that return their own seconds."""
    rounds = [[side() for side in sides] for _ in range(repeats + 1)]
    return [Times.of(runs) for runs in zip(*rounds[1:], strict=True)]


def with_floors(repeats: int, floor: Callable[[], Any], *sides: Callable[[], float]) -> tuple[list[Times], list[Any]]:
    """As `in_turns`, and what `floor` returns after each measured round: the rates that a floor takes move with what
    else uses the machine, so they are measured all along and not once."""
    rounds = [([side() for side in sides], floor()) for _ in range(repeats + 1)]
    times, found = zip(*rounds[1:], strict=True)
    return [Times.of(runs) for runs in zip(*times, strict=True)], list(found)


def run_apart(function: Callable, environment: dict[str, str] | None = None, **settings: object) -> Any:
    """What `function` of a script in this folder returns in a process of its own; settings and answer as JSON has them.

    Raises SystemExit if the process fails.
    """
    module = Path(function.__code__.co_filename).stem
    code = (f"import json, sys\nsys.path.insert(0, {str(HERE)!r})\nimport {module}\n"
            f"print(json.dumps({module}.{function.__name__}(**json.load(sys.stdin))))")
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(settings), stdout=subprocess.PIPE, text=True,
                          env=ENVIRONMENT | (environment or {}))
    if done.returncode:
        raise SystemExit(f"{module}.{function.__name__}: its process ended with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def run_forked(function: Callable, *arguments: object, limit: float) -> tuple[Any, str]:
    """What `function` returns in a process forked from this one, and how it failed, if it did (raised, crashed, hung).
    Nothing may have started a thread here before."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send((function(*arguments), ""))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            sender.send((None, f"{first_lines(error)} ({Path(place.filename).name}:{place.lineno})"))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(limit) else (None, f"no answer within {limit:g} s")
    except EOFError:
        process.join()
        answer = None, f"the process ended with code {process.exitcode}"
    process.kill()
    process.join()
    return answer


def first_lines(error: Exception, most: int = 160) -> str:
    """An error's class and the beginning of what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def device() -> torch.device:
    """The card, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> str:
    import transformers

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    kind = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        name = f"{torch.cuda.get_device_name()}, {name}"
    return (f"{name}, {torch.get_num_threads()} threads of {os.cpu_count()}, {kind}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def bandwidth(size: int | None = None, repeats: int = 5) -> float:
    """Bytes per second of reading `size` bytes; without it, of a block that no cache holds."""
    block = torch.ones((size or measuring.block) // 4)
    block.sum()
    return 4 * len(block) / min(seconds(block.sum) for _ in range(repeats))


@torch.no_grad()
def matrix_rate(shapes: list[tuple[int, int, int]], dtype: torch.dtype, repeats: int = 3) -> float:
    """Operations per second of products (rows, in, out), all shapes together, each counted 2 rows in out."""
    pairs = [(torch.randn(n, i).to(dtype), torch.randn(o, i).to(dtype)) for n, i, o in shapes]

    def multiply() -> None:
        for rows, weight in pairs:
            torch.nn.functional.linear(rows, weight)

    multiply()
    count = sum(2 * n * i * o for n, i, o in shapes)
    return count / min(seconds(multiply) for _ in range(repeats))


def memory_status(name: str, pid: int | str = "self") -> int:
    """Bytes of an entry of a process's status: VmRSS (resident now), VmHWM (the most so far)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status has no {name}; this benchmark needs Linux")


# -- rows --------------------------------------------------------------------------------------------------------------


def row_of(name: str, case: Case, ours: float, peer: float | None, unit: str, floor_ratio: float | None = None,
           **extra: object) -> dict:
    """A row, printed. ratio is how many times better ours is than the peer: larger where the unit is a rate."""
    ratio = None if peer is None else ours / peer if unit.endswith("/s") else peer / ours
    missed = [key for key, is_missed in (
        ("ratio", ratio is not None and case.min_ratio is not None and ratio < case.min_ratio),
        ("floor_ratio", floor_ratio is not None and case.max_floor_ratio is not None
         and floor_ratio > case.max_floor_ratio)) if is_missed]
    row = {"case": name, "work": case.work, "beside": case.beside, "ours": ours, "peer": peer, "ratio": ratio,
           "asked": f">= {case.min_ratio:.3g}" if case.min_ratio else "", "floor_ratio": floor_ratio,
           "floor_asked": f"<= {case.max_floor_ratio:.2g}" if case.max_floor_ratio else "", "missed": missed,
           "unit": unit, "machine": machine()} | extra
    print(described(row), flush=True)
    return row


def timed_row(name: str, case: Case, times: Sequence[Times], floors: dict[str, float] | None = None,
              num_tokens: float | None = None, unit: str = "s/step", **extra: object) -> dict:
    """A row of times: ours, and the peer's if there is one.

    floors: seconds by the key of our ratio to them. num_tokens: of a run, where tokens per second are compared.
    """
    values = [num_tokens / t.median if num_tokens else t.median for t in times]
    ranges = [[num_tokens / t.most, num_tokens / t.least] if num_tokens else [t.least, t.most] for t in times]
    ratios = {key: times[0].median / floor for key, floor in (floors or {}).items()}
    return row_of(name, case, values[0], values[1] if len(times) > 1 else None, "tokens/s" if num_tokens else unit,
                  **ratios, **dict(zip(("ours_range", "peer_range"), ranges, strict=False)), **extra)


def described(row: dict) -> str:
    """A row for the terminal: what is compared, then all other figures."""
    sides = [f"{side} {shown(row[side])}" + (f" ({shown(row[f'{side}_range'])})" if f"{side}_range" in row else "")
             for side in ("ours", "peer") if row[side] is not None]
    told = ("case", "work", "beside", "ours", "peer", "ours_range", "peer_range", "unit", "machine")
    others = [f"{key} {shown(value)}" for key, value in row.items() if key not in told and value not in (None, "", [])]
    return f"{row['case']:16} {', '.join(sides)} {row['unit']}\n{'':16} {', '.join(others)}".rstrip()


def shown(value: object) -> str:
    """A figure to three digits, and those of a list or a dictionary."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {shown(v)}" for k, v in value.items()) + ")"
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def write_rows(rows: Iterable[dict], path: str | None) -> list[dict]:
    """Write the rows as they come, a line for each, so that those of a run that is stopped stay."""
    done = []
    for row in rows:
        done.append(row)
        if path:
            Path(path).write_text("[\n" + ",\n".join(map(json.dumps, done)) + "\n]\n", encoding="utf-8")
    return done


def write_json(path: Path, found: object) -> None:
    """Write it atomically: a run that is stopped leaves the file as it was before, or whole."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    beside.rename(path)


# -- pages -------------------------------------------------------------------------------------------------------------


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell."""
    lines = [[str("" if cell is None else cell).replace("|", "/") for cell in row] for row in (columns, *rows)]
    head, *body = ["| " + " | ".join(line) + " |\n" for line in lines]
    return head + "|" + "---|" * len(columns) + "\n" + "".join(body)


def write_tables(page: Path, *tables: str) -> None:
    """Put the tables in the place of the page's own, one for one, and leave its prose; a new page is made of them.

    Raises SystemExit where the page has another number of tables.
    """
    if not page.exists():
        page.write_text("\n".join(tables), encoding="utf-8")
        return
    prose = re.split(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if len(prose) != len(tables) + 1:
        raise SystemExit(f"{page} has {len(prose) - 1} tables, not {len(tables)}; nothing is written to it")
    page.write_text(prose[0] + "".join(t + p for t, p in zip(tables, prose[1:], strict=True)), encoding="utf-8")
