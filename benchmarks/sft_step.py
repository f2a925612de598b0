"""Tokens per second of SFT beside TRL's SFTTrainer with packing (peers/offline.py), alternating in one run, and the
peak memory of each in a process of its own.

    python benchmarks/sft_step.py [--cases packed memory] [--json FILE]

Llama-shaped 134M, bf16, random weights; rows of 32 to 400 tokens, packed by TRL to 512, 4 such rows a step. Ours gets
the rows that went into TRL's step, unpacked: its micro-batches are cut by a budget of tokens and hold no padding in the
products. All tokens but a row's first are predicted. `packed` compares tokens per second with TRL's default packing;
floor_ratio is our time over that of the step's matrix products at the measured rate plus the optimizer's bytes at the
measured bandwidth. `memory` compares the most that each process held (VmHWM) in two steps, libraries and model
included. Ours keeps fp32 masters and moments, as its launcher does; TRL trains the bf16 weights themselves, with
moments in bf16. All cases take
--micro_batch_tokens, the setting engine.micro_batch_tokens of a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import steps
import torch
from floors import Shape, floor_of
from harness import Case, memory_status, row_of, run_apart, sizes_of
from peers.offline import TrlSFT
from random_models import SHAPES, actor_of, rows_of, tokenizer_of

from hybrid_rlhf.core.memory import keep_freed_blocks
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.trainers.sft import SFTTrainer

SIZES = 32, 400, 512  # the shortest row, the longest one, and what they are packed to
BATCH, ROWS = 4, 240
STEPS = 2  # of a process whose memory is measured


def our_step(place: Path, vocab: int, batches: list[list[list[int]]], micro_batch_tokens: int) -> Callable[[], None]:
    """Our SFT step, as `train.py --stage sft` builds it, on the next of `batches`."""
    tokenizer, numbers = tokenizer_of(vocab), count()
    trainer = SFTTrainer(actor_of(place, tokenizer, zero=ZeroConfig(micro_batch_tokens=micro_batch_tokens)))

    def step() -> None:
        rows = [{"input_ids": r, "loss_mask": [1] * len(r)} for r in batches[next(numbers)]]
        trainer.step(collate_sft(rows, tokenizer.pad_token_id)).compute()

    return step


def peer_of(place: Path, vocab: int, sizes: Sequence[int]) -> TrlSFT:
    """sizes: the shortest and the longest row, and what rows are packed to."""
    shortest, longest, length = sizes
    return TrlSFT(place / "base", tokenizer_of(vocab), rows_of(ROWS, (shortest, longest), vocab, 3), length, BATCH,
                  place / "trl")


def open_peer(options: argparse.Namespace) -> TrlSFT:
    return peer_of(options.place, options.vocab, sizes_of(options, *SIZES))


def prepare(options: argparse.Namespace, trl: TrlSFT) -> steps.Step:
    batches = [trl.rows(i) for i in range(options.repeats + 1)]
    sizes = [sum(map(len, rows)) for rows in batches[1:]]
    tokens = sum(sizes) / len(sizes)  # of a step; they differ by little, and both sides had the same
    model = Shape.of(SHAPES[options.shape][1])
    return steps.Step(
        our_step(options.place, options.vocab, batches, options.micro_batch_tokens), trl.step,
        lambda: {"floor_ratio": floor_of(model, round(tokens), 3, (round(tokens), 3),  # a backward costs two forwards
                                         trained=model.body + 2 * model.head)},
        tokens, lambda: {"tokens": tokens})


# -- memory ------------------------------------------------------------------------------------------------------------


def hold(side: str, place: str, vocab: int, sizes: list[int], threads: int, micro_batch_tokens: int,
         batches: list[list[list[int]]]) -> dict[str, int]:
    """In a process of its own: do STEPS steps; bytes that were resident before the model came, and the most ever."""
    torch.set_num_threads(threads)
    if side == "ours":
        keep_freed_blocks()
        idle = memory_status("VmRSS")
        step = our_step(Path(place), vocab, batches, micro_batch_tokens)
    else:
        import trl  # noqa: F401 - part of what is idle

        idle = memory_status("VmRSS")
        step = peer_of(Path(place), vocab, sizes).step
    for _ in range(STEPS):
        step()
    return {"idle": idle, "peak": memory_status("VmHWM")}


def measure_memory(options: argparse.Namespace, trl: TrlSFT) -> dict:
    batches = [trl.rows(i) for i in range(STEPS)]
    sides = {side: run_apart(hold, side=side, place=str(options.place), vocab=options.vocab,
                             sizes=sizes_of(options, *SIZES), threads=options.threads,
                             micro_batch_tokens=options.micro_batch_tokens, batches=batches)
             for side in ("ours", "trl")}
    ours, peer = sides["ours"]["peak"], sides["trl"]["peak"]
    return row_of("memory", CASES["memory"], ours / 1e6, peer / 1e6, "MB", sides=sides)


CASES = {
    "packed": Case("SFT, 134M bf16, rows of 32-400", "TRL SFTTrainer, packed to 512", 2, 1.4, prepare, open_peer),
    "memory": Case("SFT, peak of the process", "TRL SFTTrainer, packed to 512", 1 / 0.7, None, measure_memory,
                   open_peer),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = steps.parser_of(__doc__, CASES, repeats=4)
    parser.add_argument("--micro_batch_tokens", type=int, default=ZeroConfig().micro_batch_tokens,
                        help="most tokens of a forward and backward of ours")
    steps.run(CASES, parser, argv)


if __name__ == "__main__":
    main()
