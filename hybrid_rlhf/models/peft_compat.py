"""The private parts of peft that are used here, and nowhere else."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from hybrid_rlhf.core.compat import Dependency

PEFT = Dependency("peft")


def activate(layer: nn.Module, names: list[str]) -> None:
    """Make the adapters `names` of a layer the active ones. peft's own switch also toggles requires_grad."""
    PEFT.require(layer, "_active_adapter")
    layer._active_adapter = names


def active(layer: nn.Module) -> list[str] | str:
    """The active adapters: the very object given to `activate`."""
    return PEFT.part(layer, "_active_adapter")


def is_out_first(layer: nn.Module) -> bool:
    """Whether an adapted stack of experts has the shape (experts, out, in), and not (experts, in, out)."""
    return PEFT.part(layer, "_did_swap_in_out_features")


def is_refused(model: nn.Module, name: str) -> bool:
    """Whether peft refuses adapters on layers of this name (its last part): those of state-space models whose kernels
    read the weight without calling the layer."""
    refuse = PEFT.part(PEFT.module("peft.tuners.tuners_utils"), "_check_lora_target_modules_mamba")
    try:
        refuse(PEFT.module("peft").LoraConfig(), model, name)
    except ValueError:
        return True
    return False


def names_as_given() -> AbstractContextManager[None]:
    """Within the block peft does not rename targets from transformers 4's expert layers to those of 5: ours are names
    of the loaded model, and a shared expert's gate_proj would be taken for the fused experts'."""
    return PEFT.silenced("peft.utils.transformers_weight_conversion", "convert_peft_config_for_transformers")


def usual_targets(model_type: str | None) -> list[str] | str | None:
    """The modules that peft adapts in a model of this type where target_modules is not given; None for other types."""
    table = PEFT.part(PEFT.module("peft.utils"), "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING")
    return table.get(model_type)
