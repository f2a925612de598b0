"""Low-rank adapters by peft: adding them, and merging them without losing what was learned. The only door to peft.

Source: LoRA, arXiv 2106.09685: W x + (alpha / r) B A x, with W frozen.
"""

from __future__ import annotations

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
        dropout: Dropout on the adapter's input.
        target_modules: Names (or one regular expression) of the linear layers to adapt; "all-linear" takes every
            linear layer but the output head.
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

    targets = config.target_modules
    settings = peft.LoraConfig(r=config.r, lora_alpha=config.alpha or 2 * config.r, lora_dropout=config.dropout,
                               target_modules=targets if isinstance(targets, str) else list(targets))
    try:
        wrapped = peft.get_peft_model(model, settings, adapter_name=adapter_name)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(f"lora.target_modules {targets!r} matches no layer of {type(model).__name__}; "
                        f"its linear layers are {', '.join(linear)}") from error
    object.__setattr__(model, "_peft_wrapper", wrapped)  # not as a submodule: the wrapper holds the model
    return wrapped


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
    state = {k.replace(".base_layer.", "."): v for k, v in model.state_dict().items() if ".lora_" not in k}
    for name, layer in lora_layers(model).items():
        base = layer.get_base_layer().weight
        total = base.float()
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                total = total + _delta(layer, adapter)
        state[f"{name}.weight"] = total.to(base.dtype)
    return state


def _delta(layer: nn.Module, adapter: str) -> Tensor:
    """(alpha / r) B A in fp32, in the shape of the base weight (transposed for Conv1D layers)."""
    down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
    delta = (up @ down) * layer.scaling[adapter]
    return delta.T if layer.fan_in_fan_out else delta
