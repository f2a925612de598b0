"""Seconds of a reward model's optimizer step on pairs of unequal lengths beside TRL's RewardTrainer, alternating in one
run.

    python benchmarks/reward_step.py [--json FILE] [--profile]

Llama-shaped 134M with a scalar head, bf16, random weights; 4 pairs a step that share a prompt of 16 to 200 tokens, with
answers of 16 to 200 tokens each, the same pairs on both sides and in every step. Ours computes a pair's prompt once;
the answers begin at random, so nothing else is shared. floor_ratio is our time over that of the step's matrix products
at the measured rate plus the optimizer's bytes at the measured bandwidth, every row counted whole; floor_ratio_shared
counts a pair's prompt once, as ours does. Ours keeps fp32 masters and moments; TRL trains the bf16 weights themselves,
with moments in bf16.
"""

from __future__ import annotations

import argparse
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
from harness import alternate, machine, step_parser, write_rows
from peers.trl_offline import TrlReward
from ppo_models import SHAPES, make_folders

from hybrid_rlhf.core.allocator import keep_freed_blocks
from hybrid_rlhf.data.collate import collate_pairs
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.training import builders

PAIRS, SHORTEST, LONGEST = 4, 16, 200
Pair = tuple[list[int], list[int]]


def pairs_of(vocab: int, number: int) -> tuple[list[Pair], list[int]]:
    """(chosen, rejected) token ids that begin with one prompt, and the length of each prompt."""
    draws = torch.Generator().manual_seed(4)

    def tokens() -> list[int]:
        size = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=draws))
        return torch.randint(3, vocab, (size,), generator=draws).tolist()

    prompts = [tokens() for _ in range(number)]
    return [(p + tokens(), p + tokens()) for p in prompts], [len(p) for p in prompts]


class Ours:
    """Our step, as `train.py --stage reward` wires it; step() takes the next PAIRS pairs."""

    def __init__(self, folder: Path, tokenizer, pairs: list[Pair], prompts: list[int]) -> None:  # noqa: ANN001
        model = ModelConfig(model_name_or_path=str(folder), dtype="bfloat16")
        engine = builders.scalar_engine(builders.open_scalar(model, tokenizer), tokenizer)
        train, zero = TrainConfig(learning_rate=1e-6, lr_scheduler_type="constant"), ZeroConfig()
        engine.prepare_training(builders.optimizer_of(train, train.learning_rate), builders.schedule_of(train, 1000),
                                zero)
        self.trainer = RewardTrainer(Reward(engine, zero.micro_batch_tokens))
        self.rows = [{"chosen_ids": c, "rejected_ids": r, "num_prompt_tokens": n}
                     for (c, r), n in zip(pairs, prompts, strict=True)]
        self.number, self.pad = count(), tokenizer.pad_token_id

    def step(self) -> None:
        start = next(self.number) * PAIRS
        self.trainer.step(collate_pairs(self.rows[start : start + PAIRS], self.pad)).compute()


def floor_seconds(shape: str, tokens: int) -> tuple[float, str]:
    """Seconds that a step's products and the optimizer's bytes take at this machine's own rates, and a line about them.

    A backward costs two forwards; the embedding is trained, there is no head over the vocabulary.
    """
    model = Shape.of(SHAPES[shape][1])
    return floor_of(model, tokens, 3, trained=model.body + model.head)


def sides(options: argparse.Namespace, place: Path) -> tuple[Ours, TrlReward, list[Pair]]:
    """TRL first: ours makes a process group, to which TRL would adapt."""
    tokenizer = tokenizer_of(SHAPES[options.shape][1]["vocab_size"])
    pairs, prompts = (found * (options.repeats + 1) for found in pairs_of(len(tokenizer), PAIRS))
    trl = TrlReward(place / "reward", tokenizer, pairs, PAIRS, place / "trl")
    return Ours(place / "reward", tokenizer, pairs, prompts), trl, pairs


def measure(options: argparse.Namespace, place: Path) -> dict:
    ours, trl, pairs = sides(options, place)
    prompts = sum(row["num_prompt_tokens"] for row in ours.rows[:PAIRS])
    mine, theirs = alternate(options.repeats, ours.step, trl.step)
    sizes = [len(ids) for pair in pairs[:PAIRS] for ids in pair]
    tokens = sum(sizes)
    floor, line = floor_seconds(options.shape, tokens)
    shared, _ = floor_seconds(options.shape, tokens - prompts)
    row = {"case": "pairs", "ours": mine.median, "peer": theirs.median, "ratio": theirs.median / mine.median,
           "floor_ratio": mine.median / floor, "unit": "s/step", "machine": machine(), "ours_range": mine[1:],
           "peer_range": theirs[1:], "tokens": tokens,
           "different_tokens": tokens - prompts, "floor_ratio_shared": mine.median / shared}
    print(f"pairs    ours {mine}  TRL {theirs} s/step  ratio {row['ratio']:.2f}  floor_ratio {row['floor_ratio']:.2f}\n"
          f"{'':8} {tokens} tokens a step, {tokens - prompts} with each prompt once (floor_ratio "
          f"{row['floor_ratio_shared']:.2f}), with TRL's padding {len(sizes) * max(sizes)}; {line}", flush=True)
    return row


def profile(options: argparse.Namespace, place: Path) -> None:
    """Where one of our steps spends its time, by operation."""
    from torch.profiler import ProfilerActivity, profile

    ours = sides(options, place)[0]
    ours.step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        ours.step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = step_parser(__doc__, repeats=5)
    parser.add_argument("--cpu-time", action="store_true",
                        help="one thread's processor time in place of the wall's, on a machine that others use too")
    parser.add_argument("--profile", action="store_true", help="print where our step spends its time instead")
    options = parser.parse_args()
    if options.cpu_time:
        harness.clock[0], options.threads = time.process_time, 1
    torch.set_num_threads(options.threads)
    keep_freed_blocks()  # as the launcher does; TRL, in the same process, profits as well
    with tempfile.TemporaryDirectory() as folder:
        make_folders(options.shape, Path(folder))
        if options.profile:
            profile(options, Path(folder))
            return
        row = measure(options, Path(folder))
    write_rows([row], options.json)


if __name__ == "__main__":
    main()
