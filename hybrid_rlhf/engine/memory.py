"""Running out of memory: how it is recognised, and what is given back before another try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybrid_rlhf.config import UserError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, on an accelerator or on the CPU."""
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def release() -> None:
    """Collect what a failed pass left behind and give cached blocks back to the device. Call it outside `except`,
    for a caught exception holds the frames that hold the tensors."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


@contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Within the block, running out of memory is a UserError that names `what` and gives `advice`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory in {what}; {advice}") from error


def fewer_slots(num_slots: int, capacity: int, error: BaseException) -> int:
    """Half of the slots of a cache that could not be allocated. Raises UserError where one slot is too many, and
    `error` itself if it is not about memory."""
    if not is_out_of_memory(error):
        raise error
    if num_slots <= 1:
        raise UserError(f"out of memory while generating: the cache of one request of {capacity} tokens does not fit; "
                        "shorten the prompt or max_new_tokens") from error
    return num_slots // 2
