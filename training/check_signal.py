"""--check_signal: check before training whether the rewards can teach a task.

Samples several responses to each of a few prompts, scores them, and times training steps. Nothing is written: the steps
change the weights of this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from hybrid_rlhf.algorithms.reward_signal import RewardSignal, figures, verdict
from hybrid_rlhf.core.distributed import is_main, max_over_ranks, print_main
from hybrid_rlhf.data import collate
from hybrid_rlhf.report.terminal import duration, number, sample_lines
from hybrid_rlhf.rewards import part_scores
from hybrid_rlhf.rollout import Rollout
from hybrid_rlhf.rollout.collect import samples_of, signal_of
from hybrid_rlhf.rollout.episode_record import measure
from hybrid_rlhf.run.loop import Trainer
from hybrid_rlhf.training import builders, on_policy
from hybrid_rlhf.training.stage_config import OnPolicyConfig

NUM_PROMPTS, MIN_RESPONSES = 32, 8
PROMPTS_AT_ONCE, MAX_SECONDS = 8, 30.0  # of sampling; at least PROMPTS_AT_ONCE are asked
STEP_PROMPTS = (4, 8, 24)  # of the steps taken for their time: the first warms up
LONG = 1800.0  # seconds of a run
WIDTH = 118  # of a sample's lines


def check(make_trainer: Callable[[on_policy.RunContext], Trainer], config: OnPolicyConfig) -> RewardSignal:
    """Sample, score, and print figures and verdict; then time training steps. All processes take part, the main one
    prints."""
    config = on_policy.prepared(config)
    builders.seed_everything(config.seed)
    opened = on_policy.open_run(config)
    if opened.reward_line:
        print_main(opened.reward_line)
    trainer, sampling = make_trainer(opened), config.method.sampling
    sampling = replace(sampling, num_samples=max(sampling.num_samples, MIN_RESPONSES))
    print_main(f"{sampling.num_samples} responses to each of up to {NUM_PROMPTS} prompts ...")
    began = time.perf_counter()
    rollout = _sample(opened, sampling, config.seed)
    signal = signal_of(rollout, sampling.num_samples)
    print_main(f"{len(rollout)} responses in {duration(time.perf_counter() - began)}")
    if is_main():
        lines = [*(f"{name:<18}{text}" for name, text in figures(signal).items()), *_calls(rollout), *_samples(rollout),
                 ""]
        print("\n".join([*lines, *(f"verdict: {text}" for text in verdict(signal))]), flush=True)
    print_main("now training steps, for the time that they take ...")
    text = _time_step(trainer, opened)
    if is_main():
        print(f"\n{'a training step':<18}{text}")
    return signal


def _time_step(trainer: Trainer, opened: on_policy.RunContext) -> str:
    """How long a step and the run take: measured on all prompts of a step, or extrapolated from parts of many prompts,
    linearly from the last two parts."""
    batch, taken, last = opened.loader.next(), [], 0
    if hasattr(trainer, "warmup_steps"):  # in which the actor would not be trained
        trainer.num_steps = trainer.warmup_steps
    for size in (min(len(batch), size) for size in STEP_PROMPTS):
        if taken:
            print_main(f"{last} prompts took {duration(taken[-1])}; {size} ...")
        began = time.perf_counter()
        trainer.step(batch.rows(range(size)))
        taken.append(max_over_ranks(round(1000 * (time.perf_counter() - began))) / 1000)
        last = size
    rest = (len(batch) - size) / (size - STEP_PROMPTS[1]) if len(batch) > size else 0.0
    seconds = taken[-1] + max(0.0, taken[-1] - taken[-2]) * rest
    part = f" (measured on {size} of its {len(batch)} prompts)" if size < len(batch) else ""
    total = f"; the run has {opened.num_steps}: about {duration(seconds * opened.num_steps)}"
    if seconds * opened.num_steps > LONG:
        total += (f"\n{'':<18}train.max_steps or train.max_seconds end it sooner; "
                  "train.per_device_train_batch_size makes steps shorter")
    return f"{'about ' * bool(part)}{number(seconds)} s{part}{total * (opened.num_steps > 1)}"


@torch.no_grad()
def _sample(opened: on_policy.RunContext, sampling, seed: int) -> Rollout:  # noqa: ANN001
    """Responses to NUM_PROMPTS training prompts, or to as many as MAX_SECONDS allow, and their scores."""
    actor, began, rollout = opened.roles.actor, time.perf_counter(), None
    for prompts in _prompts(opened.data.train, seed):
        with actor.inference():
            part = actor.generate(prompts.repeat(sampling.num_samples), sampling, seed)
        part.scores = part_scores(opened.source, part)
        part.source_scores = {}
        rollout = part if rollout is None else rollout + part
        if max_over_ranks(time.perf_counter() - began > MAX_SECONDS):
            break
    return rollout


def _prompts(rows, seed: int) -> Iterator:  # noqa: ANN001
    """NUM_PROMPTS rows drawn by `seed`, a few at a time; the same ones on every process."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:NUM_PROMPTS]
    for part in order.split(PROMPTS_AT_ONCE):
        yield collate.collate_prompts([rows[i] for i in part.tolist()])


def _calls(rollout: Rollout) -> list[str]:
    """How often tools were called, and how often a call failed, where there are tools."""
    metrics = measure(rollout.episodes).compute() if rollout.episodes else {}
    if "tools/call_frequency" not in metrics:
        return []
    has_failures = "tools/failure_frequency" in metrics
    failed = f", {metrics['tools/failure_frequency']:.0%} of them failed" if has_failures else ""
    return [f"{'calls of tools':<18}{metrics['tools/call_frequency']:.2f} in an episode{failed}"]


def _samples(rollout: Rollout) -> list[str]:
    """The best, the median and the worst response; any three where all have one score."""
    scored = sorted((i for i in range(len(rollout)) if not rollout.scores[i].isnan()),
                    key=lambda i: -float(rollout.scores[i]))
    is_constant = not scored or rollout.scores[scored[0]] == rollout.scores[scored[-1]]
    names = ("one response", "another", "a third") if is_constant else ("best", "median", "worst")
    lines = []
    for name, place in zip(names, (0, len(scored) // 2, -1), strict=True) if scored else ():
        row = rollout.rows(torch.tensor([scored[place]]))
        lines += ["", name, *sample_lines(samples_of(row, 1)[0], WIDTH)]
    return lines
