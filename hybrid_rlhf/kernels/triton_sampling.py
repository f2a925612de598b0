"""Sampling in Triton. kernels/reference.py: sample is its definition.

`_scan` reads the logits once, a chunk of a row to a program: maximum and sum for the log-probability, and the best
token of the draw. `_draw` joins the chunks of a row. Truncation needs no sort: top-k, top-p and min-p keep the first
tokens of the ranking, so the best token of the draw is tested; if it is cut, so is all that ranks below it, and the
best token above it is next. That makes about 1 / top_p tests, or log2(V / k) for top-k over flat logits. Only top-k
with top-p searches for a threshold (the mass of the k), by bisection.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.kernels import reference

_CHUNK = 2048  # tokens of one program of _scan
_BLOCK = 4096  # tokens that _draw reads together


@triton.jit
def _splitmix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(tokens, stream, position):
    """-log(exponential) of each token (int32): reference.random_words and exponentials, then the Gumbel variate.

    log1p(-u) is log(w) u / (1 - w) with w = 1 - u rounded (Kahan), and -u itself where w is 1.
    """
    state = _splitmix64(_splitmix64(stream.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))
    low, high = (state & 0xFFFFFFFF).to(tl.uint32), (state >> 32).to(tl.uint32)
    x = tokens.to(tl.uint32, bitcast=True) * 0x9E3779B9 + low
    x = (x ^ (x >> 16)) * 0x7FEB352D + high
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - uniform
    slope = tl.where(rest == 1.0, 1.0, -tl.log(rest) / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    return -tl.log(uniform * slope)


@triton.jit
def _scores(logits, seen, forbidden, tokens, inside, temperature, penalty, HAS_SEEN: tl.constexpr,
            HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """(logits, scores) of tokens, both over the temperature; scores with penalty and forbidden tokens, -inf outside.

    logits, seen and forbidden point at the row.
    """
    raw = tl.load(logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    scores = raw
    if HAS_SEEN:
        is_seen = tl.load(seen + tokens, mask=inside, other=0) != 0
        scores = tl.where(is_seen, tl.where(raw > 0, tl.div_rn(raw, penalty), raw * penalty), raw)
    if HAS_FORBIDDEN:
        scores = tl.where(tl.load(forbidden + tokens, mask=inside, other=0) != 0, float("-inf"), scores)
    if TEMPERED:
        raw, scores = tl.div_rn(raw, temperature), tl.div_rn(scores, temperature)
    return raw, scores


@triton.jit
def _mass(values):
    """Maximum of `values` and the sum of exp(values - maximum), which is NaN where one is or the maximum is inf."""
    top = tl.max(values, 0)
    return top, tl.sum(tl.exp(values - tl.where(top == float("-inf"), 0.0, top)), 0)


@triton.jit
def _best(values, tokens):
    """The largest value and the first token that has it."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, tokens, 2147483647), 0)


