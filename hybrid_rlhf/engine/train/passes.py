"""One forward (and backward) pass, which may run out of memory while other processes wait in it for this one.

DeepSpeed gathers weights and adds up gradients in the midst of a pass, and every pass over a module comes to the same
collectives in the same order. A process that ran out of memory therefore repeats the pass with the smallest batch,
skips the collectives that it has made, and joins the others in the rest. The result of the pass is useless on every
process; the caller has all of them agree on that, and begin again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine.device_memory import release
from hybrid_rlhf.engine.train.deepspeed_compat import Collectives, OutOfStep, PassStart, is_partitioned


def attempt(module: nn.Module, run: Callable[[], None], least: Callable[[], None] | None = None,
            undo: Callable[[], None] = lambda: None) -> Exception | None:
    """Run a pass over `module` by `run`. Where memory runs out, return the error: at once, if other processes do not
    take part in the pass (`least` is None), else after `undo` (of what `run` left half done) and `least`, a pass with
    the smallest batch.

    Raises whatever else `run` raises, and UserError where the others cannot be joined again.
    """
    if least is None:
        return _shortage(run)
    start = PassStart(module) if is_partitioned(module) else None
    made = Collectives()
    with made.watched():
        error = _shortage(run)
    if error is None:
        return None
    release()
    undo()
    if not all(collective.is_made for collective in made.noted):
        raise UserError(f"out of memory inside a collective ({error}); set "
                        "engine.micro_batch_tokens to less and start again") from error
    if start is not None:
        start.restore()
    rest = Collectives(made.noted)
    try:
        with rest.watched():
            least()
        if len(rest.noted) < len(made.noted):
            raise OutOfStep(f"{len(rest.noted)} collectives in place of {len(made.noted)}")
    except OutOfStep as cause:
        raise UserError(f"out of memory, and this model's passes differ ({cause}), so that the other processes cannot "
                        "go on; set engine.micro_batch_tokens to less and start again") from error
    return error


def forget(module: nn.Module) -> None:
    """Release the gathered weights on all processes, after a pass that one of them could not finish."""
    if is_partitioned(module):
        PassStart(module).forget()


def _shortage(run: Callable[[], None]) -> Exception | None:
    """The out-of-memory error of `run`, without its frames, which hold memory; None where there is none."""
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)
    return None


# -- the smallest pass, by which a process joins the collectives of others that have more to compute -------------------


def dummy_batch(pad_id: int, device: torch.device) -> SequenceBatch:
    """The smallest batch: one sequence of two tokens, of which one is predicted."""
    ids = torch.full((1, 2), pad_id, device=device)
    real = torch.ones_like(ids, dtype=torch.bool)
    return SequenceBatch(ids, real, real)


def zero_of(output: object) -> Tensor:
    """A zero with zero gradient that depends on every float in an output (a tensor, or an object of tensors)."""
    numbers = [output] if isinstance(output, Tensor) else [v for v in vars(output).values() if isinstance(v, Tensor)]
    return sum(v.float().sum() for v in numbers if v.is_floating_point()) * 0.0
