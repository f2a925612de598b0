"""The private parts of transformers that are used here, and nowhere else: registries of attention and masks, and what
models keep for them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.compat import Dependency
from hybrid_rlhf.core.out_of_memory import is_out_of_memory

TRANSFORMERS = Dependency("transformers")
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


def _functions(module: str, registry: str) -> dict[str, Callable]:
    """The functions of a registry by name, as every model finds them."""
    return TRANSFORMERS.part(TRANSFORMERS.part(TRANSFORMERS.module(f"transformers.{module}"), registry),
                             "_global_mapping")


def _attentions() -> dict[str, Callable]:
    return _functions("modeling_utils", "AttentionInterface")


def _masks() -> dict[str, Callable]:
    return _functions("masking_utils", "AttentionMaskInterface")


def attention_name(config) -> str:  # noqa: ANN001 - a transformers class
    """The name of the attention that models of this configuration take: eager, sdpa, ..."""
    return TRANSFORMERS.part(config, "_attn_implementation")


def takes_custom_attention(model: nn.Module) -> bool:
    """Whether every attention of `model` looks its function up in transformers' registry."""
    name = "_can_set_attn_implementation"
    TRANSFORMERS.require(TRANSFORMERS.module("transformers").PreTrainedModel, name)
    return all(getattr(type(m), name)() for m in model.modules() if hasattr(m, name))


def response_template(spec: dict) -> Any:
    """A response template, which says how a model writes its turns, in the form that is read from."""
    module = TRANSFORMERS.module("transformers.utils.chat_parsing.response_templates")
    return TRANSFORMERS.part(module, "load_response_template")(spec)


def read_response(compiled: Any, text: str, prefix: str, tools: list[dict]) -> tuple[dict, list[dict]]:
    """What a turn says by a compiled response template: its fields, and the events of reading it (regions that open
    and close). Raises ValueError, among others, for what the template cannot read."""
    parser = TRANSFORMERS.part(TRANSFORMERS.module("transformers.utils.chat_parsing"), "ResponseParser")(
        compiled, prefix, tools=tools)
    events = parser.feed(text)
    message, last = parser.finalize()
    return message, [*parser.initial_events, *events, *last]


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether transformers loads the weight of a name in fp32 where `model` is loaded in `dtype`."""
    parts = TRANSFORMERS.part(model, "_get_dtype_plan")(dtype)
    return lambda name: any(re.search(part.replace("*", ".*"), name) for part in parts)


@contextmanager
def as_stored() -> Iterator[None]:
    """Within the block transformers reads each weight in the dtype of its file, whichever is asked for: on a CPU it is
    then mapped and not copied, but for weights that files have in other pieces (single experts). What is computed, and
    not read, has the dtype that is asked for."""
    owner, name = TRANSFORMERS.module("transformers").PreTrainedModel, "_get_dtype_plan"
    before = TRANSFORMERS.part(owner, name)
    setattr(owner, name, lambda _model, _dtype: {"*": None})
    try:
        yield
    finally:
        setattr(owner, name, before)


def names_in_files(model: nn.Module, sources: Mapping[str, Hashable]) -> list[str]:
    """The names that transformers would write of weights name -> source: of those tied to each other, which have one
    source, one; and none that the model's class leaves out."""
    ignored = set(TRANSFORMERS.part(model, "_keys_to_ignore_on_save") or ())
    stand_ins = {source: torch.empty(1) for source in sources.values()}
    without_ties = TRANSFORMERS.part(TRANSFORMERS.module("transformers.modeling_utils"),
                                     "remove_tied_weights_from_state_dict")
    return list(without_ties({k: stand_ins[s] for k, s in sources.items() if k not in ignored}, model))


