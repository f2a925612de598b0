"""Low-rank adapters by peft: adding, saving and loading them, several on one base. The only module that imports peft.

Source: LoRA, arXiv 2106.09685: W x + (alpha / r) B A x, with W frozen.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.models import added_rows

if not torch.cuda.is_available():  # peft looks for deepspeed, which says on stdout that it found no accelerator
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "score.weight"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters. With r = 0 all weights are trained.

    Attributes:
        r: Rank of the update; 0 turns LoRA off.
        alpha: Scale: the update is multiplied by alpha / r. None means 2 r.
        dropout: Dropout on the adapter's input while SFT and reward models train (the other stages compare two forwards
            of one policy and take none); not for fused experts.
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


def _settings(model: nn.Module, config: LoraConfig):  # noqa: ANN202 - peft's class
    import peft

    modules, experts = _targets(model, config.target_modules)
    check(not (experts and config.dropout),
          f"lora.dropout is {config.dropout}, but the fused experts of {type(model).__name__} take none; set it to 0 "
          "or give lora.target_modules without experts")
    return peft.LoraConfig(r=config.r, lora_alpha=config.alpha or 2 * config.r, lora_dropout=config.dropout,
                           target_modules=modules, target_parameters=experts or None,
                           # a scalar head is trained whole; an adapter on it would do nothing
                           exclude_modules=["score"] if hasattr(model, "score") else None)


def check_targets(model: nn.Module, config: LoraConfig) -> None:
    """UserError unless lora.target_modules match a layer of `model`, whose weights may be on the meta device."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules == "all-linear":
        return
    settings = _settings(model, config)
    if not settings.target_parameters and not any(check_target_module_exists(settings, name)
                                                  for name, _ in model.named_modules()):
        raise _no_target(model, config)


def _no_target(model: nn.Module, config: LoraConfig) -> UserError:
    linear = sorted({n.rsplit(".", 1)[-1] for n in [*plain_linear_layers(model), *expert_weights(model)]})
    return UserError(f"lora.target_modules {config.target_modules!r} matches no layer of {type(model).__name__}; its "
                     f"linear layers are {', '.join(linear)}")


def add_lora(model: nn.Module, config: LoraConfig, adapter_name: str = "default", new_ids: Sequence[int] = ()) -> None:
    """Freeze `model` and put new adapters beside its linear layers, in place. They change nothing until trained.

    new_ids: tokens that the vocabulary did not have, whose rows are trained with the adapter (models/added_rows.py).
    Raises UserError when target_modules match nothing: an adapter that adapts nothing trains nothing.
    """
    try:
        _add(model, _settings(model, config), adapter_name)
    except ValueError as error:
        raise _no_target(model, config) from error
    if new_ids:
        added_rows.add_rows(model, adapter_name, new_ids, adapter_dtype(model))
    _activate_rows(model)


def _activate_rows(model: nn.Module) -> None:
    """The rows of added tokens that are in use are those of the active adapters."""
    for rows in added_rows.holders(model).values():
        rows.active = next(iter(lora_layers(model).values())).active_adapters


def adapter_dtype(model: nn.Module) -> torch.dtype:
    """In a bfloat16 model an adapter is bfloat16 too, for its optimizer keeps fp32 masters; fp32 adapters would take an
    fp32 copy of every layer's input and give one of its output."""
    return torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32


def _add(model: nn.Module, settings: object, name: str) -> None:
    import peft

    in_fp32 = adapter_dtype(model) == torch.float32
    with _names_as_given():
        if hasattr(model, "_peft_wrapper"):
            model._peft_wrapper.add_adapter(name, settings, autocast_adapter_dtype=in_fp32)
            return
        wrapped = peft.get_peft_model(model, settings, adapter_name=name, autocast_adapter_dtype=in_fp32)
    object.__setattr__(model, "_peft_wrapper", wrapped)  # not as a submodule: the wrapper holds the model


def expert_weights(model: nn.Module) -> list[str]:
    """Names of the fused expert weights (num_experts, ., .) of a mixture of experts, adapters left out of the names."""
    holders = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "num_experts", None), int)}
    return [plain_name(f"{name}.{weight}") for name, module in holders.items()
            for weight, value in module.named_parameters(recurse=False)
            if value.ndim == 3 and len(value) == module.num_experts]


