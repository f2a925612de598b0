"""The loss scale of fp32 adapters in a float16 model: what DeepSpeed does for weights in float16 themselves.

Gradients pass through the frozen float16 layers in float16, where those below 6e-8 are 0 and those above 65,504 are
infinite (1710.03740). Multiplied by the scale the small ones survive; powers of two change no digit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hybrid_rlhf.core.errors import NotFinite

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
