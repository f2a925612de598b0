"""Expert choices of a whole minibatch, counted before its gradient, so that the router's loss is a sum over tokens.

The count is a no-grad forward over the minibatch, in evaluation mode. If one micro-batch on one process is the whole
minibatch, it counts its own choices, without an extra forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import gather_over_ranks, world_size
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train import accumulate


def expert_shares(engine: HybridEngine, batch: SequenceBatch, max_tokens: int) -> Callable[[int], Tensor | None]:
    """Number of rows of a micro-batch -> (E,) each expert's choices per real token of `batch` over all processes.

    None if the micro-batch can count its own, or there is no router. Every process calls this at the same point.
    """
    router = getattr(engine.module, "router", None)
    if router is None or router.num_choices is None:
        return lambda _rows: None
    counted = cache(lambda: _counted(engine, batch, max_tokens))
    if world_size() > 1:
        counted()  # now on all processes: the forward may contain collectives
        return lambda _rows: counted()
    return lambda rows: None if rows == len(batch) else counted()


@torch.no_grad()
def _counted(engine: HybridEngine, batch: SequenceBatch, max_tokens: int) -> Tensor:
    was_training, counts = engine.module.training, []
    engine.module.eval()
    bare = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))  # no token is scored
    with engine.active():
        for _, choices in accumulate.score(
                engine, batch.attention_mask.sum(1), max_tokens,
                lambda index: engine(bare.rows(index).to(engine.device), with_choices=True).choices):
            if choices is not None:
                counts.append(choices.cpu())
    engine.module.train(was_training)
    num_chosen = torch.stack(counts).double().sum(0).tolist() if counts else []
    everywhere = torch.tensor([each for each in gather_over_ranks(num_chosen) if each], dtype=torch.float64).sum(0)
    return engine.module.router.shares(everywhere).float()
