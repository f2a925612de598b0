"""Draws tokens from the logits of a decode step, under one configuration or several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.kernels import Ops


def sampling_key(sampling: SamplingConfig) -> tuple:
    """The settings that affect a draw; with equal keys the same tokens are drawn."""
    return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
            sampling.min_new_tokens)


class Sampler:
    """Draws tokens by the kernels. stops: tokens that end a response; never: tokens that are not drawn. Two with the
    same `key` draw the same."""

    def __init__(self, ops: Ops, sampling: SamplingConfig, stops: Iterable[int], device: torch.device,
                 never: Sequence[int] = ()) -> None:
        stops = sorted(stops)
        self.sampling = sampling
        self.settings = dict(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                             min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty)
        self.key = (*sampling_key(sampling), *stops, None, *never)
        self._sample = ops.sample
        self._stop_ids = torch.tensor(stops, dtype=torch.long, device=device)
        self._never_ids = torch.tensor(never, dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, streams: Tensor, counts: Tensor, seen: Tensor | None = None,
                 below_min_tokens: bool = False, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits (B, V), streams and counts (B,), seen (B, >= V) -> tokens (B,), logprobs (B,); marks them as seen.

        below_min_tokens: some rows may not stop yet, for they have not reached min_new_tokens. kept (B, V) bool: is
        filled with the candidate tokens of each draw, over which the logprobs are then normalised.
        """
        seen = seen if seen is None else seen[:, : logits.shape[1]]
        tokens, logprobs = self._sample(logits, streams, counts, **self.settings, seen=seen, kept=kept,
                                        forbidden=self._forbidden(logits, counts, below_min_tokens))
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens, logprobs

    def _forbidden(self, logits: Tensor, counts: Tensor, below_min_tokens: bool) -> Tensor | None:
        """(B, V) bool: the tokens that are never drawn, and stop tokens in rows that have not reached min_new_tokens;
        None where there are none."""
        has_young = below_min_tokens and len(self._stop_ids)
        if not has_young and not len(self._never_ids):
            return None
        forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        forbidden.index_fill_(1, self._never_ids, True)
        if has_young:
            is_young = (counts < self.sampling.min_new_tokens)[:, None].expand(-1, len(self._stop_ids))
            forbidden.index_copy_(1, self._stop_ids, is_young.contiguous())
        return forbidden


class MixedSampler:
    """Draws rows of several settings, each row as under its own alone. parts: (rows (b,) int64, their sampler)."""

    def __init__(self, parts: list[tuple[Tensor, Sampler]]) -> None:
        self._parts = parts

    def __call__(self, logits: Tensor, streams: Tensor, counts: Tensor, seen: Tensor | None = None,
                 below_min_tokens: bool = False, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Sampler`: all rows must be in one of the parts."""
        tokens, logprobs = torch.empty_like(streams), logits.new_empty(len(streams), dtype=torch.float32)
        for rows, draw in self._parts:
            part_seen, part_kept = (None if marks is None else marks[rows] for marks in (seen, kept))
            tokens[rows], logprobs[rows] = draw(logits[rows], streams[rows], counts[rows], part_seen, below_min_tokens,
                                                part_kept)
            if seen is not None:
                seen[rows] = part_seen
            if kept is not None:
                kept[rows] = part_kept
        return tokens, logprobs


def new_candidate_mask(logits: Tensor) -> Tensor:
    """An uninitialised mask (B, V), bool, for a draw from these logits to fill."""
    return torch.empty(logits.shape, dtype=torch.bool, device=logits.device)


def candidate_ids(kept: Tensor) -> Sequence[Tensor]:
    """kept (B, V) bool -> the candidate ids of each row, int32, on the host."""
    if kept.device.type == "cpu":  # numpy's flatnonzero is several times as fast as torch's
        return [torch.from_numpy(np.flatnonzero(row).astype(np.int32)) for row in kept.numpy()]
    return kept.nonzero()[:, 1].to("cpu", torch.int32).split(kept.sum(1).tolist())
