"""Micro-batches: rows grouped by a token budget, which falls when memory runs out.

Losses are shares of one sum, so a minibatch may be split anyhow. When a micro-batch does not fit, the budget becomes
half its size. A scoring pass goes on with the rows that are left. An update starts its minibatch again from no gradient
at all: a backward pass that failed has left some of its gradients, and no copy is kept to undo them. What was learnt
stays in `engine.learnt`, phase -> most tokens, for later steps and for checkpoints (it moves the rounding).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import isfinite
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.config import NotFinite, UserError
from hybrid_rlhf.distributed import world_size
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.memory import is_out_of_memory, peak_in, release
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.tensors import kindred_groups, token_budget_groups

Numbers = TypeVar("Numbers")
Share = Callable[[Tensor], tuple[Tensor, dict[str, tuple[Tensor, float]]]]

_log = logging.getLogger(__name__)

# What starting a forward and backward costs, in tokens times weights: about 20 ms of the device's products. Reading the
# weights once more comes to about 64 tokens everywhere.
_PASS_WEIGHTS = {"cpu": 5e9}
UPDATE, SCORE = "update", "score"  # the phases: with gradients and without


class Part(NamedTuple):
    """Rows of an update: their lengths (N,) in tokens, what some of them add to the loss, and kin (N,), if rows of one
    number are to be kept together."""

    lengths: Tensor
    share: Share
    kin: Tensor | None = None


def budget(engine: HybridEngine, phase: str, max_tokens: int) -> int:
    """The most tokens of a micro-batch in `phase`: as set, or fewer where memory has run out before."""
    return min(max_tokens, engine.learnt.get(phase, max_tokens))


def _groups(engine: HybridEngine, lengths: Tensor, max_tokens: int, kin: Tensor | None) -> list[Tensor]:
    """Rows in micro-batches, cut where less padding is worth another forward (and backward). kin (N,): rows of one
    number share tokens, so they stay together and padding costs nothing."""
    if kin is not None:
        return kindred_groups(kin, lengths, max_tokens)
    if world_size() > 1:  # forwards may wait for those of other processes: as few as possible
        return token_budget_groups(lengths, max_tokens)
    size = max(1, sum(p.numel() for p in engine.module.parameters()))
    return token_budget_groups(lengths, max_tokens, 64 + _PASS_WEIGHTS.get(engine.device.type, 1.5e12) // size)


def groups(engine: HybridEngine, phase: str, lengths: Tensor, max_tokens: int, kin: Tensor | None = None,
           ) -> list[Tensor]:
    """Rows of these lengths (N,) as the micro-batches of `phase` that hold them now; see Part for kin."""
    return _groups(engine, lengths, budget(engine, phase, max_tokens), kin)


def measure(engine: HybridEngine, lengths: Tensor, max_tokens: int,
            numbers: Callable[[Tensor], Numbers], kin: Tensor | None = None) -> Iterator[tuple[Tensor, Numbers]]:
    """(rows, numbers(rows)) for groups of row indices that hold every row once.

    lengths (N,): tokens of each row; kin (N,): rows of one number are kept together. A group that runs out of memory
    is split, and so are those after it. Raises UserError where a single row does not fit.
    """
    waiting = _groups(engine, lengths, budget(engine, SCORE, max_tokens), kin)
    num_idle = engine.num_forwards(len(waiting)) - len(waiting)  # agreed on before the first, for all meet in each
    while waiting:
        try:
            found = numbers(waiting[0])
        except Exception as error:
            tokens = _fewer(engine, SCORE, lengths[waiting[0]], error)
        else:
            yield waiting.pop(0), found
            continue
        release()
        rows = torch.cat(waiting)
        waiting = [rows[group] for group in _groups(engine, lengths[rows], tokens, None if kin is None else kin[rows])]
    for _ in range(num_idle):
        engine.idle_forward()


def update(engine: HybridEngine, max_tokens: int, *parts: Part) -> Metrics:
    """One optimizer step over all rows of all parts, each in micro-batches of its own.

    Of a part, share(rows) -> (what they add to the loss, {name: (mean, weight)}). Returns what was observed, grad_norm,
    learning_rate, micro_batch_tokens (the budget in force) and the peak of memory in bytes. A minibatch that ran out of
    memory starts again with smaller micro-batches and gives the same gradient; UserError where a single row does not
    fit.
    """
    rate = engine.training.learning_rate
    while True:
        tokens = budget(engine, UPDATE, max_tokens)
        running: list[Tensor] = []  # the lengths of the rows under way, last
        metrics = Metrics()
        pieces = [(part, rows) for part in parts for rows in _groups(engine, part.lengths, tokens, part.kin)]
        try:
            with peak_in(metrics, f"{engine.name.split()[0]}/{UPDATE}", engine.device):
                norm = engine.update(pieces, _observed(metrics, running))
        except Exception as error:
            if not running:
                raise
            _fewer(engine, UPDATE, running[-1], error)
        else:
            return _stepped(engine, norm, metrics).add("learning_rate", rate).add("micro_batch_tokens", tokens)
        release()


def _stepped(engine: HybridEngine, norm: float, metrics: Metrics) -> Metrics:
    """`metrics` with grad_norm, where it is a number, and how many updates were skipped because it was none.

    Raises NotFinite after too many in a row. Every process counts the same.
    """
    training = engine.training
    if training.num_skipped_in_a_row:
        _log.warning("the %s's gradient is not finite (norm %s): update %d is skipped, %d in a row", engine.name, norm,
                     training.num_steps, training.num_skipped_in_a_row)
    if training.num_skipped_in_a_row >= training.max_skipped_in_a_row:
        raise NotFinite(f"the {engine.name}'s gradient was not finite in {training.num_skipped_in_a_row} updates in a "
                        "row; lower train.learning_rate, or look at the data")
    metrics.add("grad_norm", norm, weight=1.0) if isfinite(norm) else metrics.add("grad_norm", 0.0, weight=0.0)
    return metrics.add_spread("train/skipped_updates", torch.tensor([float(training.num_skipped)]), "max")


def _observed(metrics: Metrics, running: list[Tensor]) -> Callable[[tuple[Part, Tensor]], Tensor]:
    """A part's share as the engine calls it, its observations going to `metrics`."""

    def share(piece: tuple[Part, Tensor]) -> Tensor:
        part, rows = piece
        running.append(part.lengths[rows])
        value, observed = part.share(rows)
        for name, (mean, weight) in observed.items():
            metrics.add(name, mean, weight)
        return value

    return share


