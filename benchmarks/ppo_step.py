"""Seconds of one whole PPO step beside the same step written plainly (peers/plain_ppo.py), alternating in one run.

    python benchmarks/ppo_step.py [--cases full lora ragged ragged_lora] [--json FILE]

OPT-125m shape, bf16, batch 8, 64 prompt tokens; `full`: all weights of actor and critic are trained, four models;
`lora`: rank 16, one base for four roles; 64 response tokens each. `ragged`: as full, `ragged_lora`: as lora, response
lengths drawn once from a geometric law with mean 24, at most 64, the same for both sides. floor_ratio is our time over
that of the step's matrix products at the measured rate plus its unavoidable bytes (weights read once per decode step,
optimizer state) at the measured bandwidth. It has nothing for attention, norms, activations, softmax over the
vocabulary, adapters or the writing of gradients: a step that fused everything perfectly would still take longer. The
critic's old values cost the floor no forward, for the one that an only update trains on could give them; our step makes
one, for simpler code.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import steps
import torch
from floors import Shape, ppo_floor
from harness import Case, sizes_of
from peers.plain_ppo import PlainPPO
from random_models import LORA, SHAPES, TimedStep, limits_of, prompts_of, roles_of, trainer_of

ROWS, PROMPT, RESPONSE = 8, 64, 64


def prepare(options: argparse.Namespace, _peer: None, is_lora: bool, is_ragged: bool = False) -> steps.Step:
    place, (rows, prompt, response) = options.place, sizes_of(options, ROWS, PROMPT, RESPONSE)
    limits = limits_of(rows, response, is_ragged)
    roles, reward = roles_of(place, lora=is_lora, share="all" if is_lora else "none", micro_batch_tokens=8192)
    ours = TimedStep(trainer_of(roles, reward, max(limits)), roles.actor.engine, prompts_of(place, rows, prompt),
                     limits)
    plain = PlainPPO(place / "base", place / "reward", limits, LORA.r if is_lora else 0)
    ids = torch.tensor(ours.prompts.ids)
    shape = Shape.of(SHAPES[options.shape][1])
    return steps.Step(ours.step, lambda: plain.step(ids),
                      lambda: {"floor_ratio": ppo_floor(shape, [prompt] * len(limits), limits, is_lora)},
                      extra=lambda: {"phases": ours.seconds})


PLAIN = "the plain four-model step"
CASES = {
    "full": Case("PPO step, OPT-125m, all weights", PLAIN, None, 1.3, partial(prepare, is_lora=False)),
    "lora": Case("PPO step, OPT-125m, LoRA", PLAIN, None, 1.3, partial(prepare, is_lora=True)),
    "ragged": Case("the same, all weights, ragged", PLAIN, prepare=partial(prepare, is_lora=False, is_ragged=True)),
    "ragged_lora": Case("the same, LoRA, ragged", PLAIN, prepare=partial(prepare, is_lora=True, is_ragged=True)),
}


def main(argv: Sequence[str] | None = None) -> None:
    steps.run(CASES, steps.parser_of(__doc__, CASES, repeats=5), argv, shape="opt125m")


if __name__ == "__main__":
    main()
