"""Low-rank adapters by peft: adding, saving and loading them, several on one base. The only module that imports peft.

Source: LoRA, arXiv 2106.09685: W x + (alpha / r) B A x, with W frozen.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.models import added_rows, peft_compat
from hybrid_rlhf.models.added_rows import holders
from hybrid_rlhf.models.backbone import reads_text, text_backbone, towers
from hybrid_rlhf.models.folder_files import check_files, read_object, refusing
from hybrid_rlhf.models.weights import read_header

if not torch.cuda.is_available():  # else deepspeed, which peft looks for, prints a note about accelerators
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "score.weight"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters. With r = 0, and null until a run resolves it, all weights are trained.

    Attributes:
        r: Rank of the update; 0 trains all weights. null: 0, or 16 where training all weights of a run would take more
            than three quarters of the memory that is free.
        alpha: Scale: the update is multiplied by alpha / r. None means 2 r.
        dropout: Dropout on the adapter's input while SFT and reward models train (the other stages compare two forwards
            of one policy and take none); not for fused experts.
        target_modules: Names (or one regular expression) of the linear layers to adapt, fused expert weights such as
            gate_up_proj among them; "all-linear" takes every linear layer but the output head, routers and those that
            peft refuses (a state-space layer's out_proj).
    """

    r: int | None = None
    alpha: float | None = None
    dropout: float = within(0.0, "[0, 1)")
    target_modules: list[str] | str = "all-linear"

    def __post_init__(self) -> None:
        check(self.r is None or self.r >= 0, f"lora.r is {self.r}; it must be 0 (off) or a positive rank such as 8")
        check_values(self, "lora.")
        if isinstance(self.target_modules, str):
            _check_expression(self.target_modules)


def _check_expression(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"lora.target_modules {pattern!r} is not a regular expression ({error}); give a list of names, "
                        "such as [q_proj, v_proj]") from None


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
    """UserError unless lora.target_modules match layers of `model`, whose weights may be on the meta device, and only
    those that adapters can be merged into: linear layers and fused experts."""
    from peft.tuners.tuners_utils import Conv1D, check_target_module_exists

    wanted = config.target_modules
    if wanted == "all-linear":
        return
    settings, experts, is_of_text = _settings(model, config), expert_weights(model), reads_text(model)
    for target in wanted if isinstance(wanted, list) else ():
        ends = [n for n, _ in model.named_modules() if f".{n}".endswith(f".{target}")]
        check(not ends or any(map(is_of_text, ends)), f"lora.target_modules: {target!r} is a layer of "
              f"{type(model).__name__}'s towers alone ({ends[0] if ends else ''}), which are frozen; name layers of "
              f"its text part: {_linear_names(model)}")
    if not settings.target_parameters and not any(is_of_text(name) and check_target_module_exists(settings, name)
                                                  for name, _ in model.named_modules()):
        raise _no_target(model, config)
    layers = {name: m for n, m in model.named_modules()  # the last of an adapted layer's names is its base
              if ".lora_" not in n and is_of_text(n) and _is_wanted(name := plain_name(n), wanted)}
    is_narrowed = bool(experts) and isinstance(wanted, str)  # with experts an expression selects among layers only
    for name, module in layers.items():
        where = f"lora.target_modules {wanted!r}: {name} of {type(model).__name__} is"
        check(is_narrowed or isinstance(module, (nn.Linear, Conv1D)), f"{where} {type(module).__name__}, not a linear "
              f"layer; there are {_linear_names(model)}")
        check(module is not model.get_output_embeddings() or not getattr(model.config, "tie_word_embeddings", False),
              f"{where} the embedding's own matrix (tie_word_embeddings), and an adapter would part them; leave it out")


def _linear_names(model: nn.Module) -> str:
    return ", ".join(sorted({n.rsplit(".", 1)[-1] for n in [*plain_linear_layers(model), *expert_weights(model)]}))


def _no_target(model: nn.Module, config: LoraConfig) -> UserError:
    return UserError(f"lora.target_modules {config.target_modules!r} matches no layer of {type(model).__name__}; its "
                     f"linear layers are {_linear_names(model)}")


