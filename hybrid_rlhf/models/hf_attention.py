"""transformers' interfaces for attention, masks and caches: where the decode engine plugs into a model's own forward.

It imports transformers, as load.py and backbone.py do, because a cache must be an instance of its Cache class and
because attention and mask functions are found in its registries by name. Nothing here knows what is plugged in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
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
    """The class, as `derived` names it, that the forward of `model` demands of its cache."""
    return {"minimax": "transformers.models.minimax.modeling_minimax:MiniMaxCache"}.get(
        model.config.model_type, "Cache")


def causal_mask_function() -> Callable:
    """The function by which transformers says "plain causal" to a mask function."""
    from transformers.masking_utils import causal_mask_function

    return causal_mask_function


def takes_custom_attention(model: nn.Module) -> bool:
    """Whether every attention of `model` looks its function up in transformers' registry."""
    parts = [m for m in model.modules() if hasattr(m, "_can_set_attn_implementation")]
    return all(type(m)._can_set_attn_implementation() for m in parts)


@contextmanager
def custom_attention(model: nn.Module, name: str, attention: Callable, mask: Callable) -> Iterator[None]:
    """Within the block, `model` attends by `attention` with the masks of `mask`, registered as `name`."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    # every config that some module reads, for composite models hold copies
    configs = {id(m.config): m.config for m in model.modules()
               if hasattr(getattr(m, "config", None), "_attn_implementation_internal")}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    AttentionInterface._global_mapping[name] = attention
    AttentionMaskInterface._global_mapping[name] = mask
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


@contextmanager
def own_attention(is_float: Callable, is_bool: Callable) -> Iterator[None]:
    """Within the block, models that attend by themselves get additive masks from `is_float`, boolean from `is_bool`."""
    from transformers.masking_utils import AttentionMaskInterface

    mapping = AttentionMaskInterface._global_mapping
    before = {name: mapping[name] for name in ("eager", "sdpa")}
    mapping.update(eager=is_float, sdpa=is_bool)
    try:
        yield
    finally:
        mapping.update(before)


@contextmanager
def sdpa_replaced(attention: Callable) -> Iterator[None]:
    """Within the block models whose attention is "sdpa" call attention(original, module, query, key, ...) in its place,
    where original is what they would have called. Their configuration, and so their masks, stay as they are."""
    from transformers.modeling_utils import AttentionInterface

    mapping = AttentionInterface._global_mapping
    original = mapping["sdpa"]
    mapping["sdpa"] = partial(attention, original)
    try:
        yield
    finally:
        mapping["sdpa"] = original


@contextmanager
def without_padding_check(model: nn.Module) -> Iterator[None]:
    """Within the block, models that look for padding in their input to warn of it do not: the look makes the host wait
    for the device at every step, and there is no padding.
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


def forward_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that the module's forward declares (through transformers' decorators)."""
    return _parameters(type(module))


@cache
def _parameters(module_class: type) -> frozenset[str]:
    return frozenset(inspect.signature(module_class.forward).parameters)
