"""SFT and reward-model steps by TRL's own trainers: the peers of sft_step.py and reward_step.py.

Set up as who knows TRL would on a CPU: weights in bf16 (which is faster here than autocast over fp32 ones), no gradient
checkpointing unless asked for, nothing saved or logged, rows tokenized beforehand. Its optimizer is the Trainer's own
choice (fused AdamW, moments in bf16, no fp32 masters), its head is TRL's fused one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peers.turns import Turns


def quiet(out: Path, batch: int, is_checkpointing: bool) -> dict:
    """Settings that both trainers share."""
    return dict(output_dir=str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=1,
                max_steps=100_000, learning_rate=1e-6, lr_scheduler_type="constant", bf16=False,
                gradient_checkpointing=is_checkpointing, use_cpu=True, save_strategy="no", report_to="none",
                logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
                train_sampling_strategy="sequential")


class TrlSFT:
    """step() does an optimizer step on the next `batch` packed rows; .rows(step) says which rows went into it.

    rows: token ids, packed to `length` by TRL's own packing: "bfd", its default (best fit, decreasing; a step is one
    row of all its tokens, under a mask by which rows do not see each other), or "wrapped" (cut anywhere; what is packed
    together is seen as one text, so that no mask is needed).
    """

    def __init__(self, model: Path, tokenizer, rows: list[list[int]], length: int, batch: int, out: Path,  # noqa: ANN001
                 is_checkpointing: bool = False, packing: str = "bfd") -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(**quiet(out, batch, is_checkpointing), max_length=length, packing=True,
                           packing_strategy=packing)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        trainer = SFTTrainer(model=policy, args=config, processing_class=tokenizer,
                             train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]))
        self._packed, self._batch = trainer.train_dataset, batch
        self._pieces = pieces(rows, length) if packing == "wrapped" else None
        self.step = Turns(trainer).step

    def rows(self, step: int) -> list[list[int]]:
        """The rows of optimizer step `step` of the first epoch, those that were cut as their parts."""
        found, numbers = [], range(step * self._batch, (step + 1) * self._batch)
        if self._pieces is not None:
            return [piece for i in numbers for piece in self._pieces[i]]
        for i in numbers:
            ids, lengths = self._packed[i]["input_ids"], self._packed[i]["seq_lengths"]
            ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
            for n in lengths:
                found.append(ids[:n])
                ids = ids[n:]
        return found


def pieces(rows: list[list[int]], length: int) -> list[list[list[int]]]:
    """Of each `length` tokens of all rows in a line, the parts of rows that it consists of."""
    found, room = [[]], length
    for row in rows:
        while row:
            if not room:
                found.append([])
                room = length
            found[-1].append(row[:room])
            row, room = row[room:], room - len(found[-1][-1])
    return found


class TrlRaggedSFT:
    """step() does an optimizer step on the next `batch` rows of token ids, in order, padded to the longest of them."""

    def __init__(self, model: Path, tokenizer, rows: list[list[int]], batch: int, out: Path,  # noqa: ANN001
                 dtype: torch.dtype = torch.bfloat16) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import SFTConfig, SFTTrainer

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        trainer = SFTTrainer(model=policy, args=SFTConfig(**quiet(out, batch, False), max_length=None),
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
        trainer = RewardTrainer(model=scalar, args=RewardConfig(**quiet(out, batch, False)), processing_class=tokenizer,
                                train_dataset=Dataset.from_list(rows))
        self.step = Turns(trainer).step
