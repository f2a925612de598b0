"""Seconds of one whole PPO step beside the same step written plainly (peers/plain_ppo.py), alternating in one run.

    python benchmarks/ppo_step.py [--cases full lora ragged ragged_lora] [--json FILE] [--profile]

OPT-125m shape, bf16, batch 8, 64 prompt tokens; `full`: all weights of actor and critic are trained, four models;
`lora`: rank 16, one base for four roles; 64 response tokens each. `ragged`: as full, `ragged_lora`: as lora, response
lengths drawn once from a geometric law with mean 24, at most 64, the same for both sides. floor_ratio is our time over
that of the step's matrix products at the measured rate plus its unavoidable bytes (weights read once per decode step,
optimizer state) at the measured bandwidth. It has nothing for attention, norms, activations, softmax over the
vocabulary, adapters or the writing of gradients: a step that fused everything perfectly would still take longer. The
critic's old values cost the floor no forward, for the one that an only update trains on could give them; our step makes
one, for simpler code. wide_floor_ratio is over a
floor that also counts attention's and adapters' products, and the bytes no cache can hold: the weights of each pass,
what a forward keeps for its backward, logits, and gradients as they are written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import steps
import torch
from floors import Shape, ppo_floor
from harness import Case, bandwidth, matrix_rate, sizes_of
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
    return steps.Step(ours.step, lambda: plain.step(ids), lambda: floors_of(shape, is_lora, prompt, limits),
                      extra=lambda: {"phases": ours.seconds})


def floors_of(shape: Shape, is_lora: bool, prompt: int, limits: list[int]) -> dict[str, tuple[float, str]]:
    """Seconds that the step's products and bytes take at this machine's own rates, and those of the wide floor."""
    floor, line = ppo_floor(shape, [prompt] * len(limits), limits, is_lora)
    operations, num_bytes = beyond_products(shape, is_lora, prompt, limits)
    rate = matrix_rate(shape.products(len(limits) * prompt + sum(limits)), torch.bfloat16)
    wide = floor + operations / rate + num_bytes / bandwidth()
    return {"floor_ratio": (floor, line), "wide_floor_ratio": (
        wide, f"wide floor {wide:.2f} s: {operations:.2g} operations, {num_bytes / 1e9:.2f} GB more")}


def beyond_products(model: Shape, is_lora: bool, prompt: int, limits: list[int]) -> tuple[float, float]:
    """Operations and bytes that the floor leaves out and no step can: four forwards and two backwards, in 16 bits.

    Attention looks back only, and its backward takes 2.5 forwards. A forward with gradients keeps eight states of the
    hidden size and two of the inner one (a gated MLP three) of each token and layer, written once and read once. Logits
    are written and read by reference and actor, read again for the gradient, which is written and read (twice where it
    makes a weight's). An adapter takes rank x (in + out) products a token in three forwards, twice that in a backward.
    """
    read, answered = len(limits) * prompt + sum(limits), sum(limits)
    attention = model.layers * sum(2 * model.hidden * (prompt + n) ** 2 for n in limits) * (4 + 2 * 2.5)
    sides = sum(i + o for _, i, o in model.products(read))
    adapters = 2 * LORA.r * model.layers * sides * read * (3 + 2 * 2) if is_lora else 0
    kept = 2 * 2 * read * model.layers * (8 * model.hidden + (model.ups + 1) * model.inner)
    logits = answered * model.vocab * (4 + 1 + 1 + (1 if is_lora else 2))
    gradients = 0 if is_lora else 2 * model.body + model.head
    return attention + adapters, 2 * (model.body * (4 + 2) + kept + logits + gradients)


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
