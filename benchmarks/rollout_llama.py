"""Decoding beside llama.cpp: the same weights as a GGUF file of the same precision, both sides greedy, in turns.

A part of rollout.py (`--cases llama_cpp`); llama-cpp-python is looked for in this Python or in `--peer_python`, and
runs in a process of its own that waits while ours works. It has flash attention, a cache for each sequence in 16 bits
(f16 is the faster one here), and reads all prompts in one forward, as we do. What is compared is counted alike on both
sides: `prompt` ends when every sequence has its first token, `decode` is all the others. That both compute the same
model is shown in fp32 first, where greedy tokens must be equal but for near ties, which random weights have many of,
in 16 bits most of all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from harness import Case, Times, seconds, timed_row
from rollout_floor import Floor
from torch import nn

PEER = Path(__file__).resolve().parent / "peers/llama_cpp_streams.py"


class Sides(NamedTuple):
    """Seconds of each turn, the peer's own description, and the part of the tokens that are the same up to where a
    sequence first departs from the other side's."""

    ours: dict[str, list[float]]
    peer: dict[str, list[float]]
    equal: float
    peer_is: str


class Work(NamedTuple):
    """What both sides do. generate(n): our side, greedy, n tokens for each prompt."""

    model: nn.Module
    prompts: list[list[int]]
    response: int
    generate: Callable[[int], list[list[int]]]


def is_installed(python: str) -> bool:
    done = subprocess.run([python, "-c", "import llama_cpp, numpy"], capture_output=True, check=False)
    return done.returncode == 0


def write_model(model: nn.Module, folder: Path) -> Path:
    """The model as GGUF. Its tokenizer, which llama.cpp wants and nobody asks here, is one of few tokens."""
    from hybrid_rlhf.export.gguf import write_gguf
    from hybrid_rlhf.models.tokenizer import train_tokenizer

    dtype = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[next(model.parameters()).dtype]
    model.save_pretrained(folder)
    train_tokenizer(["a few words"], 300).save_pretrained(folder)
    return write_gguf(folder, folder / "model.gguf", dtype)


@contextmanager
def peer_process(python: str, path: Path, settings: dict) -> Iterator[tuple[Callable[[], dict], str]]:
    """(turn, what it is): turn() lets llama.cpp do its work once."""
    with subprocess.Popen([python, str(PEER), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:

        def ask(line: str) -> str:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"llama.cpp's process ended with {process.wait()}")
            return answer

        peer_is = ask(json.dumps(settings)).strip()
        try:
            yield lambda: json.loads(ask("")), peer_is
        finally:
            process.stdin.close()


def beside_llama(work: Work, repeats: int, python: str, cache: str) -> Sides:
    """Turns of both sides after one unmeasured turn each."""
    settings = {"prompts": work.prompts, "response": work.response, "threads": torch.get_num_threads(), "cache": cache,
                "ubatch": sum(map(len, work.prompts))}
    turns: list[tuple[float, float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(work.model, Path(folder))
        with peer_process(python, path, settings) as (turn, peer_is):
            for _ in range(repeats + 1):
                first, drawn = seconds(lambda: work.generate(1)), []
                whole = seconds(lambda: drawn.extend(work.generate(work.response)))  # noqa: B023 - called at once
                found = turn()
                turns.append((first, whole - first, found["prompt"], found["decode"]))
    columns = [[turn[i] for turn in turns[1:]] for i in range(4)]
    return Sides({"prompt": columns[0], "decode": columns[1]}, {"prompt": columns[2], "decode": columns[3]},
                 _equal(drawn, found["tokens"]), peer_is)


def check_same(work: Work, python: str, least: float = 0.9) -> float:
    """The part of the greedy tokens in fp32 that are llama.cpp's; below `least` there is nothing to compare."""
    equal = beside_llama(work, 0, python, "f32").equal
    if equal < least:
        raise SystemExit(f"llama_cpp: {equal:.1%} of the greedy tokens in fp32 are equal; not measured")
    return equal


def _equal(ours: list[list[int]], theirs: list[list[int]]) -> float:
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, ours))


def row_of(name: str, case: Case, phase: str, sides: Sides, work: Work, floor: Floor, **extra: object) -> dict:
    """The row of a phase: `decode`, or `prompt`."""
    streams = len(work.prompts)
    steps = streams * (work.response - 1)
    num_tokens, least = {
        "decode": (steps, floor.products * steps / (streams * work.response) + floor.cache),
        "prompt": (sum(map(len, work.prompts)), floor.prompts + floor.step_own)}[phase]
    times = [Times.of(side[phase]) for side in (sides.ours, sides.peer)]
    return timed_row(name, case, times, {"floor_ratio": least}, num_tokens, equal_tokens=sides.equal,
                     peer_is=sides.peer_is, **extra)


def skipped(python: str) -> None:
    print(f"llama_cpp: not measured; {python} has no llama-cpp-python (pip install llama-cpp-python, or give "
          "--peer_python PATH of a Python that has it)", file=sys.stderr)
