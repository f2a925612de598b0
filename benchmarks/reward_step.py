"""Seconds of a reward model's optimizer step on pairs of unequal lengths beside TRL's RewardTrainer, alternating in one
run.

    python benchmarks/reward_step.py [--json FILE]

Llama-shaped 134M with a scalar head, bf16, random weights; 4 pairs a step that share a prompt of 16 to 200 tokens, with
answers of 16 to 200 tokens each, the same pairs on both sides and in every step. Ours computes a pair's prompt once;
the answers begin at random, so nothing else is shared. floor_ratio is our time over that of the step's matrix products
at the measured rate plus the optimizer's bytes at the measured bandwidth, every row counted whole; floor_ratio_shared
counts a pair's prompt once, as ours does. Ours keeps fp32 masters and moments; TRL trains the bf16 weights themselves,
with moments in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import steps
import torch
from floors import Shape, floor_of
from harness import Case, sizes_of
from peers.offline import TrlReward
from random_models import SHAPES, prepared, tokenizer_of

from hybrid_rlhf.data.collate import collate_pairs
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.training import builders

PAIRS, SHORTEST, LONGEST = 4, 16, 200
Pair = tuple[list[int], list[int]]


def pairs_of(options: argparse.Namespace) -> tuple[list[Pair], list[int]]:
    """(chosen, rejected) token ids that begin with one prompt, and the length of each prompt."""
    draws, (shortest, longest) = torch.Generator().manual_seed(4), sizes_of(options, SHORTEST, LONGEST)

    def tokens() -> list[int]:
        size = int(torch.randint(shortest, longest + 1, (), generator=draws))
        return torch.randint(3, options.vocab, (size,), generator=draws).tolist()

    prompts = [tokens() for _ in range(PAIRS)]
    return [(p + tokens(), p + tokens()) for p in prompts], [len(p) for p in prompts]


def open_peer(options: argparse.Namespace) -> TrlReward:
    pairs = pairs_of(options)[0] * (options.repeats + 1)
    return TrlReward(options.place / "reward", tokenizer_of(options.vocab), pairs, PAIRS, options.place / "trl")


def prepare(options: argparse.Namespace, trl: TrlReward) -> steps.Step:
    """Our step as `train.py --stage reward` builds it."""
    (pairs, prompts), tokenizer = pairs_of(options), tokenizer_of(options.vocab)
    model, zero = ModelConfig(model_name_or_path=str(options.place / "reward"), dtype="bfloat16"), ZeroConfig()
    engine = prepared(builders.scalar_engine(builders.open_scalar(model, tokenizer), tokenizer), zero)
    trainer = RewardTrainer(Reward(engine, zero.micro_batch_tokens))
    rows = [{"chosen_ids": c, "rejected_ids": r, "num_prompt_tokens": n}
            for (c, r), n in zip(pairs, prompts, strict=True)]
    sizes = [len(ids) for pair in pairs for ids in pair]
    whole, shared = sum(sizes), sum(sizes) - sum(prompts)
    shape = Shape.of(SHAPES[options.shape][1])

    def floor(tokens: int) -> tuple[float, str]:
        """A backward costs two forwards; the embedding is trained, there is no head over the vocabulary."""
        return floor_of(shape, tokens, 3, trained=shape.body + shape.head)

    return steps.Step(lambda: trainer.step(collate_pairs(rows, tokenizer.pad_token_id)).compute(), trl.step,
                      lambda: {"floor_ratio": floor(whole), "floor_ratio_shared": floor(shared)},
                      extra=lambda: {"tokens": whole, "different_tokens": shared,
                                     "padded_tokens": len(sizes) * max(sizes)})


CASES = {"pairs": Case("reward step, 134M bf16, unequal pairs", "TRL RewardTrainer", 2, 1.4, prepare, open_peer)}


def main(argv: Sequence[str] | None = None) -> None:
    steps.run(CASES, steps.parser_of(__doc__, CASES, repeats=5), argv)


if __name__ == "__main__":
    main()
