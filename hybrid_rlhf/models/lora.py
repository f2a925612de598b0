"""Low-rank adapters by peft: adding them, and merging them without losing what was learned. The only door to peft.

Source: LoRA, arXiv 2106.09685: W x + (alpha / r) B A x, with W frozen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid_rlhf.config import UserError, check


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters. With r = 0 all weights are trained.

    Attributes:
        r: Rank of the update; 0 turns LoRA off.
        alpha: Scale: the update is multiplied by alpha / r. None means 2 r.
        dropout: Dropout on the adapter's input; not for fused experts.
        target_modules: Names (or one regular expression) of the linear layers to adapt, fused expert weights such as
            gate_up_proj among them; "all-linear" takes every linear layer but the output head and a router.
    """

    r: int = 0
    alpha: float | None = None
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"

    def __post_init__(self) -> None:
        check(self.r >= 0, f"lora.r is {self.r}; it must be 0 (off) or a positive rank such as 8")
        check(0.0 <= self.dropout < 1.0, f"lora.dropout is {self.dropout}; it must lie in [0, 1)")


def add_lora(model: nn.Module, config: LoraConfig, adapter_name: str = "default") -> nn.Module:
    """Freeze `model` and put adapters beside its linear layers, in place; returns peft's wrapper (for saving).

    Raises UserError when target_modules match nothing: an adapter that adapts nothing trains nothing.
    """
    import peft

    modules, experts = _targets(model, config.target_modules)
    check(not (experts and config.dropout),
          f"lora.dropout is {config.dropout}, but the fused experts of {type(model).__name__} take none; set it to 0 "
          "or give lora.target_modules without experts")
    settings = peft.LoraConfig(r=config.r, lora_alpha=config.alpha or 2 * config.r, lora_dropout=config.dropout,
                               target_modules=modules, target_parameters=experts or None)
    try:
        with _names_as_given():
            wrapped = peft.get_peft_model(model, settings, adapter_name=adapter_name)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n in [*_linear_layers(model), *expert_weights(model)]})
        raise UserError(f"lora.target_modules {config.target_modules!r} matches no layer of {type(model).__name__}; "
                        f"its linear layers are {', '.join(linear)}") from error
    object.__setattr__(model, "_peft_wrapper", wrapped)  # not as a submodule: the wrapper holds the model
    return wrapped


def expert_weights(model: nn.Module) -> list[str]:
    """Names of the fused expert weights (num_experts, ., .) of a mixture of experts, adapters left out of the names."""
    holders = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "num_experts", None), int)}
    return [_plain(f"{name}.{weight}") for name, module in holders.items()
            for weight, value in module.named_parameters(recurse=False)
            if value.ndim == 3 and len(value) == module.num_experts]


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers but the heads, adapters left out."""
    heads = {id(m) for m in (model.get_output_embeddings(), getattr(model, "score", None)) if m is not None}
    return [_plain(n) for n, m in model.named_modules()
            if isinstance(m, nn.Linear) and ".lora_" not in n and id(m) not in heads]


def _plain(name: str) -> str:
    """A name as it was before peft wrapped the layer (fused experts are wrapped once for each weight)."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def _targets(model: nn.Module, wanted: list[str] | str) -> tuple[list[str] | str, list[str]]:
    """What `wanted` means, as peft takes it: linear layers and fused expert weights.

    Without experts peft finds the layers. With experts they are named one by one, since peft speaks of experts by the
    names that they had before they were fused, and would adapt the router too.
    """
    experts = expert_weights(model)
    if not experts:
        return wanted if isinstance(wanted, str) else list(wanted), []

    def is_wanted(name: str) -> bool:
        if isinstance(wanted, str):
            return wanted == "all-linear" or re.fullmatch(wanted, name) is not None
        return any(name == w or name.endswith(f".{w}") for w in wanted)

    modules, weights = ([n for n in names if is_wanted(n)] for names in (_linear_layers(model), experts))
    if not modules and not weights:  # peft's error says what there is
        return list(wanted) if not isinstance(wanted, str) else wanted, []
    return modules, weights


@contextmanager
def _names_as_given() -> Iterator[None]:
    """Within the block peft does not rename targets from transformers 4's layers of experts to those of 5: ours are
    names of the model in hand, and a shared expert's gate_proj would be taken for the fused experts'."""
    from peft.utils import transformers_weight_conversion as conversion

    before = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_args, **_named: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = before


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """The adapters of a model that `add_lora` adapted, in peft's own format."""
    model._peft_wrapper.save_pretrained(folder)


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers of a model by name (empty for a model without adapters)."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "get_delta_weight")}


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict `model` would have had without peft, adapters merged; the model itself is not touched.

    The product B A is formed and added in fp32 and rounded to the weight's dtype once, so that a bf16 base loses
    nothing but that one rounding.
    """
    state = {_plain(k): v for k, v in model.state_dict().items() if ".lora_" not in k}
    for name, layer in lora_layers(model).items():
        base = layer.get_param() if _is_fused(layer) else layer.get_base_layer().weight
        total = base.float()
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                total = total + _delta(layer, adapter)
        state[f"{_plain(name)}.{layer.parameter_name if _is_fused(layer) else 'weight'}"] = total.to(base.dtype)
    return state


def _is_fused(layer: nn.Module) -> bool:
    """Whether an adapted layer is a fused expert weight and not a linear layer."""
    return hasattr(layer, "parameter_name")


def _delta(layer: nn.Module, adapter: str) -> Tensor:
    """(alpha / r) B A in fp32, in the shape of the base weight (transposed for Conv1D layers)."""
    down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
    if _is_fused(layer):  # A: (experts x r, in), B: (out, r x experts)
        down, up = down.view(layer.num_experts, -1, down.shape[1]), up.view(up.shape[0], -1, layer.num_experts)
        delta = torch.einsum("ore,eri->eoi", up, down) * layer.scaling[adapter]
        return delta if layer._did_swap_in_out_features else delta.mT  # (experts, out, in), or the other way round
    delta = (up @ down) * layer.scaling[adapter]
    return delta.T if layer.fan_in_fan_out else delta
