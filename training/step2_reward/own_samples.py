"""Agreement of two reward models, each trained on half of the pairs, on answers of the model that stage 2 started from.

Held-out pairs show how a reward model ranks answers like those it learned from; in stage 3 it scores the policy's own
samples, which are closer to each other. Where two models of disjoint halves of the data disagree, the ranking is noise
(ensembles of reward models as a check on over-optimisation: Coste et al. 2310.02743).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.data import collate
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.rollout import Rollout
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.training import builders, fixed_prompts, scored_answers, supervised

Open = Callable[[supervised.Opened], Reward]  # a new reward model with its optimizer
MAX_HELD_OUT = 512  # pairs


def agreement(opened: supervised.Opened, open_reward: Open, num_steps: int) -> dict:
    """{"own_samples": {agreement, pairs, held_out}}: the share of pairs of sampled answers that both halves rank alike,
    the number of pairs, and the same share on the held-out pairs. {"own_samples": {"why": ...}} where it could not be
    measured: the run is finished without it. num_steps: steps of the run; a run that was stopped is not measured."""
    num_prompts = opened.config.reward.own_samples
    if not num_prompts:
        return {}
    try:
        check(num_steps >= opened.steps, f"the run ended after step {num_steps} of {opened.steps}; let it finish")
        with activity.slow(f"training on each half of the pairs (reward.own_samples {num_prompts})"), \
                explained("while measuring the model's own samples"):
            measured = _measured(opened, open_reward, num_prompts)
    except UserError as error:
        measured = {"why": str(error)}
    few = 0 < measured.get("pairs", num_prompts) < num_prompts
    print_main(f"reward.own_samples: {line(measured)}" + f"; {num_prompts} were asked for" * few + (
        "; this may be chance" if may_be_chance(measured.get("agreement"), measured.get("pairs", 0)) else ""))
    return {"own_samples": measured}


def announce(opened: supervised.Opened) -> None:
    """One line on what comes after the last step, in no limit and no estimate of the run."""
    config, steps = opened.config, opened.steps
    if config.reward.own_samples:
        limited = (f"; not counted in train.max_seconds either, and skipped if that ends the run before step {steps}"
                   if config.train.max_seconds else "")
        print_main(f"reward.own_samples {config.reward.own_samples}: after step {steps} two models are trained on half "
                   f"of the pairs each, about {steps} steps together, not counted in the estimated time{limited}")


def line(measured: dict) -> str:
    """One line with the measured agreement, or the reason why there is none."""
    if "why" in measured:
        return f"agreement on the starting model's own answers was not measured: {measured['why']}"
    if measured["agreement"] is None:
        return "agreement on the starting model's own answers was not measured: both to each prompt got equal scores"
    beside = "" if measured["held_out"] is None else f", in {measured['held_out']:.0%} on held-out pairs"
    return (f"two models of half the data each agreed in {measured['agreement']:.0%} of {measured['pairs']} pairs of "
            f"the starting model's own answers{beside} (50% is chance)")


def may_be_chance(share: float | None, count: int) -> bool:
    """Whether a share of `count` pairs is within two standard errors (1 / sqrt(n)) of chance, 0.5."""
    return share is not None and share - count ** -0.5 < 0.5


def _measured(opened: supervised.Opened, open_reward: Open, num_prompts: int) -> dict:
    rollout = _sampled(opened, num_prompts)
    pairs = [opened.data.held_out[i] for i in range(min(len(opened.data.held_out), MAX_HELD_OUT))]
    verdicts = [_verdicts(opened, open_reward, half, rollout, pairs) for half in range(2)]
    sampled, held_out = (_agreement(*both) for both in zip(*verdicts, strict=True))
    return {"agreement": sampled[0], "pairs": sampled[1], "held_out": held_out[0]}


def _sampled(opened: supervised.Opened, num_prompts: int) -> Rollout:
    """Two answers to each of the first held-out prompts, sampled by the starting model."""
    prompts = fixed_prompts.prompts_of(opened.data, opened.tokenizer, num_prompts)
    limit = max(1, min(fixed_prompts.MAX_NEW_TOKENS, opened.config.data.max_length - max(map(len, prompts.ids))))
    actor = scored_answers.open_actor(opened.model, opened.tokenizer)
    with torch.no_grad(), actor.inference():
        return actor.generate(prompts.repeat(2), SamplingConfig(max_new_tokens=limit, temperature=1.0),
                              opened.config.seed)


def _verdicts(opened: supervised.Opened, open_reward: Open, half: int, rollout: Rollout,
              pairs: Sequence[dict]) -> tuple[Tensor, Tensor]:
    """Score differences within the sampled pairs, and within the held-out `pairs`, of a model trained on every second
    pair from `half`."""
    config, pad = opened.config, opened.tokenizer.pad_token_id
    rows = [opened.data.train[i] for i in range(half, len(opened.data.train), 2)]
    loader = builders.train_loader(rows, config.train, config.seed, lambda rows: collate.collate_pairs(rows, pad),
                                   drop_last=False)
    steps = max(1, opened.steps // 2)
    builders.seed_everything(config.seed + half)  # a head for each half, the same one after a resume
    reward = open_reward(opened._replace(steps=steps))
    trainer = RewardTrainer(reward, config.reward.center_coef)
    for _ in range(steps):
        trainer.step(loader.next())
    with torch.no_grad():
        sampled = reward.score_rollout(rollout).view(-1, 2)
        held_out = reward.score(collate.collate_pairs(pairs, pad).sequences).view(2, -1).T if pairs else sampled[:0]
    return sampled[:, 0] - sampled[:, 1], held_out[:, 0] - held_out[:, 1]


def _agreement(first: Tensor, second: Tensor) -> tuple[float | None, int]:
    """The share of pairs that both rank alike, and the number of pairs; ties, which have no order, are left out."""
    is_ranked = (first != 0) & (second != 0)
    count = int(is_ranked.sum())
    return (float((first.sign() == second.sign())[is_ranked].float().mean()) if count else None), count
