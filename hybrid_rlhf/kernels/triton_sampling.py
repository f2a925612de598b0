"""Sampling in Triton. kernels/reference.py: sample is its definition.

`_scan` reads the logits once, a chunk of a row to a program: maximum and sum for the log-probability, and the best
token of the draw; `_draw` joins the chunks of a row. What top-k, top-p and min-p keep is the beginning of a ranking (by
score, the first of equals first): `_cut` searches for its end by bisection, one program a row that reads it ten
to thirty times, without a sort; a second scan draws from what ranks above it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048  # tokens of one program of _scan
_BLOCK = 4096  # tokens that _cut reads together


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
def _scan(logits, seen, forbidden, streams, positions, sums, picks, levels, lasts, kept, num_tokens, logits_b, seen_b,
          forbidden_b, kept_b, temperature, penalty, CHUNK: tl.constexpr, HAS_SEEN: tl.constexpr,
          HAS_FORBIDDEN: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, CUT: tl.constexpr,
          KEEPS: tl.constexpr):
    """Grid (rows, chunks). sums (5, rows, chunks): maximum and mass of the logits, the best value of the draw, maximum
    and mass of the scores (unless CUT). picks (rows, chunks): the token of the best value. CUT: the draw is from what
    `_cut` has left by levels and lasts (rows,). KEEPS: these tokens are marked in kept (rows, V), and the logits are
    theirs alone.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, step = row * tl.num_programs(1) + chunk, tl.num_programs(0) * tl.num_programs(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < num_tokens
    raw, scores = _scores(logits + row * logits_b, seen + row * seen_b, forbidden + row * forbidden_b, tokens, inside,
                          temperature, penalty, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
    if CUT:
        level = tl.load(levels + row)
        stays = (scores > level) | ((scores == level) & (tokens < tl.load(lasts + row)) & (scores > float("-inf")))
        scores = tl.where(stays, scores, float("-inf"))
        if KEEPS:
            raw = tl.where(stays, raw, float("-inf"))
            tl.store(kept + row * kept_b + tokens, stays, mask=inside)
    else:
        top, mass = _mass(scores)
        tl.store(sums + 3 * step + place, top)
        tl.store(sums + 4 * step + place, mass)
    top, mass = _mass(raw)
    tl.store(sums + place, top)
    tl.store(sums + step + place, mass)
    if not GREEDY:
        scores += _noise(tokens, tl.load(streams + row), tl.load(positions + row))
    value, token = _best(scores, tokens)
    tl.store(sums + 2 * step + place, value)
    tl.store(picks + place, token)


@triton.jit
def _joined(sums, place, step, there):
    """Maximum and mass of a row from those of its chunks."""
    tops = tl.load(sums + place, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    scale = tl.exp(tops - tl.where(top == float("-inf"), 0.0, top))
    return top, tl.sum(tl.load(sums + step + place, mask=there, other=0.0) * scale, 0)


@triton.jit
def _around(logits, seen, forbidden, num_tokens, temperature, penalty, level, top, BLOCK: tl.constexpr,
            HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """Of the scores above `level`: how many, the sum of exp(score - top), the lowest; and the highest of the others."""
    count, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
    lowest, highest = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        _, scores = _scores(logits, seen, forbidden, tokens, tokens < num_tokens, temperature, penalty, HAS_SEEN,
                            HAS_FORBIDDEN, TEMPERED)
        is_above = scores > level
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(scores - top), 0.0)
        lowest = tl.where(is_above & (scores < lowest), scores, lowest)
        highest = tl.where((scores <= level) & (scores > highest), scores, highest)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _lowest_kept(logits, seen, forbidden, num_tokens, temperature, penalty, top, most, most_mass, least,
                 BLOCK: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """The lowest score, of those from `least` (finite) on, above which are fewer than `most` scores, of a mass below
    `most_mass`; the largest at least."""
    below, kept, reach = top * 0 + float("-inf"), top, top * 0 + 16.0  # nothing at `below` or lower is kept
    is_open = tl.abs(top) < float("inf")
    while is_open:
        half = tl.maximum(0.5 * below + 0.5 * kept, below)
        middle = tl.where(below == float("-inf"), tl.maximum(kept - reach, least),
                          tl.where(half < kept, half, below))
        reach *= 4
        count, mass, lowest, highest = _around(logits, seen, forbidden, num_tokens, temperature, penalty, middle, top,
                                               BLOCK, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
        fits = (count < most) & (mass < most_mass)  # so all above `middle` is kept, and so is the next below it
        is_open = tl.where(fits, highest > below, (lowest < kept) & (middle > below))
        kept = tl.where(fits, tl.where(highest > below, highest, tl.minimum(lowest, kept)), kept)
        below = tl.where(fits, below, middle)
        is_open = is_open & (kept > least)
    return kept


@triton.jit
def _equals(logits, seen, forbidden, num_tokens, temperature, penalty, level, most, BLOCK: tl.constexpr,
            HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr, TEMPERED: tl.constexpr):
    """How many tokens score `level`, and the one after the first `most` of them."""
    count = tl.full((), 0, tl.int32)
    last = count + num_tokens
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        _, scores = _scores(logits, seen, forbidden, tokens, tokens < num_tokens, temperature, penalty, HAS_SEEN,
                            HAS_FORBIDDEN, TEMPERED)
        equal = (scores == level).to(tl.int32)
        is_last = (equal != 0) & (count + tl.cumsum(equal, 0) == most)
        last = tl.minimum(last, tl.min(tl.where(is_last, tokens + 1, num_tokens), 0))
        count += tl.sum(equal, 0)
    return count, last


@triton.jit
def _cut(logits, seen, forbidden, sums, levels, lasts, num_tokens, num_chunks, logits_b, seen_b, forbidden_b,
         temperature, penalty, top_k, top_p, min_p, CHUNKS: tl.constexpr, HAS_TOP_K: tl.constexpr,
         HAS_TOP_P: tl.constexpr, BLOCK: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_FORBIDDEN: tl.constexpr,
         TEMPERED: tl.constexpr):
    """Grid (rows,). levels and lasts (rows,): what scores above the level stays, and of what scores the level the
    tokens before the last; the level is NaN in a row that is broken, of which nothing stays. min_p: its logarithm.
    """
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    place, step, there = row * num_chunks + chunks, tl.num_programs(0) * num_chunks, chunks < num_chunks
    raw_top, raw_mass = _joined(sums, place, step, there)
    top, mass = _joined(sums + 3 * step, place, step, there)
    logits, seen, forbidden = logits + row * logits_b, seen + row * seen_b, forbidden + row * forbidden_b
    level, last, least = top * 0 + float("-inf"), num_tokens, top * 0 - 3.4028234663852886e38
    if HAS_TOP_K:
        level = _lowest_kept(logits, seen, forbidden, num_tokens, temperature, penalty, top, top_k, float("inf"), least,
                             BLOCK, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
        least = tl.maximum(level, least)
    if HAS_TOP_P:
        if HAS_TOP_K:  # the mass of what top-k keeps
            _, mass, _, _ = _around(logits, seen, forbidden, num_tokens, temperature, penalty, level, top, BLOCK,
                                    HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
            count, _ = _equals(logits, seen, forbidden, num_tokens, temperature, penalty, level, 0, BLOCK, HAS_SEEN,
                               HAS_FORBIDDEN, TEMPERED)
            mass += count * tl.exp(level - top)
        most_mass = top_p * mass
        level = tl.maximum(level, _lowest_kept(logits, seen, forbidden, num_tokens, temperature, penalty, top,
                                               2147483647, most_mass, least, BLOCK, HAS_SEEN, HAS_FORBIDDEN,
                                               TEMPERED))
        _, mass_above, _, _ = _around(logits, seen, forbidden, num_tokens, temperature, penalty, level, top, BLOCK,
                                      HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
        most = tl.minimum(tl.ceil((most_mass - mass_above) / tl.exp(level - top)), 2147483520.0)
        _, last = _equals(logits, seen, forbidden, num_tokens, temperature, penalty, level,
                          tl.maximum(most, 1.0).to(tl.int32), BLOCK, HAS_SEEN, HAS_FORBIDDEN, TEMPERED)
    last = tl.where(top + min_p > level, num_tokens, last)
    is_sound = (tl.abs(raw_top) < float("inf")) & (raw_mass < float("inf"))
    tl.store(levels + row, tl.where(is_sound, tl.maximum(level, top + min_p), float("nan")))
    tl.store(lasts + row, last)


@triton.jit
def _draw(logits, sums, picks, out, logprobs, num_tokens, num_chunks, logits_b, temperature, CHUNKS: tl.constexpr,
          TEMPERED: tl.constexpr):
    """Grid (rows,): token and log-probability of each row from the sums of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    place, step, there = row * num_chunks + chunks, tl.num_programs(0) * num_chunks, chunks < num_chunks
    _, token = _best(tl.load(sums + 2 * step + place, mask=there, other=float("-inf")),
                     tl.load(picks + place, mask=there, other=2147483647))
    token = tl.where(token < num_tokens, token, 0)  # nothing may be drawn, or all is NaN
    top, mass = _joined(sums, place, step, there)
    raw = tl.load(logits + row * logits_b + token).to(tl.float32)
    if TEMPERED:
        raw = tl.div_rn(raw, temperature)
    logprob = (raw - top) - tl.log(mass)
    is_finite = (tl.abs(top) < float("inf")) & (tl.abs(logprob) < float("inf"))
    tl.store(out + row, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(logprobs + row, tl.where(is_finite, logprob, float("nan")))


def sample(logits: Tensor, streams: Tensor, positions: Tensor, *, temperature: float = 1.0, top_k: int = 0,
           top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seen: Tensor | None = None,
           forbidden: Tensor | None = None, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """kernels/reference.py: sample."""
    (rows, num_tokens), streams, positions = logits.shape, streams.contiguous(), positions.contiguous()
    is_greedy, has_seen = temperature == 0, seen is not None and repetition_penalty != 1
    has_top_k, has_top_p = not is_greedy and 0 < top_k < num_tokens, not is_greedy and top_p < 1
    has_min_p, keeps, has_forbidden = not is_greedy and min_p > 0, kept is not None, forbidden is not None
    seen, forbidden = seen if has_seen else logits, forbidden if has_forbidden else logits
    num_chunks = triton.cdiv(num_tokens, _CHUNK)
    chunks = triton.next_power_of_2(num_chunks)
    sums, levels = (logits.new_empty(*shape, dtype=torch.float32) for shape in ((5, rows, num_chunks), (rows,)))
    picks, lasts = (logits.new_empty(*shape, dtype=torch.int32) for shape in ((rows, num_chunks), (rows,)))
    tokens, logprobs = torch.empty_like(streams), logits.new_empty(rows, dtype=torch.float32)
    flags = dict(HAS_SEEN=has_seen, HAS_FORBIDDEN=has_forbidden, TEMPERED=temperature not in (0, 1))
    strides = logits.stride(0), seen.stride(0), forbidden.stride(0)
    rules = float(temperature), float(repetition_penalty)

    def scan(*, is_greedy: bool, is_cut: bool) -> None:
        _scan[rows, num_chunks](logits, seen, forbidden, streams, positions, sums, picks, levels, lasts,
                                kept if keeps else picks, num_tokens, *strides, kept.stride(0) if keeps else 0, *rules,
                                CHUNK=_CHUNK, GREEDY=is_greedy, CUT=is_cut, KEEPS=is_cut and keeps, **flags,
                                num_warps=4)

    if has_top_k or has_top_p or has_min_p or keeps:
        scan(is_greedy=True, is_cut=False)
        _cut[(rows,)](logits, seen, forbidden, sums, levels, lasts, num_tokens, num_chunks, *strides, *rules, top_k,
                      float(top_p), math.log(min_p) if has_min_p else -math.inf, CHUNKS=chunks, HAS_TOP_K=has_top_k,
                      HAS_TOP_P=has_top_p, BLOCK=_BLOCK, **flags, num_warps=16)
        scan(is_greedy=is_greedy, is_cut=True)
    else:
        scan(is_greedy=is_greedy, is_cut=False)
    _draw[(rows,)](logits, sums, picks, tokens, logprobs, num_tokens, num_chunks, logits.stride(0), rules[0],
                   CHUNKS=chunks, TEMPERED=flags["TEMPERED"], num_warps=4)
    return tokens, logprobs
