"""Overrides for particular models to run over slots: undone when the mode ends, and subject to the parity check. They
replace positions and attention only, no forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from hybrid_rlhf.engine.decode.attention import SlotAttention
from hybrid_rlhf.models.hf_attention import forward_parameters
from hybrid_rlhf.models.transformers_compat import attends_by


def has_own_attention_adapted(model: nn.Module) -> bool:
    """Whether we have an attention for a model that transformers' registry of attention functions does not cover."""
    return any(_name(module) in _ATTENTIONS for module in model.modules())


def counters(model: nn.Module) -> list[nn.Module]:
    """Position embeddings that count one position for the whole batch but accept each row's own (BART's family)."""
    if "position_ids" in forward_parameters(model):
        return []
    lengths = {"cache_length", "past_key_values_length"}  # of transformers 5.24, and of earlier releases
    return [m for m in model.modules() if "position_ids" in (named := forward_parameters(m)) and lengths & named]


@contextmanager
def adapted(model: nn.Module, attention: SlotAttention, with_attention: bool) -> Iterator[None]:
    """Within the block rows have the positions of `attention`'s step and, with_attention, attend by `attention`."""
    with ExitStack() as stack:
        for module in counters(model):
            for hook in _placed(module, attention):
                stack.callback(hook.remove)
        modules = [m for m in model.modules() if with_attention and _name(m) in _ATTENTIONS]
        for index, module in enumerate(modules):
            stack.enter_context(attends_by(module, _ATTENTIONS[_name(module)](module, index, attention)))
        yield


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"


def _placed(module: nn.Module, attention: SlotAttention) -> list:
    """Hooks for such a module, which looks up one row of positions: they flatten all rows and reshape its output."""

    def line_up(_module: nn.Module, inputs: tuple, named: dict) -> tuple[tuple, dict]:
        return inputs[:1], {"position_ids": attention.cache.step.positions.flatten()}

    def cut(_module: nn.Module, _inputs: tuple, embedded: Tensor) -> Tensor:
        return embedded.reshape(*attention.cache.step.positions.shape, -1)

    return [module.register_forward_pre_hook(line_up, with_kwargs=True), module.register_forward_hook(cut)]


def _gpt_neo(module: nn.Module, _index: int, attention: SlotAttention) -> Callable:
    """GPT-Neo does not scale attention scores, and every second layer has a sliding window."""
    window = module.config.window_size if module.attention_type == "local" else None

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        step = attention.cache.step
        if window is not None and step.width > window:
            attention_mask = attention.bool_mask(batch_size=len(query), kv_length=step.width,
                                                 mask_function=lambda _b, _h, q, k: k > q - window)
        return attention.attend(module, query, key, value, attention_mask, scaling=1.0)[0].transpose(1, 2), None

    return attend


def _openai_gpt(module: nn.Module, index: int, attention: SlotAttention) -> Callable:
    """GPT-1 has no cache of its own; its keys come as (B, H, D, Q)."""

    def attend(query: Tensor, key: Tensor, value: Tensor, _mask: None = None, _weights: bool = False) -> list[Tensor]:
        key, value = attention.cache.update(key.transpose(2, 3), value, index)
        scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
        return [attention.attend(module, query, key, value, None, scaling=scaling)[0].transpose(1, 2)]

    return attend


_ATTENTIONS: dict[str, Callable] = {"modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
                                    "modeling_openai.Attention": _openai_gpt}
