"""How training is laid out over memory and processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.engine.train.optimizers import MASTERED

OFFLOADS = {"optimizer": 1, "parameters": 3, "activations": 0}  # what -> the lowest ZeRO stage that can


@dataclass(frozen=True)
class ZeroConfig:
    """How training is laid out.

    Attributes:
        zero_stage: What processes share out instead of each holding it whole: 0 nothing, 1 the optimizer's state, 2 the
            gradients too, 3 the weights too. null takes the lowest that does what is asked: 0 for float32, and for
            bfloat16 with AdamW on one process or on adapters; 1 for other 16-bit training or an offloaded optimizer,
            3 for offloaded parameters.
        offload: What is kept in the CPU's memory: optimizer (state and step; ZeRO 1 or more), parameters (ZeRO 3),
            activations (what the backward pass needs, best with model.gradient_checkpointing).
        micro_batch_tokens: Most tokens (padding included) that one forward and backward may hold. Smaller needs less
            memory and gives the same gradient.
    """

    zero_stage: int | None = None
    offload: list[str] = field(default_factory=list)
    micro_batch_tokens: int = within(8192, "[1,")

    def __post_init__(self) -> None:
        check(self.zero_stage in (None, 0, 1, 2, 3), f"engine.zero_stage is {self.zero_stage}; choose 0, 1, 2 or 3")
        for name in self.offload:
            check(name in OFFLOADS, f"engine.offload: {name!r} cannot be offloaded; choose from {', '.join(OFFLOADS)}"
                                    f"{nearest(name, OFFLOADS)}")
            check(self.zero_stage is None or self.zero_stage >= OFFLOADS[name],
                  f"engine.offload: {name} need engine.zero_stage {OFFLOADS[name]} or more, not {self.zero_stage}")
        check_values(self, "engine.")

    @property
    def cuts_weights(self) -> bool:
        """Whether each process holds a part of the weights (ZeRO 3)."""
        return self.zero_stage == 3 or (self.zero_stage is None and "parameters" in self.offload)

    def stage(self, dtype: torch.dtype, optim: str = "adamw", *, is_small: bool = False) -> int:
        """The ZeRO stage for trained weights of `dtype`, which are a small part of the model (adapters) or not. Raises
        UserError for 16-bit weights at ZeRO 0, but where our own masters take DeepSpeed's place: bfloat16 by AdamW, on
        one process or of a small part."""
        least = lowest_stage(dtype, world_size(), optim, is_small=is_small)
        check(least == 0 or self.zero_stage != 0,
              f"engine.zero_stage 0 with {dtype} weights, {optim} and {world_size()} process(es): DeepSpeed would take "
              "a step without gradients at start; use engine.zero_stage 1 or model.dtype float32")
        lowest = max([least, *(OFFLOADS[name] for name in self.offload)])
        return lowest if self.zero_stage is None else self.zero_stage


def lowest_stage(dtype: torch.dtype, world: int = 1, optim: str = "adamw", *, is_small: bool = False) -> int:
    """The lowest ZeRO stage that trains weights of `dtype` on `world` processes."""
    is_ours = dtype == torch.bfloat16 and (world == 1 or is_small) and optim in MASTERED
    return int(dtype != torch.float32 and not is_ours)
