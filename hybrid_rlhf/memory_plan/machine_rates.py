"""The rates of this machine's processor, measured in about a second: products, copies, our kernels, and calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_rlhf.kernels import Ops, ops_for
from hybrid_rlhf.memory_plan.rates import Points, Rates

MOST, LEAST = 0.02, 3  # seconds and series for one figure
SIDE = 768  # of the products' weights
ROWS = (8, 64, 512)
SIZES = (2**18, 2**20, 2**22, 2**24, 2**27)  # bytes that a copy reads
# A model's own Python around each operation, in calls of a small module: modules in modules, views, hooks. As measured
# on Llama's and OPT's layers in transformers 5.
CODE = 2.5

clock = time.perf_counter  # what tells seconds; benchmarks on shared machines take processor time


@cache
def machine_rates(dtype: torch.dtype) -> Rates:
    """What this processor does with models of `dtype`, by the threads that torch has now. Kernels of ours are compiled
    if they are missing, as the run itself would do."""
    name, ops = str(dtype).removeprefix("torch."), ops_for("cpu")
    start = _product_start(F.linear, dtype)
    products = {name: _products(F.linear, dtype, start)}
    has_own = ops.linear is not None and dtype in ops.linear_dtypes
    few = {name: _products(ops.linear, dtype, 0.0)} if has_own and ops.linear else {}
    launch, gradient_launch = _launches()
    return Rates("this machine's CPU", _copies(), products, few, attention={name: _attention(ops, dtype)},
                 passes={d: _passes(getattr(torch, d)) for d in dict.fromkeys((name, "float32"))},
                 launch=CODE * launch, gradient_launch=CODE * gradient_launch, product_start={name: start},
                 has_layers=has_own and ops.decode_layer is not None)


def _best(act: Callable[[], object]) -> float:
    """Seconds of one call: the least of a few short series."""
    act()
    began, best, num_series = clock(), float("inf"), 0
    while clock() - began < MOST or num_series < LEAST:
        start, count = clock(), 0
        num_series += 1
        while count == 0 or clock() - start < MOST / 8:
            act()
            count += 1
        best = min(best, (clock() - start) / count)
    return best


@torch.no_grad()
def _products(product: Callable, dtype: torch.dtype, start: float) -> Points:
    weight, found = torch.randn(SIDE, SIDE).to(dtype), []
    for rows in ROWS:
        given = torch.randn(rows, SIDE).to(dtype)
        taken = _best(lambda given=given: product(given, weight, None)) - start
        found.append((float(rows), 2 * rows * SIDE * SIDE / max(taken, 1e-7)))
    return tuple(found)


@torch.no_grad()
def _product_start(product: Callable, dtype: torch.dtype) -> float:
    """Seconds that the smallest product takes."""
    weight, given = torch.randn(64, 64).to(dtype), torch.randn(8, 64).to(dtype)
    return _best(lambda: product(given, weight, None))


def _copies() -> Points:
    source = torch.ones(SIZES[-1] // 4)
    target = torch.empty_like(source)
    return tuple((2.0 * size, 2 * size / _best(lambda n=size // 4: target[:n].copy_(source[:n]))) for size in SIZES)


def _passes(dtype: torch.dtype) -> float:
    """Bytes per second of an element-wise operation within the cache."""
    one = torch.ones(2**18, dtype=dtype)
    out = torch.empty_like(one)
    return 3 * one.numel() * one.element_size() / _best(lambda: torch.mul(one, one, out=out))


@torch.no_grad()
def _attention(ops: Ops, dtype: torch.dtype) -> float:
    """Operations per second of causal attention, forward."""
    query, key, value = (torch.randn(4, 4, 192, 64).to(dtype) for _ in range(3))

    def attend() -> Tensor:
        if ops.causal_attention:
            return ops.causal_attention(query, key, value, scaling=0.125)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return 2 * 4 * 4 * 192 * 192 * 64 / _best(attend)


def _launches() -> tuple[float, float]:
    """Seconds of a call of a small module: without gradients, and of forward and backward each."""
    model, given, length = nn.Sequential(*(nn.SiLU() for _ in range(32))), torch.ones(1, 8, requires_grad=True), 32

    def with_gradients() -> None:
        model(given).sum().backward()

    with torch.no_grad():
        plain = _best(lambda: model(given))
    return plain / length, _best(with_gradients) / (2 * length)