def _fewer(engine: HybridEngine, phase: str, lengths: Tensor, error: Exception) -> int:
    """Half the tokens of the micro-batch of `lengths` that ran out of memory, noted as learnt.

    Raises `error` if it is not about memory, and UserError where nothing can be split.
    """
    if not is_out_of_memory(error):
        raise error
    longest, size = int(lengths.max()), len(lengths) * int(lengths.max())
    what = f"out of memory in the {engine.name}'s {phase}: a micro-batch of {size} tokens ({len(lengths)} x {longest})"
    if len(lengths) == 1:
        raise UserError(f"{what} is a single row and cannot be split; shorten it (data.max_length, or "
                        "data.max_prompt_length and max_new_tokens), set model.gradient_checkpointing true, or train "
                        "fewer weights (model.lora.r)") from error
    if _waits_for_others(engine, phase):
        raise UserError(f"{what} does not fit, and other processes are in the midst of the same pass; set "
                        f"engine.micro_batch_tokens to {size // 2} or less and start again") from error
    engine.learnt[phase] = size // 2
    _log.warning("%s does not fit; from now on at most %d tokens", what, size // 2)
    return size // 2


def _waits_for_others(engine: HybridEngine, phase: str) -> bool:
    """Whether a pass of this phase talks to other processes before its end, so that one alone cannot repeat it."""
    stage = engine.training.stage if engine.training else 0
    return world_size() > 1 and stage >= (2 if phase == UPDATE else 3)
