"""All uses of private parts of transformers: registries of attention and masks, loading, response templates,
checkpointing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.compat import Dependency
from hybrid_rlhf.core.memory import is_out_of_memory

TRANSFORMERS = Dependency("transformers")
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


def _functions(module: str, registry: str) -> dict[str, Callable]:
    """The global functions of a registry, by name."""
    return TRANSFORMERS.part(TRANSFORMERS.part(TRANSFORMERS.module(f"transformers.{module}"), registry),
                             "_global_mapping")


def _attentions() -> dict[str, Callable]:
    return _functions("modeling_utils", "AttentionInterface")


def _masks() -> dict[str, Callable]:
    return _functions("masking_utils", "AttentionMaskInterface")


def attention_name(config) -> str:  # noqa: ANN001 - a transformers class
    """The name of the attention that models of this configuration use: eager, sdpa, ..."""
    return TRANSFORMERS.part(config, "_attn_implementation")


def takes_custom_attention(model: nn.Module) -> bool:
    """Whether every attention module of `model` looks up its function in transformers' registry."""
    name = "_can_set_attn_implementation"
    TRANSFORMERS.require(TRANSFORMERS.module("transformers").PreTrainedModel, name)
    return all(getattr(type(m), name)() for m in model.modules() if hasattr(m, name))


def response_template(spec: dict) -> Any:
    """Compile a response template, which describes the format of a model's turns."""
    module = TRANSFORMERS.module("transformers.utils.chat_parsing.response_templates")
    return TRANSFORMERS.part(module, "load_response_template")(spec)


def read_response(compiled: Any, text: str, prefix: str, tools: list[dict]) -> tuple[dict, list[dict]]:
    """Parse a turn by a compiled response template: its fields, and the parser's events (regions that open and close).
    Raises ValueError, among others, for text that the template cannot read."""
    parser = TRANSFORMERS.part(TRANSFORMERS.module("transformers.utils.chat_parsing"), "ResponseParser")(
        compiled, prefix, tools=tools)
    events = parser.feed(text)
    message, last = parser.finalize()
    return message, [*parser.initial_events, *events, *last]


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """A function that tells whether a `model` loaded in `dtype` has the weight of a name in fp32 by transformers."""
    parts = TRANSFORMERS.part(model, "_get_dtype_plan")(dtype)
    return lambda name: any(re.search(part.replace("*", ".*"), name) for part in parts)


@contextmanager
def as_stored() -> Iterator[None]:
    """Within the block transformers reads each weight in the dtype of its file, whatever dtype is requested: on a CPU
    it is then memory-mapped and not copied, except weights that files split differently (single experts). Computed
    buffers have the requested dtype."""
    owner, name = TRANSFORMERS.module("transformers").PreTrainedModel, "_get_dtype_plan"
    before = TRANSFORMERS.part(owner, name)
    setattr(owner, name, lambda _model, _dtype: {"*": None})
    try:
        yield
    finally:
        setattr(owner, name, before)


def names_in_files(model: nn.Module, sources: Mapping[str, Hashable]) -> list[str]:
    """The names that transformers would write for weights name -> source: one of those tied to each other, which have
    one source, and without those that the model's class leaves out."""
    ignored = set(TRANSFORMERS.part(model, "_keys_to_ignore_on_save") or ())
    stand_ins = {source: torch.empty(1) for source in sources.values()}
    without_ties = TRANSFORMERS.part(TRANSFORMERS.module("transformers.modeling_utils"),
                                     "remove_tied_weights_from_state_dict")
    return list(without_ties({k: stand_ins[s] for k, s in sources.items() if k not in ignored}, model))


