"""Dynamic sampling (DAPO, 2503.14476): groups of zero reward variance are replaced by groups of new prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybrid_rlhf.core.distributed import place_over_ranks
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.rollout import Rollout


def resample_groups(first: Rollout, group_size: int, max_rounds: int, sample: Callable[[int], Rollout],
                    metrics: Metrics) -> Rollout:
    """As many groups as in `first`, those whose scores are all equal replaced by groups of new prompts (2503.14476).

    sample(round) returns another rollout, at most max_rounds times; every process calls it equally often. Groups are
    accepted in the order of all processes' prompts, as one process would, so one process may end with more of them than
    another. If the rounds end too early, the groups accepted so far are returned; if there are none, `first`.
    """
    wanted, size = place_over_ranks(len(first) // group_size)[1], group_size
    kept, accepted = _accepted(first, size, 0, wanted)
    rounds = 0
    while rounds < max_rounds and accepted < wanted:
        rounds += 1
        extra, accepted = _accepted(sample(rounds), size, accepted, wanted)
        kept = kept + extra
    metrics.add("refill/rounds", rounds)
    metrics.add("refill/filled", len(kept) / max(len(first), 1), len(first))
    return kept if accepted else first


def _accepted(rollout: Rollout, size: int, accepted: int, wanted: int) -> tuple[Rollout, int]:
    """The groups of this process among the first `wanted` of all processes, after `accepted` earlier ones, with the
    numbers that one process would give them; and how many are accepted now."""
    groups = _with_reward_variance(rollout, size)
    before, total = place_over_ranks(len(groups) // size)
    num_taken = min(max(wanted - accepted - before, 0), len(groups) // size)
    groups = groups.rows(torch.arange(num_taken * size))
    groups.numbers = torch.arange(num_taken * size) + (accepted + before) * size
    return groups, min(accepted + total, wanted)


def _with_reward_variance(rollout: Rollout, group_size: int) -> Rollout:
    """The groups whose scores differ: only they have a gradient."""
    return rollout.rows(rollout.has_reward_variance(group_size).repeat_interleave(group_size).nonzero()[:, 0])
