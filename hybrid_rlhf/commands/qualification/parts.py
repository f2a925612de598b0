"""The parts of qualify, in their order."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_rlhf.commands.qualification import equality, machine, speed, steps
from hybrid_rlhf.commands.qualification.findings import Part


class Share(NamedTuple):
    """run: the part; least, most: seconds without which it is not begun, and after which it is stopped."""

    run: Part
    least: float
    most: float


PARTS = {"environment": Share(machine.environment, 5, 90), "equality": Share(equality.equality, 30, 200),
         "speed": Share(speed.speed, 30, 120), "grpo-qlora": Share(steps.steps, 60, 240),
         "ppo-qlora": Share(steps.steps, 60, 240), "grpo": Share(steps.steps, 60, 240),
         "ppo": Share(steps.steps, 60, 240)}