def as_files_have_it(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `model` with the names and splits of its files, such as single experts for fused ones."""
    revert = TRANSFORMERS.part(TRANSFORMERS.module("transformers.core_model_loading"), "revert_weight_conversion")
    with _changed(model, _weight_conversions=_plain_conversions(model)):
        return dict(revert(model, state))


def _plain_conversions(model: nn.Module) -> list | None:
    """The conversions by which `model` was read from its files, without those that unpack quantised weights, which
    cannot be reversed; None for a model that was not read."""
    conversions, plain = getattr(model, "_weight_conversions", None), []
    if not is_published_quantised(model) or conversions is None:
        return conversions
    for conversion in conversions:
        with suppress(NotImplementedError):
            conversion.reverse_transform()
            plain.append(conversion)
    return plain


def is_published_quantised(model: nn.Module) -> bool:
    """Whether the files of `model` hold quantised weights."""
    return getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False)


@contextmanager
def as_plain_model(model: nn.Module) -> Iterator[None]:
    """Within the block save_pretrained writes the configuration of a quantised model as that of a plain one, without
    the names of code that is not saved, and without generation settings, which it might refuse."""
    settings = getattr(model, "generation_config", None)
    hidden = ["quantization_config", *([] if has_own_code(model) else ["auto_map"])]
    with (_changed(model, hf_quantizer=None, _weight_conversions=[], generation_config=settings and type(settings)()),
          ExitStack() as stack):
        for part, name in product(_configurations(model), hidden):
            if name in vars(part):
                stack.callback(setattr, part, name, vars(part).pop(name))
        yield


@contextmanager
def in_configurations(model: nn.Module, **values: object) -> Iterator[None]:
    """Within the block the configuration of `model` has these values, as have those of its parts that set them."""
    with ExitStack() as stack:
        for part, (name, value) in product(_configurations(model), values.items()):
            if part is model.config or getattr(part, name, None) is not None:
                stack.callback(setattr, part, name, getattr(part, name))
                setattr(part, name, value)
        yield


def _configurations(model: nn.Module) -> list:
    """The configuration of `model` and those of its parts (text, images)."""
    parts = (getattr(model.config, name, None) for name in getattr(model.config, "sub_configs", ()))
    return [model.config, *(part for part in parts if part is not None)]


def has_own_code(model: nn.Module) -> bool:
    """Whether the class of `model` is custom code from its folder."""
    return type(model).__module__.startswith("transformers_modules")


@contextmanager
def _changed(owner: object, **values: object) -> Iterator[None]:
    """Within the block `owner` has these attributes."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)


@contextmanager
def custom_attention(model: nn.Module, name: str, attention: Callable, mask: Callable,
                     apart: Collection[str] = ()) -> Iterator[None]:
    """Within the block, `model` attends by `attention` with the masks of `mask`, registered as `name`; but for the
    modules named `apart`, with all that is in them."""
    attentions, masks, key = _attentions(), _masks(), "_attn_implementation_internal"
    TRANSFORMERS.require(model.config, key)
    # the config of every module, since composite models hold copies
    configs = {id(m.config): m.config for place, m in model.named_modules() if hasattr(getattr(m, "config", None), key)
               and not any(f"{place}.".startswith(f"{other}.") for other in apart)}
    before = [(config, getattr(config, key)) for config in configs.values()]
    attentions[name], masks[name] = attention, mask
    try:
        for config, _ in before:
            setattr(config, key, name)
        yield
    finally:
        for config, value in before:
            setattr(config, key, value)
        del attentions[name], masks[name]


@contextmanager
def own_attention(is_float: Callable, is_bool: Callable) -> Iterator[None]:
    """Within the block models with own attention code get additive masks from `is_float`, boolean from `is_bool`."""
    masks = _masks()
    before = {name: masks[name] for name in ("eager", "sdpa")}
    masks.update(eager=is_float, sdpa=is_bool)
    try:
        yield
    finally:
        masks.update(before)


def sdpa_replaced(attention: Callable) -> AbstractContextManager[None]:
    """Within the block models whose attention is "sdpa" call attention(original, module, query, key, ...) instead, with
    the replaced function as `original`. Their configuration, and so their masks, do not change."""
    return _replaced(_attentions(), attention)


def sdpa_masks_replaced(mask: Callable) -> AbstractContextManager[None]:
    """Within the block models whose attention is "sdpa" call mask(original, ...) for their masks."""
    return _replaced(_masks(), mask)


@contextmanager
def _replaced(functions: dict[str, Callable], function: Callable) -> Iterator[None]:
    original = functions["sdpa"]
    functions["sdpa"] = partial(function, original)
    try:
        yield
    finally:
        functions["sdpa"] = original


def can_recompute_within(model: nn.Module) -> bool:
    """Whether every part of `model` that checkpoints activations uses a function with a context for recomputation:
    torch's non-reentrant one. True without checkpointing."""
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in _checkpointing(model)]
    return all(isinstance(f, partial) and f.keywords.get("use_reentrant") is False for f in functions)


