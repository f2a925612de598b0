"""Evaluation mode for every submodule, and their own modes afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within the block every submodule is in evaluation mode, without gradient checkpointing; then as before."""
    modes = {m: m.training for m in module.modules()}
    checkpointing = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    module.eval()
    for part in checkpointing:
        part.gradient_checkpointing = False  # with it on, transformers refuses to keep a cache
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        for part in checkpointing:
            part.gradient_checkpointing = True
