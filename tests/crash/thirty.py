"""Thirty kills over the three stages, half of them in the midst of a save, and a page of what came of it: `make crash`.

python -m tests.crash.thirty --kills 30 --markdown docs/results/crash.md
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.nursery import count_operations
from tests.crash.place import CHILD, Nursery, difference, launch, prepare, three_stages

STAGES, STEPS, SAVE_STEPS, KILLS_A_RUN = ("sft", "reward", "ppo"), 6, 2, 5
FRESH = "import sys; from tests.crash.thirty import fresh; sys.exit(fresh(int(sys.argv.pop(1))))"


def fresh(at: int) -> int:
    """In a process of its own: the command line, killed before file operation `at` (0: never)."""
    from hybrid_rlhf.cli import main

    count_operations(at or None)
    return main()


class FreshProcesses:
    """As a Nursery, but each command line starts as a person starts it: imports and all."""

    def run(self, argv: list[str], *, after: float | None = None, at: int | None = None) -> dict:
        process, began = launch([str(at or 0), *argv], FRESH) if at else launch(argv, CHILD), time.monotonic()
        try:
            _, log = process.communicate(timeout=after)
        except Exception:  # the time has come
            process.kill()
            _, log = process.communicate()
        return {"code": process.returncode, "seconds": time.monotonic() - began, "log": log}


def reached(out: Path) -> str:
    """The stage and step that a killed run had come to."""
    found = "nothing yet"
    for stage in STAGES:
        path = out / stage / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in reversed(lines):
            try:
                found = f"{stage}, step {json.loads(line)['step']}"
                break
            except ValueError:  # the line that the kill tore
                continue
    return found


def one_run(place: Path, number: int, kills: int, straight: dict, runners: list,
            draw: random.Random) -> tuple[list, str]:
    """Kill a run of all stages `kills` times and let it end: rows of the table, and what differs ("" for nothing)."""
    out, rows = f"killed{number}", []
    argv = three_stages(place, out, STEPS, SAVE_STEPS)
    done = {"code": -9}
    while len(rows) < kills or done["code"] != 0:
        moment = {}
        if len(rows) < kills:
            # a part is behind it each time: moments are drawn from what is left of the uninterrupted run
            left = 1 - len(rows) / (kills + 1)
            is_by_time = len(rows) % 2 == 0
            moment = ({"after": draw.uniform(0.05, 0.6 * left) * straight["seconds"] + runners[0].delay} if is_by_time
                      else {"at": draw.randrange(1, int(0.5 * left * straight["operations"]) + 2)})
        done = runners[len(rows) % len(runners)].run(argv, **moment)
        if done["code"] not in (0, -9):
            return rows, f"exit code {done['code']}: {done['log'].strip().splitlines()[-1:]}"
        if done["code"] == -9:
            went_on = re.findall(r"goes on after step (\d+)", done["log"])
            how = f"{moment['after']:.2f} s" if "after" in moment else f"file operation {moment['at']}"
            rows.append((number, how, reached(place / out), ", ".join(went_on) or "-"))
        elif moment:
            break  # it came to its end before the moment
    wrong = [f"{s}: {found}" for s in STAGES if (found := difference(place / "straight" / s, place / out / s))]
    return rows, "; ".join(wrong)


def page(rows: list[tuple], wrong: dict[int, str], seconds: float) -> str:
    in_saves = sum("file" in row[1] for row in rows)
    lines = ["# Kill test", "",
             f"{len(rows)} times SIGKILL over `--stage all` on a tiny model ({STEPS} steps a stage, a checkpoint every "
             f"{SAVE_STEPS}; dropout in stage 1, four roles in stage 3), {in_saves} of them at a chosen file operation "
             "of a save, the others by the clock. Each time the same command was given again. Compared with the run "
             "that was "
             "not interrupted, bit for bit: exported weights, the last checkpoint of each stage (weights, moments, "
             "kl_coef, generators, loader), samples.jsonl, and metrics.jsonl but for time/*, memory/* and "
             "engine/{tokens_per_second,kv_bytes}. Run 0 in processes of its own, the others forked from one that had "
             "imported the libraries.", "",
             f"**{sum(not w for w in wrong.values())} of {len(wrong)} runs ended in the same bits** "
             f"({seconds:.0f} s in all). `make crash` repeats it.", "",
             "| run | killed after | it had come to | went on after step |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    lines += [f"\nRun {n} differs: {text}" for n, text in wrong.items() if text]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", default="docs/results/crash.md")
    given = parser.parse_args()
    draw, began, rows, wrong = random.Random(given.seed), time.monotonic(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        place = prepare(Path(folder))
        nurseries, alone = [Nursery(place), Nursery(place)], FreshProcesses()
        straight = nurseries[0].run(three_stages(place, "straight", STEPS, SAVE_STEPS))
        assert straight["code"] == 0, straight["log"][-3000:]
        for each in nurseries:
            each.delay = 0.0
        import_began = time.monotonic()
        alone.run(["--help"])
        alone.delay = time.monotonic() - import_began
        while len(rows) < given.kills:
            number = len(wrong)
            kills = min(KILLS_A_RUN, given.kills - len(rows))
            found, wrong[number] = one_run(place, number, kills, straight, nurseries if number else [alone], draw)
            rows += found
            print(f"run {number}: {len(found)} kills, {wrong[number] or 'the same bits'}", file=sys.stderr, flush=True)
            Path(given.markdown).write_text(page(rows, wrong, time.monotonic() - began), encoding="utf-8")
        for each in nurseries:
            each.close()
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
