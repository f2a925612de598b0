"""Sampling and scoring of a rollout, shared by all on-policy methods."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor

from hybrid_rlhf.algorithms import reward_signal
from hybrid_rlhf.algorithms.reward_signal import RewardSignal
from hybrid_rlhf.core import activity
from hybrid_rlhf.core.errors import UserError, present
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import KeptSets
from hybrid_rlhf.data.turns import IMAGE_SHOWN
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.device_memory import peak_in
from hybrid_rlhf.rewards import Reporting, RewardSource, part_scores
from hybrid_rlhf.rewards.mixture import Mixture
from hybrid_rlhf.roles import Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.old_logprobs import OldLogprobs

_log = logging.getLogger(__name__)
_MUCH = 1 << 30  # bytes
_warned_size: WeakSet[HybridEngine] = WeakSet()
_warned_skipped: WeakSet[HybridEngine] = WeakSet()


@torch.no_grad()
def collect(prompts: Prompts, roles: Roles, source: RewardSource, sampling: SamplingConfig, seed: int,
            metrics: Metrics, old_logprobs: OldLogprobs | None = None, *, with_values: bool = True,
            keep_candidates: bool = False) -> Rollout:
    """Sample `sampling.num_samples` responses to each prompt, then score them with every role and the reward source.

    seed: of the sampling, another one at each step. old_logprobs: which log-probabilities are the old ones (None: those
    of a training forward). with_values: whether a critic's values are computed; else that is left to the caller.
    keep_candidates: whether all log-probabilities are normalised over the candidate tokens of truncated sampling.
    metrics receives the time and the peak memory of each phase, and metrics of the engine and the source.

    The score of a response that every source skipped is NaN, for the caller to leave out.
    """
    old_logprobs, start = old_logprobs or OldLogprobs("recompute"), time.perf_counter()
    activity.doing(f"sampling {len(prompts) * sampling.num_samples} responses")
    peak = partial(peak_in, metrics, device=roles.actor.engine.device)
    with explained("while generating"), roles.actor.resident():
        with peak("actor/generate"), metrics.timer("generate"), roles.actor.inference():
            rollout = roles.actor.generate(prompts.repeat(sampling.num_samples), sampling, seed, keep_candidates)
        metrics.add("engine/tokens_per_second", rollout.action_mask.sum() / (time.perf_counter() - start))
        metrics.add("engine/kv_bytes", roles.actor.engine.kv_bytes)
        metrics.add("engine/preempted", roles.actor.engine.num_preempted)
        if rollout.kept is not None:
            _observe_kept(rollout.kept, roles.actor.engine, metrics)
        activity.doing("scoring the responses")
        with explained("while scoring"), metrics.timer("score"), peak("actor/score"):
            rollout.logprobs = old_logprobs.logprobs(rollout, roles.actor, metrics)  # (B, R)
    with explained("while scoring"), metrics.timer("score"):
        if roles.ref:
            with peak("ref/score"):
                rollout.ref_logprobs = roles.ref.logprobs(rollout)  # (B, R)
        with peak("reward/score"):
            rollout.scores = _scores(source, rollout)  # (B,)
    if not (isinstance(source, Mixture) and not source.parts):  # distillation may have no source, and none skips then
        rollout.source_scores = rollout.source_scores or {source.name: rollout.scores}  # a mixture has set its parts
        _warn_skipped(rollout.scores, roles.actor.engine)
    if isinstance(source, Reporting):
        source.report(metrics)
    if sampling.num_samples > 1:
        _observe_groups(rollout, sampling.num_samples, metrics)
    if roles.critic and with_values:
        measure_values(rollout, roles, metrics)
    return rollout


def signal_of(rollout: Rollout, group_size: int) -> RewardSignal:
    """The reward signal of a scored rollout whose groups are contiguous."""
    is_empty = torch.tensor([not text.strip() for text in rollout.completions], dtype=torch.bool)
    return reward_signal.measure(*(values.view(-1, group_size) for values in (
        rollout.scores, rollout.action_mask.sum(1), rollout.has_eos, is_empty)))


def _observe_kept(kept: KeptSets, engine: HybridEngine, metrics: Metrics) -> None:
    """Measure the memory of the candidate tokens; if it is large, warn once with ways to reduce it."""
    num_bytes, num_tokens = kept.num_bytes(), sum(map(len, kept.sizes))
    metrics.add("engine/kept_bytes", num_bytes)
    if num_bytes > _MUCH and engine not in _warned_size:
        _warned_size.add(engine)
        _log.warning("the candidate tokens kept for replay use %.1f GiB of memory for a rollout, about %d for each "
                     "token: a lower top_p, a higher min_p or a top_k keeps fewer; of PPO and its relatives "
                     "ppo.replay_truncation false keeps none", num_bytes / 2**30,
                     sum(map(len, kept.ids)) / max(num_tokens, 1))


def _observe_groups(rollout: Rollout, group_size: int, metrics: Metrics) -> None:
    """Metrics of the groups' scores; the mean best score is pass@G where scores are 0 or 1."""
    signal = signal_of(rollout, group_size)
    metrics.add("prompts/num_responses", group_size, signal.num_prompts)
    metrics.add("prompts/with_spread", signal.with_spread, signal.num_prompts)
    metrics.add("prompts/best_score", signal.best, 0 if math.isnan(signal.best) else signal.num_prompts)


