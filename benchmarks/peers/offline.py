"""Steps by TRL's SFT, reward and DPO trainers, and LoRA steps by the plain Hugging Face Trainer and peft: the peers of
sft_step.py, reward_step.py, offline_step.py and ragged_memory.py.

Set up as who knows TRL would on a CPU: weights in bf16 (which is faster here than autocast over fp32 ones), no gradient
checkpointing, nothing saved or logged, rows tokenized beforehand. Its optimizer is the Trainer's own
choice (fused AdamW, moments in bf16, no fp32 masters), its head is TRL's fused one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peers.turns import Turns


def quiet(out: Path, batch: int) -> dict:
    """Settings that all trainers share."""
    return dict(output_dir=str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=1,
                max_steps=100_000, learning_rate=1e-6, lr_scheduler_type="constant", bf16=False,
                gradient_checkpointing=False, use_cpu=True, save_strategy="no", report_to="none",
                logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
                train_sampling_strategy="sequential")


class TrlSFT:
    """step() does an optimizer step on the next `batch` packed rows; .rows(step) says which rows went into it.

    rows: token ids, packed to `length` by TRL's default packing (best fit, decreasing; a step is one row of all its
    tokens, under a mask by which rows do not see each other).
    """

    def __init__(self, model: Path, tokenizer, rows: list[list[int]], length: int, batch: int,  # noqa: ANN001
                 out: Path) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**quiet(out, batch), max_length=length, packing=True)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        trainer = SFTTrainer(model=policy, args=config, processing_class=tokenizer,
                             train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]))
        self._packed, self._batch = trainer.train_dataset, batch
        self.step = Turns(trainer).step

    def rows(self, step: int) -> list[list[int]]:
        """The rows of optimizer step `step` of the first epoch."""
        found: list[list[int]] = []
        for i in range(step * self._batch, (step + 1) * self._batch):
            ids, lengths = self._packed[i]["input_ids"], self._packed[i]["seq_lengths"]
            ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
            for n in lengths:
                found.append(ids[:n])
                ids = ids[n:]
        return found


class TrlRaggedSFT:
    """step() does an optimizer step on the next `batch` rows of token ids, in order, padded to the longest of them."""

    def __init__(self, model: Path, tokenizer, rows: list[list[int]], batch: int, out: Path,  # noqa: ANN001
                 dtype: torch.dtype = torch.bfloat16) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import SFTConfig, SFTTrainer

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        trainer = SFTTrainer(model=policy, args=SFTConfig(**quiet(out, batch), max_length=None),
                             processing_class=tokenizer,
                             train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]))
        self.step = Turns(trainer).step


class TrlReward:
    """step() does an optimizer step on the next `batch` pairs of token ids (chosen, rejected), in order."""

    def __init__(self, model: Path, tokenizer, pairs: list[tuple[list[int], list[int]]], batch: int,  # noqa: ANN001
                 out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        from datasets import Dataset
        from transformers import AutoModelForSequenceClassification
        from trl import RewardConfig, RewardTrainer

        scalar = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=dtype)
        rows = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs]
        trainer = RewardTrainer(model=scalar, args=RewardConfig(**quiet(out, batch)), processing_class=tokenizer,
                                train_dataset=Dataset.from_list(rows))
        self.step = Turns(trainer).step


class TrlDPO:
    """step() does an optimizer step on the next `batch` pairs of `pairs`, a JSON list of {prompt, chosen, rejected} as
    text, in order. Its reference is its own copy of the model, asked in every step, as ours is."""

    def __init__(self, model: str, tokenizer: str, pairs: str, batch: int, beta: float, out: str) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import DPOConfig, DPOTrainer

        policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16) for _ in range(2))
        config = DPOConfig(**quiet(Path(out), batch), beta=beta, max_length=None)
        rows = json.loads(Path(pairs).read_text(encoding="utf-8"))
        trainer = DPOTrainer(model=policy, ref_model=reference, args=config, train_dataset=Dataset.from_list(rows),
                             processing_class=AutoTokenizer.from_pretrained(tokenizer))
        self.step = Turns(trainer).step


class TrainerPeft:
    """step() does an optimizer step on the next `batch` of `rows`, a JSON list of token ids, in order."""

    def __init__(self, model: str, rows: str, batch: int, rank: int, out: str) -> None:
        import peft
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        data = [{"input_ids": ids} for ids in json.loads(Path(rows).read_text(encoding="utf-8"))]
        trainer = Trainer(model=peft.get_peft_model(policy, adapters, autocast_adapter_dtype=False),
                          args=TrainingArguments(**quiet(Path(out), batch)), train_dataset=data,
                          data_collator=padded)
        self.step = Turns(trainer).step


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch padded to the longest of its rows, as the Trainer's own collator makes it."""
    width = max(len(r["input_ids"]) for r in rows)
    ids, labels = (torch.tensor([r["input_ids"] + [fill] * (width - len(r["input_ids"])) for r in rows])
                   for fill in (0, -100))
    lengths = torch.tensor([[len(r["input_ids"])] for r in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(width) < lengths).long()}
