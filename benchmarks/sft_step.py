"""Tokens per second of SFT beside TRL's SFTTrainer with packing (peers/trl_offline.py), alternating in one run, and the
peak memory of each in a process of its own.

    python benchmarks/sft_step.py [--cases packed memory] [--json FILE] [--profile]

Llama-shaped 134M, bf16, random weights; rows of 32 to 400 tokens, packed by TRL to 512, 4 such rows a step. Ours gets
the rows that went into TRL's step, unpacked: its micro-batches are cut by a budget of tokens and hold no padding in the
products. All tokens but a row's first are predicted. `packed` compares tokens per second; floor_ratio is our time over
that of the step's matrix products at the measured rate plus the optimizer's bytes at the measured bandwidth. `memory`
compares the most that each process held (VmHWM) in two steps, libraries and model included. Ours keeps fp32 masters
and moments, as its launcher does; TRL trains the bf16 weights themselves, with moments in bf16. Both cases take
--micro_batch_tokens, the setting engine.micro_batch_tokens of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import harness
import torch
from floors import Shape, floor_of
from grpo_step import tokenizer_of
from harness import Times, alternate, machine, status, step_parser, write_rows
from peers.trl_offline import TrlSFT
from ppo_models import SHAPES, make_folders

from hybrid_rlhf.core.allocator import give_back_freed_blocks, keep_freed_blocks
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import builders

SHORTEST, LONGEST, LENGTH, BATCH, ROWS = 32, 400, 512, 4, 240
SIDES = ("ours", "ours_frugal", "trl", "trl_checkpointing")
STEPS = 2  # of a process whose memory is measured
ENVIRONMENT = dict(os.environ)  # before our engine names a process group in it, which a child would try to join


def rows_of(vocab: int) -> list[list[int]]:
    """Distinct random rows, lengths even between SHORTEST and LONGEST."""
    draws = torch.Generator().manual_seed(3)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (ROWS,), generator=draws).tolist()
    return [torch.randint(3, vocab, (n,), generator=draws).tolist() for n in lengths]


class Ours:
    """Our SFT step, as `train.py --stage sft` wires it; step() takes the next batch of `batches`, endlessly."""

    def __init__(self, base: Path, tokenizer, batches: list[list[list[int]]], micro: int) -> None:  # noqa: ANN001
        model = ModelConfig(model_name_or_path=str(base), dtype="bfloat16")
        engine = builders.policy_engine(builders.open_policy(model, tokenizer, 0, dropout=True), tokenizer)
        train = TrainConfig(learning_rate=1e-6, lr_scheduler_type="constant")
        zero = ZeroConfig(micro_batch_tokens=micro)
        engine.prepare_training(builders.optimizer_of(train, train.learning_rate), builders.schedule_of(train, 1000),
                                zero)
        self.trainer = SFTTrainer(Actor(engine, tokenizer, zero.micro_batch_tokens))
        self.batches, self.number, self.pad = batches, count(), tokenizer.pad_token_id

    def step(self) -> None:
        rows = [{"input_ids": r, "loss_mask": [1] * len(r)} for r in self.batches[next(self.number)]]
        self.trainer.step(collate_sft(rows, self.pad)).compute()


def peer_of(shape: str, place: Path, is_checkpointing: bool = False, packing: str = "bfd") -> TrlSFT:
    vocab = SHAPES[shape][1]["vocab_size"]
    return TrlSFT(place / "base", tokenizer_of(vocab), rows_of(vocab), LENGTH, BATCH, place / "trl", is_checkpointing,
                  packing)


def floor_seconds(shape: str, tokens: int) -> tuple[float, str]:
    """Seconds that a step's products and the optimizer's bytes take at this machine's own rates, and a line about them.

    A backward costs two forwards.
    """
    model = Shape.of(SHAPES[shape][1])
    return floor_of(model, tokens, 3, (tokens, 3), trained=model.body + 2 * model.head)


def measure_speed(options: argparse.Namespace, place: Path, trl: TrlSFT) -> dict:
    rounds = options.repeats + 1
    batches = [trl.rows(i) for i in range(rounds)]
    ours = Ours(place / "base", tokenizer_of(SHAPES[options.shape][1]["vocab_size"]), batches,
                options.micro_batch_tokens)
    sizes = [sum(map(len, rows)) for rows in batches[1:]]
    mine, theirs = alternate(options.repeats, ours.step, trl.step)
    tokens = sum(sizes) / len(sizes)  # of a step; they differ by little, and both sides had the same
    floor, line = floor_seconds(options.shape, round(tokens))
    case = "wrapped" if options.packing == "wrapped" else "packed"
    row = {"case": case, "ours": tokens / mine.median, "peer": tokens / theirs.median,
           "ratio": theirs.median / mine.median, "floor_ratio": mine.median / floor, "unit": "tokens/s",
           "machine": machine(), "ours_range": rates(mine, tokens), "peer_range": rates(theirs, tokens)}
    print(f"{case:8} ours {row['ours']:.0f}  TRL {row['peer']:.0f} tokens/s  ratio {row['ratio']:.2f}  floor_ratio "
          f"{row['floor_ratio']:.2f}; {tokens:.0f} tokens a step ({min(sizes)}-{max(sizes)}), ours {mine} s, "
          f"TRL {theirs} s\n{'':8} {line}", flush=True)
    return row


def rates(times: Times, tokens: float) -> list[float]:
    return [tokens / times.most, tokens / times.least]


# -- memory ------------------------------------------------------------------------------------------------------------


def child(side: str, shape: str, place: Path, micro: int) -> None:
    """Do STEPS steps; print what was resident before the model came, and the most ever."""
    vocab = SHAPES[shape][1]["vocab_size"]
    if side.startswith("ours"):
        (give_back_freed_blocks if side == "ours_frugal" else keep_freed_blocks)()
        idle = status("VmRSS")
        step = Ours(place / "base", tokenizer_of(vocab), json.loads((place / "batches.json").read_text()),
                    micro).step
    else:
        import trl  # noqa: F401 - part of what is idle

        idle = status("VmRSS")
        step = peer_of(shape, place, is_checkpointing=side == "trl_checkpointing").step
    for _ in range(STEPS):
        step()
    print(json.dumps({"idle": idle, "peak": status("VmHWM")}), flush=True)


def held(side: str, options: argparse.Namespace, place: Path) -> dict:
    command = [sys.executable, __file__, "--child", side, "--place", str(place), "--shape", options.shape,
               "--threads", str(options.threads), "--micro_batch_tokens", str(options.micro_batch_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    if done.returncode:
        raise SystemExit(f"{side}: the measuring process failed with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(options: argparse.Namespace, place: Path, trl: TrlSFT) -> dict:
    (place / "batches.json").write_text(json.dumps([trl.rows(i) for i in range(STEPS)]), encoding="utf-8")
    found = {}
    for side in options.sides:
        sizes = found[side] = held(side, options, place)
        print(f"memory   {side:18} peak {sizes['peak'] / 1e6:.0f} MB, of it {sizes['idle'] / 1e6:.0f} before the model",
              flush=True)
    ours, peer = found["ours"]["peak"], found["trl"]["peak"]
    return {"case": "memory", "ours": ours / 1e6, "peer": peer / 1e6, "ratio": peer / ours, "floor_ratio": None,
            "unit": "MB", "machine": machine(), "sides": found}


def profile(options: argparse.Namespace, place: Path, trl: TrlSFT) -> None:
    """Where one of our steps spends its time, by operation."""
    from torch.profiler import ProfilerActivity, profile

    ours = Ours(place / "base", tokenizer_of(SHAPES[options.shape][1]["vocab_size"]), [trl.rows(0)] * 2,
                options.micro_batch_tokens)
    ours.step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        ours.step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


CASES = {"packed": measure_speed, "memory": measure_memory}


def main() -> None:
    parser = step_parser(__doc__, CASES)
    parser.add_argument("--cpu-time", action="store_true",
                        help="one thread's processor time in place of the wall's, on a machine that others use too")
    parser.add_argument("--profile", action="store_true", help="print where our step spends its time instead")
    parser.add_argument("--packing", choices=["bfd", "wrapped"], default="bfd",
                        help="TRL's; wrapped is a case of its own: its rows see each other")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "trl"],
                        help="whose memory: ours_frugal gives freed blocks back, as with train.py --memory")
    parser.add_argument("--micro_batch_tokens", type=int, default=ZeroConfig().micro_batch_tokens,
                        help="most tokens of a forward and backward of ours")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu_time:
        harness.clock[0], options.threads = time.process_time, 1
    torch.set_num_threads(options.threads)
    if options.child:
        child(options.child, options.shape, Path(options.place), options.micro_batch_tokens)
        return
    keep_freed_blocks()  # as the launcher does; TRL, in the same process, profits as well
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_folders(options.shape, place)
        # before ours, which makes a process group: TRL would adapt to it
        trl = peer_of(options.shape, place, packing=options.packing)
        if options.profile:
            profile(options, place, trl)
            return
        write_rows((CASES[name](options, place, trl) for name in options.cases), options.json)


if __name__ == "__main__":
    main()
