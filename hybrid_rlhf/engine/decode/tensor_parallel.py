"""Tensor parallelism for inference: each rank of a group multiplies by its shard of weights that it holds anyway.

transformers' own plan of the model says which layers are sharded and how (`base_model_tp_plan` and the head's
`_tp_plan`). A shard is a view of the training parameter: `weight[rows]` of a column-parallel layer,
`weight[:, columns]` of a row-parallel one (Megatron-LM, arXiv 1909.08053), whole experts of a mixture, since a packed
gate and up projection has no view that holds a part of both. Embedding tables stay whole: a look-up is not a product.
The logits are gathered, bit for bit the same on every rank, so that all ranks draw the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import RankGroup
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.train.deepspeed_compat import is_part, is_partitioned, without_hooks
from hybrid_rlhf.engine.train.zero import gathered_weights
from hybrid_rlhf.models.backbone import text_backbone

_COLWISE = frozenset(("colwise", "colwise_gather_output", "colwise_rep"))
_ROWWISE = frozenset(("rowwise", "rowwise_split_input", "rowwise_rep"))
_GATHERS = frozenset(("colwise_gather_output", "colwise_rep"))
_SPLITS = frozenset(("rowwise_split_input", "rowwise_rep"))
_EXPERTS = "moe_tp_experts"
# Styles without effect when there are no gradients and embedding tables stay whole; "local_params" is about DTensors.
_UNSHARDED = frozenset(("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate",
                        "embedding_rowwise", "embedding_colwise"))


def plan_of(model: nn.Module) -> dict[str, str]:
    """Module or parameter name -> style, for everything that transformers' plan of `model` names. Parameters of sharded
    experts are left out: they are part of their module."""
    plan = getattr(model, "tp_plan", None) or {}
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
    names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
    styles = {n: style for n in names for pattern, style in patterns if pattern.fullmatch(n)}
    experts = {n for n, style in styles.items() if style == _EXPERTS}
    return {n: style for n, style in styles.items() if n.rpartition(".")[0] not in experts}


def check_shardable(model: nn.Module, degree: int) -> None:
    """UserError, in one line, where `model` cannot be sharded over `degree` ranks."""
    plan, name = plan_of(model), type(model).__name__
    check(bool(getattr(text_backbone(model), "tp_plan", None)),
          f"{name} has no tensor-parallel plan in transformers; it runs with tp 1 only")
    unknown = sorted(set(plan.values()) - _COLWISE - _ROWWISE - _UNSHARDED - {_EXPERTS})
    check(not unknown, f"{name}: its tensor-parallel plan uses {', '.join(unknown)}, which this engine does not know; "
                       "it runs with tp 1 only")
    for path, style in plan.items():
        if style in _UNSHARDED:
            continue
        part, parent = _at(model, path), model.get_submodule(path.rpartition(".")[0])
        if style == _EXPERTS:
            _check_experts(part, f"{name}: {path}", degree)
        elif isinstance(part, nn.Module):
            _check_linear(part, f"{name}: {path}")
            if style == "colwise":
                _check_heads(part, parent, path, degree)


def check_configured(config: object, degree: int, option: str) -> None:
    """`check_shardable` by a transformers configuration, before any weight is read. option: for the message."""
    text = config.get_text_config()
    plan = text.base_model_tp_plan
    check(bool(plan), f"{option} is {degree}, but {text.model_type} has no tensor-parallel plan in transformers; use 1")
    if not any("att" in key and style == "colwise" for key, style in plan.items()):
        return
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        check(not isinstance(heads, int) or heads % degree == 0,
              f"{option} is {degree}, but {text.model_type} has {field} {heads}, which {degree} does not divide; "
              "choose a divisor")


def _check_linear(module: nn.Module, where: str) -> None:
    weight = getattr(_base(module), "weight", None)
    check(weight is not None and weight.ndim == 2 and weight.is_floating_point(),
          f"{where} is a {type(_base(module)).__name__} with quantized or unusual weights; it runs with tp 1 only")
    check(not getattr(module, "lora_variant", None) and not any(getattr(module, "lora_bias", {}).values()),
          f"{where} has adapters other than plain LoRA; they run with tp 1 only")


def _check_heads(module: nn.Module, parent: nn.Module, path: str, degree: int) -> None:
    """The rows of an attention projection are whole heads; those of a shard must be, too."""
    size = next((s for s in (getattr(parent, n, None) for n in ("head_dim", "head_size")) if isinstance(s, int)), 1)
    if size == 1:
        return
    heads = _base(module).weight.shape[0] // size
    check(heads % degree == 0, f"{path} has {heads} heads of {size}, which tp {degree} does not divide; "
                               "choose a divisor")


def _check_experts(module: nn.Module, where: str, degree: int) -> None:
    stacked = _with_wrappers(module)[-1]
    count, weights = getattr(stacked, "num_experts", None), dict(stacked.named_parameters())
    check(isinstance(count, int) and weights and all("." not in n and p.shape[0] == count and p.is_floating_point()
                                                     for n, p in weights.items()),
          f"{where}: experts whose weights are not one floating-point tensor of all run with tp 1 only; use tp 1")
    check(count >= degree, f"{where} has {count} experts, fewer than tp {degree}; lower it")


# -- the mode --------------------------------------------------------------------------------------------------------


@contextmanager
def sharded(model: nn.Module, ranks: RankGroup) -> Iterator[None]:
    """Within the block every planned layer of `model` holds and multiplies by its shard, and the ranks add or gather
    the outputs. Afterwards every module has its own parameter objects back, also after an error.

    Weights that ZeRO 3 partitions are gathered one layer at a time and their shard is copied; what the plan leaves
    whole is gathered for the block. Every process of the run must then enter.
    """
    parts = {path: style for path, style in plan_of(model).items() if style not in _UNSHARDED}
    is_in_parts = is_partitioned(model)
    with ExitStack() as stack:
        if is_in_parts:
            stack.enter_context(without_hooks(model))
        for path, style in parts.items():
            part = _at(model, path)
            weights = part.parameters() if isinstance(part, nn.Module) else [part]
            with gathered_weights(weights) if is_in_parts else nullcontext():
                _shard(stack, model, path, style, ranks)
        if is_in_parts:
            stack.enter_context(gathered_weights(p for p in model.parameters() if is_part(p)))
        yield


def _shard(stack: ExitStack, model: nn.Module, path: str, style: str, ranks: RankGroup) -> None:
    part = _at(model, path)
    if not isinstance(part, nn.Module):
        owner, _, name = path.rpartition(".")
        _swap(stack, model.get_submodule(owner), name, _cut(part, style, ranks))
    elif style == _EXPERTS:
        _shard_experts(stack, part, ranks)
    elif style in _COLWISE:
        _shard_columns(stack, part, ranks, style in _GATHERS)
    else:
        _shard_rows(stack, part, ranks, style in _SPLITS)


def gathers_logits(model: nn.Module) -> bool:
    """Whether the plan gathers the head's output, so that the logits are bit for bit the same on every rank."""
    head = model.get_output_embeddings()
    plan = plan_of(model)
    return any(module is head and plan.get(name) in _GATHERS for name, module in model.named_modules())


