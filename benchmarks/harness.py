"""What the benchmarks share: turns, medians, the machine's own speed, peak memory of a process, and the json rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Seconds of several runs."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f}-{self.most:.3f})"


clock = [time.perf_counter]  # what seconds are told by; time.process_time where others use the machine too


def seconds(act: Callable[[], object]) -> float:
    start = clock[0]()
    act()
    return clock[0]() - start


def alternate(repeats: int, *acts: Callable[[], object], warm: int = 1) -> list[Times]:
    """Seconds of each, taken in turns after `warm` unmeasured rounds."""
    for _ in range(warm):
        for act in acts:
            act()
    rounds = [[seconds(act) for act in acts] for _ in range(repeats)]
    return [Times(statistics.median(t), min(t), max(t)) for t in zip(*rounds, strict=True)]


def machine() -> str:
    import transformers

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    kind = torch.backends.cpu.get_cpu_capability()
    return (f"{name}, {torch.get_num_threads()} threads of {os.cpu_count()}, {kind}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def bandwidth(size: int = 2**29, repeats: int = 5) -> float:
    """Bytes per second of reading `size` bytes that no cache holds."""
    block = torch.ones(size // 4)
    block.sum()
    return size / min(seconds(block.sum) for _ in range(repeats))


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


def status(name: str) -> int:
    """Bytes of an entry of this process's status: VmRSS (resident now), VmHWM (the most so far)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}; this benchmark needs Linux")


def write_rows(rows: Iterable[dict], path: str | None) -> None:
    """Write the rows as they come, so that those of a run that is stopped stay."""
    done = []
    for row in rows:
        done.append(row)
        if path:
            Path(path).write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


def step_parser(doc: str, cases: Iterable[str] = (), *, shapes: Iterable[str] = ("llama134m", "tiny"),
                repeats: int = 4) -> argparse.ArgumentParser:
    """The options that every benchmark of steps has; the first shape is the one that figures are given for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names := list(cases):
        parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--shape", choices=list(shapes), default=next(iter(shapes)))
    parser.add_argument("--repeats", type=int, default=repeats,
                        help="measured steps of each side; the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the rows to this file")
    return parser
