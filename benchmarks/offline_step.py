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
from collections.abc import Callable, Sequence

import steps
from floors import Shape, floor_of
from harness import Case, sizes_of
from peers.process import PeerProcess, python_for
from random_models import LORA, SHAPES, actor_of, policy_config, rows_of, text_of, tokenizer_of

from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.roles import Reference
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import builders

PAIRS, PIECE, ROWS, ROW, BETA, EOS = 4, (16, 200), 8, (32, 400), 0.1, 2
COPIES = 40  # of a step's rows in the peer's data, so that it never ends an epoch within a run


def step_of(ours: Callable[[], object], peer: PeerProcess, tokens: int,
            floor: Callable[[], tuple[float, str]]) -> steps.Step:
    return steps.Step(ours, peer.step, lambda: {"floor_ratio": floor()}, close=peer.close,
                      extra=lambda: {"tokens": tokens, "peer_runs_on": peer.versions, "peer_peak": peer.peak})


def dpo(options: argparse.Namespace, _peer: None) -> steps.Step:
    place, tokenizer = options.place, tokenizer_of(options.vocab)
    tokenizer.save_pretrained(place / "tokenizer")
    prompts, chosen, rejected = (rows_of(PAIRS, sizes_of(options, *PIECE), options.vocab, seed) for seed in (4, 5, 6))
    pairs = [{"prompt": text_of(p), "chosen": text_of(c), "rejected": text_of(r)}
             for p, c, r in zip(prompts, chosen, rejected, strict=True)]
    (place / "pairs.json").write_text(json.dumps(pairs * COPIES), encoding="utf-8")
    peer = PeerProcess(python_for("trl"), "offline:TrlDPO",
                       dict(model=str(place / "base"), tokenizer=str(place / "tokenizer"),
                            pairs=str(place / "pairs.json"), batch=PAIRS, beta=BETA, out=str(place / "trl")),
                       options.threads)
    policy = actor_of(place, tokenizer)
    frozen = builders.open_policy(policy_config(place), tokenizer, 0, dropout=False).requires_grad_(False)
    reference = Reference(builders.policy_engine(frozen, tokenizer), ZeroConfig().micro_batch_tokens)
    trainer = OfflineTrainer(policy, reference, DPOConfig(beta=BETA))
    rows = [{"chosen_ids": [*p, *c, EOS], "rejected_ids": [*p, *r, EOS], "num_prompt_tokens": len(p)}
            for p, c, r in zip(prompts, chosen, rejected, strict=True)]
    answered = sum(len(c) + len(r) + 2 for c, r in zip(chosen, rejected, strict=True))
    read, model = sum(map(len, prompts)) + answered, Shape.of(SHAPES[options.shape][1])
    return step_of(lambda: trainer.step(collate_pairs(rows, 0)).compute(), peer, read,
                   lambda: floor_of(model, read, 4, (answered, 4), trained=model.body + 2 * model.head))


def sft_lora(options: argparse.Namespace, _peer: None) -> steps.Step:
    place, rows = options.place, rows_of(ROWS, sizes_of(options, *ROW), options.vocab, 3)
    (place / "rows.json").write_text(json.dumps(rows * COPIES), encoding="utf-8")
    peer = PeerProcess(python_for("peft"), "offline:TrainerPeft",
                       dict(model=str(place / "base"), rows=str(place / "rows.json"), batch=ROWS, rank=LORA.r,
                            out=str(place / "trainer")), options.threads)
    trainer = SFTTrainer(actor_of(place, tokenizer_of(options.vocab), is_lora=True))
    batch = [{"input_ids": r, "loss_mask": [1] * len(r)} for r in rows]
    read = sum(map(len, rows))
    return step_of(lambda: trainer.step(collate_sft(batch, 0)).compute(), peer, read,
                   lambda: floor_of(Shape.of(SHAPES[options.shape][1]), read, 2, (read, 2)))


CASES = {
    "dpo": Case("DPO step, 134M bf16, unequal pairs", "TRL DPOTrainer", None, 1.4, dpo),
    "sft_lora": Case("SFT step, LoRA, 134M bf16, rows of 32-400", "HF Trainer + peft", None, 1.4, sft_lora),
}


def main(argv: Sequence[str] | None = None) -> None:
    steps.run(CASES, steps.parser_of(__doc__, CASES, repeats=4), argv)


if __name__ == "__main__":
    main()
