"""Groups of fresh responses with their scores, for best-of-n methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hybrid_rlhf.algorithms.shaping import missing_eos
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.roles import Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.collect import collect, collect_held_out, samples_of
from hybrid_rlhf.rollout.old_logprobs import OldLogprobs


class BestOfNSampler:
    """Samples groups of fresh responses and scores them.

    missing_eos_penalty is subtracted from the score of a response that did not end by itself. keep_candidates: whether
    log-probabilities are normalised over the candidate tokens of truncated sampling (for methods with a ratio).
    num_steps: rounds of sampling so far, each with a seed of its own. last_rollout: the last one.
    """

    def __init__(self, roles: Roles, source: RewardSource, sampling: SamplingConfig, seed: int,
                 missing_eos_penalty: float = 0.0, keep_candidates: bool = False) -> None:
        self.roles, self.source, self.sampling, self.seed = roles, source, sampling, seed
        self.missing_eos_penalty, self.keep_candidates = missing_eos_penalty, keep_candidates
        self.old_logprobs = OldLogprobs()
        self.num_steps = 0
        self.last_rollout: Rollout | None = None

    def sample(self, prompts: Prompts, metrics: Metrics) -> tuple[Rollout, Tensor]:
        """num_samples responses to each prompt, and their scores (B,) to rank by: NaN where every source skipped."""
        rollout = collect(prompts, self.roles, self.source, self.sampling, self.seed * 1_000_003 + self.num_steps,
                          metrics, self.old_logprobs, keep_candidates=self.keep_candidates)
        self.num_steps, self.last_rollout = self.num_steps + 1, rollout
        return rollout, missing_eos(rollout.scores, rollout.has_eos, self.missing_eos_penalty)

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        return collect_held_out(batches, self.roles, self.source, self.sampling, self.seed,
                                keep_candidates=self.keep_candidates)

    def samples(self, count: int = 4) -> list[dict]:
        """The first responses of the last round, for people; the score of a skipped one is None."""
        return samples_of(self.last_rollout, count)

    def state(self) -> dict:
        """The state for a checkpoint, that of the roles included."""
        state = self.roles.state() | {"num_steps": self.num_steps}
        return state | ({"source": self.source.state()} if hasattr(self.source, "state") else {})

    def load_state(self, state: Mapping) -> None:
        """Restore `state`; other keys are ignored."""
        self.roles.load_state(state)
        self.num_steps = int(state["num_steps"])
        if "source" in state:
            self.source.load_state(state["source"])  # type: ignore[attr-defined]  # it has a state()
