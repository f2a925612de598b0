"""transformers' own continuous batching (`generate_batch`) as a peer: its manager is made beforehand, its cache sized
for the requests, so that only the work on them is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def continuous_batching(model: nn.Module, prompts: list[list[int]], limits: list[int], rows: int) -> Iterator:
    """A function that samples all requests, each to its own limit, and returns their tokens; `rows` run at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = 256  # transformers' default; 32 was no faster here
    pages = -(-max(len(p) + n for p, n in zip(prompts, limits, strict=True)) // page) + 1
    drawn = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(limits),
                             eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(page_size=page, num_blocks=pages * rows, max_batch_tokens=2048,
                                     max_requests_per_batch=rows, allow_block_sharing=False)
    implementation = model.config._attn_implementation
    try:
        with torch.no_grad(), model.continuous_batching_context_manager(
                generation_config=drawn, continuous_batching_config=sizes, warmup=False) as manager:
            yield lambda: _run(manager, prompts, limits)
    finally:
        model.set_attn_implementation(implementation)


def _run(manager, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:  # noqa: ANN001
    names = [manager.add_request(p, max_new_tokens=n, eos_token_id=-1) for p, n in zip(prompts, limits, strict=True)]
    results: dict[str, list[int]] = {}
    while len(results) < len(names):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise SystemExit("transformers' continuous batching has died")
        if result is not None and result.is_finished():
            results[result.request_id] = result.generated_tokens
    tokens = [results[name] for name in names]
    if [len(t) for t in tokens] != limits:
        raise SystemExit("transformers' continuous batching did not keep to the limits; not measured")
    return tokens
