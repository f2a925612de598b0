"""What the decode engine reads of transformers' models: the kinds of their layers, the classes that a cache must be an
instance of, the parameters of their forwards. transformers_compat.py has the registries of attention and masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import NamedTuple

from torch import nn


class LayerKind(NamedTuple):
    """What one layer keeps between tokens. num_states: convolution and recurrent states (0: none)."""

    has_keys: bool
    num_states: int
    is_sliding: bool
    base: str  # the transformers class that a layer of this kind must be an instance of


_KINDS = {"DynamicLayer": LayerKind(True, 0, False, "CacheLayerMixin"),
          "DynamicSlidingWindowLayer": LayerKind(True, 0, True, "CacheLayerMixin"),
          "DynamicIndexedLayer": LayerKind(True, 0, False, "CacheLayerMixin"),
          "LinearAttentionLayer": LayerKind(False, 1, False, "LinearAttentionCacheLayerMixin"),
          "LinearAttentionAndFullAttentionLayer": LayerKind(True, 1, False, "LinearAttentionAndFullAttentionLayer"),
          "LinearAttentionAndSlidingWindowAttentionLayer":
              LayerKind(True, 1, True, "LinearAttentionAndFullAttentionLayer"),
          "DummyLayer": LayerKind(False, 0, False, "DummyLayer")}


def layer_kinds(model: nn.Module) -> list[LayerKind]:
    """The kinds of the model's layers, from the cache that transformers would make for it.

    Raises NotImplementedError for a model with a cache class of its own.
    """
    from transformers import DynamicCache

    kinds = []
    for layer in DynamicCache(config=model.config).layers:
        name = type(layer).__name__
        if name not in _KINDS:
            raise NotImplementedError(f"its cache has layers of the class {name}")
        kind = _KINDS[name]
        kinds.append(kind._replace(num_states=layer.number_of_states) if kind.num_states else kind)
    return kinds


@cache
def derived(ours: tuple[type, ...], theirs: str) -> type:
    """A class with the methods of `ours` that is also transformers' `theirs`, as its isinstance checks demand.

    theirs: a class of transformers.cache_utils, or "module:class" of another one.
    """
    module, _, name = theirs.rpartition(":")
    return type(ours[0].__name__, (*ours, getattr(import_module(module or "transformers.cache_utils"), name)), {})


def cache_class(model: nn.Module) -> str:
    """The class, as `derived` names it, that the cache of `model` must be an instance of."""
    return {"minimax": "transformers.models.minimax.modeling_minimax:MiniMaxCache"}.get(
        model.config.model_type, "Cache")


def causal_mask_function() -> Callable:
    """transformers' mask function of plain causal attention."""
    from transformers.masking_utils import causal_mask_function

    return causal_mask_function


@contextmanager
def without_padding_check(model: nn.Module) -> Iterator[None]:
    """Within the block models do not check their input for padding to warn of it: the check synchronises host and
    device at every step, and there is no padding.
    """
    name = "warn_if_padding_and_no_attention_mask"
    modules = [m for m in model.modules() if hasattr(m, name) and name not in vars(m)]
    for module in modules:
        setattr(module, name, lambda *_inputs, **_named: None)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, name)


# Names of the cache, as an argument of forwards and in outputs: `cache` since transformers 5.24; before that
# past_key_values, or cache_params in state-space models.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(module: nn.Module) -> str | None:
    """The name under which the module's forward takes its cache; None if it takes none."""
    return next((name for name in CACHE_NAMES if name in forward_parameters(module)), None)


def cache_of(output: Mapping) -> object | None:
    """The cache in a model's or generate's output."""
    return next((output[name] for name in CACHE_NAMES if name in list(output)), None)


def forward_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that the module's forward declares (through transformers' decorators)."""
    return _parameters(type(module))


@cache
def _parameters(module_class: type) -> frozenset[str]:
    return frozenset(inspect.signature(module_class.forward).parameters)
