"""Rows and a model for a first step of TRL's trainers and of ours."""

from __future__ import annotations

import torch

PAD, VOCABULARY, TOLERANCE = 0, 64, 1e-5


def tiny(kind: str, seed: int = 0):
    """A seeded Llama of two layers, its weights drawn wide enough that its losses differ from log(vocabulary)."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD,
                         bos_token_id=1, eos_token_id=2, num_labels=1, initializer_range=0.3)
    return {"causal": LlamaForCausalLM, "scalar": LlamaForSequenceClassification}[kind](config).eval()


def sft_rows() -> list[dict]:
    """Four rows of unequal prompts and completions, one of them with two turns to learn."""
    generator = torch.Generator().manual_seed(5)
    masks = [[0] * 4 + [1] * 3, [0] * 2 + [1] * 9, [0] * 7 + [1], [0] * 3 + [1] * 2 + [0] * 4 + [1] * 5]
    return [{"input_ids": tokens(len(m), generator), "completion_mask": m} for m in masks]


def pair_rows(with_margin: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(6)
    rows = [{"chosen_ids": tokens(c, generator), "rejected_ids": tokens(r, generator)}
            for c, r in ((5, 9), (12, 3), (7, 7), (1, 2))]
    return [row | {"margin": 0.4 * i} for i, row in enumerate(rows)] if with_margin else rows


def tokens(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
