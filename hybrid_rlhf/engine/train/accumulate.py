"""One optimizer step over a minibatch: micro-batches within a token budget, a backward pass after each, then the step.

Each micro-batch's loss is its share of the minibatch's, so the gradient does not depend on the split. When a
micro-batch runs out of memory the budget becomes half its size. Scoring goes on with the rows that are left. A step
discards its gradients, of which a failed backward pass leaves some, and restarts its minibatch. So do all processes
where one of them ran out, under the lowest limit of any; passes.py keeps them in step until then. The limits are kept
in `engine.oom_limits`, phase -> most tokens, for later steps and for checkpoints (they change the rounding).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import is_main, max_over_ranks, world_size
from hybrid_rlhf.core.errors import CRITIC_CURE, NotFinite, UserError
from hybrid_rlhf.core.memory import explained, is_out_of_memory
from hybrid_rlhf.core.metrics import Metrics, Observed, on_host
from hybrid_rlhf.core.tensors import prefix_groups_within, token_budget_groups
from hybrid_rlhf.engine.device_memory import peak_in, release
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.idle_cache import give_back_idle
from hybrid_rlhf.engine.train.passes import attempt, forget
from hybrid_rlhf.models.complete import few

Scores = TypeVar("Scores")

_log = logging.getLogger(__name__)

# Fixed cost of a forward and backward, in tokens times weights: about 20 ms of the device's matrix products. Reading
# the weights once more costs about as much as 64 tokens on any device.
_PASS_WEIGHTS = {"cpu": 5e9}
_is_rehearsal = False
UPDATE, SCORE = "update", "score"  # the phases: with gradients and without
_NO_ROOM = "its state does not fit: train fewer weights (model.lora.r) or take a smaller model"

Shortage = tuple[Tensor, Exception]  # lengths of the micro-batch that ran out of memory, and the error


@contextmanager
def rehearsal() -> Iterator[None]:
    """Within the block steps run their passes, to measure their time, and change no weight: the gradients are
    discarded, as those of a step that ran out of memory are."""
    global _is_rehearsal
    _is_rehearsal = True
    try:
        yield
    finally:
        _is_rehearsal = False


class Rows(NamedTuple):
    """Rows of a minibatch, to be split into micro-batches.

    lengths (N,): tokens of each. micro_batch_loss(index of rows) -> (their share of the minibatch's loss, {metric:
    (mean, weight)}). prefix_groups (N,): rows of one number share a prefix and are kept together.
    """

    lengths: Tensor
    micro_batch_loss: Callable[[Tensor], tuple[Tensor, dict[str, tuple[Tensor, float]]]]
    prefix_groups: Tensor | None = None


def accumulate(engine: HybridEngine, max_tokens: int, *minibatch: Rows) -> Metrics:
    """One optimizer step over all rows of the minibatch.

    Returns the metrics of the micro-batches, grad_norm, learning_rate, micro_batch_tokens (the budget in force) and
    the peak of memory in bytes. Raises UserError where a single row does not fit in memory, and whatever a loss raises;
    no gradient is left behind.
    """
    with explained(f"while updating the {engine.name}"):
        return _accumulated(engine, max_tokens, minibatch)


def _accumulated(engine: HybridEngine, max_tokens: int, minibatch: Sequence[Rows]) -> Metrics:
    training, learning_rate = engine.training, engine.training.learning_rate
    while True:
        budget, metrics = token_budget(engine, UPDATE, max_tokens), Metrics()
        engine.module.train()
        try:
            with (engine.active(), peak_in(metrics, f"{engine.name.split()[0]}/{UPDATE}", engine.device),
                  _naming_unreached(engine) as reached):
                seen, shortage = _passes(engine, budget, minibatch)
                if _is_rehearsal:
                    reached.clear()
                    training.discard_gradients()
                    return metrics
                norm = None
                if max_over_ranks(int(shortage is not None)):
                    reached.clear()
                else:
                    with explained(f"in the {engine.name}'s optimizer step", _NO_ROOM):
                        norm = training.step()
        except BaseException:
            training.discard_gradients()
            raise
        if norm is not None:
            for each in on_host(seen):  # once, after all launches: reading a number waits for the work before it
                metrics.add_all(each)
            return _report(engine, norm, metrics).add("learning_rate", learning_rate).add("micro_batch_tokens", budget)
        training.discard_gradients()
        forget(engine.module)
        if shortage is not None:
            halve_budget(engine, UPDATE, *shortage)
        agree_on_limit(engine, UPDATE)
        release()


@contextmanager
def _naming_unreached(engine: HybridEngine) -> Iterator[set[str]]:
    """Warn in an engine's first step, in one line, about trained weights that no backward pass within the block
    reaches, except experts, which the router may have passed by, and embeddings whose gradient comes by rows. Yields
    the names of those reached; if cleared, as after a step that did not fit in memory, there is no warning."""
    reached: set[str] = set()
    weights = {} if engine.training.num_steps else {
        name: weight for name, weight in engine.training.parameters.items()
        if "expert" not in name and not engine.training.takes_rows(weight)}
    hooks = [weight.register_hook(lambda _gradient, name=name: reached.add(name)) for name, weight in weights.items()]
    try:
        yield reached
    finally:
        for hook in hooks:
            hook.remove()
    if (left := sorted(weights.keys() - reached)) and reached and is_main():
        _log.warning("the %s's loss does not depend on %s, which are trained and get no gradient: freeze them "
                     "(model.freeze), or leave them out of lora.target_modules", engine.name, few(left, "weight"))


def _passes(engine: HybridEngine, budget: int, minibatch: Sequence[Rows]) -> tuple[list[Observed], Shortage | None]:
    """The forward and backward passes of a step: their metrics, and where memory ran out, if it did."""
    micro_batches = [(rows, index) for rows in minibatch
                     for index in split(engine, rows.lengths, budget, rows.prefix_groups)]
    num_passes = max(1, engine.num_forwards(len(micro_batches)))  # under ZeRO 2 and 3 as many on every process
    if num_passes > len(micro_batches) or _meets_others(engine, UPDATE):
        return _passes_together(engine, micro_batches, num_passes)
    observed: list[Observed] = []
    for number, (rows, index) in enumerate(micro_batches, 1):
        try:
            loss, metrics = rows.micro_batch_loss(index)
            engine.training.backward(loss, is_last=number == len(micro_batches))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return observed, (rows.lengths[index], error.with_traceback(None))  # its frames hold memory
        observed.append(metrics)
    return observed, None


def _passes_together(engine: HybridEngine, micro_batches: Sequence[tuple[Rows, Tensor]], num_passes: int
                     ) -> tuple[list[Observed], Shortage | None]:
    """The same in step with other processes: dummy passes where there are no rows left, and a process that ran out of
    memory goes on to the last pass, in which the others wait."""
    observed: list[Observed] = []
    shortage: Shortage | None = None

    def run(number: int, rows: Rows | None, index: Tensor | None) -> None:
        if rows is None:
            loss = engine.dummy_forward()
        else:
            loss, metrics = rows.micro_batch_loss(index)
            observed.append(metrics)
        engine.training.backward(loss, is_last=number == num_passes - 1)

    for i in range(num_passes):
        rows, index = micro_batches[i] if i < len(micro_batches) and shortage is None else (None, None)
        least = partial(run, i, None, None) if _meets_others(engine, UPDATE) else None
        error = attempt(engine.module, partial(run, i, rows, index), least, engine.training.discard_gradients)
        if error is not None and (rows is None or shortage is not None):
            raise error  # the smallest pass does not fit either
        if error is not None:
            shortage = rows.lengths[index], error
    return observed, shortage


def token_budget(engine: HybridEngine, phase: str, max_tokens: int) -> int:
    """The most tokens of a micro-batch in `phase`: as set, or fewer where memory has run out before."""
    return min(max_tokens, engine.oom_limits.get(phase, max_tokens))


def split(engine: HybridEngine, lengths: Tensor, budget: int, prefix_groups: Tensor | None) -> list[Tensor]:
    """Indices of rows in micro-batches, cut where less padding is worth another forward (and backward)."""
    if prefix_groups is not None:  # rows that share tokens stay together, and padding costs nothing
        return prefix_groups_within(prefix_groups, lengths, budget)
    if world_size() > 1:  # forwards may wait for those of other processes: as few as possible
        return token_budget_groups(lengths, budget)
    size = max(1, sum(p.numel() for p in engine.module.parameters()))
    return token_budget_groups(lengths, budget, 64 + _PASS_WEIGHTS.get(engine.device.type, 1.5e12) // size)


def score(engine: HybridEngine, lengths: Tensor, max_tokens: int, score_fn: Callable[[Tensor], Scores],
          prefix_groups: Tensor | None = None) -> Iterator[tuple[Tensor, Scores]]:
    """(index of rows, score_fn(index)) for micro-batches that hold every row once; nothing is trained.

    lengths (N,): tokens of each row; prefix_groups as in Rows. A micro-batch that runs out of memory is split, and so
    are those after it. Raises UserError where a single row does not fit.
    """
    waiting = split(engine, lengths, token_budget(engine, SCORE, max_tokens), prefix_groups)
    least = engine.dummy_forward if _meets_others(engine, SCORE) else None
    is_again = False
    while num_passes := engine.num_forwards(len(waiting)):  # under ZeRO 2 and 3 as many on every process
        if is_again and engine.stage >= 2:  # memory ran out on this process or another, as all know
            forget(engine.module)
            agree_on_limit(engine, SCORE)
        error, is_again = None, True
        for _ in range(num_passes):
            if error is not None or not waiting:
                engine.dummy_forward()
                continue
            results: list[Scores] = []
            error = attempt(engine.module, partial(_into, results, score_fn, waiting[0]), least)
            if error is None:
                yield waiting.pop(0), results.pop()
            elif least is None:
                break
        if error is not None:
            budget, rows = halve_budget(engine, SCORE, lengths[waiting[0]], error), torch.cat(waiting)
            groups = None if prefix_groups is None else prefix_groups[rows]
            waiting = [rows[index] for index in split(engine, lengths[rows], budget, groups)]
            error = None
            release()


def _into(results: list[Scores], score_fn: Callable[[Tensor], Scores], index: Tensor) -> None:
    results.append(score_fn(index))


def agree_on_limit(engine: HybridEngine, phase: str) -> None:
    """Take the lowest limit of all processes. Each calls it where one of them ran out of memory in `phase`."""
    limit = engine.oom_limits.get(phase, sys.maxsize)
    lowest = -max_over_ranks(-limit)
    if lowest < limit:
        engine.oom_limits[phase] = lowest
        _log.warning("out of memory in the %s's %s on another process; from now on a micro-batch has at most %d tokens "
                     "on all", engine.name, phase, lowest)


def _report(engine: HybridEngine, norm: float, metrics: Metrics) -> Metrics:
    """`metrics` with grad_norm, where it is finite, and the number of updates skipped because it was not.

    Raises NotFinite after too many in a row. Every process counts the same.
    """
    training = engine.training
    if training.num_skipped_in_a_row:
        scale = "" if training.loss_scale is None else f"; the loss scale of float16 is now {training.loss_scale:g}"
        _log.warning("the %s's gradient is not finite (norm %s): update %d is skipped, %d in a row%s", engine.name,
                     norm, training.num_steps, training.num_skipped_in_a_row, scale)
    if training.num_skipped_in_a_row >= training.max_skipped_in_a_row:
        cure = CRITIC_CURE if engine.name == "critic" else (
            "lower train.learning_rate (roles.actor.learning_rate of a stage that samples), or look at the data")
        raise NotFinite(f"the {engine.name}'s gradient was not finite in {training.num_skipped_in_a_row} updates in a "
                        f"row; {cure}")
    metrics.add("grad_norm", norm, weight=1.0) if isfinite(norm) else metrics.add("grad_norm", 0.0, weight=0.0)
    if training.loss_scale is not None:
        metrics.add("train/loss_scale", training.loss_scale)
    return metrics.add_spread("train/skipped_updates", torch.tensor([float(training.num_skipped)]), "max")


def halve_budget(engine: HybridEngine, phase: str, lengths: Tensor, error: BaseException) -> int:
    """Half the tokens of the micro-batch of `lengths` that ran out of memory, kept as a limit; or the same size, where
    an idle decode cache was freed.

    Raises `error` if it is not about memory, and UserError where nothing can be split.
    """
    longest, size = int(lengths.max()), len(lengths) * int(lengths.max())
    if give_back_idle():
        _log.warning("out of memory in the %s's %s; the decode cache is not kept between rollouts any more",
                     engine.name, phase)
        return size
    what = f"out of memory in the {engine.name}'s {phase}: a micro-batch of {size} tokens ({len(lengths)} x {longest})"
    if len(lengths) == 1:
        raise UserError(f"{what} is a single row and cannot be split; shorten it (data.max_length, or "
                        "data.max_prompt_length and max_new_tokens), set model.gradient_checkpointing true, or train "
                        "fewer weights (model.lora.r)") from error
    engine.oom_limits[phase] = size // 2
    _log.warning("%s does not fit; from now on at most %d tokens", what, size // 2)
    return size // 2


def _meets_others(engine: HybridEngine, phase: str) -> bool:
    """Whether other processes may wait for this one in a pass of this phase: in updates at every stage of ZeRO, because
    the last one reduces the gradients."""
    return world_size() > 1 and (phase == UPDATE or engine.stage == 3)