def as_files_have_it(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of `model` under the names and in the pieces of its files: single experts for fused ones, say."""
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
    """Whether the files of `model` hold quantised weights, and not those that they were made from."""
    return getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False)


@contextmanager
def as_plain_model(model: nn.Module) -> Iterator[None]:
    """Within the block save_pretrained writes the configuration of a quantised model as that of a plain one, without
    the names of code that is not saved, and no settings of generation, which it might refuse."""
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
    """Within the block the configuration of `model` has these values, and so have those of its parts that have any."""
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
    """Whether the class of `model` came with its files."""
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
def custom_attention(model: nn.Module, name: str, attention: Callable, mask: Callable) -> Iterator[None]:
    """Within the block, `model` attends by `attention` with the masks of `mask`, registered as `name`."""
    attentions, masks, key = _attentions(), _masks(), "_attn_implementation_internal"
    TRANSFORMERS.require(model.config, key)
    # every config that some module reads, for composite models hold copies
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), key)}
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
    """Within the block, models that attend by themselves get additive masks from `is_float`, boolean from `is_bool`."""
    masks = _masks()
    before = {name: masks[name] for name in ("eager", "sdpa")}
    masks.update(eager=is_float, sdpa=is_bool)
    try:
        yield
    finally:
        masks.update(before)


def sdpa_replaced(attention: Callable) -> AbstractContextManager[None]:
    """Within the block models whose attention is "sdpa" call attention(original, module, query, key, ...) in its place,
    where original is what they would have called. Their configuration, and so their masks, stay as they are."""
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
    """Whether every part of `model` that checkpoints its activations does so by a function that takes a context for
    computing them again: torch's own, without reentrance. True where none does."""
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in _checkpointing(model)]
    return all(isinstance(f, partial) and f.keywords.get("use_reentrant") is False for f in functions)


@contextmanager
def recomputed_within(model: nn.Module, context: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """What `model` checkpoints in forwards within the block is computed again within context(), whenever the backward
    pass does it."""
    before = [(part, TRANSFORMERS.part(part, "_gradient_checkpointing_func")) for part in _checkpointing(model)]
    for part, function in before:
        part._gradient_checkpointing_func = partial(function, context_fn=lambda: (nullcontext(), context()))
    try:
        yield
    finally:
        for part, function in before:
            part._gradient_checkpointing_func = function


def _checkpointing(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


@contextmanager
def shortage_passes() -> Iterator[None]:
    """Within the block an allocation that fails while transformers quantises or joins weights is raised as it is. Else
    it is noted, and the end is an error that tells of weights that could not be converted."""
    owner, name = TRANSFORMERS.module("transformers.core_model_loading"), "log_conversion_errors"
    noting = TRANSFORMERS.part(owner, name)

    @contextmanager
    def passing(*given: object, **named: object) -> Iterator[None]:
        short = None
        try:
            with noting(*given, **named):
                try:
                    yield
                except Exception as error:
                    short = error if is_out_of_memory(error) else None
                    raise
        except Exception:
            if short is not None:
                raise short from None
            raise

    setattr(owner, name, passing)
    try:
        yield
    finally:
        setattr(owner, name, noting)


@contextmanager
def each_as_read(then: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Within the block then(model, name) is called for each weight that transformers has just put into a model, and
    none is read before the one before it is done with: else its threads read ahead, to the end."""
    module, name, switch = TRANSFORMERS.module("transformers.core_model_loading"), "set_param_for_module", _NO_THREADS
    before, environment = TRANSFORMERS.part(module, name), os.environ.get(switch)

    def put(model: nn.Module, target: str, *given: object, **named: object) -> None:
        before(model, target, *given, **named)
        then(model, target)

    os.environ[switch] = "1"
    setattr(module, name, put)
    try:
        yield
    finally:
        setattr(module, name, before)
        del os.environ[switch]
        os.environ |= {} if environment is None else {switch: environment}


@contextmanager
def names_read() -> Iterator[set[str]]:
    """Within the block the names, as files have them, of all weights that transformers takes for a model are added to
    the set: what is in a file and not in it, the model's class does not read."""
    owner = TRANSFORMERS.part(TRANSFORMERS.module("transformers.core_model_loading"), "WeightTransform")
    before, names = TRANSFORMERS.part(owner, "add_tensor"), set()

    def add(transform: object, target_key: str, source_key: str, *given: object, **named: object) -> None:
        names.add(source_key)
        before(transform, target_key, source_key, *given, **named)

    owner.add_tensor = add
    try:
        yield names
    finally:
        owner.add_tensor = before


def never_packed() -> AbstractContextManager[None]:
    """Within the block transformers does not look at position ids for packed rows, which fake ones cannot answer: it
    would make a mask, where a real row has none, and attention with a mask is another."""
    return TRANSFORMERS.silenced("transformers.masking_utils", "find_packed_sequence_indices")


@contextmanager
def attends_by(module: nn.Module, attention: Callable) -> Iterator[None]:
    """Within the block a module that attends by a method of its own calls attention(query, key, value, ...) for it."""
    TRANSFORMERS.require(module, "_attn")
    module._attn = attention
    try:
        yield
    finally:
        del module._attn