def plain_linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers but the heads, adapters left out."""
    heads = {id(m) for m in (model.get_output_embeddings(), getattr(model, "score", None)) if m is not None}
    return [plain_name(n) for n, m in model.named_modules()
            if isinstance(m, nn.Linear) and ".lora_" not in n and id(m) not in heads]


def plain_name(name: str) -> str:
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

    modules, weights = ([n for n in names if is_wanted(n)] for names in (plain_linear_layers(model), experts))
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


def save_adapter(model: nn.Module, folder: str | Path, adapter_name: str | None = None) -> None:
    """One adapter (None: the active one) in peft's own format, with the scalar head of a model that has one."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    wrapped = model._peft_wrapper
    name = adapter_name or next(iter(lora_layers(model).values())).active_adapters[0]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(wrapped, adapter_name=name, save_embedding_layers=False)
    rows, indices = added_rows.to_file(model, name)
    state |= rows
    settings = copy.copy(wrapped.peft_config[name])
    settings.task_type = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"  # AutoPeftModel goes by it
    if hasattr(model, "score"):  # as peft names a head that is trained whole
        state[f"base_model.model.{_HEAD}"], settings.modules_to_save = model.score.weight, ["score"]
    save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, folder / _WEIGHTS, {"format": "pt"})
    settings.inference_mode, settings.trainable_token_indices = True, indices
    settings.base_model_name_or_path = settings.base_model_name_or_path or model.config._name_or_path or None
    settings.save_pretrained(str(folder))


def is_adapter(folder: str | Path) -> bool:
    """Whether `folder` holds an adapter whose weights are safetensors."""
    return (Path(folder) / _CONFIG).exists() and (Path(folder) / _WEIGHTS).exists()


def task_of(folder: str | Path) -> str | None:
    """What an adapter's file says that it is for: CAUSAL_LM, SEQ_CLS (a reward model) or nothing."""
    return json.loads((Path(folder) / _CONFIG).read_text(encoding="utf-8")).get("task_type")


def load_adapter(model: nn.Module, folder: str | Path, adapter_name: str) -> None:
    """The adapter in `folder`, saved by `save_adapter` or by peft, beside the others of `model`; its head, where both
    have one, in place of the model's.

    Raises UserError for a folder that is no plain LoRA adapter, or one whose layers are not this model's.
    """
    import peft
    from safetensors.torch import load_file

    check(is_adapter(folder), f"{folder} holds no adapter: {_CONFIG} and {_WEIGHTS} are needed")
    settings = peft.PeftConfig.from_pretrained(str(folder))
    is_plain = isinstance(settings, peft.LoraConfig) and not settings.use_dora
    check(is_plain and settings.modules_to_save in (None, ["score"]),
          f"{folder} is no plain LoRA adapter; train one by model.lora")
    if not hasattr(model, "score"):
        settings.exclude_modules = None  # peft warns of exclusions that exclude nothing
    # rows and head are not peft's to hold: rows are added below, and the head is the model's own
    indices, settings.trainable_token_indices = settings.trainable_token_indices, None
    settings.modules_to_save = settings.task_type = None
    try:
        _add(model, settings, adapter_name)
    except ValueError as error:
        raise UserError(f"the adapter {folder} does not fit {type(model).__name__}: {error}; "
                        "give the base that it was made for") from error
    own = peft.get_peft_model_state_dict(model._peft_wrapper, adapter_name=adapter_name, save_embedding_layers=False)
    saved = load_file(Path(folder) / _WEIGHTS)
    head = saved.pop(f"base_model.model.{_HEAD}", None)
    fits = added_rows.from_file(model, adapter_name, indices, saved, adapter_dtype(model))
    check(fits and own.keys() == saved.keys() and all(own[k].shape == saved[k].shape for k in own),
          f"the adapter {folder} does not fit {type(model).__name__}: its layers, their shapes or its tokens are not "
          "the model's; give the base that it was made for")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(saved[name])
        if head is not None and hasattr(model, "score"):
            model.score.weight.copy_(head)
    _activate_rows(model)


@torch.no_grad()
def copy_adapter(model: nn.Module, source: str, target: str) -> None:
    """A new adapter `target` with the settings and the weights of `source`."""
    _add(model, copy.deepcopy(model._peft_wrapper.peft_config[source]), target)
    for layer in lora_layers(model).values():
        for part in (layer.lora_A, layer.lora_B):
            if source in part:
                part[target].load_state_dict(part[source].state_dict())
    for name, rows in added_rows.holders(model).items():
        if source in rows.adapters:
            own = rows.adapters[source]
            added_rows.add_rows(model, target, own.ids.tolist(), own.weight.dtype, {name: own.weight})


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers of a model by name (empty for a model without adapters)."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "get_delta_weight")}
