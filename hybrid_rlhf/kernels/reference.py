"""The definition of every kernel, in plain torch. A device's kernel has the same signature and meaning; its results
differ by rounding only, which its tests bound. Decode attention and sampling never make the host wait for a card, for
they run there where its own kernels are not available.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_rlhf.core.tensors import PackedMatrix

_MASK32 = 0xFFFFFFFF
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


def decode_attention(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, pages: Tensor,
                     positions: Tensor, width: int, *, scaling: float, softcap: float | None = None,
                     sinks: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Write one new token's key and value into the cache, then attend from that token. Returns (B, 1, H, Dv).

    query (B, H, 1, D); key (B, K, 1, D), value (B, K, 1, Dv): the new token's, of any strides with a dense last
    dimension; H is a multiple of K and query head h reads key head h // (H / K). keys (S, K, P, D) and values
    (S, K, P, Dv): the caches of S pages of P columns, written in place. pages (B, N) int64: pages[b, i] holds columns
    i P to (i + 1) P - 1 of row b; rows may share pages, but not those that they write. positions (B,) int64: the row's
    column, which is also its number of earlier tokens; row b reads its columns 0..positions[b], the new one included. A
    row at position -1 is idle: nothing is written for it, its output is zero, and it may name the pages of another row
    whose position is not the last column. width: a host-side bound, every position < width <= N P. mask (B, width) bool
    or None: columns that are not true are not read (sliding and chunked windows); a row that may read nothing gives
    zeros.

    Scores are q k * scaling, then softcap * tanh(scores / softcap) if given; sinks (H,) joins the softmax as the score
    of a column whose value is zero. Sums and softmax are in fp32; the result has the query's dtype, and is contiguous.
    """
    # the host does not know the idle rows: they write back what the last column, at -1, holds
    is_live = (positions >= 0)[:, None, None]
    page, place = places_of(pages, positions, keys.shape[2])
    for cache, new in ((keys, key), (values, value)):
        cache[page, :, place] = torch.where(is_live, new[:, :, 0].to(cache.dtype), cache[page, :, place])
    visible = torch.arange(width, device=query.device) <= positions[:, None]  # (B, width)
    if mask is not None:
        visible = visible & mask
    grouped = query.float().unflatten(1, (keys.shape[1], -1))[..., 0, :]  # (B, K, H/K, D)
    scores = grouped @ columns_of(keys, pages, width).float().mT * scaling  # (B, K, H/K, width)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, keys.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, extra], -1)
    # a row that may read nothing has 0 / 0; any other NaN comes from a broken model and must stay visible
    weights = scores.softmax(-1)[..., :width].masked_fill(~visible.any(1)[:, None, None, None], 0.0)
    out = weights @ columns_of(values, pages, width).float()  # (B, K, H/K, Dv)
    return out.flatten(1, 2)[:, None].to(query.dtype)


