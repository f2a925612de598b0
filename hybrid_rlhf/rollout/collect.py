"""Prompts to Rollout: the part that all on-policy methods share."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hybrid_rlhf.algorithms import reward_signal
from hybrid_rlhf.algorithms.reward_signal import RewardSignal
from hybrid_rlhf.algorithms.shaping import missing_eos
from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import place_over_ranks, sum_over_ranks
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import masked_mean
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.engine.device_memory import peak_in
from hybrid_rlhf.rewards import RewardSource, checked_scores, part_scores
from hybrid_rlhf.roles import Actor, Roles
from hybrid_rlhf.rollout import Prompts, Rollout

_log = logging.getLogger(__name__)

OLD_LOGPROBS = ("auto", "sampler", "recompute")


@dataclass
class DriftGate:
    """Whose log-probabilities count as the old ones of a rollout: the sampler's, or a training forward's.

    mode "sampler" and "recompute" decide once; "auto" takes the sampler's while the mean |sampled - training| stays
    within max_drift (nats per token), and the training forward's otherwise. The drift is measured at every step: on the
    whole rollout where it is recomputed anyway, else on every num_skipped-th sequence.
    """

    mode: str = "auto"
    max_drift: float = 0.02
    num_skipped: int = 8
    _was_closed: bool = field(default=False, init=False)

    def logprobs(self, rollout: Rollout, actor: Actor, metrics: Metrics) -> Tensor:
        """(B, R) old log-probabilities; metrics receives engine/logprob_drift."""
        if self.mode == "recompute":
            recomputed = actor.logprobs(rollout)
            _measure(rollout, recomputed, metrics)
            return recomputed
        sample = rollout.rows(torch.arange(0, len(rollout), self.num_skipped))
        drift = _measure(sample, actor.logprobs(sample), metrics)
        if self.mode == "sampler":
            return rollout.sampled_logprobs
        is_closed = not drift <= self.max_drift  # a drift that is not a number closes it too
        if is_closed != self._was_closed:
            _log.warning("engine/logprob_drift is %.3g, %s %.3g: old log-probabilities are now %s", drift,
                         "more than" if is_closed else "within", self.max_drift,
                         "recomputed by a training forward" if is_closed else "the sampler's")
        self._was_closed = is_closed
        return actor.logprobs(rollout) if is_closed else rollout.sampled_logprobs

    def state(self) -> dict[str, bool]:
        return {"was_closed": self._was_closed}

    def load_state(self, state: Mapping[str, bool]) -> None:
        self._was_closed = bool(state["was_closed"])


def _measure(rollout: Rollout, recomputed: Tensor, metrics: Metrics) -> float:
    """Mean |sampled - recomputed| over the actions of all ranks, so that every rank decides alike."""
    gap = (rollout.sampled_logprobs - recomputed).abs()
    count = rollout.action_mask.sum()
    metrics.add("engine/logprob_drift", masked_mean(gap, rollout.action_mask), count)
    total, count = sum_over_ranks(torch.stack([gap[rollout.action_mask].sum().double(), count.double()])).tolist()
    return total / max(count, 1)


@torch.no_grad()
def collect(prompts: Prompts, roles: Roles, source: RewardSource, sampling: SamplingConfig, seed: int,
            metrics: Metrics, gate: DriftGate | None = None, *, may_skip: bool = False,
            with_values: bool = True) -> Rollout:
    """Sample `sampling.num_samples` responses to each prompt, then score them and measure every role on them.

    seed makes the sampling a function of the step. gate: whose log-probabilities are the old ones (None: recomputed).
    may_skip: whether a response that every source skipped has the score NaN; else it is an error. with_values: whether
    a critic's values are measured; else that is left to the caller. metrics receives the time and the peak memory of
    each phase, and what the engine has to say of itself.
    """
    start = time.perf_counter()
    activity.doing(f"sampling {len(prompts) * sampling.num_samples} responses")
    peak = partial(peak_in, metrics, device=roles.actor.engine.device)
    with peak("actor/generate"), metrics.timer("generate"), roles.actor.inference():
        rollout = roles.actor.generate(prompts.repeat(sampling.num_samples), sampling, seed)
    metrics.add("engine/tokens_per_second", rollout.action_mask.sum() / (time.perf_counter() - start))
    metrics.add("engine/kv_bytes", roles.actor.engine.kv_bytes)
    activity.doing("scoring the responses")
    with metrics.timer("score"):
        with peak("actor/score"):
            rollout.logprobs = (gate or DriftGate("recompute")).logprobs(rollout, roles.actor, metrics)  # (B, R)
        if roles.ref:
            with peak("ref/score"):
                rollout.ref_logprobs = roles.ref.logprobs(rollout)  # (B, R)
        with peak("reward/score"):
            rollout.scores = _scores(source, rollout, may_skip)  # (B,)
        rollout.source_scores = rollout.source_scores or {source.name: rollout.scores}  # a mixture has told its parts
    if sampling.num_samples > 1:
        _observe_groups(rollout, sampling.num_samples, metrics)
    if roles.critic and with_values:
        measure_values(rollout, roles, metrics)
    return rollout


def signal_of(rollout: Rollout, group_size: int) -> RewardSignal:
    """The figures of a scored rollout whose groups are contiguous."""
    is_empty = torch.tensor([not text.strip() for text in rollout.completions], dtype=torch.bool)
    return reward_signal.measure(*(values.view(-1, group_size) for values in (
        rollout.scores, rollout.action_mask.sum(1), rollout.has_eos, is_empty)))


def _observe_groups(rollout: Rollout, group_size: int, metrics: Metrics) -> None:
    """What the scores of each prompt's responses say together: the best of them is pass@G where they are 0 or 1."""
    signal = signal_of(rollout, group_size)
    metrics.add("prompts/num_responses", group_size, signal.num_prompts)
    metrics.add("prompts/with_spread", signal.with_spread, signal.num_prompts)
    metrics.add("prompts/best_score", signal.best, 0 if math.isnan(signal.best) else signal.num_prompts)


