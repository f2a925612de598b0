"""The optimizers and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hybrid_rlhf.core.config import check
from hybrid_rlhf.engine.train.adamw_master import MasterAdamW
from hybrid_rlhf.models import quantize


def _adamw(groups: list[dict], config: OptimizerConfig, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_epsilon, fused=fused)


def _sgd(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate)


def _adamw_8bit(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = config.adam_beta1, config.adam_beta2
    return quantize.adamw_8bit(groups, config.learning_rate, betas, config.adam_epsilon)


def _mastered(groups: list[dict], config: OptimizerConfig, *, fused: bool) -> torch.optim.Optimizer:
    return MasterAdamW(groups, config.learning_rate, (config.adam_beta1, config.adam_beta2), config.adam_epsilon,
                       fused=fused)


# name -> (parameter groups, settings) -> optimizer
OPTIMIZERS: dict[str, Callable[[list[dict], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": partial(_adamw, fused=True), "adamw_unfused": partial(_adamw, fused=False),
    "adamw_8bit": _adamw_8bit, "sgd": _sgd}
# the same for bfloat16 weights without DeepSpeed's masters (ZeRO 0)
MASTERED: dict[str, Callable[[list[dict], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": partial(_mastered, fused=True), "adamw_unfused": partial(_mastered, fused=False)}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its bounds. Norms and biases are never decayed. max_skipped_updates: the
    run ends after so many updates in a row whose gradient is not finite."""

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw"
    max_skipped_updates: int = 20

    def __post_init__(self) -> None:
        if self.optim == "adamw_8bit":
            quantize.require("train.optim adamw_8bit")
        check(self.optim in OPTIMIZERS, f"optim is {self.optim!r}; choose {', '.join(OPTIMIZERS)}")
