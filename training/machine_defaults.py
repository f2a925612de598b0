"""Defaults that depend on the machine: the dtype of weights trained on a CPU, and LoRA where memory is short."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import device, world_size
from hybrid_rlhf.core.processor import bf16_line, bf16_unit
from hybrid_rlhf.engine.decode.kv_cache import free_bytes
from hybrid_rlhf.engine.train.optimizers import MASTERED
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.load import ModelConfig, configuration

# Below so many weights the overhead of calls, not matrix products, takes a step's time: bfloat16 does not help.
LEAST_FOR_BF16 = 20_000_000
RANK, SHARE = 16, 0.75  # rank of adapters; share of the free memory for weights and optimizers, not activations
TRAINED, FROZEN = 16, 4  # bytes of a weight at most: fp32 with gradient and moments, or bf16 with an fp32 master


def with_dtype(config: object, start: ModelConfig) -> object:
    """The settings with bfloat16 for model.dtype auto, where the processor multiplies it and fp32 masters are kept
    beside the weights: a model that is not small, trained on a CPU by one process with AdamW. start: the model that the
    run starts from. On a GPU auto stays, and loading resolves it."""
    if (config.model.dtype != "auto" or device().type != "cpu" or world_size() > 1 or config.model.quantize
            or config.train.optim not in MASTERED or bf16_unit() is None
            or (num_weights(start) or 0) < LEAST_FOR_BF16):
        return config
    return replace(config, model=replace(config.model, dtype="bfloat16"))


def with_rank(config: object, start: ModelConfig, recorded: int | None = None) -> object:
    """The settings with model.lora.r filled in: as `recorded` by the run that is resumed; else 0 (all weights), or RANK
    with a line where training all would not fit into the free memory. Always 0 with settings that already take less
    memory in one place: quantised bases, model.freeze, offloading, a smaller optimizer, several processes."""
    if recorded is None:
        recorded, free, count = 0, free_bytes(device()), num_weights(start)
        roles = vars(config.roles).values() if hasattr(config, "roles") else ()
        is_other = (config.model.quantize or config.model.freeze or config.train.optim not in MASTERED
                    or config.engine.offload or any(getattr(role, "offload", False) for role in roles)
                    or world_size() > 1)
        if free is not None and count is not None and not is_other and (
                needed := training_bytes(config, count)) > SHARE * free:
            recorded = RANK
            print(f"model.lora.r {RANK}: training all weights would take about {needed / 2**30:.0f} GiB, and "
                  f"{free / 2**30:.0f} are free; 0 trains them all the same", file=sys.stderr)
    return replace(config, model=replace(config.model, lora=replace(config.model.lora, r=recorded)))


def training_bytes(config: object, count: int) -> int:
    """Bytes of weights, gradients and optimizers of a run that trains all `count` weights of its models. A stage that
    samples is assumed to have a reference or a teacher."""
    trained, frozen = 1, 0
    if hasattr(config, "roles"):
        trained += hasattr(config, "ppo") and config.ppo.needs_critic
        frozen = 1 + (hasattr(config, "reward") and config.reward.has_model(config.roles, config.environment))
    elif hasattr(config, "dpo"):
        frozen = int(LOSSES[config.dpo.loss_type].needs_reference)
    return count * (TRAINED * trained + FROZEN * frozen)


def num_weights(model: ModelConfig) -> int | None:
    """Number of weights by the model's configuration; None where it cannot be read (opening it raises the error)."""
    try:
        settings = shapes.read_config(model) if model.preset else configuration(model)
        return shapes.count_parameters(settings, trust_remote_code=model.trust_remote_code)
    except UserError:
        return None


def reason(config: object, dtype: torch.dtype, total: int) -> str:
    """Why the weights, `total` in number, are in `dtype` on a CPU; empty on a GPU, and where nothing is notable."""
    if device().type != "cpu":
        return ""
    if dtype == torch.bfloat16:
        return f" (fp32 masters; {bf16_line()})" if config.train.optim in MASTERED else f" ({bf16_line()})"
    is_left_open = config.model.dtype == "auto" and not config.model.quantize and total >= LEAST_FOR_BF16
    return f" ({bf16_line()})" if is_left_open and bf16_unit() is None else ""
