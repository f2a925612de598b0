"""The optimizers and their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.engine.train.adamw_master import MasterAdamW
from hybrid_rlhf.models import quantize


def _adamw(kind: Callable[..., torch.optim.Optimizer], groups: list[dict], config: OptimizerConfig,
           **options: bool) -> torch.optim.Optimizer:
    return kind(groups, config.learning_rate, (config.adam_beta1, config.adam_beta2), config.adam_epsilon, **options)


def _sgd(groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate)


# name -> (parameter groups, settings) -> optimizer
OPTIMIZERS: dict[str, Callable[[list[dict], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": partial(_adamw, torch.optim.AdamW, fused=True),
    "adamw_unfused": partial(_adamw, torch.optim.AdamW, fused=False),
    "adamw_8bit": partial(_adamw, quantize.adamw_8bit), "sgd": _sgd}
# the same for bfloat16 weights without DeepSpeed's masters (ZeRO 0)
MASTERED: dict[str, Callable[[list[dict], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": partial(_adamw, MasterAdamW, fused=True), "adamw_unfused": partial(_adamw, MasterAdamW, fused=False)}


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


# -- The loss scale of fp32 adapters in a float16 model: what DeepSpeed does for weights in float16 themselves ---------
#
# Gradients pass through the frozen float16 layers in float16, where those below 6e-8 are 0 and those above 65,504 are
# infinite (1710.03740). Multiplied by the scale the small ones survive; powers of two change no digit.


FIRST, LEAST = 2.0**16, 1.0
WINDOW = 1000  # updates without an overflow, after which the scale doubles; as DeepSpeed's


class LossScale:
    """A factor of the loss, by which gradients are divided before they are clipped. value: the current one."""

    def __init__(self) -> None:
        self.value, self._num_good = FIRST, 0

    def update(self, *, is_finite: bool) -> None:
        """After the gradients of an update: double after WINDOW good ones in a row, halve after one that overflowed.

        Raises NotFinite where they overflow at the smallest scale: then the scale is not the cause.
        """
        if is_finite:
            self._num_good += 1
            if self._num_good == WINDOW:
                self.value, self._num_good = 2 * self.value, 0
            return
        if self.value <= LEAST:
            raise exhausted()
        self.value, self._num_good = max(LEAST, self.value / 2), 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good": self._num_good}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore `state`; an older checkpoint, without a scale, changes nothing."""
        if state:
            self.value, self._num_good = float(state["value"]), int(state["num_good"])


def exhausted() -> NotFinite:
    """The error where gradients overflow at every scale."""
    return NotFinite("gradients in float16 are not finite even at the smallest loss scale, 1; lower "
                     "train.learning_rate, or take model.dtype bfloat16")


def scale_for(module: nn.Module, trained: torch.dtype) -> LossScale | None:
    """The scale for weights of the dtype `trained` in `module`; None where no gradient is in float16, or where
    DeepSpeed, which trains weights in float16, has its own."""
    is_needed = trained == torch.float32 and any(p.dtype == torch.float16 for p in module.parameters())
    return LossScale() if is_needed else None
