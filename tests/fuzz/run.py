"""Coverage-guided fuzzing: python tests/fuzz/run.py [TARGET ...] --seconds 240 [--results docs/results/fuzz.md]

Each target runs in a process of its own under atheris (pip install 'hybrid-rlhf[fuzz]'), which mutates the seeds of
targets.py towards code that has not run yet. What is found is left in a folder and printed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_INPUT = 20  # more is a hang


def fuzz(name: str, seconds: int, folder: str) -> None:
    """In the process of one target: never returns."""
    import atheris

    with atheris.instrument_imports(include=["hybrid_rlhf", "json", "csv"]):
        from tests.fuzz.targets import SEEDS, TARGETS
    for i, seed in enumerate(SEEDS[name]):
        (Path(folder) / f"seed-{i}").write_bytes(seed)
    TARGETS[name](SEEDS[name][0])  # slow first imports are no hang
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", f"-timeout={SECONDS_PER_INPUT}", "-rss_limit_mb=6000",
                   "-max_len=4096", "-print_final_stats=1", f"-artifact_prefix={folder}/found-", folder],
                  TARGETS[name])
    atheris.Fuzz()


def one(name: str, seconds: int) -> dict:
    """Run a target in a process; its counts, and what it found ('' for nothing)."""
    folder = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "tests.fuzz.run", name, "--inside", folder, "--seconds", str(seconds)],
                          cwd=ROOT, capture_output=True, text=True, errors="replace")
    text = done.stdout + done.stderr

    def last(pattern: str) -> int:
        return int((re.findall(pattern, text) or ["0"])[-1])

    found = sorted(str(p) for p in Path(folder).glob("found-*"))
    if done.returncode or found:
        print(text[-4000:], file=sys.stderr)
    return {"target": name, "inputs": last(r"number_of_executed_units: (\d+)") or last(r"#(\d+)\s"),
            "kept": last(r"corp: (\d+)"), "branches": last(r"cov: (\d+)"),
            "slowest": last(r"slowest_unit_time_sec: (\d+)"), "seconds": round(time.monotonic() - started),
            "found": ", ".join(found) or ("" if done.returncode == 0 else f"exit code {done.returncode}")}


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("targets", nargs="*")
    flags.add_argument("--seconds", type=int, default=240)
    flags.add_argument("--inside", help=argparse.SUPPRESS)
    flags.add_argument("--json", help="append the counts to this file, a line each")
    options = flags.parse_args()
    if options.inside:
        fuzz(options.targets[0], options.seconds, options.inside)
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.targets import TARGETS

    rows = []
    for name in options.targets or TARGETS:
        rows.append(one(name, options.seconds))
        print(rows[-1], flush=True)
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(repr(rows[-1]) + "\n")
    return int(any(row["found"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
