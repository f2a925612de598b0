"""Relax garbage collection while a run starts, until its first step.

A start creates modules, functions and classes, which stay. Python's collector traverses all of them again and again as
they grow: a fifth to a third of the time to the first step.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Until its end or `restore_gc`, collect young objects a hundred thousand at a time, and old ones not at all."""
    gc.set_threshold(100_000, 1_000, 1_000)
    try:
        yield
    finally:
        restore_gc()


def restore_gc() -> None:
    gc.set_threshold(*_USUAL)


# -- Silence deprecation warnings of libraries, and their notes on unused features: the first screen is the run's ------


LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "peft", "torch", "transformers")
# Loggers that report, at import, what unused features lack; features that are asked for are checked by us.
_LOGGERS = ("bitsandbytes", "torch.distributed.elastic.multiprocessing.redirects")
# of peft, on GPT-2's layers, which it then handles correctly; of tqdm, in a notebook without widgets, which are unused
_MESSAGES = ("fan_in_fan_out is set to False but", "IProgress not found")


def quiet_libraries() -> None:
    """Silence, in this process, deprecations inside of libraries and their notes on what is not used here. Warnings of
    any other kind stay, and so do all of them where Python was given a filter (-W, PYTHONWARNINGS)."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if sys.warnoptions:
        return
    for kind in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind, module=rf"({'|'.join(LIBRARIES)})(\.|$)")
    for text in _MESSAGES:
        warnings.filterwarnings("ignore", message=text)


def _is_news(record: logging.LogRecord) -> bool:
    """Drops the message that there is no accelerator: the run says on what it computes. (DeepSpeed sets its level at
    import.)"""
    return "Setting accelerator to CPU" not in record.getMessage()
