"""Seconds from the command to its first optimizer step, beside a TRL script with the same model and data, in turns.

    python benchmarks/startup.py [--cases warm help cold] [--json FILE] [--profile]

`warm`: `train.py --stage sft` on a model of the demo's size (two layers, a vocabulary of 512, fp32) that lies in a
folder, with 512 rows of prompt and completion in a file, kernels compiled before and the system's file cache warm, rows
not tokenized before on either side; beside peers/trl_sft_script.py. The step is over when its line is in metrics.jsonl.
`cold`: the same with no compiled kernels, ours alone (the peer compiles nothing).
`help`: `train.py --stage sft --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from harness import Times, alternate, machine, write_rows

ROOT = Path(__file__).resolve().parents[1]
PAUSE = 0.02  # seconds between two looks for the first step


def prepare(place: Path) -> None:
    """place/model: a model of the demo's size with its tokenizer; place/rows.jsonl: what it is trained on."""
    from hybrid_rlhf.data.demo import demonstrations
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.models.tokenizer import train_tokenizer
    from hybrid_rlhf.training import builders

    found = [{name: messages[0]["content"] + end for (name, messages), end in zip(row.items(), ("\n", ""), strict=True)}
             for row in demonstrations()[:512]]
    (place / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found), encoding="utf-8")
    tokenizer = train_tokenizer([r["prompt"] + r["completion"] for r in found], 512)
    model = ModelConfig(preset="demo", vocab_size=512, dtype="float32")
    builders.open_policy(model, tokenizer, 0, dropout=False).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")


def ours(place: Path, out: Path) -> list[str]:
    return [sys.executable, "train.py", "--stage", "sft", "--model.model_name_or_path", str(place / "model"),
            "--model.dtype", "float32", "--data.sources", json.dumps([{"path": str(place / "rows.jsonl")}]),
            "--data.max_length", "64", "--train.max_steps", "1", "--train.per_device_train_batch_size", "8",
            "--data.cache_dir", str(out / "cache"), "--output_dir", str(out / "run")]


def theirs(place: Path, out: Path) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks/peers/trl_sft_script.py"), str(place / "model"),
            str(place / "rows.jsonl"), str(out)]


def until(command: list[str], is_done: Callable[[], bool], environment: dict[str, str]) -> float:
    """Seconds from the start of `command` until `is_done`; the process is then left to end by itself."""
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=said, stderr=said)
        while not is_done():
            if process.poll() is not None and not is_done():
                said.seek(0)
                raise SystemExit(f"{command[1]} ended with {process.returncode} before its first step:\n{said.read()}")
            time.sleep(PAUSE)
        took = time.perf_counter() - began
        process.wait()
    return took


def start_ours(place: Path, **environment: str) -> float:
    out = Path(tempfile.mkdtemp(dir=place))
    return until(ours(place, out), lambda: is_written(out / "run" / "metrics.jsonl"), environment)


def start_theirs(place: Path) -> float:
    out = Path(tempfile.mkdtemp(dir=place))
    return until(theirs(place, out), (out / "first_step").exists, {"HF_DATASETS_CACHE": str(out / "cache")})


def is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def helped() -> None:
    subprocess.run([sys.executable, "train.py", "--stage", "sft", "--help"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)


def in_turns(repeats: int, *acts: Callable[[], float]) -> list[Times]:
    """Seconds that each says of itself, in turns after an unmeasured round."""
    rounds = [[act() for act in acts] for _ in range(repeats + 1)][1:]
    return [Times(statistics.median(t), min(t), max(t)) for t in zip(*rounds, strict=True)]


def row_of(case: str, mine: Times, peer: Times | None) -> dict:
    ratio = peer.median / mine.median if peer else None
    print(f"{case:6} ours {mine} s" + (f"  TRL {peer} s  ours / TRL {1 / ratio:.2f}" if peer else ""), flush=True)
    return {"case": case, "ours": mine.median, "peer": peer.median if peer else None, "ratio": ratio,
            "floor_ratio": None, "unit": "s", "machine": machine(), "ours_range": mine[1:],
            "peer_range": peer[1:] if peer else None}


def measure(options: argparse.Namespace, place: Path) -> list[dict]:
    rows = []
    if "warm" in options.cases:
        rows.append(row_of("warm", *in_turns(options.repeats, lambda: start_ours(place), lambda: start_theirs(place))))
    if "help" in options.cases:
        rows.append(row_of("help", alternate(options.repeats, helped)[0], None))
    if "cold" in options.cases:
        took = start_ours(place, HYBRID_RLHF_CACHE=tempfile.mkdtemp(dir=place))
        rows.append(row_of("cold", Times(took, took, took), None))
    return rows


def profile(place: Path) -> None:
    """What our start imports and calls, the longest first."""
    out = Path(tempfile.mkdtemp(dir=place))
    where = out / "profile"
    subprocess.run([sys.executable, "-m", "cProfile", "-o", str(where), *ours(place, out)[1:]], cwd=ROOT, check=True)
    import pstats

    pstats.Stats(str(where)).sort_stats("cumulative").print_stats("hybrid_rlhf|training|__init__.py", 80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=["warm", "help", "cold"], default=["warm", "help", "cold"])
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each side; the median counts")
    parser.add_argument("--profile", action="store_true", help="print where our start spends its time instead")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        if options.profile:
            profile(Path(folder))
            return
        rows = measure(options, Path(folder))
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
