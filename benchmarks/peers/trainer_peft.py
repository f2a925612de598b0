"""LoRA steps of supervised fine-tuning by the plain Hugging Face Trainer and peft: a peer of offline_step.py, in a
process of its own. Rows are padded to the longest of their batch, as the Trainer's collator does it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peers.trl_offline import quiet
from peers.turns import Turns


class TrainerPeft:
    """step() does an optimizer step on the next `batch` of `rows`, a JSON list of token ids, in order."""

    def __init__(self, model: str, rows: str, batch: int, rank: int, out: str) -> None:
        import peft
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        data = [{"input_ids": ids} for ids in json.loads(Path(rows).read_text(encoding="utf-8"))]
        trainer = Trainer(model=peft.get_peft_model(policy, adapters, autocast_adapter_dtype=False),
                          args=TrainingArguments(**quiet(Path(out), batch, False)), train_dataset=data,
                          data_collator=padded)
        self.step = Turns(trainer).step


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    width = max(len(r["input_ids"]) for r in rows)
    ids, labels = (torch.tensor([r["input_ids"] + [fill] * (width - len(r["input_ids"])) for r in rows])
                   for fill in (0, -100))
    lengths = torch.tensor([[len(r["input_ids"])] for r in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(width) < lengths).long()}
