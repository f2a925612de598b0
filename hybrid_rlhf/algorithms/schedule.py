"""Learning-rate schedules by Hugging Face's names, as factors of the peak rate (transformers.get_scheduler)."""

from __future__ import annotations

import math

KINDS = ("cosine", "linear", "constant", "constant_with_warmup")


def learning_rate_factor(step: int, *, total_steps: int, warmup_steps: int, kind: str) -> float:
    """Factor for optimizer step `step` (from 0): linear from 0 over warmup_steps, then `kind` down to 0 at total_steps.

    With a warm-up, step 0 has factor 0. `constant` has no warm-up.
    """
    if kind == "constant":
        return 1.0
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    if kind == "constant_with_warmup":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(0.0, 1 - progress)
    if kind == "cosine":
        return max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
    raise ValueError(f"lr_scheduler_type {kind!r}; choose one of {', '.join(KINDS)}")
