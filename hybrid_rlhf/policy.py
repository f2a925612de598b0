"""What a policy's engine calls: token ids in, what the policy says of the marked tokens out, never whole logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs
from hybrid_rlhf.models.backbone import hidden_states, hidden_states_and_router_loss, own_head, router_coefficient
from hybrid_rlhf.tensors import SequenceBatch, predicted, predicting


@dataclass
class TokenScores:
    """What a policy says of N marked tokens: logprobs (N,) fp32, entropy (N,) or None, correct (N,) bool (argmax).

    router_loss: how unevenly experts were used (a scalar), with gradients on for a mixture of experts; None elsewhere.
    """

    logprobs: Tensor
    entropy: Tensor | None
    correct: Tensor
    router_loss: Tensor | None = None


class PolicyModule(nn.Module):
    """A causal model whose forward gives log-probabilities of the marked tokens, from chunks of the logits.

    temperature divides the logits, so that the numbers are those of the policy that was sampled.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        self.router_coef = router_coefficient(model)

    def forward(self, batch: SequenceBatch, with_entropy: bool = False) -> TokenScores:
        router_loss = None
        if self.router_coef and torch.is_grad_enabled():
            hidden, router_loss = hidden_states_and_router_loss(self.model, batch)
        else:
            hidden = hidden_states(self.model, batch)
        scores = token_logprobs(predicting(hidden, batch), predicted(batch), own_head(self.model),
                                temperature=self.temperature, with_entropy=with_entropy,
                                chunk_size=chunk_rows(self.model.config.get_text_config().vocab_size, hidden.dtype))
        return TokenScores(*scores, router_loss)
