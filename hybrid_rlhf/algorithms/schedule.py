"""Learning-rate schedules, as factors of the peak."""

from __future__ import annotations

import math

KINDS = ("constant", "constant_with_warmup", "linear", "cosine")


def learning_rate_factor(step: int, *, total_steps: int, warmup_steps: int = 0, kind: str = "cosine") -> float:
    """Factor of the peak learning rate at optimizer step `step` (the first step is 0).

    Names are those of transformers.get_scheduler, and so are the values from step warmup_steps on: linear falls to 0,
    and cosine as 0.5 (1 + cos(pi x)), both reaching 0 at step total_steps, one after the last. Warm-up is
    (step + 1) / warmup_steps, where transformers has step / warmup_steps: an update at rate 0 would cost as much as any
    other and change nothing. `constant` has no warm-up. Past total_steps the factor stays 0 (transformers' cosine
    would rise again). Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"schedule {kind!r}: there are {', '.join(KINDS)}")
    if kind == "constant":
        return 1.0
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant_with_warmup":
        return 1.0
    length = max(1, total_steps - warmup_steps)
    if kind == "linear":
        return max(0.0, (total_steps - step) / length)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup_steps) / length)))
