"""What a policy's engine calls: token ids in, what the policy says of the loss tokens out, never whole logits."""

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
from hybrid_rlhf.models.row_attention import NotShareableError, Packing
from hybrid_rlhf.models.shared_prefix import (
    distinct_states,
    distinct_states_and_router_logits,
    documents,
    packing,
    say_whole,
    sharing_is_exact,
)


@dataclass
class TokenScores:
    """What a policy says of N marked tokens: logprobs (N,) fp32, entropy (N,) or None, correct (N,) bool (argmax).

    router_loss: how unevenly experts were used (a scalar), with gradients on for a mixture of experts; None elsewhere.
    choices: (E,) how often each expert was chosen, where that was asked for. All logits are never kept, so that a loss
    over the whole vocabulary (label smoothing) has no place here, but divergence (N,) fp32 nats: from a teacher, where
    there is one, with gradients. top_ids (N, k) long, top_logprobs (N, k) fp32: the likeliest words, where asked for.
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
    """rows (N, H): the hidden states that predict the loss tokens. hidden (.., H): those of all tokens that were
    computed, with their router_logits if asked for, and counts (tokens,): how many real tokens each stands for."""

    rows: Tensor
    hidden: Tensor
    router_logits: tuple[Tensor, ...] | None
    counts: Tensor


class PolicyModule(nn.Module):
    """A causal model whose forward gives log-probabilities of the loss tokens, from chunks of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.router = router_of(model)
        self._can_share: bool | None = None

    def can_share(self) -> bool:
        """Whether rows that begin alike are computed with that beginning once; the first call tries it on the model.

        Until then, and where it is not, `forward` computes every row whole.
        """
        if self._can_share is None:
            has_own_loss = self.router is not None and self.router.num_choices is None  # of rows as they are
            self._can_share = not has_own_loss and sharing_is_exact(self.model)
        return bool(self._can_share)

    def forward(self, batch: SequenceBatch, with_entropy: bool = False, expert_shares: Tensor | None = None,
                with_choices: bool = False, temperature: float = 1.0, teacher: TeacherTargets | None = None,
                top_k: int = 0, top_temperature: float | None = None) -> TokenScores:
        """expert_shares: (E,) of the minibatch that these rows are a part of (Router.loss). with_choices: count the
        experts' choices. temperature: what the logits are divided by. teacher: on these rows, on their device; measures
        the divergence from it, whose temperature is its own. top_k: the likeliest words of each token, of the logits
        over top_temperature (None: `temperature`): what a module says as a teacher (with its whole vocabulary:
        `states(batch).rows`, inside the engine's `active()`). Raises ValueError for a teacher of other tokens."""
        router_loss = choices = None
        needs_router = self.router is not None and (with_choices or torch.is_grad_enabled())
        rows, hidden, logits, counts = self.states(batch, needs_router)
        if self.router and logits and with_choices:  # no logits: of layers that are dense, or choose by a table
            choices = self.router.choices(logits, counts)
        elif self.router and logits:
            router_loss = self.router.loss(self.model, batch, hidden, logits, expert_shares, counts)
        config: Any = self.model.config  # of transformers
        size = chunk_rows(config.get_text_config().vocab_size, rows.dtype)
        num_chunks = max(1, -(-len(rows) // size))
        if is_partitioned(self.model):  # all processes meet in each call of the head, which gathers its weights
            num_chunks = max_over_ranks(num_chunks)
        measure, beside = _measure(teacher, top_k, temperature if top_temperature is None else top_temperature)
        scores, measured = token_logprobs_and(
            measure, beside, rows, predicted(batch), own_head(self.model), temperature, size, with_entropy, num_chunks,
            ops_for(rows.device.type).token_scores, batch.kept)
        divergence = measured[0] if teacher is not None else None
        return TokenScores(*scores, router_loss, choices, divergence, *(measured[-2:] if top_k else ()))

    def states(self, batch: SequenceBatch, with_router: bool = False) -> Computed:
        """What the backbone says of the batch, each beginning that rows share and each packed document by itself where
        the model can; a row that it cannot take so (which is said once) whole."""
        packed = None
        if self._can_share and len(batch):
            packed = packing(batch) if batch.position_ids is None else documents(batch)
        elif batch.position_ids is not None:
            say_whole(self.model, "its attention is no plain causal one, or its weights are in parts", is_packed=True)
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
    """What is measured of each chunk of logits beside the tokens' own scores, and what of a teacher's it reads."""
    if teacher is None and not top_k:
        return None, ()

    def measure(logits: Tensor, *taught: Tensor) -> tuple[Tensor, ...]:
        divergence = () if teacher is None else (teacher.divergence(logits, *taught),)
        return *divergence, *(top_k_logprobs(logits, top_k, temperature) if top_k else ())

    return measure, () if teacher is None else teacher.flat()