def add_lora(model: nn.Module, config: LoraConfig, adapter_name: str = "default", new_ids: Sequence[int] = ()) -> None:
    """Freeze `model` and put new adapters beside its linear layers, in place. They change nothing until trained.

    new_ids: tokens that the vocabulary did not have, whose rows are trained with the adapter (models/added_rows.py).
    Raises UserError when target_modules match nothing or other than linear layers, and with peft's message for what it
    refuses.
    """
    check_targets(model, config)
    try:
        _add(model, _settings(model, config), adapter_name, adapter_dtype(model))
    except ValueError as error:
        raise UserError(f"lora.target_modules {config.target_modules!r}: peft refuses {type(model).__name__} "
                        f"({' '.join(str(error).split())}); choose others of {_linear_names(model)}") from error
    if new_ids:
        added_rows.add_rows(model, adapter_name, new_ids, adapter_dtype(model))
    _activate_rows(model)


def _activate_rows(model: nn.Module) -> None:
    """Use the rows of added tokens that belong to the active adapters."""
    for rows in added_rows.holders(model).values():
        rows.active = next(iter(lora_layers(model).values())).active_adapters


def adapter_dtype(model: nn.Module) -> torch.dtype:
    """bfloat16 in a bfloat16 model, since the optimizer keeps fp32 masters, else float32; fp32 adapters would copy
    every layer's input and output to fp32."""
    return torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32


def _add(model: nn.Module, settings: object, name: str, dtype: torch.dtype) -> None:
    import peft

    in_fp32 = dtype == torch.float32
    with peft_compat.names_as_given():
        if hasattr(model, "_peft_wrapper"):
            model._peft_wrapper.add_adapter(name, settings, autocast_adapter_dtype=in_fp32)
        else:
            config = dict(vars(model.config))
            wrapped = peft.get_peft_model(model, settings, adapter_name=name, autocast_adapter_dtype=in_fp32)
            vars(model.config).update(config)  # peft changes entries that exports need (pretraining_tp)
            object.__setattr__(model, "_peft_wrapper", wrapped)  # not as a submodule: the wrapper holds the model
    for layer in lora_layers(model).values():  # peft's are fp32 beside a quantised base
        for part in (layer.lora_A, layer.lora_B):
            if name in part:
                part[name].to(dtype)


def expert_weights(model: nn.Module) -> list[str]:
    """Names of the fused expert weights (num_experts, ., .) of a mixture of experts, adapters left out of the names."""
    is_of_text = reads_text(model)
    holders = {n: m for n, m in model.named_modules()
               if isinstance(getattr(m, "num_experts", None), int) and is_of_text(n)}
    return [plain_name(f"{name}.{weight}") for name, module in holders.items()
            for weight, value in module.named_parameters(recurse=False)
            if value.ndim == 3 and len(value) == module.num_experts]


def plain_linear_layers(model: nn.Module, with_head: bool = False) -> list[str]:
    """Names of the linear layers in the text part, without adapters; a language model's head only with `with_head`."""
    from peft.tuners.tuners_utils import Conv1D  # transformers' own, of GPT-2

    is_of_text = reads_text(model)
    heads = {id(getattr(model, "score", None)), *([] if with_head else [id(model.get_output_embeddings())])}
    return [plain_name(n) for n, m in model.named_modules()
            if isinstance(m, (nn.Linear, Conv1D)) and ".lora_" not in n and id(m) not in heads and is_of_text(n)]


def plain_name(name: str) -> str:
    """A name as it was before peft wrapped the layer (fused experts are wrapped once for each weight)."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def _targets(model: nn.Module, wanted: list[str] | str) -> tuple[list[str] | str, list[str]]:
    """`wanted` as peft's target_modules (linear layers) and target_parameters (fused expert weights).

    Without experts peft finds the layers. With experts they are named one by one, since peft names experts as they were
    before fusing; likewise where "all-linear" leaves some out, and beside towers.
    """
    experts = expert_weights(model)
    left_out = _left_out(model, bool(experts)) if wanted == "all-linear" else set()
    if not experts and not left_out and not towers(model):
        return wanted if isinstance(wanted, str) else list(wanted), []
    modules, weights = ([n for n in names if n not in left_out and _is_wanted(n, wanted)]
                        for names in (plain_linear_layers(model, with_head=wanted != "all-linear"), experts))
    if not modules and not weights:  # peft's error lists the layers
        return list(wanted) if not isinstance(wanted, str) else wanted, []
    return modules, weights


def _is_wanted(name: str, wanted: list[str] | str) -> bool:
    """Whether target_modules match the layer of this name, by peft's rules."""
    if isinstance(wanted, str):
        return wanted == "all-linear" or re.fullmatch(wanted, name) is not None
    return any(name == w or name.endswith(f".{w}") for w in wanted)


