"""Seconds from the command to its first optimizer step, beside a TRL script with the same model and data, in turns.

    python benchmarks/startup.py [--cases warm help cold] [--json FILE]

`warm`: `train.py --stage sft` on a model of the demo's size (two layers, a vocabulary of 512, fp32) that lies in a
folder, with 512 rows of prompt and completion in a file, kernels compiled before and the system's file cache warm, rows
not tokenized before on either side; beside peers/trl_sft_script.py. The step is over when its line is in metrics.jsonl.
`cold`: the same with no compiled kernels, ours alone (the peer compiles nothing); a quick run leaves it out.
`help`: `train.py --stage sft --help`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import ROOT, Case, Times, alternate, in_turns, parse, parser_of, timed_row, write_rows

PAUSE = 0.02  # seconds between two looks for the first step


def prepare(place: Path) -> None:
    """place/model: a model of the demo's size with its tokenizer; place/rows.jsonl: what it is trained on."""
    from hybrid_rlhf.data.demo import demonstrations
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.models.tokenizer import train_tokenizer
    from hybrid_rlhf.training import builders

    rows = [{name: messages[0]["content"] + end for (name, messages), end in zip(row.items(), ("\n", ""), strict=True)}
            for row in demonstrations()[:512]]
    (place / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    tokenizer = train_tokenizer([r["prompt"] + r["completion"] for r in rows], 512)
    model = ModelConfig(preset="demo", vocab_size=512, dtype="float32")
    builders.open_policy(model, tokenizer, 0, dropout=False).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")


def until(command: list[str], is_done: Callable[[], bool], environment: dict[str, str]) -> float:
    """Seconds from the start of `command` until `is_done`; the process is then left to end by itself."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output)
        while not is_done():
            if process.poll() is not None and not is_done():
                output.seek(0)
                raise SystemExit(f"{command[1]} ended with {process.returncode} before its first step:\n"
                                 f"{output.read()}")
            time.sleep(PAUSE)
        took = time.perf_counter() - began
        process.wait()
    return took


def start_ours(place: Path, **environment: str) -> float:
    out = Path(tempfile.mkdtemp(dir=place))
    command = [sys.executable, "train.py", "--stage", "sft", "--model.model_name_or_path", str(place / "model"),
               "--model.dtype", "float32", "--data.sources", json.dumps([{"path": str(place / "rows.jsonl")}]),
               "--data.max_length", "64", "--train.max_steps", "1", "--train.per_device_train_batch_size", "8",
               "--data.cache_dir", str(out / "cache"), "--output_dir", str(out / "run")]
    written = out / "run" / "metrics.jsonl"
    return until(command, lambda: written.exists() and written.stat().st_size > 0, environment)


def start_theirs(place: Path) -> float:
    out = Path(tempfile.mkdtemp(dir=place))
    command = [sys.executable, "benchmarks/peers/trl_sft_script.py", str(place / "model"), str(place / "rows.jsonl"),
               str(out)]
    return until(command, (out / "first_step").exists, {"HF_DATASETS_CACHE": str(out / "cache")})


def ask_help() -> None:
    subprocess.run([sys.executable, "train.py", "--stage", "sft", "--help"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)


def time_warm(place: Path, repeats: int) -> list[Times]:
    return in_turns(repeats, lambda: start_ours(place), lambda: start_theirs(place))


def time_help(_place: Path, repeats: int) -> list[Times]:
    return alternate(repeats, ask_help)


def time_cold(place: Path, _repeats: int) -> list[Times]:
    return [Times.of([start_ours(place, HYBRID_RLHF_CACHE=tempfile.mkdtemp(dir=place))])]


CASES = {
    "warm": Case("command to first optimizer step", "TRL script, same model", 1 / 0.7, prepare=time_warm),
    "help": Case("--stage sft --help", prepare=time_help),
    "cold": Case("the same, kernels to be compiled", prepare=time_cold),
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(parser_of(__doc__, CASES, repeats=3), argv)
    names = [name for name in options.cases if name != "cold" or not options.quick]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        write_rows((timed_row(name, CASES[name], CASES[name].prepare(Path(folder), options.repeats), unit="s")
                    for name in names), options.json)


if __name__ == "__main__":
    main()
