"""Stage 1: token-level cross-entropy on the response tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from hybrid_rlhf.algorithms.likelihood import imitation_loss
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.roles import Actor, TokenScores
from hybrid_rlhf.roles.role_state import load_training_state, oom_limits, training_state


class SFTTrainer:
    """Supervised fine-tuning of a policy. The loss is the mean over all loss tokens of the whole batch."""

    progress_keys = ("loss", "mean_token_accuracy", "learning_rate")
    can_rehearse = True  # a step's only effects are its optimizer's and those on this object

    def __init__(self, policy: Actor) -> None:
        self.policy = policy

    def step(self, batch: SequenceBatch) -> Metrics:
        return self.policy.fit_tokens(batch, self.loss)

    def loss(self, tokens: TokenScores, count: Tensor) -> tuple[Tensor, dict]:
        """These tokens' share of the mean negative log-likelihood over `count` tokens."""
        return imitation_loss(tokens.logprobs, tokens.correct, denominator=count)

    def evaluate(self, batches: Iterable[SequenceBatch]) -> Metrics:
        """loss, mean_token_accuracy and perplexity of the loss tokens, over all batches."""
        metrics = Metrics()
        for batch in batches:
            for tokens in self.policy.score_tokens(batch):
                for name, (mean, weight) in imitation_loss(tokens.logprobs, tokens.correct, denominator=1.0)[1].items():
                    metrics.add(name, mean, weight)
        metrics = metrics.over_ranks()
        mean = metrics.compute().get("loss")
        return metrics.add("perplexity", math.exp(min(mean, 700.0))) if mean is not None else metrics

    def samples(self) -> list[dict]:
        return []

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        return {"policy": training_state(self.policy), "oom_limits": dict(self.policy.engine.oom_limits)}

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        load_training_state(self.policy, state["policy"])
        self.policy.engine.oom_limits = dict(oom_limits(state))
