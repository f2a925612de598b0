"""A user's own training step, a plain function over roles, as a trainer for `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.roles import Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.best_of_n import BestOfNSampler

Step = Callable[[Roles, RewardSource, Prompts, SamplingConfig, int], tuple[Rollout, Metrics]]


class FlowTrainer:
    """One step: `flow(roles, source, prompts, sampling, seed)`, which returns (rollout, metrics).

    flow gets another seed at every step, for the sampling; `seed` is that of the run. The rollout's metrics, with its
    scores and, for the metric kl, its logprobs and ref_logprobs, are added to those of the function. Evaluation samples
    and scores held-out prompts as for every on-policy method. The function's own state is not in checkpoints.
    """

    progress_keys = ("reward", "kl", "completions/mean_length")

    def __init__(self, flow: Step, roles: Roles, source: RewardSource, sampling: SamplingConfig, seed: int) -> None:
        self.flow, self.roles, self.source, self.sampling = flow, roles, source, sampling
        self.sampler = BestOfNSampler(roles, source, sampling, seed)

    def step(self, prompts: Prompts) -> Metrics:
        sampler = self.sampler
        seed = sampler.seed * 1_000_003 + sampler.num_steps
        rollout, metrics = self.flow(self.roles, self.source, prompts, self.sampling, seed)
        sampler.num_steps, sampler.last_rollout = sampler.num_steps + 1, rollout
        return metrics + rollout.metrics()

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        return self.sampler.evaluate(batches)

    def samples(self) -> list[dict]:
        return self.sampler.samples()

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        return self.sampler.state()

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        self.sampler.load_state(state)
