"""What libraries tell those who program with them is not told to those who run this: the first screen is the run's."""

from __future__ import annotations

import logging
import sys
import warnings

LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "peft", "torch", "transformers")
# Loggers that name, at import, what is missing for ways that are not taken here; what is asked for is checked by us.
_LOGGERS = ("bitsandbytes", "torch.distributed.elastic.multiprocessing.redirects")
# peft, on GPT-2's layers, which it then treats as they want; tqdm, in a notebook without widgets, which are not used
_SAID = ("fan_in_fan_out is set to False but", "IProgress not found")


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
    for text in _SAID:
        warnings.filterwarnings("ignore", message=text)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that there is no accelerator: the run says on what it computes. (DeepSpeed sets its level at import.)"""
    return "Setting accelerator to CPU" not in record.getMessage()