@torch.no_grad()
def measure_values(rollout: Rollout, roles: Roles, metrics: Metrics) -> None:
    """Fill in the critic's values; metrics receives time and peak memory."""
    device = roles.actor.engine.device
    with explained("while scoring"), metrics.timer("score"), peak_in(metrics, "critic/score", device):
        rollout.values = present(roles.critic, "the critic").values(rollout)  # (B, R)


def _warn_skipped(scores: Tensor, engine: HybridEngine) -> None:
    """Warn once, the first time that every source skips a response."""
    if bool(scores.isnan().any()) and engine not in _warned_skipped:
        _warned_skipped.add(engine)
        _log.warning("every reward source skipped %d of %d responses (None): such are left out of the update and of "
                     "their prompt's baseline; completions/unscored_ratio counts them", int(scores.isnan().sum()),
                     len(scores))


def _scores(source: RewardSource, rollout: Rollout) -> Tensor:
    """(B,), NaN where every source skipped. If the source fails, no weight has changed yet: the run can resume from
    before this step."""
    try:
        return part_scores(source, rollout)
    except UserError as error:
        error.is_before_update = True
        raise


@torch.no_grad()
def collect_held_out(batches: Iterable[Prompts], roles: Roles, source: RewardSource, sampling: SamplingConfig,
                     seed: int, *, keep_candidates: bool = False) -> Metrics:
    """Scores, KL and lengths of fresh responses to held-out prompts, over all processes (always the same draw)."""
    metrics = Metrics()
    for i, prompts in enumerate(batches):
        metrics += collect(prompts, roles, source, sampling, seed + i, Metrics(), with_values=False,
                           keep_candidates=keep_candidates).metrics()
    return metrics.over_ranks()


def shown(prompts: Prompts) -> list[str]:
    """The texts of prompts for people: with the names of the images' files."""
    texts = list(prompts.texts)
    for i, images in enumerate(prompts.images):
        for image in images:
            texts[i] = texts[i].replace(IMAGE_SHOWN, f"[{os.path.basename(image.path)}]", 1)
    return texts


def pictured(prompts: Prompts, i: int) -> dict:
    """The files of a prompt's images, for pages that show them; empty without images."""
    return {"images": [image.path for image in prompts.images[i]]} if prompts.images[i] else {}


def samples_of(rollout: Rollout | None, count: int) -> list[dict]:
    """The first responses to different prompts, for people; the score of one that every source skipped is None."""
    if rollout is None:
        return []
    asked, texts = rollout.prompts.asked, shown(rollout.prompts)
    rows = [i for i in range(len(rollout)) if i == 0 or asked[i] != asked[i - 1]]  # a prompt's samples are contiguous
    return [{"prompt": texts[i], **pictured(rollout.prompts, i), "completion": rollout.shown(i),
             "score": None if rollout.scores[i].isnan() else float(rollout.scores[i]),
             "ended": bool(rollout.has_eos[i])} | _judged(rollout, i) | _replay(rollout, i) for i in rows[:count]]


def _judged(rollout: Rollout, i: int) -> dict:
    """A response's score from each of several sources, and the judge's remark; empty with one source and no judge."""
    parts = {name: float(scores[i]) for name, scores in rollout.source_scores.items() if not scores[i].isnan()}
    row = {"scores": parts} if len(rollout.source_scores) > 1 else {}
    return row | ({"judge": rollout.remarks[i]} if rollout.remarks and rollout.remarks[i] else {})


def _replay(rollout: Rollout, i: int) -> dict:
    """Why an episode ended, and its record for a replay; empty for a response of one turn."""
    if not rollout.episodes:
        return {}
    ids = rollout.response_ids[i][rollout.response_mask[i]].tolist()
    episode = rollout.episodes[i]
    return {"ended_by": episode.ended, "replay": episode.replay_record(rollout.prompts.ids[i], ids)}
