"""Defaults that go by the machine: the dtype of the weights that are trained on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import device, world_size
from hybrid_rlhf.core.processor import bf16_line, bf16_unit
from hybrid_rlhf.engine.train.optimizers import MASTERED
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig, configuration

# Below so many weights a step is not products but calls of them, which bfloat16 does not shorten.
LEAST_FOR_BF16 = 20_000_000


def with_dtype(config: object, start: ModelConfig) -> object:
    """The settings with bfloat16 for model.dtype auto, where the processor multiplies it and fp32 masters are kept
    beside the weights: a model that is not small, trained on a CPU by one process with AdamW. start: the model that the
    run starts from. On a card auto stays, which loading resolves."""
    if (config.model.dtype != "auto" or device().type != "cpu" or world_size() > 1 or config.model.quantize
            or config.train.optim not in MASTERED or bf16_unit() is None
            or (num_weights(start) or 0) < LEAST_FOR_BF16):
        return config
    return replace(config, model=replace(config.model, dtype="bfloat16"))


def num_weights(model: ModelConfig) -> int | None:
    """By the model's configuration alone; None where that cannot be read: what opens it says what is wrong."""
    try:
        settings = shapes.read_config(model) if model.preset else configuration(model)
        return shapes.count_parameters(settings, trust_remote_code=model.trust_remote_code)
    except UserError:
        return None


def reason(config: object, dtype: torch.dtype, total: int) -> str:
    """Why the weights, `total` in number, are in `dtype` on a CPU; empty on a card, and where nothing is to be said."""
    if device().type != "cpu":
        return ""
    if dtype == torch.bfloat16:
        return f" (fp32 masters; {bf16_line()})" if config.train.optim in MASTERED else f" ({bf16_line()})"
    is_left_open = config.model.dtype == "auto" and not config.model.quantize and total >= LEAST_FOR_BF16
    return f" ({bf16_line()})" if is_left_open and bf16_unit() is None else ""