def _left_out(model: nn.Module, has_experts: bool) -> set[str]:
    """The linear layers that "all-linear" leaves out: routers, and those that peft refuses to adapt."""
    routers = {"router", "router_gate", *(["gate"] if has_experts else [])}
    return {n for n in plain_linear_layers(model)
            if routers.intersection(n.split(".")) or peft_compat.is_refused(model, n.rsplit(".", 1)[-1])}


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
    settings.task_type = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"  # AutoPeftModel reads it
    if hasattr(model, "score"):  # as peft names a head that is trained whole
        state[f"base_model.model.{_HEAD}"], settings.modules_to_save = model.score.weight, ["score"]
    save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, folder / _WEIGHTS, {"format": "pt"})
    settings.inference_mode, settings.trainable_token_indices = True, indices
    settings.base_model_name_or_path = settings.base_model_name_or_path or model.config.name_or_path or None
    settings.save_pretrained(str(folder))


def is_adapter(folder: str | Path) -> bool:
    """Whether `folder` holds an adapter whose weights are safetensors."""
    return (Path(folder) / _CONFIG).exists() and (Path(folder) / _WEIGHTS).exists()


def task_of(folder: str | Path) -> str | None:
    """The task type in an adapter's file: CAUSAL_LM, SEQ_CLS (a reward model) or None."""
    return read_object(Path(folder) / _CONFIG).get("task_type")


def base_of(folder: str | Path) -> str | None:
    """The base model that an adapter's file names, or None."""
    file = Path(folder) / _CONFIG
    base = read_object(file).get("base_model_name_or_path")
    check(base is None or isinstance(base, str), f"{file}: base_model_name_or_path is {base!r:.60}; it must be text, a "
                                                 "folder or a hub id")
    return base


def _read_settings(folder: Path):  # noqa: ANN202 - peft's class
    """The settings of the adapter in `folder`, after a check of its files. UserError for other than a plain LoRA
    adapter."""
    import peft

    check(is_adapter(folder), f"{folder} holds no adapter: {_CONFIG} and {_WEIGHTS} are needed")
    check_files(folder)
    with refusing(f"cannot read {folder / _CONFIG}", "give a plain LoRA adapter", [folder / _CONFIG]):
        settings = peft.PeftConfig.from_pretrained(str(folder))
        is_plain = isinstance(settings, peft.LoraConfig) and not (settings.use_dora or settings.lora_bias)
        ranks = [settings.r, *settings.rank_pattern.values()] if is_plain else []
    check(is_plain and settings.modules_to_save in (None, ["score"]),
          f"{folder} is not a plain LoRA adapter; train one by model.lora")
    widest = max((n for entry in read_header(folder / _WEIGHTS)[1].values() for n in entry["shape"]), default=0)
    check(all(type(rank) is int and 1 <= rank <= widest for rank in ranks),
          f"{folder / _CONFIG}: r is {settings.r!r:.60}, which is not a rank of the weights beside it; give the file "
          "that they were saved with")
    return settings


def load_adapter(model: nn.Module, folder: str | Path, adapter_name: str, dtype: torch.dtype | None = None) -> None:
    """Load the adapter in `folder`, saved by `save_adapter` or by peft, beside the others of `model`; its head, where
    both have one, replaces the model's. dtype: of its weights, by default that of `adapter_dtype`.

    Raises UserError for other than a plain LoRA adapter, and for one whose layers are not this model's.
    """
    import peft
    from safetensors.torch import load_file

    settings, dtype = _read_settings(Path(folder)), dtype or adapter_dtype(model)
    if not hasattr(model, "score"):
        settings.exclude_modules = None  # peft warns of exclusions without a match
    # peft must not hold rows and head: rows are added below, and the head is the model's own
    indices, settings.trainable_token_indices = settings.trainable_token_indices, None
    settings.modules_to_save = settings.task_type = None
    with refusing(f"the adapter {folder} does not fit {type(model).__name__}", "give the base that it was made for"):
        _add(model, settings, adapter_name, dtype)
    state = peft.get_peft_model_state_dict(model._peft_wrapper, adapter_name=adapter_name, save_embedding_layers=False)
    with refusing(f"cannot read {Path(folder) / _WEIGHTS}", "download or export the adapter anew"):
        saved = load_file(Path(folder) / _WEIGHTS)
    head = saved.pop(f"base_model.model.{_HEAD}", None)
    fits = added_rows.from_file(model, adapter_name, indices, saved, dtype)
    check(fits and state.keys() == saved.keys() and all(state[k].shape == saved[k].shape for k in state),
          f"the adapter {folder} does not fit {type(model).__name__}: its layers, their shapes or its tokens are not "
          "the model's; give the base that it was made for")
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(saved[name])
        if head is not None and hasattr(model, "score"):
            model.score.weight.copy_(head)
    _activate_rows(model)


