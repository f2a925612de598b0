"""Seconds of one whole GRPO step beside TRL's GRPOTrainer (peers/trl_grpo.py), alternating in one run.

    python benchmarks/grpo_step.py [--cases fixed ragged rloo] [--json FILE]

Llama-shaped 134M, bf16, random weights; 2 prompts of 36 tokens, 8 samples each, a reward function, KL to the reference
in the loss (beta 0.04). `fixed`: 64 response tokens each; `ragged`: lengths drawn once from a geometric law with mean
24, at most 64, the same for both sides; `rloo`: fixed ones, by RLOO (TRL's RLOOTrainer), whose KL is in the reward.
floor_ratio is our time over that of the step's matrix products at the measured rate plus its unavoidable bytes (weights
read once per decode step, optimizer state) at the measured bandwidth, the prompt counted in every row;
floor_ratio_shared counts it once per group, as ours computes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import steps
from floors import Shape, decode_bytes, floor_of
from harness import Case, sizes_of
from peers.trl_grpo import TrlGRPO
from random_models import SHAPES, TimedStep, limits_of, policy_config, prompts_of, tokenizer_of

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards.functions import FunctionSource
from hybrid_rlhf.roles.sharing import Layout, RoleConfig, RolesConfig, Start
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from hybrid_rlhf.training.build_roles import build
from hybrid_rlhf.training.stage_config import OnPolicyConfig

PROMPTS, SAMPLES, PROMPT, RESPONSE, BETA = 2, 8, 36, 64, 0.04


def evenness(completion_ids: list[list[int]], **_columns: list) -> list[float]:
    """The reward function of both sides: the share of even tokens."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def our_step(place: Path, tokenizer, prompts: Prompts, limits: list[int], samples: int,  # noqa: ANN001
             estimator: str = "grpo") -> TimedStep:
    """limits: response length of each sequence."""
    start = Start(str(place / "base"), dtype="bfloat16")
    settings = OnPolicyConfig(model=policy_config(place), roles=RolesConfig(actor=RoleConfig(learning_rate=1e-5)))
    roles, _ = build(settings, {"actor": start, "ref": start}, Layout((("actor",), ("ref",)), "model"), tokenizer,
                     {"actor": 1000}, None)
    roles.actor.engine.eos_ids = []  # lengths are the benchmark's
    sampling = SamplingConfig(max_new_tokens=max(limits), num_samples=samples)
    config = PPOConfig(sampling=sampling, estimator=estimator, num_ppo_epochs=1, num_minibatches=1, kl_coef=BETA,
                       missing_eos_penalty=0.0)
    trainer = PPOTrainer(roles, FunctionSource("evenness", evenness), config, seed=0)
    return TimedStep(trainer, roles.actor.engine, prompts, limits)


def floor_of_step(shape: Shape, prompt: int, limits: list[int], num_read: int) -> tuple[float, str]:
    """Seconds that the step's products and bytes take at this machine's own rates, and a line about them.

    A backward costs two forwards; the head is needed where tokens are predicted only; each prompt is prefilled once.
    num_read: prompts that a pass reads.
    """
    answered, read = sum(limits), num_read * prompt + sum(limits)
    passes = 4 + PROMPTS * prompt / read  # the reference, the actor, its backward; prefilling
    return floor_of(shape, read, passes, (answered, 4),
                    (answered, decode_bytes(shape, [prompt] * len(limits), limits)), shape.body + 2 * shape.head)


def work_of(options: argparse.Namespace, is_ragged: bool) -> tuple[Prompts, int, list[int]]:
    """The prompts, how often each is sampled, and the length of each response."""
    samples, prompt, response = sizes_of(options, SAMPLES, PROMPT, RESPONSE)
    return prompts_of(options.place, PROMPTS, prompt), samples, limits_of(PROMPTS * samples, response, is_ragged)


def open_peer(options: argparse.Namespace, is_ragged: bool = False, estimator: str = "grpo") -> TrlGRPO:
    prompts, samples, limits = work_of(options, is_ragged)
    return TrlGRPO(options.place / "base", tokenizer_of(options.vocab), prompts.texts, samples, limits, evenness, BETA,
                   options.place / "trl", estimator)


def prepare(options: argparse.Namespace, trl: TrlGRPO, is_ragged: bool = False, estimator: str = "grpo") -> steps.Step:
    prompts, samples, limits = work_of(options, is_ragged)
    ours = our_step(options.place, tokenizer_of(options.vocab), prompts, limits, samples, estimator)
    shape, length = Shape.of(SHAPES[options.shape][1]), len(prompts.ids[0])
    return steps.Step(ours.step, trl.step,
                      lambda: {"floor_ratio": floor_of_step(shape, length, limits, len(limits)),
                               "floor_ratio_shared": floor_of_step(shape, length, limits, PROMPTS)},
                      extra=lambda: {"phases": ours.seconds, "response_tokens": sum(limits)})


def case_of(work: str, min_ratio: float | None, **settings: object) -> Case:
    trainer = f"TRL {settings.get('estimator', 'grpo').upper()}Trainer"
    return Case(work, trainer, min_ratio, 1.4, partial(prepare, **settings), partial(open_peer, **settings))


CASES = {
    "fixed": case_of("GRPO step, 134M, equal lengths", 2.5),
    "ragged": case_of("GRPO step, 134M, ragged", 4, is_ragged=True),
    "rloo": case_of("RLOO step, 134M, equal lengths", None, estimator="rloo"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = steps.parser_of(__doc__, CASES, repeats=4)
    steps.run(CASES, parser, argv)


if __name__ == "__main__":
    main()
