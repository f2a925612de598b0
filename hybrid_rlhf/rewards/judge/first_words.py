"""How probable words are as the beginning of a reply, in each way in which a tokenizer writes them as one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs_and
from hybrid_rlhf.core.tensors import SequenceBatch, predicted, summed_by_row
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.models.backbone import own_head
from hybrid_rlhf.roles.scoring import per_sequence, score

SPACES = ("", "Ġ", "▁")  # before a word in a vocabulary: none, a space in byte-level BPE, one in sentencepiece


def other_tokens(vocab: Mapping[str, int], words: Sequence[str], scored: Sequence[list[int]]) -> list[list[int]]:
    """For each word the tokens that are all of it, beside the tokens by which it is scored: behind a space, and in
    small and large letters (Yes, yes, YES; but a is not A).

    A way of writing counts where every word has a token for it, so that no side has more of them than the other, and
    where none of these begins another word or stands for one.
    """
    ways = [[vocab[space + text] for text in texts] for texts in _written(words) for space in SPACES
            if all(space + text in vocab for text in texts)]
    places = range(len(words))
    foreign = [{ids[j] for ids in ways for j in places if j != k} | {scored[j][0] for j in places if j != k}
               for k in places]
    ways = [ids for ids in ways if not any(ids[k] in foreign[k] for k in places)]
    return [list(dict.fromkeys(ids[k] for ids in ways if [ids[k]] != scored[k])) for k in places]


def _written(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """The words as they are, and in small and large letters where none is a single one."""
    yield words
    if all(len(word) > 1 for word in words):
        yield from ([change(word) for word in words] for change in (str.lower, str.upper))


@torch.no_grad()
def sums(engine: HybridEngine, batch: SequenceBatch, max_tokens: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(B,) fp32 on the CPU: the summed log-probabilities of each row's loss tokens; (B, len(tokens)) those of `tokens`,
    were they in the place of its first one."""
    if not tokens:
        return per_sequence(engine, batch, max_tokens), torch.zeros(len(batch), 0)
    own, others = torch.zeros(len(batch)), torch.zeros(len(batch), len(tokens))
    for index, (of_rows, of_tokens) in score(engine, batch, max_tokens, _asking(engine, tokens)):
        own[index], others[index] = of_rows.cpu(), of_tokens.cpu()
    return own, others


def _asking(engine: HybridEngine, tokens: Sequence[int]) -> Callable[[SequenceBatch], tuple[Tensor, Tensor]]:
    module: Any = engine.module  # a PolicyModule
    size = module.model.config.get_text_config().vocab_size
    ids = torch.tensor(tokens, device=engine.device)

    def measure(logits: Tensor) -> tuple[Tensor]:
        return (logits.float().log_softmax(-1)[:, ids],)

    def ask(rows: SequenceBatch) -> tuple[Tensor, Tensor]:
        hidden = module.states(rows).rows
        (logprobs, *_), (of_tokens,) = token_logprobs_and(
            measure, (), hidden, predicted(rows), own_head(module.model), chunk_size=chunk_rows(size, hidden.dtype),
            score_logits=ops_for(hidden.device.type).token_scores)
        counts = rows.loss_mask[:, 1:].sum(1)
        return summed_by_row(logprobs, rows), of_tokens[counts.cumsum(0) - counts]

    return ask
