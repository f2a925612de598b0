"""What a policy's engine calls: token ids in, what the policy says of the loss tokens out, never whole logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs
from hybrid_rlhf.core.distributed import max_over_ranks
from hybrid_rlhf.core.tensors import SequenceBatch, predicted, predicting
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.models.backbone import hidden_states, hidden_states_and_router_logits, own_head
from hybrid_rlhf.models.router import router_of
from hybrid_rlhf.models.shared_prefix import NotShareableError, documents, packing, shared_states, sharing_is_exact

_log = logging.getLogger(__name__)


@dataclass
class TokenScores:
    """What a policy says of N marked tokens: logprobs (N,) fp32, entropy (N,) or None, correct (N,) bool (argmax).

    router_loss: how unevenly experts were used (a scalar), with gradients on for a mixture of experts; None elsewhere.
    choices: (E,) how often each expert was chosen, where that was asked for. All logits are never kept, so that a loss
    over the whole vocabulary (label smoothing) has no place here.
    """

    logprobs: Tensor
    entropy: Tensor | None
    correct: Tensor
    router_loss: Tensor | None = None
    choices: Tensor | None = None


class PolicyModule(nn.Module):
    """A causal model whose forward gives log-probabilities of the loss tokens, from chunks of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.router = router_of(model)
        self._can_share: bool | None = None
        self._is_masked = False  # packed rows, and this was said

    def can_share(self) -> bool:
        """Whether rows that begin alike are computed with that beginning once; the first call tries it on the model.

        Until then, and where it is not, `forward` computes every row whole.
        """
        if self._can_share is None:
            self._can_share = self.router is None and sharing_is_exact(self.model)
        return self._can_share

    def forward(self, batch: SequenceBatch, with_entropy: bool = False, expert_shares: Tensor | None = None,
                with_choices: bool = False, temperature: float = 1.0) -> TokenScores:
        """expert_shares: (E,) of the minibatch that these rows are a part of (Router.loss). with_choices: count the
        experts' choices. temperature: what the logits are divided by."""
        router_loss = choices = None
        if self.router and (with_choices or torch.is_grad_enabled()):
            hidden, logits = hidden_states_and_router_logits(self.model, batch)
            if with_choices:
                choices = self.router.choices(logits, batch)
            else:
                router_loss = self.router.loss(self.model, batch, hidden, logits, expert_shares)
            rows = predicting(hidden, batch)
        else:
            rows = self._states(batch)
        config: Any = self.model.config  # of transformers
        size = chunk_rows(config.get_text_config().vocab_size, rows.dtype)
        num_chunks = max(1, -(-len(rows) // size))
        if is_partitioned(self.model):  # all processes meet in each call of the head, which gathers its weights
            num_chunks = max_over_ranks(num_chunks)
        scores = token_logprobs(rows, predicted(batch), own_head(self.model), with_entropy=with_entropy,
                                temperature=temperature, chunk_size=size, num_chunks=num_chunks,
                                score_logits=ops_for(rows.device.type).token_scores)
        return TokenScores(*scores, router_loss, choices)

    def _states(self, batch: SequenceBatch) -> Tensor:
        """(N, H): the hidden states that predict the loss tokens."""
        packed = None
        if self._can_share and len(batch):
            packed = packing(batch) if batch.position_ids is None else documents(batch)
        if packed is None:
            if batch.position_ids is not None:
                self._say_masked("its attention is no plain causal one, or its weights are in parts")
            return predicting(hidden_states(self.model, batch), batch)
        try:
            return shared_states(self.model, batch, packed)
        except NotShareableError as error:
            if batch.position_ids is None:
                raise
            self._can_share = False  # a window shorter than the packed rows, say: its mask is the model's own
            self._say_masked(str(error))
            return predicting(hidden_states(self.model, batch), batch)

    def _say_masked(self, reason: str) -> None:
        if not self._is_masked:
            _log.warning("data.packing: documents are kept apart by masks whose memory grows with the square of "
                         "data.max_length (%s)", reason)
        self._is_masked = True
