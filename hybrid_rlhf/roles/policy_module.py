"""The module of a policy's engine: token ids in, log-probabilities of the loss tokens out, never all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rlhf.algorithms.divergence import TeacherTargets, top_k_logprobs
from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs_and
from hybrid_rlhf.core.distributed import max_over_ranks
from hybrid_rlhf.core.tensors import SequenceBatch, predicted, predicting
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.models.backbone import hidden_states, hidden_states_and_router_logits, own_head
from hybrid_rlhf.models.router import router_of
from hybrid_rlhf.models.shared_prefix import (
    NotShareableError,
    Packing,
    distinct_states,
    distinct_states_and_router_logits,
    documents,
    packing,
    say_whole,
    sharing_is_exact,
)


@dataclass
class TokenScores:
    """Scores of N loss tokens: logprobs (N,) fp32, entropy (N,) or None, correct (N,) bool (argmax).

    router_loss: the load-balancing loss (a scalar) of a mixture of experts, if gradients are on; else None.
    choices: (E,) how often each expert was chosen, if requested. All logits are never stored, so that a loss over the
    whole vocabulary (label smoothing) is not possible here. divergence (N,) fp32 nats: from a teacher, if there is one,
    with gradients. top_ids (N, k) long, top_logprobs (N, k) fp32: the likeliest tokens, if requested.
    """

    logprobs: Tensor
    entropy: Tensor | None
    correct: Tensor
    router_loss: Tensor | None = None
    choices: Tensor | None = None
    divergence: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class Computed(NamedTuple):
    """rows (N, H): the hidden states that predict the loss tokens. hidden (.., H): those of all computed tokens, with
    their router_logits if requested, and counts (tokens,): how many real tokens each stands for."""

    rows: Tensor
    hidden: Tensor
    router_logits: tuple[Tensor, ...] | None
    counts: Tensor


class PolicyModule(nn.Module):
    """A causal model whose forward returns log-probabilities of the loss tokens, computed from chunks of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.router = router_of(model)
        self._can_share: bool | None = None

    def can_share(self) -> bool:
        """Whether a prefix that rows share is computed once; the first call tries it on the model.

        Until then, and if not, `forward` computes every row in full.
        """
        if self._can_share is None:
            has_own_loss = self.router is not None and self.router.num_choices is None  # over full rows
            self._can_share = not has_own_loss and sharing_is_exact(self.model)
        return bool(self._can_share)

    def forward(self, batch: SequenceBatch, with_entropy: bool = False, expert_shares: Tensor | None = None,
                with_choices: bool = False, temperature: float = 1.0, teacher: TeacherTargets | None = None,
                top_k: int = 0, top_temperature: float | None = None) -> TokenScores:
        """expert_shares: (E,) of the minibatch of these rows (Router.loss). with_choices: count the experts' choices.
        temperature: divides the logits. teacher: of these rows, on their device; the divergence from it is measured, at
        its own temperature. top_k: the likeliest tokens at each position, from the logits over top_temperature (None:
        `temperature`): the output of a teacher (for its whole vocabulary: `states(batch).rows`, inside the engine's
        `active()`). Raises ValueError for a teacher of other tokens."""
        router_loss = choices = None
        needs_router = self.router is not None and (with_choices or torch.is_grad_enabled())
        rows, hidden, logits, counts = self.states(batch, needs_router)
        if self.router and logits and with_choices:  # no logits: dense layers, or a table of choices
            choices = self.router.choices(logits, counts)
        elif self.router and logits:
            router_loss = self.router.loss(self.model, batch, hidden, logits, expert_shares, counts)
        config: Any = self.model.config  # of transformers
        size = chunk_rows(config.get_text_config().vocab_size, rows.dtype)
        num_chunks = max(1, -(-len(rows) // size))
        if is_partitioned(self.model):  # each call of the head gathers its weights: a collective
            num_chunks = max_over_ranks(num_chunks)
        measure, beside = _measure(teacher, top_k, temperature if top_temperature is None else top_temperature)
        scores, measured = token_logprobs_and(
            measure, beside, rows, predicted(batch), own_head(self.model), temperature, size, with_entropy, num_chunks,
            ops_for(rows.device.type).token_scores, batch.kept)
        divergence = measured[0] if teacher is not None else None
        return TokenScores(*scores, router_loss, choices, divergence, *(measured[-2:] if top_k else ()))

    def states(self, batch: SequenceBatch, with_router: bool = False) -> Computed:
        """The backbone's hidden states of the batch. A prefix that rows share is computed once, and packed documents do
        not attend to each other, if the model can; rows where it cannot are computed in full, with one warning."""
        packed = None
        if self._can_share and len(batch):
            packed = packing(batch) if batch.position_ids is None else documents(batch)
        elif batch.position_ids is not None:
            say_whole(self.model, "its attention is not plain causal, or its weights are in parts", is_packed=True)
        if packed is not None:
            try:
                return self._distinct(batch, packed, with_router)
            except NotShareableError as error:  # these rows are longer than those of the trial
                say_whole(self.model, str(error), is_packed=batch.position_ids is not None)
        hidden, logits = (hidden_states_and_router_logits(self.model, batch) if with_router
                          else (hidden_states(self.model, batch), None))
        return Computed(predicting(hidden, batch), hidden, logits, batch.attention_mask.flatten())

    def _distinct(self, batch: SequenceBatch, packed: Packing, with_router: bool) -> Computed:
        hidden, logits = (distinct_states_and_router_logits(self.model, batch, packed) if with_router
                          else (distinct_states(self.model, batch, packed), None))
        return Computed(hidden.index_select(0, packed.predicting(batch)), hidden, logits, packed.counts(batch))


def _measure(teacher: TeacherTargets | None, top_k: int,
             temperature: float) -> tuple[Callable | None, Sequence[Tensor]]:
    """The function of a chunk of logits beside the tokens' own scores, and the teacher's tensors that it takes."""
    if teacher is None and not top_k:
        return None, ()

    def measure(logits: Tensor, *taught: Tensor) -> tuple[Tensor, ...]:
        divergence = () if teacher is None else (teacher.divergence(logits, *taught),)
        return *divergence, *(top_k_logprobs(logits, top_k, temperature) if top_k else ())

    return measure, () if teacher is None else teacher.flat()