@triton.jit
def _scan(logits, seen, forbidden, streams, positions, sums, picks, num_tokens, logits_b, seen_b, forbidden_b,
          temperature, penalty, CHUNK: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr,
          GREEDY: tl.constexpr, TEMPERED: tl.constexpr, TRUNCATED: tl.constexpr):
    """Grid (rows, chunks). sums (5, rows, chunks): maximum and mass of the logits, the best value of the draw, maximum
    and mass of the scores (if TRUNCATED). picks (rows, chunks): the token of the best value.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, step = row * tl.num_programs(1) + chunk, tl.num_programs(0) * tl.num_programs(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < num_tokens
    raw, scores = _scores(logits + row * logits_b, seen + row * seen_b, forbidden + row * forbidden_b, tokens, inside,
                          temperature, penalty, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
    top, mass = _mass(raw)
    tl.store(sums + place, top)
    tl.store(sums + step + place, mass)
    if TRUNCATED:
        top, mass = _mass(scores)
        tl.store(sums + 3 * step + place, top)
        tl.store(sums + 4 * step + place, mass)
    if not GREEDY:
        scores += _noise(tokens, tl.load(streams + row), tl.load(positions + row))
    value, token = _best(scores, tokens)
    tl.store(sums + 2 * step + place, value)
    tl.store(picks + place, token)


@triton.jit
def _above(logits, seen, forbidden, num_tokens, temperature, penalty, score, token, top, BLOCK: tl.constexpr,
           HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """How many tokens score higher than `score`; of those ranking above (score, token), where the first of equals
    ranks higher: how many, and the sum of exp(score - top).
    """
    higher, above = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        _, scores = _scores(logits, seen, forbidden, tokens, tokens < num_tokens, temperature, penalty, HAS_SEEN,
                            HAS_FORBIDDEN, TEMPERED)
        ranks = (scores > score) | ((scores == score) & (tokens < token))
        higher += (scores > score).to(tl.int32)
        above += ranks.to(tl.int32)
        mass += tl.where(ranks, tl.exp(scores - top), 0.0)
    return tl.sum(higher, 0), tl.sum(above, 0), tl.sum(mass, 0)


@triton.jit
def _best_above(logits, seen, forbidden, stream, position, num_tokens, temperature, penalty, score, token,
                BLOCK: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """The token of the best draw among those ranking above (score, token), and its score."""
    best, best_tokens = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 2147483647, tl.int32)
    best_scores = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        _, scores = _scores(logits, seen, forbidden, tokens, tokens < num_tokens, temperature, penalty, HAS_SEEN,
                            HAS_FORBIDDEN, TEMPERED)
        values = scores + _noise(tokens, stream, position)
        wins = ((scores > score) | ((scores == score) & (tokens < token))) & (values > best)
        best, best_tokens = tl.where(wins, values, best), tl.where(wins, tokens, best_tokens)
        best_scores = tl.where(wins, scores, best_scores)
    _, winner = _best(best, best_tokens)
    return winner, tl.max(tl.where(best_tokens == winner, best_scores, float("-inf")), 0)


@triton.jit
def _as_float(key):
    """The float whose rank in the order of all floats is `key`, an integer of 32 bits held in 64."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _top_k_mass(logits, seen, forbidden, num_tokens, temperature, penalty, top, mass, TOP_K: tl.constexpr,
                BLOCK: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """The sum of exp(score - top) over the scores not below the TOP_K-th: the threshold is found by bisection."""
    bits = top.to(tl.int32, bitcast=True)
    least, most = tl.full((), -2139095041, tl.int64), tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    while least < most:  # at least TOP_K scores reach `least` (at first -inf); fewer reach what lies above `most`
        middle = least + (most - least + 1) // 2
        reached, reached_mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, num_tokens, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            _, scores = _scores(logits, seen, forbidden, tokens, tokens < num_tokens, temperature, penalty, HAS_SEEN,
                                HAS_FORBIDDEN, TEMPERED)
            is_reached = scores >= _as_float(middle)
            reached += is_reached.to(tl.int32)
            reached_mass += tl.where(is_reached, tl.exp(scores - top), 0.0)
        count = tl.sum(reached, 0)
        mass = tl.where(count >= TOP_K, tl.sum(reached_mass, 0), mass)
        least = tl.where(count >= TOP_K, middle, least)
        most = tl.where(count == TOP_K, middle, tl.where(count > TOP_K, most, middle - 1))
    return mass


