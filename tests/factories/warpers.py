"""Truncated sampling as transformers has it: the independent side of the tests of kept sets."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def warped(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """What transformers leaves of the logits (n, V), -inf elsewhere."""
    chain = [TemperatureLogitsWarper(float(temperature))]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in chain:
        logits = warper(None, logits)
    return logits


@torch.no_grad()
def warped_by_model(model, prompt: list[int], tokens: list[int], **settings) -> Tensor:
    """(len(tokens), V): what transformers leaves of the plain forward's logits before each of these tokens."""
    ids = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
    return warped(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().cpu(), **settings)
