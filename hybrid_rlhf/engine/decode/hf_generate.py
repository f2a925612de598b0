"""transformers' own generate with our choice of the next token, for models that do not run over slots.

generate manages the cache and the inputs of such a model; every next token is chosen here. Prompts are not padded,
because some of these models count padding as positions. The model's generation_config is not used: its top_k or forced
tokens would silently change the policy that is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybrid_rlhf.models.hf_attention import cache_of


@torch.no_grad()
def generate_by(model: nn.Module, prompts: Sequence[Sequence[int]], choose: Callable[[Tensor, Tensor], Tensor],
                is_done: Callable[[], list[bool]], max_new_tokens: int, use_cache: bool) -> int:
    """Run B prompts of one length through the model's generate until every one is done; returns its cache's bytes.

    choose(ids (B, T) so far, logits (B, V) fp32) -> (B,) int64, the next tokens; is_done() -> whether each prompt is
    finished, asked after every token.
    """

    def only_chosen(ids: Tensor, scores: Tensor) -> Tensor:
        tokens = choose(ids, scores)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens[:, None], 0.0)

    def stop(ids: Tensor, _scores: Tensor, **_named: object) -> Tensor:
        return torch.tensor(is_done(), device=ids.device)

    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    settings = dict(do_sample=False, max_new_tokens=max_new_tokens, use_cache=use_cache, pad_token_id=0,
                    return_dict_in_generate=True)
    with _empty_generation_config(model) as config_class:
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), logits_processor=[only_chosen],
                             stopping_criteria=[stop], generation_config=config_class(**settings))
    return _num_bytes(cache_of(out), set())


def _num_bytes(part: object, counted: set[int]) -> int:
    """Bytes of all tensors in a cache, whatever its class."""
    if id(part) in counted:
        return 0
    counted.add(id(part))
    if isinstance(part, Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, dict):
        return sum(_num_bytes(p, counted) for p in part.values())
    if isinstance(part, (list, tuple)):
        return sum(_num_bytes(p, counted) for p in part)
    is_part = type(part).__module__.startswith("transformers") and "config" not in type(part).__module__
    return _num_bytes(vars(part), counted) if is_part and hasattr(part, "__dict__") else 0


def cache_growth(model: nn.Module) -> tuple[float, float]:
    """Bytes of generate's cache for one sequence: per column, and constant ones. Measured at 4 and at 8 columns."""
    short, long = (generate_by(model, [[5] * n], lambda _ids, logits: logits.argmax(-1), lambda: [True], 1, True)
                   for n in (4, 8))
    return (long - short) / 4, max(0.0, 2.0 * short - long)


def forced_logits(model: nn.Module, sequences: Sequence[Sequence[int]], lengths: Sequence[int],
                  use_cache: bool) -> Tensor:
    """Logits (B, N, V), fp32, of generate when it is forced along `sequences`.

    lengths: of each one's prompt; N tokens follow it in every sequence, and logits[b, i] predicts the (i+1)-th of them.
    Each runs beside its own reverse, for there are models whose decoding mixes the rows of a batch (RWKV).
    """
    return torch.stack([_forced(model, sequence, length, use_cache)
                        for sequence, length in zip(sequences, lengths, strict=True)])


def _forced(model: nn.Module, sequence: Sequence[int], length: int, use_cache: bool) -> Tensor:
    rows, seen = (sequence, sequence[::-1]), []

    def follow(ids: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits[0].float())
        return torch.tensor([row[ids.shape[1]] for row in rows], device=ids.device)

    steps = len(sequence) - length
    generate_by(model, [row[:length] for row in rows], follow, lambda: [len(seen) >= steps] * 2, steps, use_cache)
    return torch.stack(seen[:steps])


@contextmanager
def _empty_generation_config(model: nn.Module) -> Iterator[type]:
    """Within the block the model's generation_config is empty, for generate takes settings that are None from it."""
    config = model.generation_config
    model.generation_config = type(config)()
    try:
        yield type(config)
    finally:
        model.generation_config = config