@torch.no_grad()
def measure_values(rollout: Rollout, roles: Roles, metrics: Metrics) -> None:
    """Fill in the critic's values; metrics receives time and peak memory."""
    with metrics.timer("score"), peak_in(metrics, "critic/score", roles.actor.engine.device):
        rollout.values = roles.critic.values(rollout)  # (B, R)


def _scores(source: RewardSource, rollout: Rollout, may_skip: bool) -> Tensor:
    """(B,). Where the source fails, nothing of the step has been learnt yet: a run can be taken up before it."""
    try:
        return (part_scores if may_skip else checked_scores)(source, rollout)
    except UserError as error:
        error.is_before_update = True
        raise


def refill(first: Rollout, group_size: int, max_rounds: int, sample: Callable[[int], Rollout],
           metrics: Metrics) -> Rollout:
    """As many groups as in `first`, those whose scores are all equal replaced by groups of new prompts (2503.14476).

    sample(round) gives another rollout, at most max_rounds times; every process asks as often. Groups are accepted in
    the order of all processes' prompts, as one process would, so one process may end with more of them than another.
    What was accepted stays where the rounds end before it is enough; where none was, `first` itself comes back.
    """
    wanted, size = place_over_ranks(len(first) // group_size)[1], group_size
    kept, accepted = _accepted(first, size, 0, wanted)
    rounds = 0
    while rounds < max_rounds and accepted < wanted:
        rounds += 1
        more, accepted = _accepted(sample(rounds), size, accepted, wanted)
        kept = kept + more
    metrics.add("refill/rounds", rounds)
    metrics.add("refill/filled", len(kept) / max(len(first), 1), len(first))
    return kept if accepted else first


def _accepted(rollout: Rollout, size: int, accepted: int, wanted: int) -> tuple[Rollout, int]:
    """The groups of this process that are among the first `wanted` of all, of which `accepted` were there before, with
    the numbers that one process would give them; and how many there are now."""
    found = _spread_groups(rollout, size)
    before, total = place_over_ranks(len(found) // size)
    own = min(max(wanted - accepted - before, 0), len(found) // size)
    found = found.rows(torch.arange(own * size))
    found.numbers = torch.arange(own * size) + (accepted + before) * size
    return found, min(accepted + total, wanted)


def _spread_groups(rollout: Rollout, group_size: int) -> Rollout:
    """The groups that teach something."""
    return rollout.rows(rollout.has_spread(group_size).repeat_interleave(group_size).nonzero()[:, 0])


@torch.no_grad()
def collect_held_out(batches: Iterable[Prompts], roles: Roles, source: RewardSource, sampling: SamplingConfig,
                     seed: int, *, may_skip: bool = False) -> Metrics:
    """Scores, KL and lengths of fresh responses to held-out prompts, over all processes (always the same draw)."""
    metrics = Metrics()
    for i, prompts in enumerate(batches):
        metrics += collect(prompts, roles, source, sampling, seed + i, Metrics(), may_skip=may_skip,
                           with_values=False).metrics()
    return metrics.over_ranks()


def samples_of(rollout: Rollout | None, count: int) -> list[dict]:
    """The first responses of a rollout, for people; the score of one that every source skipped is None."""
    if rollout is None:
        return []
    return [{"prompt": rollout.prompts.texts[i], "completion": rollout.completions[i],
             "score": None if rollout.scores[i].isnan() else float(rollout.scores[i]),
             "ended": bool(rollout.has_eos[i])} for i in range(min(count, len(rollout)))]


class Ranking:
    """Fresh responses in groups, and what the source thinks of each: what best-of-n methods learn from.

    missing_eos_penalty is subtracted from the score of a response that did not end by itself. num_steps: rounds of
    sampling so far, each with a seed of its own. newest: the last one.
    """

    def __init__(self, roles: Roles, source: RewardSource, sampling: SamplingConfig, seed: int,
                 missing_eos_penalty: float = 0.0) -> None:
        self.roles, self.source, self.sampling, self.seed = roles, source, sampling, seed
        self.missing_eos_penalty = missing_eos_penalty
        # log-probabilities are taken at temperature 1; at another one the sampler's are of another distribution
        self.gate = DriftGate("auto" if sampling.temperature == 1 else "recompute")
        self.num_steps = 0
        self.last_rollout: Rollout | None = None

    def sample(self, prompts: Prompts, metrics: Metrics) -> tuple[Rollout, Tensor]:
        """num_samples responses to each prompt, and their scores (B,) to rank by: NaN where every source skipped."""
        rollout = collect(prompts, self.roles, self.source, self.sampling, self.seed * 1_000_003 + self.num_steps,
                          metrics, self.gate, may_skip=True)
        self.num_steps, self.last_rollout = self.num_steps + 1, rollout
        return rollout, missing_eos(rollout.scores, rollout.has_eos, self.missing_eos_penalty)

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        return collect_held_out(batches, self.roles, self.source, self.sampling, self.seed, may_skip=True)

    def samples(self, count: int = 4) -> list[dict]:
        """The first responses of the newest round, for people; the score of a skipped one is None."""
        return samples_of(self.last_rollout, count)

    def state(self) -> dict:
        """For a checkpoint, with the roles' own."""
        state = self.roles.state() | {"num_steps": self.num_steps, "gate": self.gate.state()}
        return state | ({"source": self.source.state()} if hasattr(self.source, "state") else {})

    def load_state(self, state: Mapping) -> None:
        """Go on where `state` was taken; other keys are left alone."""
        self.roles.load_state(state)
        self.num_steps = int(state["num_steps"])
        self.gate.load_state(state["gate"])
        if "source" in state:
            self.source.load_state(state["source"])
