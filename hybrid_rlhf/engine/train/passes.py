"""One forward (and backward) pass, which may run out of memory while other processes wait in it for this one.

DeepSpeed gathers weights and adds up gradients in the midst of a pass, and every pass over a module comes to the same
collectives in the same order. A process that ran out of memory therefore goes through the pass again with the least
there is to compute, leaves out the collectives that it has been through, and meets the others in the rest. What came of
the pass is of no use on any process; whoever runs passes has all of them agree on that, and begin again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.out_of_memory import is_out_of_memory
from hybrid_rlhf.engine.device_memory import release
from hybrid_rlhf.engine.train.deepspeed_compat import Collectives, OutOfStep, PassStart, is_partitioned


def attempt(module: nn.Module, run: Callable[[], None], least: Callable[[], None] | None = None,
            undo: Callable[[], None] = lambda: None) -> Exception | None:
    """Run a pass over `module` by `run`. Where memory runs out, the error is returned: at once, if other processes have
    no part in the pass (`least` is None), else after `undo` (of what `run` left half done) and `least`, a pass with the
    least to compute.

    Raises whatever else `run` raises, and UserError where the others cannot be met again.
    """
    if least is None:
        return _shortage(run)
    start = PassStart(module) if is_partitioned(module) else None
    met = Collectives()
    with met.watched():
        error = _shortage(run)
    if error is None:
        return None
    release()
    undo()
    if not all(each.is_made for each in met.noted):
        raise UserError(f"out of memory in what processes tell each other ({error}); set "
                        "engine.micro_batch_tokens to less and start again") from error
    if start is not None:
        start.restore()
    rest = Collectives(met.noted)
    try:
        with rest.watched():
            least()
        if len(rest.noted) < len(met.noted):
            raise OutOfStep(f"{len(rest.noted)} collectives in place of {len(met.noted)}")
    except OutOfStep as lost:
        raise UserError(f"out of memory, and this model's passes differ ({lost}), so that the other processes cannot "
                        "go on; set engine.micro_batch_tokens to less and start again") from error
    return error


def forget(module: nn.Module) -> None:
    """After a pass that one of the processes could not finish, on all of them: no weight is taken to be whole."""
    if is_partitioned(module):
        PassStart(module).forget()


def _shortage(run: Callable[[], None]) -> Exception | None:
    """The error by which `run` says that memory has run out, without its frames, which hold memory."""
    try:
        run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)
    return None
