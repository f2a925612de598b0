"""Predicted seconds of a step on cards, for the second table of docs/results/cards.md; benchmarks/cards.py writes it.

Rates are published figures times assumed shares (hybrid_rlhf/memory_plan/rates.py). decode / floor: a decode step over
the reading of all weights and of the cache at the card's published bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import table_of

from hybrid_rlhf.core.config import parse
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.rates import CARDS, rates_of_card
from hybrid_rlhf.training import memory_options, step3_ppo
from hybrid_rlhf.training.time_options import times_of


class Case(NamedTuple):
    """settings: of config.json; options: of the run; most: what decode / floor may be."""

    work: str
    settings: dict
    options: list[str]
    most: float | None = None


def _ppo(rows: int, prompt: int, response: int, *more: str) -> list[str]:
    return [f"--train.per_device_train_batch_size={rows}", f"--data.max_prompt_length={prompt}",
            f"--ppo.sampling.max_new_tokens={response}", "--ppo.num_ppo_epochs=1", "--ppo.num_minibatches=1", *more]


_OPT = {"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 50272, "word_embed_proj_dim": 2048, "max_position_embeddings": 2048}
_LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
          "max_position_embeddings": 8192}
_QWEN = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
         "max_position_embeddings": 32768}
_MODEL = "--roles.reward.model_name_or_path={folder}"
CASES = {
    "opt": Case("PPO, OPT-1.3B, all weights, 8 x (256 + 128)", _OPT, _ppo(8, 256, 128, _MODEL), 1.3),
    "opt_lora": Case("the same, LoRA", _OPT, _ppo(8, 256, 128, _MODEL, "--model.lora.r=16")),
    "llama_qlora": Case("PPO, Llama-8B, QLoRA, 16 x (512 + 512)", _LLAMA, _ppo(
        16, 512, 512, _MODEL, "--model.lora.r=16", "--model.load_in_4bit=true", "--model.gradient_checkpointing=true",
        "--engine.micro_batch_tokens=2048"), 2.0),
    "qwen_grpo": Case("GRPO, Qwen2.5-0.5B, all weights, 8 x 8 x (256 + 256), a reward function", _QWEN, _ppo(
        8, 256, 256, "--ppo.estimator=grpo", "--ppo.sampling.num_samples=8", "--reward.functions=[format]")),
}


def rows(place: Path, cards: Sequence[str] = tuple(CARDS), cases: Sequence[str] = tuple(CASES)) -> Iterator[dict]:
    for name in cases:
        case, folder = CASES[name], place / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(case.settings))
        config, _ = parse(step3_ppo.Config, [f"--model.model_name_or_path={folder}", "--model.dtype=bfloat16", *(
            option.format(folder=folder) for option in case.options)], prog="cards_time")
        for card in cards:
            gpu = memory_options.Place.of(Cards(1, 1, CARDS[card].gib << 30, card))
            plan, = memory_options.plans_of(config, gpu)
            time = times_of(plan, gpu.device, rates_of_card(CARDS[card]))
            step, floor = time.decode or (0.0, 1.0)
            row = {"case": name, "card": CARDS[card].name, "fits": plan.short <= 0, "phases": time.phases,
                   "step": time.whole, "tokens_per_second": time.tokens / time.whole, "decode_step": step,
                   "decode_over_floor": step / floor, "asked": case.most}
            print(json.dumps(row), flush=True)
            yield row


def table(found: Sequence[dict]) -> str:
    """A line for each case and card; in italics where the plan does not fit, in bold where an aim is missed."""
    lines = []
    for row in found:
        case, phases = CASES[row["case"]], row["phases"]
        update = sum(v for name, v in phases.items() if name.startswith(("train", "step")))
        ratio = f"{row['decode_over_floor']:.2f}"
        ratio = f"**{ratio}**" if case.most and row["decode_over_floor"] > case.most else ratio
        card = row["card"] if row["fits"] else f"_{row['card']} (does not fit)_"
        lines.append((case.work, card, *(f"{v:.2f}" for v in (phases["generate"], phases.get("score", 0), update,
                                                              row["step"])),
                      f"{row['tokens_per_second']:.0f}", f"{1000 * row['decode_step']:.2f}", ratio,
                      f"<= {case.most}" if case.most else ""))
    return table_of(("work", "card", "generate, s", "score, s", "update, s", "step, s", "tokens/s", "decode step, ms",
                     "decode / floor", "asked"), lines)
