"""Measures the rates of this machine's CPU (in about a second), and of its card: products, copies, our kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_rlhf.kernels import Ops, cpu, ops_for
from hybrid_rlhf.memory_plan.rates import SHARES, Points, Rates

MOST, LEAST = 0.02, 3  # seconds and series for one figure
SIDE = 768  # of the products' weights
VOCAB = 8192
ROWS = (8, 64, 512)
NUM_WEIGHTS = 64
SIZES = (2**18, 2**20, 2**22, 2**24, 2**27)  # bytes that a copy reads
# Cost of a model's own Python around each operation (nested modules, views, hooks), in calls of a small module, as
# measured on Llama's and OPT's layers in transformers 5.
CODE = 5
# Efficiency factor: the share that whole phases reached of rates measured in bursts over warm data, from models of 4M
# to 134M (docs/results/plan_time.md).
REACHED = 0.87
CPU = torch.device("cpu")

clock = time.perf_counter  # in seconds; benchmarks on shared machines use processor time


@cache
def machine_rates(dtype: torch.dtype) -> Rates:
    """The rates of this CPU for models of `dtype`, with torch's current number of threads."""
    name, ops = str(dtype).removeprefix("torch."), ops_for("cpu")
    dtypes = {d: getattr(torch, d) for d in (name, "float32")}  # routers and state spaces multiply in float32
    starts = {d: _product_start(F.linear, kind) for d, kind in dtypes.items()}
    products = {d: _products(F.linear, kind, starts[d]) for d, kind in dtypes.items()}
    has_own = ops.linear is not None and dtype in ops.linear_dtypes
    few = {name: _products(ops.linear, dtype, 0.0, NUM_WEIGHTS)} if has_own and ops.linear else {}
    launch, gradient_launch = _launches()
    threads = torch.get_num_threads()
    device = f"this CPU, {threads} thread{'s' * (threads > 1)}"
    return Rates(device, copies(), products, few, attention={name: _attention(ops, dtype)},
                 passes={d: _passes(kind) for d, kind in dtypes.items()},
                 cache=_decode_attention(ops, dtype), draws=_draws(ops, dtype), scores=_scores(ops, dtype),
                 launch=CODE * launch, gradient_launch=CODE * gradient_launch, product_start=starts,
                 has_layers=has_own and ops.decode_layer is not None, reached=REACHED)


def can_measure() -> bool:
    """Whether no kernel has to be compiled first, which would take longer than all the rest of a plan."""
    return cpu.is_built() or not cpu.can_load()


@torch.no_grad()
def card_rates(device: torch.device, dtype: torch.dtype, *, is_dry: bool = False) -> Rates:
    """The card's measured rates; shortest kernel and gap between kernels are assumed, as for other cards."""
    names = {str(d).removeprefix("torch."): d for d in (dtype, torch.float32)}
    rows, heads, length, width = (1, 2, 32, 16) if is_dry else (4, 16, 512, 64)
    side, counts = (64, (8, 32)) if is_dry else (4096, (64, 512, 4096))
    heads_of = [torch.ones(rows, heads, length, width, dtype=dtype, device=device) for _ in range(3)]
    attention = seconds_of(lambda: F.scaled_dot_product_attention(*heads_of, is_causal=True), device)
    (forward, backward), (cpu_forward, cpu_backward) = _launches(device), _launches(CPU)
    return Rates(torch.cuda.get_device_name(device), copies(device, (2**16 if is_dry else 2**28,)),
                 {name: _products(F.linear, kind, 0.0, device=device, side=side, rows=counts)
                  for name, kind in names.items()},
                 attention={next(iter(names)): 2 * rows * heads * length * length * width / attention},
                 launch=forward + (CODE - 1) * cpu_forward, gradient_launch=backward + (CODE - 1) * cpu_backward,
                 overlaps=True, kernel=SHARES["kernel"], gap=SHARES["gap"], captures=True)


def seconds_of(act: Callable[[], object], device: torch.device = CPU) -> float:
    """Seconds of one call: the median of a few short series, as other load on the machine slows a run too."""

    def series(count: int) -> float:
        start = clock()
        for _ in range(count):
            act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max((clock() - start) / count, 1e-9)

    series(1)
    count, began, taken = max(1, round(MOST / 8 / series(1))), clock(), []
    while clock() - began < MOST or len(taken) < LEAST:
        taken.append(series(count))
    return statistics.median(taken)