def _at(model: nn.Module, path: str) -> nn.Module | Tensor:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _base(module: nn.Module) -> nn.Module:
    """The layer itself, without the adapters beside it."""
    return getattr(module, "base_layer", module)


def _with_wrappers(experts: nn.Module) -> list[nn.Module]:
    """The experts and the wrappers that give each of their weights its adapter, outermost first."""
    layers = [experts]
    while hasattr(layers[-1], "base_layer"):
        layers.append(layers[-1].base_layer)
    return layers


def _adapters(module: nn.Module, name: str) -> list[nn.Module]:
    return list(getattr(module, name, {}).values())


def _swap(stack: ExitStack, module: nn.Module, name: str, value: Tensor | None) -> None:
    original = getattr(module, name)
    setattr(module, name, None if value is None else nn.Parameter(_kept(original, value), requires_grad=False))
    stack.callback(setattr, module, name, original)


def _kept(parameter: Tensor, view: Tensor) -> Tensor:
    """A view of a parameter, or a copy of it where the parameter is gathered only for the moment."""
    return view.clone(memory_format=torch.contiguous_format) if is_part(parameter) else view


def _cut(parameter: Tensor, style: str, ranks: RankGroup) -> Tensor:
    """This rank's view of a bare parameter: output features are its last but one dimension, or its only one."""
    full = parameter.detach()
    dim = full.ndim - 1 if style in _ROWWISE else max(full.ndim - 2, 0)
    part = ranks.part(full.shape[dim])
    return full.narrow(dim, part.start, part.stop - part.start)


def _shard_columns(stack: ExitStack, module: nn.Module, ranks: RankGroup, gathers: bool) -> None:
    size = _base(module).weight.shape[0]
    for layer in (_base(module), *_adapters(module, "lora_B")):
        for name, parameter in layer.named_parameters(recurse=False):
            _swap(stack, layer, name, _cut(parameter, "colwise", ranks))
    if gathers:
        # before any other hook: the rows of added tokens are columns of the full output
        stack.callback(module.register_forward_hook(lambda _m, _i, out: ranks.gather(out, size), prepend=True).remove)


