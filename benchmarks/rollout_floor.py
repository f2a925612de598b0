"""What a rollout cannot do without, at the machine's rates in the same run: products of the weights, bytes of cache.

The floor of a case is the products of its prompts (without the head, whose logits nobody reads) and of its decode
steps, each by torch or by us, whichever is faster here, and one reading of every column of the cache that a token
attends to, at the speed of reading a block of the cache's size. There are as many steps as full batches need, and at
least as many as the longest response has tokens; with idle rows a step costs that of one row and a share of what the
others add to a full one. Attention's own arithmetic, norms, sampling, Python, and the further steps with idle rows that
come from not knowing beforehand how long a response will be, are above the floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from harness import bandwidth, seconds
from torch import nn

from hybrid_rlhf.engine.hybrid import HybridEngine

PREFILL_ROWS = 2048  # of the product whose rate counts for prompts


class Requests(NamedTuple):
    """A model and what it is asked; `rows` run at once, each response has exactly its limit of tokens."""

    model: nn.Module
    prompts: list[list[int]]
    limits: list[int]
    rows: int

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(self.limits)

    @property
    def least_steps(self) -> int:
        """Decode steps that no order of the requests can do without."""
        return max(max(self.limits), -(-self.num_tokens // self.rows))

    @property
    def capacity(self) -> int:
        """Columns of a slot, as the engine makes its cache for these requests."""
        return max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))


class Floor(NamedTuple):
    """Seconds. step_torch, step_own: the products of one full decode step as each side multiplies them."""

    prompts: float
    products: float
    cache: float
    step_torch: float
    step_own: float

    @property
    def whole(self) -> float:
        return self.prompts + self.products + self.cache


def products(engine: HybridEngine, rows: int, is_own: bool, has_head: bool = True) -> Callable[[], float]:
    """The matrix products of `rows` tokens and nothing else, by torch or as the engine computes them; returns
    seconds."""
    model = engine.model if has_head else engine.model.base_model
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    inputs = {m.in_features: torch.randn(rows, m.in_features).to(m.weight.dtype) for m in layers}

    @torch.no_grad()
    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    def timed() -> float:
        with engine.inference() if is_own else nullcontext():
            run()
            return seconds(run)

    return timed


def floor_of(engine: HybridEngine, requests: Requests, repeats: int) -> Floor:
    """The floor of `requests`, which `engine` has run before."""

    def median(rows: int, is_own: bool, has_head: bool, times: int) -> float:
        act = products(engine, rows, is_own, has_head)
        return statistics.median(act() for _ in range(times))

    step_torch, step_own = (median(requests.rows, is_own, True, 2 * repeats + 1) for is_own in (False, True))
    one_row = min(median(1, is_own, True, 2 * repeats + 1) for is_own in (False, True))
    each_more = (min(step_torch, step_own) - one_row) / max(1, requests.rows - 1)
    steps = requests.least_steps
    read = sum(len(p) - 1 for p in requests.prompts)  # a prompt's last token is read by the first decode step
    rows = min(read, PREFILL_ROWS)
    prompts = min(median(rows, is_own, False, 3) for is_own in (False, True)) * read / rows
    columns = sum(n * len(p) + n * (n - 1) // 2 for p, n in zip(requests.prompts, requests.limits, strict=True))
    attended = columns * engine._runner.bytes_per_column
    return Floor(prompts, steps * one_row + (requests.num_tokens - steps) * each_more,
                 attended / bandwidth(max(2**20, engine.kv_bytes)), step_torch, step_own)