@torch.no_grad()
def _products(product: Callable, dtype: torch.dtype, start: float, num_weights: int = 1, *, device: torch.device = CPU,
              side: int = SIDE, rows: tuple[int, ...] = ROWS) -> Points:
    """Rates by rows, over several weights in turn: a decode step finds none of them in the nearest cache."""
    rates, weights = [], cycle(torch.full((num_weights, side, side), 0.1, dtype=dtype, device=device).unbind())
    for count in rows:
        x = torch.randn(count, side).to(device, dtype)
        taken = seconds_of(lambda x=x: product(x, next(weights), None), device)
        rates.append((float(count), 2 * count * side * side / max(taken - start, taken / 4)))
    return tuple(rates)


@torch.no_grad()
def _product_start(product: Callable, dtype: torch.dtype) -> float:
    weight, x = torch.randn(64, 64).to(dtype), torch.randn(8, 64).to(dtype)
    return seconds_of(lambda: product(x, weight, None))


def copies(device: torch.device = CPU, sizes: tuple[int, ...] = SIZES) -> Points:
    """(bytes that a copy reads and writes, bytes per second), by size of what is copied."""
    source = torch.ones(sizes[-1] // 4, device=device)
    target = torch.empty_like(source)
    return tuple((2.0 * size, 2 * size / seconds_of(lambda n=size // 4: target[:n].copy_(source[:n]), device))
                 for size in sizes)


def _passes(dtype: torch.dtype) -> float:
    """Bytes per second of an element-wise operation within the cache."""
    one = torch.ones(2**18, dtype=dtype)
    out = torch.empty_like(one)
    return 3 * one.numel() * one.element_size() / seconds_of(lambda: torch.mul(one, one, out=out))


@torch.no_grad()
def _attention(ops: Ops, dtype: torch.dtype) -> float:
    """Operations per second of causal attention, forward."""
    query, key, value = (torch.randn(4, 4, 192, 64).to(dtype) for _ in range(3))

    def attend() -> Tensor:
        if ops.causal_attention:
            return ops.causal_attention(query, key, value, scaling=0.125)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return 2 * 4 * 4 * 192 * 192 * 64 / seconds_of(attend)


@torch.no_grad()
def _decode_attention(ops: Ops, dtype: torch.dtype) -> float:
    """Bytes of keys and values per second, of a decode step over slots with 128 columns."""
    rows, heads, columns, width = 8, 8, 128, 64
    query, key, value = (torch.randn(rows, heads, 1, width).to(dtype) for _ in range(3))
    keys, values = (torch.randn(rows, heads, columns, width).to(dtype) for _ in range(2))
    slots, places = torch.arange(rows), torch.full((rows,), columns - 1)
    return (keys.nbytes + values.nbytes) / seconds_of(lambda: ops.decode_attention(
        query, key, value, keys, values, slots[:, None], places, columns, scaling=0.125))


@torch.no_grad()
def _draws(ops: Ops, dtype: torch.dtype) -> float:
    logits, streams = torch.randn(8, VOCAB).to(dtype), torch.arange(8)
    return logits.numel() / seconds_of(lambda: ops.sample(logits, streams, streams))


def _scores(ops: Ops, dtype: torch.dtype) -> tuple[float, float]:
    """Logits per second of log-probabilities with entropies, forward and backward."""
    if ops.token_scores is None:
        return 0.0, 0.0
    score, targets = ops.token_scores, torch.zeros(64, dtype=torch.long)
    logits = torch.randn(64, VOCAB).to(dtype).requires_grad_()

    def both() -> None:
        scores = score(logits, targets, 1.0, True)
        (scores[0] + scores[1]).sum().backward()

    forward = seconds_of(lambda: score(logits.detach(), targets, 1.0, True))
    return logits.numel() / forward, logits.numel() / max(seconds_of(both) - forward, forward / 4)


def _launches(device: torch.device = CPU) -> tuple[float, float]:
    """Seconds of the host for a call of a small module: without gradients, and of forward and backward each."""
    count = 32
    model, x = nn.Sequential(*(nn.SiLU() for _ in range(count))), torch.ones(1, 8, device=device, requires_grad=True)
    with torch.no_grad():
        plain = seconds_of(lambda: model(x), device)
    with torch.enable_grad():
        return plain / count, seconds_of(lambda: model(x).sum().backward(), device) / (2 * count)
