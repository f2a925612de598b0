"""Partition weights over the processes as they are read, so that no process ever holds a full model before ZeRO 3.

Between reading and ZeRO a partitioned ("cut") weight keeps its shape, dtype and device, is a view of one NaN, and takes
no memory: a computation with it gives NaN, and not plausible numbers. Small weights stay whole, and so do embeddings
and heads, which are resized, copied or initialised in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.distributed import joined_over_ranks, rank, world_size

Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager]  # a block in which these weights are gathered
_PART = "part_of_this_process"
_HEADS = ("score", "classifier")


def part_of(parameter: Tensor) -> Tensor | None:
    """This process's part of a cut weight: (ceil(numbers / processes),), of the flattened weight from rank x that size
    on, padded with zeros on the last process. None for a weight that is whole."""
    return getattr(parameter, _PART, None)


def is_cut(module: nn.Module) -> bool:
    """Whether some weight of `module` is cut and not taken over by ZeRO yet."""
    return any(part_of(p) is not None for p in module.parameters())


@torch.no_grad()
def cut(parameter: nn.Parameter, device: torch.device) -> None:
    """Keep this process's part of a weight, on `device`, and free the rest."""
    flat = parameter.data.reshape(-1)
    size = -(-flat.numel() // world_size())
    local = flat[rank() * size:(rank() + 1) * size]
    part = torch.zeros(size, dtype=flat.dtype, device=device)
    part[:len(local)].copy_(local)
    setattr(parameter, _PART, part)
    parameter.data = _stand_in(parameter.data, device)


def take_part(parameter: nn.Parameter) -> Tensor:
    """The part of a cut weight, handed over: the weight no longer refers to it."""
    part = getattr(parameter, _PART)
    delattr(parameter, _PART)
    return part


def cut_as_read(model: nn.Module, name: str, device: torch.device) -> None:
    """Cut the weight `name` of a transformers model that has just been read, unless it is to stay whole."""
    place, _, last = name.rpartition(".")
    owner = model.get_submodule(place)
    weight = owner._parameters.get(last)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    stays = any(owner is table for table in tables) or place.split(".")[0] in _HEADS
    if weight is not None and weight.dim() > 1 and weight.is_floating_point() and not weight.is_meta and not stays:
        cut(weight, device)


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within the block the cut ones among these weights are gathered on every process, for reading. A collective: every
    process enters with the same weights."""
    cut_ones = [(p, part, p.data) for p in parameters if (part := part_of(p)) is not None]
    for parameter, part, stand_in in cut_ones:
        parameter.data = joined_over_ranks(part)[:stand_in.numel()].view(stand_in.shape)
    try:
        yield
    finally:
        for parameter, _, stand_in in cut_ones:
            parameter.data = stand_in


@contextmanager
def layer_by_layer(model: nn.Module, gather: Gather) -> Iterator[None]:
    """Within the block a forward of `model` gathers the weights of each layer while that layer computes, and those
    outside of layers throughout."""
    layers = list(_layers(model))
    inside = {id(p) for layer in layers for p in layer.parameters()}
    open_layers: dict[int, ExitStack] = {}

    def before(layer: nn.Module, *_inputs: object) -> None:
        open_layers[id(layer)] = ExitStack()
        open_layers[id(layer)].enter_context(gather(layer.parameters()))

    def after(layer: nn.Module, *_inputs: object) -> None:
        open_layers.pop(id(layer)).close()

    hooks = [hook for layer in layers
             for hook in (layer.register_forward_pre_hook(before), layer.register_forward_hook(after))]
    try:
        with gather(p for p in model.parameters() if id(p) not in inside):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        while open_layers:
            open_layers.popitem()[1].close()


def computing(model: nn.Module) -> AbstractContextManager:
    """A block in which `model` may compute, whether its weights are cut or not. A collective: every process enters, and
    computes the same."""
    return layer_by_layer(model, gathered) if is_cut(model) else nullcontext()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists: the layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (member for member in child if not isinstance(member, nn.ModuleList))
            yield from (layer for member in child if isinstance(member, nn.ModuleList) for layer in member)
        else:
            yield from _layers(child)


def _stand_in(like: Tensor, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=like.dtype, device=device).expand(like.shape)