@triton.jit
def _kept(logits, seen, forbidden, stream, position, num_tokens, temperature, penalty, top, mass, token, floor, top_p,
          TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, BLOCK: tl.constexpr, HAS_SEEN: tl.constexpr,
          HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """The token of the best draw that truncation keeps, searched from the best of all on."""
    if TOP_K > 0 and HAS_TOP_P:
        mass = _top_k_mass(logits, seen, forbidden, num_tokens, temperature, penalty, top, mass, TOP_K, BLOCK,
                           HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
    tokens = token + tl.arange(0, 1)
    _, scores = _scores(logits, seen, forbidden, tokens, tokens < num_tokens, temperature, penalty, HAS_SEEN,
                        HAS_FORBIDDEN, TEMPERED)
    score = tl.max(scores, 0)
    is_cut = num_tokens > 0
    while is_cut:
        higher, above, mass_above = _above(logits, seen, forbidden, num_tokens, temperature, penalty, score, token, top,
                                           BLOCK, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
        is_cut = score < floor
        if TOP_K > 0:
            is_cut = is_cut | (higher >= TOP_K)
        if HAS_TOP_P:
            is_cut = is_cut | (mass_above >= top_p * mass)
        is_cut = is_cut & (above > 0)  # the first of the ranking always stays, and NaN has no rank
        if is_cut:
            token, score = _best_above(logits, seen, forbidden, stream, position, num_tokens, temperature, penalty,
                                       score, token, BLOCK, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
    return token


@triton.jit
def _draw(logits, seen, forbidden, streams, positions, sums, picks, out, logprobs, num_tokens, num_chunks, logits_b,
          seen_b, forbidden_b, temperature, penalty, top_p, min_p, CHUNKS: tl.constexpr, TOP_K: tl.constexpr,
          HAS_TOP_P: tl.constexpr, BLOCK: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr,
          TEMPERED: tl.constexpr, TRUNCATED: tl.constexpr):
    """Grid (rows,): token and log-probability of each row from the sums of its chunks. min_p: its logarithm."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    place, step = row * num_chunks + chunks, tl.num_programs(0) * num_chunks
    there = chunks < num_chunks
    _, token = _best(tl.load(sums + 2 * step + place, mask=there, other=float("-inf")),
                     tl.load(picks + place, mask=there, other=2147483647))
    token = tl.where(token < num_tokens, token, 0)  # nothing may be drawn, or all is NaN
    if TRUNCATED:
        tops = tl.load(sums + 3 * step + place, mask=there, other=float("-inf"))
        top = tl.max(tops, 0)
        mass = tl.sum(tl.load(sums + 4 * step + place, mask=there, other=0.0) * tl.exp(tops - top), 0)
        token = _kept(logits + row * logits_b, seen + row * seen_b, forbidden + row * forbidden_b,
                      tl.load(streams + row), tl.load(positions + row), num_tokens, temperature, penalty, top, mass,
                      token, top + min_p, top_p, TOP_K, HAS_TOP_P, BLOCK, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
        token = tl.where(token < num_tokens, token, 0)
    tops = tl.load(sums + place, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    scale = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(tl.load(sums + step + place, mask=there, other=0.0) * scale, 0)
    raw = tl.load(logits + row * logits_b + token).to(tl.float32)
    if TEMPERED:
        raw = tl.div_rn(raw, temperature)
    logprob = (raw - top) - tl.log(mass)
    is_finite = (tl.abs(top) < float("inf")) & (tl.abs(logprob) < float("inf"))
    tl.store(out + row, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(logprobs + row, tl.where(is_finite, logprob, float("nan")))


def _sample_among(kept: Tensor, logits: Tensor, streams: Tensor, positions: Tensor, *, temperature: float,
                  **rules: Any) -> tuple[Tensor, Tensor]:
    """A draw from the tokens `kept` (B, V) bool, which the truncating kernel never stores, and its log-probability
    among them."""
    tokens, logprobs = sample(logits, streams, positions, temperature=temperature, forbidden=~kept, **rules)
    among = (logits.float() / (temperature or 1.0)).masked_fill(~kept, -math.inf)
    chosen = among.gather(-1, tokens[:, None])[:, 0] - among.logsumexp(-1)
    return tokens, torch.where(logprobs.isfinite() & chosen.isfinite(), chosen, math.nan)


def sample(logits: Tensor, streams: Tensor, positions: Tensor, *, temperature: float = 1.0, top_k: int = 0,
           top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seen: Tensor | None = None,
           forbidden: Tensor | None = None, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """kernels/reference.py: sample."""
    if kept is not None:
        rules = dict(temperature=temperature, repetition_penalty=repetition_penalty, seen=seen)
        kept.copy_(reference.allowed_scores(logits, **rules, top_k=top_k, top_p=top_p, min_p=min_p,
                                            forbidden=forbidden) > -math.inf)
        return _sample_among(kept, logits, streams, positions, **rules)
    (rows, num_tokens), streams, positions = logits.shape, streams.contiguous(), positions.contiguous()
    is_greedy, has_seen = temperature == 0, seen is not None and repetition_penalty != 1
    top_k = 0 if is_greedy or top_k >= num_tokens else top_k
    has_top_p, has_min_p = not is_greedy and top_p < 1, not is_greedy and min_p > 0
    seen, has_forbidden = seen if has_seen else logits, forbidden is not None
    forbidden = forbidden if has_forbidden else logits
    num_chunks = triton.cdiv(num_tokens, _CHUNK)
    sums = logits.new_empty(5, rows, num_chunks, dtype=torch.float32)
    picks = logits.new_empty(rows, num_chunks, dtype=torch.int32)
    tokens, logprobs = torch.empty_like(streams), logits.new_empty(rows, dtype=torch.float32)
    flags = dict(HAS_SEEN=has_seen, HAS_FORBIDDEN=has_forbidden, TEMPERED=temperature not in (0, 1),
                 TRUNCATED=top_k > 0 or has_top_p or has_min_p)
    _scan[rows, num_chunks](logits, seen, forbidden, streams, positions, sums, picks, num_tokens, logits.stride(0),
                            seen.stride(0), forbidden.stride(0), float(temperature), float(repetition_penalty),
                            CHUNK=_CHUNK, GREEDY=is_greedy, **flags, num_warps=4)
    _draw[(rows,)](logits, seen, forbidden, streams, positions, sums, picks, tokens, logprobs, num_tokens, num_chunks,
                   logits.stride(0), seen.stride(0), forbidden.stride(0), float(temperature),
                   float(repetition_penalty), float(top_p), math.log(min_p) if has_min_p else -math.inf,
                   CHUNKS=triton.next_power_of_2(num_chunks), TOP_K=top_k, HAS_TOP_P=has_top_p, BLOCK=_BLOCK, **flags,
                   num_warps=16 if flags["TRUNCATED"] else 4)
    return tokens, logprobs
