"""Weights in parts over the processes from the moment they are read: what ZeRO 3 cuts is never whole on any of them.

Between reading and ZeRO a cut weight looks like itself (shape, dtype, device), is a view of one NaN, and takes no
memory: whoever computes with it unasked finds NaN, and nothing plausible. Small weights stay whole, and so do the
tables of words and heads, which are resized, copied and begun anew in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.distributed import joined_over_ranks, rank, world_size

Gather = Callable[[Iterable[nn.Parameter]], AbstractContextManager]  # a block in which these weights are whole
_PART = "part_of_this_process"
_HEADS = ("score", "classifier")


def part_of(parameter: Tensor) -> Tensor | None:
    """What this process holds of a cut weight: (ceil(numbers / processes),), of the flat whole those from rank x that
    on, the last process's ended with zeros. None for a weight that is whole."""
    return getattr(parameter, _PART, None)


def is_cut(module: nn.Module) -> bool:
    """Whether some weight of `module` is in parts that ZeRO has not taken yet."""
    return any(part_of(p) is not None for p in module.parameters())


@torch.no_grad()
def cut(parameter: nn.Parameter, device: torch.device) -> None:
    """Keep this process's part of a weight, on `device`, and let the whole go."""
    flat = parameter.data.reshape(-1)
    size = -(-flat.numel() // world_size())
    own = flat[rank() * size:(rank() + 1) * size]
    part = torch.zeros(size, dtype=flat.dtype, device=device)
    part[:len(own)].copy_(own)
    setattr(parameter, _PART, part)
    parameter.data = _stand_in(parameter.data, device)


def take_part(parameter: nn.Parameter) -> Tensor:
    """The part of a cut weight, which is then nobody else's."""
    part = getattr(parameter, _PART)
    delattr(parameter, _PART)
    return part


def cut_as_read(model: nn.Module, name: str, device: torch.device) -> None:
    """Cut the weight `name` of a transformers model that has just been read, if it is one to be cut."""
    place, _, last = name.rpartition(".")
    owner = model.get_submodule(place)
    weight = owner._parameters.get(last)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    stays = any(owner is table for table in tables) or place.split(".")[0] in _HEADS
    if weight is not None and weight.dim() > 1 and weight.is_floating_point() and not weight.is_meta and not stays:
        cut(weight, device)


@contextmanager
def whole(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within the block the cut ones among these weights are whole on every process, to be read. Every process enters
    with the same."""
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
    """Within the block a forward of `model` has the weights of each layer whole while that one computes, and those
    outside of layers throughout."""
    layers = list(_layers(model))
    inside = {id(p) for layer in layers for p in layer.parameters()}
    open_layers: dict[int, ExitStack] = {}

    def before(layer: nn.Module, *_given: object) -> None:
        open_layers[id(layer)] = ExitStack()
        open_layers[id(layer)].enter_context(gather(layer.parameters()))

    def after(layer: nn.Module, *_given: object) -> None:
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
    """The block in which `model` may compute, whether its weights are cut or not. Every process enters, and computes
    the same."""
    return layer_by_layer(model, whole) if is_cut(model) else nullcontext()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (each for each in child if not isinstance(each, nn.ModuleList))
            yield from (layer for each in child if isinstance(each, nn.ModuleList) for layer in each)
        else:
            yield from _layers(child)


def _stand_in(like: Tensor, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=like.dtype, device=device).expand(like.shape)
