"""Seconds of a DPO step beside TRL's DPOTrainer, and of a LoRA step of SFT beside the plain Hugging Face Trainer with
peft, in turns; the peers run in a process of their own (peers/process.py).

    python benchmarks/offline_step.py [--cases dpo sft_lora] [--json FILE]

Llama-shaped 134M, bf16, random weights. `dpo`: 4 pairs a step that share a prompt of 16 to 200 tokens, with answers of
16 to 200 tokens each, all weights trained, a reference beside the policy, beta 0.1. `sft_lora`: 8 rows a step of 32 to
400 tokens, all predicted, LoRA rank 16 on all linear layers. The same rows on both sides and in every step. floor_ratio
is our time over that of the step's products and the optimizer's bytes (floors.py); a prompt that two answers share is
counted once. Ours keeps fp32 masters and moments; the peers train the bf16 weights themselves, with moments in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch
from floors import Shape, floor_of
from grpo_step import tokenizer_of
from harness import alternate, machine, step_parser, write_rows
from peers.process import PeerProcess, python_for
from ppo_models import LORA, SHAPES, make_folders

from hybrid_rlhf.core.allocator import keep_freed_blocks
from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import builders

PAIRS, PIECE, ROWS, ROW, BETA, EOS = 4, (16, 200), 8, (32, 400), 0.1, 2
COPIES = 40  # of a step's rows in the peer's data, so that it never ends an epoch within a run


class Case(NamedTuple):
    """Our step, the peer's process, tokens that a step cannot do without, the floor and its line."""

    step: Callable[[], None]
    peer: PeerProcess
    tokens: int
    floor: tuple[float, str]


def drawn(count: int, lengths: tuple[int, int], vocab: int, seed: int) -> list[list[int]]:
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.randint(lengths[0], lengths[1] + 1, (count,), generator=draws).tolist()
    return [torch.randint(3, vocab, (n,), generator=draws).tolist() for n in sizes]


def text(ids: list[int]) -> str:
    return "".join(f" <{i}>" for i in ids)


def engine_of(base: Path, tokenizer, lora: bool):  # noqa: ANN001, ANN201
    """A policy's engine as the stages wire it."""
    settings = {"lora": LORA} if lora else {}
    model = ModelConfig(model_name_or_path=str(base), dtype="bfloat16", **settings)
    engine = builders.policy_engine(builders.open_policy(model, tokenizer, 0, dropout=True), tokenizer)
    train = TrainConfig(learning_rate=1e-6, lr_scheduler_type="constant")
    engine.prepare_training(builders.optimizer_of(train, train.learning_rate), builders.schedule_of(train, 1000),
                            ZeroConfig())
    return engine


def dpo(shape: str, place: Path, threads: int) -> Case:
    vocab, tokens = SHAPES[shape][1]["vocab_size"], ZeroConfig().micro_batch_tokens
    tokenizer = tokenizer_of(vocab)
    tokenizer.save_pretrained(place / "tokenizer")
    prompts, chosen, rejected = (drawn(PAIRS, PIECE, vocab, seed) for seed in (4, 5, 6))
    pairs = [{"prompt": text(p), "chosen": text(c), "rejected": text(r)}
             for p, c, r in zip(prompts, chosen, rejected, strict=True)]
    (place / "pairs.json").write_text(json.dumps(pairs * COPIES), encoding="utf-8")
    peer = PeerProcess(python_for("trl"), "trl_dpo:TrlDPO",
                       dict(model=str(place / "base"), tokenizer=str(place / "tokenizer"),
                            pairs=str(place / "pairs.json"), batch=PAIRS, beta=BETA, out=str(place / "trl")), threads)
    policy = Actor(engine_of(place / "base", tokenizer, False), tokenizer, tokens)
    frozen = builders.open_policy(ModelConfig(model_name_or_path=str(place / "base"), dtype="bfloat16"), tokenizer, 0,
                                  dropout=False).requires_grad_(False)
    trainer = OfflineTrainer(policy, Reference(builders.policy_engine(frozen, tokenizer), tokens), DPOConfig(beta=BETA))
    rows = [{"chosen_ids": [*p, *c, EOS], "rejected_ids": [*p, *r, EOS], "num_prompt_tokens": len(p)}
            for p, c, r in zip(prompts, chosen, rejected, strict=True)]
    answered = sum(len(c) + len(r) + 2 for c, r in zip(chosen, rejected, strict=True))
    read = sum(map(len, prompts)) + answered
    model = Shape.of(SHAPES[shape][1])
    return Case(lambda: trainer.step(collate_pairs(rows, 0)).compute(), peer, read,
                floor_of(model, read, 4, (answered, 4), trained=model.body + 2 * model.head))


def sft_lora(shape: str, place: Path, threads: int) -> Case:
    vocab = SHAPES[shape][1]["vocab_size"]
    tokenizer, rows = tokenizer_of(vocab), drawn(ROWS, ROW, vocab, 3)
    (place / "rows.json").write_text(json.dumps(rows * COPIES), encoding="utf-8")
    peer = PeerProcess(python_for("peft"), "trainer_peft:TrainerPeft",
                       dict(model=str(place / "base"), rows=str(place / "rows.json"), batch=ROWS, rank=LORA.r,
                            out=str(place / "trainer")), threads)
    trainer = SFTTrainer(Actor(engine_of(place / "base", tokenizer, True), tokenizer, ZeroConfig().micro_batch_tokens))
    batch = [{"input_ids": r, "loss_mask": [1] * len(r)} for r in rows]
    read = sum(map(len, rows))
    return Case(lambda: trainer.step(collate_sft(batch, 0)).compute(), peer, read,
                floor_of(Shape.of(SHAPES[shape][1]), read, 2, (read, 2)))


CASES = {"dpo": dpo, "sft_lora": sft_lora}


def measure(name: str, options: argparse.Namespace, place: Path) -> dict:
    case = CASES[name](options.shape, place, options.threads)
    with case.peer as peer:
        mine, theirs = alternate(options.repeats, case.step, peer.step)
    floor, line = case.floor
    row = {"case": name, "ours": mine.median, "peer": theirs.median, "ratio": theirs.median / mine.median,
           "floor_ratio": mine.median / floor, "unit": "s/step", "machine": machine(), "ours_range": mine[1:],
           "peer_range": theirs[1:], "tokens": case.tokens, "peer_runs_on": peer.versions, "peer_peak": peer.peak}
    print(f"{name:9} ours {mine}  peer {theirs} s/step  ratio {row['ratio']:.2f}  floor_ratio {row['floor_ratio']:.2f}"
          f"\n{'':9} {case.tokens} tokens a step; {line}; the peer's process held {peer.peak / 1e6:.0f} MB", flush=True)
    return row


def main() -> None:
    parser = step_parser(__doc__, CASES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_blocks()  # as the launcher does
    with tempfile.TemporaryDirectory() as folder:
        make_folders(options.shape, Path(folder))
        write_rows((measure(name, options, Path(folder)) for name in options.cases), options.json)


if __name__ == "__main__":
    main()