@contextmanager
def recomputed_within(model: nn.Module, context: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Activations that `model` checkpoints in forwards within the block are recomputed within context(), whenever the
    backward pass runs."""
    before = [(part, TRANSFORMERS.part(part, "_gradient_checkpointing_func")) for part in _checkpointing(model)]
    for part, function in before:
        part._gradient_checkpointing_func = partial(function, context_fn=lambda: (nullcontext(), context()))
    try:
        yield
    finally:
        for part, function in before:
            part._gradient_checkpointing_func = function


def checkpoint_without_draws(model: nn.Module) -> None:
    """Keep no state of random number generators for the recomputation of activations, which then draws nothing."""
    for part in _checkpointing(model):
        function = getattr(part, "_gradient_checkpointing_func", None)  # a model's own code may have none
        if isinstance(function, partial) and function.func is torch.utils.checkpoint.checkpoint:
            part._gradient_checkpointing_func = partial(function, preserve_rng_state=False)


def _checkpointing(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


@contextmanager
def shortage_passes() -> Iterator[None]:
    """Within the block an out-of-memory error while transformers quantises or joins weights is raised unchanged. Else
    transformers collects it and reports only that weights could not be converted."""
    owner, name = TRANSFORMERS.module("transformers.core_model_loading"), "log_conversion_errors"
    original = TRANSFORMERS.part(owner, name)

    @contextmanager
    def passing(*args: object, **named: object) -> Iterator[None]:
        out_of_memory = None
        try:
            with original(*args, **named):
                try:
                    yield
                except Exception as error:
                    out_of_memory = error if is_out_of_memory(error) else None
                    raise
        except Exception:
            if out_of_memory is not None:
                raise out_of_memory from None
            raise

    setattr(owner, name, passing)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def each_as_read(then: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Within the block then(model, name) is called for each weight that transformers has just put into a model, before
    the next one is read: without this its threads would read ahead, to the end."""
    module, name, switch = TRANSFORMERS.module("transformers.core_model_loading"), "set_param_for_module", _NO_THREADS
    original, environment = TRANSFORMERS.part(module, name), os.environ.get(switch)

    def put(model: nn.Module, target: str, *args: object, **named: object) -> None:
        original(model, target, *args, **named)
        then(model, target)

    os.environ[switch] = "1"
    setattr(module, name, put)
    try:
        yield
    finally:
        setattr(module, name, original)
        del os.environ[switch]
        os.environ |= {} if environment is None else {switch: environment}


@contextmanager
def names_read() -> Iterator[set[str]]:
    """Within the block the names in files of all weights that transformers loads into a model are added to the yielded
    set: the model's class does not read the other tensors of the files."""
    owner = TRANSFORMERS.part(TRANSFORMERS.module("transformers.core_model_loading"), "WeightTransform")
    before, names = TRANSFORMERS.part(owner, "add_tensor"), set()

    def add(transform: object, target_key: str, source_key: str, *args: object, **named: object) -> None:
        names.add(source_key)
        before(transform, target_key, source_key, *args, **named)

    owner.add_tensor = add
    try:
        yield names
    finally:
        owner.add_tensor = before


def never_packed() -> AbstractContextManager[None]:
    """Within the block transformers does not search position ids for packed rows. On fake tensors it cannot, and would
    make a mask that a real row has not, and attention with a mask takes another kernel."""
    return TRANSFORMERS.silenced("transformers.masking_utils", "find_packed_sequence_indices")


@contextmanager
def attends_by(module: nn.Module, attention: Callable) -> Iterator[None]:
    """Within the block a module with an attention method of its own calls attention(query, key, value, ...) instead."""
    TRANSFORMERS.require(module, "_attn")
    module._attn = attention
    try:
        yield
    finally:
        del module._attn
