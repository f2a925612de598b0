"""Twenty thousand PPO steps of a tiny model in one process: does anything grow? The first tenth against the last.

    python benchmarks/long_run.py [--cases ppo] [--steps 20000] [--quick] [--json FILE] [--page FILE]

`ppo` is `--stage ppo` by the command line itself, with loop, reports, a checkpoint every 2,000 steps and held-out rows:
actor, reference and critic of two layers, a reward function from a file, two prompts, responses of four tokens.
Every 100 steps it notes resident memory, open descriptors, threads, objects that Python's collector tracks, and the
median time of those steps (the processor's, which other work on the machine moves least).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import machine, memory_status, parse, parser_of, table_of, write_rows, write_tables

EVERY = 100  # steps between two samples
PAY = "def pay(completions, **_):\n    return [float(len(c) % 5) for c in completions]\n"
# what is noted, its unit, and the most by which the last tenth may exceed the first
MEASURES: dict[str, tuple[str, float]] = {
    "memory": ("MB", 0.05), "descriptors": ("", 0.0), "threads": ("", 0.0), "objects": ("", 0.10), "step": ("ms", 0.10)}


def words(place: Path, steps: int) -> list[str]:
    """The command line of the run; fills the place."""
    from tests.factories.tiny import save_tiny

    save_tiny(place / "base")
    rows = [{"prompt": f"say {word} {i}"} for i in range(10) for word in ("red", "blue", "cat", "dog", "sun")]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "pay.py").write_text(PAY, encoding="utf-8")
    return ["--stage", "ppo", "--model.model_name_or_path", str(place / "base"), "--model.dtype", "float32",
            f"--data.sources=[{place}/rows.jsonl]", "--data.cache_dir", str(place / "cache"), "--data.split", "null",
            "--data.max_prompt_length", "32", "--data.eval_fraction", "0.1", "--output_dir", str(place / "run"),
            f"--reward.functions=[{place}/pay.py:pay]", "--train.per_device_train_batch_size", "2",
            "--train.max_steps", str(steps), "--train.logging_steps", str(EVERY), "--train.eval_steps", str(10 * EVERY),
            "--train.save_steps", str(20 * EVERY), "--train.save_total_limit", "2", "--ppo.sampling.max_new_tokens",
            "4",
            "--ppo.num_ppo_epochs", "1", "--ppo.num_minibatches", "1"]


def sample(times: list[float]) -> dict[str, float]:
    return {"memory": memory_status("VmRSS") / 1e6, "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")), "objects": len(gc.get_objects()),
            "step": 1000 * statistics.median(times)}


def watched(step: Callable, samples: list[dict], every: int, estimate: Callable[[float], None]) -> Callable:
    """`step` of the loop, with a sample after each `every` of them."""
    times: list[float] = []

    def counted(*given: object) -> object:
        began = time.process_time()
        found = step(*given)
        times.append(time.process_time() - began)
        if len(times) == every:
            if not samples:
                estimate(statistics.median(times))
            gc.collect()
            samples.append(sample(times))
            times.clear()
        return found

    return counted


def run_ppo(steps: int, every: int) -> list[dict]:
    """The samples of a run."""
    from hybrid_rlhf.cli import main as command_line
    from hybrid_rlhf.run import loop

    samples: list[dict] = []

    def estimate(seconds: float) -> None:
        print(f"{1000 * seconds:.1f} ms a step: {steps * seconds / 60:.1f} minutes for {steps} steps", flush=True)

    step, loop._step = loop._step, watched(loop._step, samples, every, estimate)
    try:
        with tempfile.TemporaryDirectory() as place:
            code = command_line(words(Path(place), steps))
    finally:
        loop._step = step
    if code:
        raise SystemExit(f"the run ended with {code}; see above")
    return samples


def row_of(name: str, samples: Sequence[dict], steps: int) -> dict:
    """Medians of the first and the last tenth of the samples, and what has grown by more than it may."""
    tenth = max(1, len(samples) // 10)
    ends = {part: {key: statistics.median(s[key] for s in found) for key in MEASURES}
            for part, found in (("first", samples[:tenth]), ("last", samples[-tenth:]))}
    grown = {key: ends["last"][key] / ends["first"][key] - 1 for key in MEASURES}
    missed = [key for key, (_, most) in MEASURES.items() if grown[key] > most]
    row = {"case": name, "steps": steps, **ends, "grown": grown, "missed": missed, "samples": list(samples),
           "machine": machine()}
    for key, (unit, _) in MEASURES.items():
        print(f"{name} {key:12} {ends['first'][key]:10.1f} {ends['last'][key]:10.1f} {unit:3} {grown[key]:+.1%}"
              f"{' more than asked' * (key in missed)}", flush=True)
    return row


def table(row: dict) -> str:
    return table_of(
        (f"{row['steps']} steps", "first tenth", "last tenth", "change", "asked"),
        [(f"{key}{f', {unit}' * bool(unit)}", f"{row['first'][key]:.4g}", f"{row['last'][key]:.4g}",
          f"{row['grown'][key]:+.1%}", f"at most +{most:.0%}: {'missed' if key in row['missed'] else 'met'}")
         for key, (unit, most) in MEASURES.items()])


CASES = {"ppo": run_ppo}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--page", help="put the table into this page, or make it")
    parser.set_defaults(threads=1)
    options = parse(parser, argv)
    every = 2 if options.quick else EVERY
    steps = 6 if options.quick else options.steps
    rows = write_rows((row_of(name, CASES[name](steps, every), steps) for name in options.cases), options.json)
    if options.page:
        write_tables(Path(options.page), *map(table, rows))
    return int(any(row["missed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