@torch.no_grad()
def copy_adapter(model: nn.Module, source: str, target: str) -> None:
    """Add an adapter `target` with the settings and the weights of `source`."""
    _add(model, copy.deepcopy(model._peft_wrapper.peft_config[source]), target, adapter_dtype(model))
    for layer in lora_layers(model).values():
        for part in (layer.lora_A, layer.lora_B):
            if source in part:
                part[target].load_state_dict(part[source].state_dict())
    for name, rows in added_rows.holders(model).items():
        if source in rows.adapters:
            original = rows.adapters[source]
            added_rows.add_rows(model, target, original.ids.tolist(), original.weight.dtype, {name: original.weight})


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What `save_adapter` reads: the weights and rows of all adapters, and a scalar head."""
    parts = [part for layer in lora_layers(model).values() for part in (layer.lora_A, layer.lora_B)]
    parts += [*added_rows.holders(model).values(), *([model.score] if hasattr(model, "score") else [])]
    return [parameter for part in parts for parameter in part.parameters()]


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers of a model by name (empty for a model without adapters)."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "get_delta_weight")}


# -- Switch between several low-rank adapters on one frozen base, with checks against lost gradients -------------------


class Adapters:
    """The adapters of one frozen base, of which `use(name)` makes one active, or none (the base itself).

    A forward and its backward belong into one block of `use`, and every forward of the backbone into some block. What
    breaks this raises RuntimeError: nested blocks, a forward outside of a block, a backward after its block has ended
    or after another switch. peft's own switch, which toggles requires_grad, is not used: it silently loses the
    gradients of what was computed before it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers, self._rows = lora_layers(model), holders(model)
        self.names = sorted({n for layer in self._layers.values() for n in layer.lora_A})
        self._entries, self._entry = itertools.count(1), 0  # 0: outside
        self._select([])
        backbone = text_backbone(model)
        backbone.register_forward_pre_hook(lambda *_: self._require(self._entry))
        backbone.register_forward_hook(lambda _module, _inputs, output: self._watch(output))

    @contextmanager
    def use(self, name: str | Sequence[str] | None) -> Iterator[None]:
        """Within the block `name` is active (None: no adapter; several: their updates add). Blocks do not nest."""
        names = [] if name is None else [name] if isinstance(name, str) else list(name)
        if self._entry:
            raise RuntimeError(f"adapter {name!r} inside the block of {self._active}: roles take turns on one base")
        for adapter in names:
            if adapter not in self.names:
                raise RuntimeError(f"there is no adapter {adapter!r}; the base has {', '.join(self.names)}")
        self._entry = next(self._entries)
        self._select(names)
        try:
            yield
        finally:
            self._entry = 0
            self._select([])

    def train_only(self, names: Iterable[str]) -> None:
        """Once, before any optimizer is made: the adapters `names` are trained, the others and the base are frozen."""
        names = set(names)
        for layer in self._layers.values():
            for part in (layer.lora_A, layer.lora_B):
                for name, linear in part.items():
                    linear.requires_grad_(name in names)
        for table in self._rows.values():
            for name, rows in table.adapters.items():
                rows.requires_grad_(name in names)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of one adapter by name."""
        weights = {f"{place}.{kind}.weight": getattr(layer, kind)[name].weight
                   for place, layer in self._layers.items() for kind in ("lora_A", "lora_B") if name in layer.lora_A}
        return weights | {f"{place}.added_rows.weight": table.adapters[name].weight
                          for place, table in self._rows.items() if name in table.adapters}

    def _select(self, names: list[str]) -> None:
        self._active = names
        for layer in self._layers.values():
            peft_compat.activate(layer, names)
        for table in self._rows.values():
            table.active = names

    def _require(self, entry: int) -> None:
        if not entry:
            raise RuntimeError("a forward of a shared base outside use(): no role has said whose adapter is meant")
        if entry != self._entry:
            raise RuntimeError("a backward outside the block of its forward: another adapter may be active by now")
        if any(peft_compat.active(layer) is not self._active for layer in self._layers.values()):
            raise RuntimeError("the active adapter was changed behind the back of use(); gradients would be lost")

    def _watch(self, output: object) -> None:
        """Check in the backward pass that gradients reach the backbone's output in the block of its forward."""
        entry, hidden = self._entry, output.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(lambda _grad: self._require(entry))
