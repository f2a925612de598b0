"""Decoder layers of one row by plain torch in double precision, for the kernels that compute whole layers."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def numbers_of(dtype, seed):
    """Draws of any shape, one after the other."""
    g = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=1.0: (torch.randn(*shape, generator=g) * scale).to(dtype)


def plain(x, weights, biases, norms, angles, columns, scaling, is_gelu, adds_one):
    """The layer of one row in double precision: x (E), keys and values (C, K, D) before it -> its output and column."""
    dim = angles[0].numel()

    def norm(v, weight):
        if weight is None:
            return v
        return v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight + (1 if adds_one else 0))

    def turn(v):
        return v * angles[0] + torch.cat([-v[..., dim // 2:], v[..., : dim // 2]], -1) * angles[1]

    query, key, value = ((w @ norm(x, norms[0]) + (0 if b is None else b)).view(-1, dim)
                         for w, b in zip(weights[:3], biases[:3], strict=True))
    query, key = turn(norm(query, norms[2])), turn(norm(key, norms[3]))
    keys, values = (torch.cat([c, n[None]]) for c, n in zip(columns, (key, value), strict=True))
    group = len(query) // len(key)
    heads = [((keys[:, h // group] @ query[h] * scaling).softmax(0) @ values[:, h // group])
             for h in range(len(query))]
    x = x + weights[3] @ torch.cat(heads)
    inner = norm(x, norms[1])
    gate, up = weights[4] @ inner, weights[5] @ inner
    act = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    return x + weights[6] @ (act * up), key, value


def plain_opt(x, weights, biases, norms, norm_biases, adapters, columns, scaling):
    """OPT's layer of one row in double precision, x (E): LayerNorm, no rotation, no gate, ReLU, adapters."""
    def norm(v, i):
        v = (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt()
        return v * norms[i] + norm_biases[i]

    def product(i, v):
        down, up, factor = adapters[i] or (v.new_zeros(1, len(v)), v.new_zeros(len(weights[i]), 1), 0)
        return weights[i] @ v + biases[i] + factor * (up @ (down @ v))

    inner = norm(x, 0)
    query, key, value = (product(i, inner).view(-1, columns[0].shape[-1]) for i in range(3))
    keys, values = (torch.cat([c, n[None]]) for c, n in zip(columns, (key, value), strict=True))
    heads = [(keys[:, h] @ query[h] * scaling).softmax(0) @ values[:, h] for h in range(len(query))]
    x = x + product(3, torch.cat(heads))
    return x + product(6, product(5, norm(x, 1)).clamp(min=0)), key, value
