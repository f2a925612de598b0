"""DPO steps by TRL's own DPOTrainer: the peer of offline_step.py, in a process of its own.

Set up as the other TRL peers are: weights in bf16, no gradient checkpointing, nothing saved or logged. Its reference is
its own copy of the model, asked in every step, as ours is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peers.trl_offline import quiet
from peers.turns import Turns


class TrlDPO:
    """step() does an optimizer step on the next `batch` pairs of `pairs`, a JSON list of {prompt, chosen, rejected} as
    text, in order."""

    def __init__(self, model: str, tokenizer: str, pairs: str, batch: int, beta: float, out: str) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import DPOConfig, DPOTrainer

        policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16) for _ in range(2))
        config = DPOConfig(**quiet(Path(out), batch, False), beta=beta, max_length=None)
        rows = json.loads(Path(pairs).read_text(encoding="utf-8"))
        trainer = DPOTrainer(model=policy, ref_model=reference, args=config, train_dataset=Dataset.from_list(rows),
                             processing_class=AutoTokenizer.from_pretrained(tokenizer))
        self.step = Turns(trainer).step