def places_of(pages: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The page of each row's position, and its column there, both (B,); -1 is the last column of all."""
    index = positions.remainder(pages.shape[1] * size) // size
    return pages.gather(1, index[:, None])[:, 0], positions.remainder(size)


def columns_of(cache: Tensor, pages: Tensor, width: int) -> Tensor:
    """The first `width` columns of rows that lie in pages (B, N) of a cache (S, K, P, D): a copy (B, K, width, D)."""
    if width <= cache.shape[2]:
        return cache[pages[:, 0], :, :width]
    read = cache[pages[:, : -(-width // cache.shape[2])]]
    return read.transpose(1, 2).flatten(2, 3)[:, :, :width]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
    """(B, H, Q, D), (B, K, Q, D), (B, K, Q, Dv) -> (B, Q, H, Dv): each token attends to itself and all before it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                          enable_gqa=query.shape[1] != key.shape[1]).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> Tensor:
    """Root mean square normalisation (1910.07467) of x (.., D) by weight (D) of the same dtype.

    The scaled numbers are rounded to the dtype and then multiplied by the weight (Llama); with adds_one they are
    multiplied by 1 + weight in fp32 and rounded once (Gemma).
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight.float())).to(x.dtype) if adds_one else weight * scaled.to(x.dtype)


def gated(gate: Tensor, up: Tensor, is_gelu: bool = False) -> Tensor:
    """act(gate) * up, of the same shape and dtype: SiLU (SwiGLU, 2002.05202), or GELU by its tanh formula."""
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up


def rotary(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (2104.09864), halves paired: query (B, H, Q, D), key (B, K, Q, D), angles (B or 1, Q, D)."""
    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cosines[:, None] + torch.cat([-b, a], -1) * sines[:, None]

    return turned(query), turned(key)


class DecodeLayer:
    """A decoder layer of Llama's or OPT's form, for one new token of each row.

    weights: of the products query (H D, E), key and value (K D, E), output (E, H D), gate and up (I, E), down (E, I);
    biases: theirs, or None. Without a gate (None) the MLP is down act(up x). adapters: of each product (down (r, in),
    up (out, r), scaling), in the weights' dtype, or None. norms: before attention (E), before the MLP (E), of each
    query head and of each key head (D) or None, with `eps` and `adds_one` as in `rms_norm`; norm_biases: theirs, where
    they are LayerNorm (1607.06450), or None. activation: "silu", "gelu" (tanh's) or, without a gate, "relu".
    max_rows: the most rows of a call. takes_packed: whether weights there may be packed ones, rounded to the
    norms' dtype.
    """

    max_rows = 1 << 20

    @staticmethod
    def takes_packed(_device: torch.device) -> bool:
        return True

    def __init__(self, weights: list[Tensor | PackedMatrix | None], biases: list[Tensor | None],
                 norms: list[Tensor | None], norm_biases: list[Tensor | None],
                 adapters: list[tuple[Tensor, Tensor, float] | None], *, eps: float, adds_one: bool, scaling: float,
                 activation: str) -> None:
        weights = [unpacked(w, norms[0].dtype) if isinstance(w, PackedMatrix) else w for w in weights]
        self._products = [w if w is None else partial(_adapted, weight=w, bias=b, adapter=a)
                          for w, b, a in zip(weights, biases, adapters, strict=True)]
        self._norms = [(lambda x: x) if w is None
                       else partial(rms_norm, weight=w, eps=eps, adds_one=adds_one) if b is None
                       else partial(F.layer_norm, normalized_shape=w.shape, weight=w, bias=b, eps=eps)
                       for w, b in zip(norms, norm_biases, strict=True)]
        self._scaling, self._activation = scaling, activation

    def __call__(self, hidden: Tensor, cosines: Tensor | None, sines: Tensor | None, keys: Tensor, values: Tensor,
                 pages: Tensor, positions: Tensor, width: int) -> Tensor:
        """hidden (B, 1, E), angles (B or 1, 1, D) or None -> (B, 1, E); cache, pages, positions and width as in
        `decode_attention`, which writes the new columns."""
        to_query, to_key, to_value, to_output, to_gate, to_up, to_down = self._products
        x = self._norms[0](hidden)
        query, key, value = (product(x).unflatten(-1, (-1, keys.shape[-1])) for product in (to_query, to_key, to_value))
        query, key = self._norms[2](query).transpose(1, 2), self._norms[3](key).transpose(1, 2)
        if cosines is not None:
            query, key = rotary(query, key, cosines, sines)
        attended = decode_attention(query, key, value.transpose(1, 2), keys, values, pages, positions, width,
                                    scaling=self._scaling)
        hidden = hidden + to_output(attended.flatten(2))
        x = self._norms[1](hidden)
        if to_gate:
            return hidden + to_down(gated(to_gate(x), to_up(x), self._activation == "gelu"))
        act = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}[self._activation]
        return hidden + to_down(act(to_up(x)))


def unpacked(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """(out, in): its numbers, multiplied in fp32 and rounded once."""
    if matrix.table is None:
        return (matrix.values.float() * matrix.scales[:, None]).to(dtype)
    places = torch.stack([matrix.values >> 4, matrix.values & 15], -1).long()
    return (matrix.table[places].view(-1, 64) * matrix.scales[:, None]).view(matrix.shape).to(dtype)


def _adapted(x: Tensor, weight: Tensor, bias: Tensor | None, adapter: tuple[Tensor, Tensor, float] | None) -> Tensor:
    out = F.linear(x, weight, bias)
    if adapter is None:
        return out
    down, up, scaling = adapter
    return out + scaling * F.linear(F.linear(x, down), up)


def token_scores(logits: Tensor, targets: Tensor, temperature: float = 1.0,
                 with_entropy: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
    """logits (N, V), targets (N,) long -> logprobs (N,) fp32, entropy (N,) fp32 in nats or None, correct (N,) bool.

    Of the distribution softmax(logits / temperature), taken in fp32; correct: the target is its (first) most likely
    token. A token with a logit of -inf adds nothing to the entropy.
    """
    x = logits.float() / temperature
    logprobs = x.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1) if with_entropy else None
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy, x.argmax(-1) == targets


def adamw(weight: Tensor | None, master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: int,
          lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, factor: float = 1.0) -> None:
    """Step number `step` (from 1) of decoupled AdamW (1711.05101) in place, all dense and of one size: master, exp_avg
    and exp_avg_sq fp32, of gradient times `factor`. weight, of any dtype, becomes the master rounded (None: none)."""
    wide = gradient.float().reshape(master.shape) * factor
    master.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(wide, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    root = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5
    master.addcdiv_(exp_avg, root + eps, value=-lr / (1 - beta1**step))
    if weight is not None:
        weight.copy_(master)


def sum_of_squares(x: Tensor) -> float:
    """The sum over all numbers of x: in fp32 within pieces, which are added up in double precision."""
    return float(x.double().square().sum())


def splitmix64(x: Tensor) -> Tensor:
    """The splitmix64 step (Steele, Lea, Flood 2014) of int64 values as uint64; products wrap around."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_words(streams: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """(B, V) int64 in [0, 2^32): the random word of every token of the vocabulary, one counter-based draw per row.

    streams (B,) int64 names the request, positions (B,) int64 its draw. With s = splitmix64(splitmix64(stream) +
    position), a = s mod 2^32 and b = s >> 32 (unsigned), all of what follows mod 2^32, token i gets
    x = i * 0x9E3779B9 + a;  x = (x ^ (x >> 16)) * 0x7FEB352D + b;  x = (x ^ (x >> 15)) * 0x846CA68B;  x ^ (x >> 16).
    """
    state = splitmix64(splitmix64(streams) + positions)
    low, high = (state & _MASK32)[:, None], _shift(state, 32)[:, None]
    x = (torch.arange(num_tokens, device=streams.device) * 0x9E3779B9 + low) & _MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D + high) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def exponentials(words: Tensor) -> Tensor:
    """Random words (.., V) to standard exponential variates, fp32: -log(1 - u), u = min((x + 0.5) / 2^32, 1 - 2^-24).

    x is rounded to fp32 first, so u is the same to the bit wherever it is made.
    """
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


def truncated(scores: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Scores (B, V) with -inf where top-k, then top-p, then min-p forbid, as transformers' warpers define them.

    top-k keeps every score not below the k-th; top-p the smallest set, likeliest first, whose probability (after top-k)
    reaches p, the likeliest always; min-p all that reach min_p times the likeliest.
    """
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, -1).values[..., -1:], float("-inf"))
    if top_p < 1:
        ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
        probs = ranked.double().softmax(-1)  # in fp32 the sum of 256,000 is off by more than what a tail weighs
        dropped = probs.cumsum(-1) - probs >= top_p
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), float("-inf"))
    if min_p > 0:
        floor = scores.amax(-1, keepdim=True) + torch.full((), min_p, device=scores.device).log()
        scores = scores.masked_fill(scores < floor, float("-inf"))
    return scores