def _shard_rows(stack: ExitStack, module: nn.Module, ranks: RankGroup, splits: bool) -> None:
    base = _base(module)
    bias, part = getattr(base, "bias", None), ranks.part(base.weight.shape[1])
    for layer in (base, *_adapters(module, "lora_A")):
        _swap(stack, layer, "weight", _cut(layer.weight, "rowwise", ranks))
    if bias is not None:  # added once, to the sum
        _swap(stack, base, "bias", None)
        bias = _kept(bias, bias.detach())

    def add_up(_module: nn.Module, _inputs: tuple, out: Tensor) -> Tensor:
        out = ranks.sum(out)
        return out if bias is None else out + bias

    stack.callback(module.register_forward_hook(add_up).remove)
    if splits:
        stack.callback(module.register_forward_pre_hook(lambda _m, inputs: (inputs[0][..., part], *inputs[1:])).remove)


def _shard_experts(stack: ExitStack, module: nn.Module, ranks: RankGroup) -> None:
    """Shard the experts. A token's experts on other ranks become this rank's first one, with weight zero."""
    layers = _with_wrappers(module)
    stacked, count = layers[-1], layers[-1].num_experts
    part = ranks.part(count)
    for name, parameter in list(stacked.named_parameters(recurse=False)):
        _swap(stack, stacked, name, parameter.detach()[part])
    for layer in layers:
        for down in _adapters(layer, "lora_A"):  # (experts x rank, in features)
            _swap(stack, down, "weight", down.weight.detach().unflatten(0, (count, -1))[part].flatten(0, 1))
        for up in _adapters(layer, "lora_B"):  # (out features, rank x experts); peft takes the three apart as well
            _swap(stack, up, "weight", up.weight.detach().unflatten(1, (-1, count))[..., part])
        layer.num_experts = part.stop - part.start
        stack.callback(setattr, layer, "num_experts", count)

    def select(_module: nn.Module, inputs: tuple) -> tuple:
        hidden, index, weights, *rest = inputs
        if index.is_floating_point() or not weights.is_floating_point():
            raise TypeError("experts that are not called with (hidden states, expert index, weights)")
        is_local = (index >= part.start) & (index < part.stop)
        return hidden, (index - part.start).where(is_local, 0), weights.where(is_local, 0), *rest

    stack.callback(module.register_forward_pre_hook(select).remove)
    stack.callback(module.register_forward_hook(lambda _m, _i, out: ranks.sum(out)).remove)


# -- Ranks of a tensor-parallel group generate as one: the same requests, the same tokens, errors raised on all --------


def as_group(tp: RankGroup | ProcessGroup | None) -> RankGroup | None:
    """`tp` as a group of two or more ranks, or None."""
    ranks = tp if tp is None or isinstance(tp, RankGroup) else RankGroup(tp)
    return None if ranks is None or ranks.degree == 1 else ranks


def all_agree(ranks: RankGroup, answer: Callable[[], object]) -> list:
    """answer() of each rank of the group (numbers, strings, lists). An error on one of them is raised on all."""
    failure, value = None, None
    try:
        value = answer()
    except Exception as error:  # sent to the others before it is raised
        failure = error
    answers = ranks.exchange([value, None if failure is None else str(failure), isinstance(failure, UserError)])
    if failure is not None:
        raise failure
    for i, (_, error, is_users) in enumerate(answers):
        if error is not None:
            raise (UserError if is_users else RuntimeError)(f"rank {i} of the tensor-parallel group: {error}")
    return [value for value, _, _ in answers]


@contextmanager
def propagate_errors(ranks: RankGroup) -> Iterator[None]:
    """An error in the block on this rank alone ends the group, so that the others raise too instead of waiting. A
    UserError is raised on all ranks by construction and leaves the group usable."""
    try:
        yield
    except UserError:
        raise
    except BaseException:
        ranks.abandon()
        raise


def draw_together(ranks: RankGroup, asked: Sequence[tuple], sampling: SamplingConfig, check: Callable[[], None],
                  draw: Callable[[list[tuple]], list]) -> list:
    """This rank's requests (number, prompt, limit, seed), drawn by all ranks with those of the others; equal ones once.

    check: raises UserError where this rank's requests cannot be drawn. draw: runs requests, the same ones on every
    rank, and returns them with their tokens.
    """

    def checked_requests() -> list:
        check()
        return [repr(sampling), [list(request) for request in asked]]

    with propagate_errors(ranks):
        answers = all_agree(ranks, checked_requests)
        if len({settings for settings, _ in answers}) > 1:
            raise UserError("the ranks of a tensor-parallel group were given different sampling settings; "
                            "give all the same")
        everyones = {_name(request): tuple(request) for _, requests in answers for request in requests}
        drawn = dict(zip(everyones, draw(list(everyones.values())), strict=True))
        if len(set(all_agree(ranks, lambda: hash(tuple(t for request in drawn.values() for t in request.tokens))))) > 1:
            raise RuntimeError("the ranks of a tensor-parallel group drew different tokens")
        return [drawn[_name(request)] for request in asked]


def _name(request: Sequence) -> tuple:
    number, prompt, limit, seed = request
    return number, tuple(prompt), limit, seed
