"""Our matrix products in place of nn.Linear's, in the dtypes in which the CPU kernels are faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def own_products(model: nn.Module, linear: Callable | None, dtypes: frozenset[torch.dtype]) -> Iterator[int]:
    """Within the block every plain nn.Linear of `model` with weights in `dtypes` multiplies by
    `linear(input, weight, bias)`, which reads the weights in place; yields how many do.

    Left alone: layers of other dtypes, quantized ones, other subclasses, modules whose forward is replaced already
    (offloading hooks), and every call that needs gradients or mixes dtypes. linear None: nothing is done.
    """
    modules = [m for m in model.modules() if linear and _is_plain(m, dtypes)]
    for module in modules:
        module.forward = _forward(module, linear)
    try:
        yield len(modules)
    finally:
        for module in modules:
            del module.forward


def _is_plain(module: nn.Module, dtypes: frozenset[torch.dtype]) -> bool:
    return (type(module) is nn.Linear and module.weight.dtype in dtypes
            and module.weight.device.type == "cpu" and "forward" not in vars(module))


def _forward(module: nn.Linear, linear: Callable) -> Callable[[Tensor], Tensor]:
    weight, bias = module.weight, module.bias  # looked up once: nn.Module's look-up is slow beside a small product
    dtype = weight.dtype

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name for it
        if torch.is_grad_enabled() or input.dtype != dtype or not input.numel():
            return F.linear(input, weight, bias)
        return linear(input, weight, bias)

    return forward