def allowed_scores(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
                   repetition_penalty: float = 1.0, seen: Tensor | None = None,
                   forbidden: Tensor | None = None) -> Tensor:
    """(B, V) fp32: the scores by which `sample` draws, -inf where a token may not be drawn. Greedy: not truncated."""
    raw = logits.float()
    scores = raw if repetition_penalty == 1 or seen is None else torch.where(
        seen, torch.where(raw > 0, raw / repetition_penalty, raw * repetition_penalty), raw)
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, float("-inf"))
    return scores if temperature == 0 else truncated(scores / temperature, top_k, top_p, min_p)


def sample(logits: Tensor, streams: Tensor, positions: Tensor, *, temperature: float = 1.0, top_k: int = 0,
           top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seen: Tensor | None = None,
           forbidden: Tensor | None = None, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token per row. Returns tokens (B,) int64 and logprobs (B,) fp32.

    logits (B, V), fp32, bf16 or fp16, dense last dimension. temperature 0 is greedy: the first largest score.
    repetition_penalty divides positive and multiplies negative logits of the tokens true in seen (B, V) bool
    (arXiv 1909.05858), before the temperature. forbidden (B, V) bool: tokens that may not be drawn at all. Then
    `truncated`; then the token with the largest score - log(exponential), the exponentials being those of
    `random_words(streams, positions, V)`: an exact draw from the softmax (the Gumbel-max trick) that depends on the
    row's own logits, stream and position only.

    logprobs are those of the policy that training sees: log softmax(logits / temperature) of the drawn token (with
    temperature 1 where greedy), before penalty, forbidden and truncation. kept (B, V) bool, dense: is filled with the
    candidate tokens of the draw, and the logprobs are of the softmax over these alone. A row whose logits have no
    finite maximum or contain NaN gives token 0 and a logprob that is not finite, from which the caller sees that the
    model broke; what is kept of it is not defined.
    """
    raw = logits.float()
    scores = allowed_scores(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                            repetition_penalty=repetition_penalty, seen=seen, forbidden=forbidden)
    if temperature == 0:
        tokens = scores.argmax(-1)
    else:
        tokens = (scores - exponentials(random_words(streams, positions, logits.shape[-1])).log()).argmax(-1)
        raw = raw / temperature
    is_sound = raw.amax(-1).isfinite()
    if kept is not None:
        kept.copy_(scores > float("-inf"))
        raw = raw.masked_fill(~kept, float("-inf"))
    logprobs = raw.gather(-1, tokens[:, None])[:, 0] - raw.logsumexp(-1)
    broken = ~(is_sound & logprobs.isfinite())
    return tokens.masked_fill(broken, 0), logprobs.masked_fill(broken, float("nan"))
