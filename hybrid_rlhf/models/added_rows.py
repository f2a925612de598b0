"""Trainable embedding and head rows of tokens added to the vocabulary, beside low-rank adapters.

A new token's row is the mean of the old ones, and adapters leave embedding and head frozen: no training of them could
make such a token likelier than 1 / V (an answer would never end), nor tell two of them apart. So each adapter has
rows of its own, which replace the tables' outputs for these tokens; the tables stay unchanged. peft's own way
(trainable_token_indices) copies both tables in every forward and does not run under ZeRO 3; its files are written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from hybrid_rlhf.core.torch_compat import copy_with

_FILE_SUFFIX = ".token_adapter.trainable_tokens_delta"  # peft's, behind the table's name
_FILE_PREFIX = "base_model.model."


class _Rows(nn.Module):
    """One adapter's rows of one table. A separate module, so that ZeRO 3 gathers them where they are used.

    ids (N,), sorted; weight (N, H); base (N, H): the table's own rows; bias (N,) or None: the head's for these tokens.
    """

    def __init__(self, ids: Tensor, weight: Tensor, base: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        for name, value in (("ids", ids), ("base", base), ("bias", bias)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        """For an embedding: places (..) -> (.., H), scaled as by the layer. For a head: states (.., H) -> (.., N)."""
        if x.is_floating_point():
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        like = copy_with(layer, {"weight": self.weight.to(layer.weight.dtype)})  # the layer's own code on these rows
        like.padding_idx = None
        return type(layer).forward(like, x)


class AddedRows(nn.Module):
    """The attribute `added_rows` of a table: the rows of each adapter, of which those of `active` are used."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict()
        self.active: Sequence[str] = []

    def in_use(self) -> Iterator[_Rows]:
        yield from (self.adapters[name] for name in self.active if name in self.adapters)


class _Replaced(torch.autograd.Function):
    """logits (.., V) with the columns `ids` (N,) replaced, in place. The gradient is that of logits + columns - before,
    where `before` are the head's own columns, so that no gradient of the logits' size is copied."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, columns: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.mark_dirty(logits)
        return logits.index_copy_(-1, ids, columns)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        selected = gradient.index_select(-1, *ctx.saved_tensors)
        return gradient, selected, -selected, None


def _after_embedding(layer: nn.Module, inputs: tuple, named: dict, embedded: Tensor) -> Tensor:
    ids = inputs[0] if inputs else named["input"]
    for rows in layer.added_rows.in_use():
        places = torch.searchsorted(rows.ids, ids).clamp_(max=len(rows.ids) - 1)
        is_added = rows.ids[places] == ids
        embedded = torch.where(is_added[..., None], rows(layer, places).to(embedded.dtype), embedded)
    return embedded


def _after_head(layer: nn.Module, inputs: tuple, named: dict, logits: Tensor) -> Tensor:
    hidden = inputs[0] if inputs else named["input"]
    for rows in layer.rows_beside[0].added_rows.in_use():
        columns = rows(layer, hidden).to(logits.dtype)
        if torch.is_grad_enabled() and (logits.requires_grad or columns.requires_grad):
            before = F.linear(hidden, rows.base.to(hidden.dtype)).to(logits.dtype)
            logits = _Replaced.apply(logits, columns, before, rows.ids)
        else:
            logits.index_copy_(-1, rows.ids, columns)
    return logits


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """The input embedding and the head, by name; without a tied head, and without the head of a scalar model."""
    layers = [_inner(model.get_input_embeddings())]
    head = _head(model)
    if head is not None and head.weight is not layers[0].weight:
        layers.append(head)
    return {_plain(name): m for name, m in model.named_modules() if any(m is layer for layer in layers)}


def _inner(layer: nn.Module) -> nn.Module:
    return getattr(layer, "base_layer", layer)


def _plain(name: str) -> str:
    return name.removesuffix(".base_layer")


def _head(model: nn.Module) -> nn.Module | None:
    return None if hasattr(model, "score") or (head := model.get_output_embeddings()) is None else _inner(head)


@torch.no_grad()
def add_rows(model: nn.Module, adapter: str, ids: Sequence[int], dtype: torch.dtype,
             only: Mapping[str, Tensor] | None = None) -> None:
    """Give `adapter` its own rows for the tokens `ids`. They start as copies of the tables' rows; with `only` (table's
    name -> (N, H)) as its values, for its tables alone. In place; the tables themselves are frozen."""
    embedding, head = _inner(model.get_input_embeddings()), _head(model)
    order = torch.tensor(ids).argsort()
    for name, layer in tables(model).items():
        if only is not None and name not in only:
            continue
        places = torch.tensor(ids)[order].to(layer.weight.device)
        base = layer.weight.detach()[places]
        value = base if only is None else only[name].to(base.device)[order.to(base.device)]
        is_head = head is not None and head.weight is layer.weight
        bias = head.bias.detach()[places] if is_head and getattr(head, "bias", None) is not None else None
        if not hasattr(layer, "added_rows"):
            layer.added_rows = AddedRows()
            if layer is embedding:
                layer.register_forward_hook(_after_embedding, with_kwargs=True)
            if is_head:
                head.rows_beside = (layer,)  # in a tuple: the head does not own the rows of a tied embedding
                head.register_forward_hook(_after_head, with_kwargs=True)
        layer.added_rows.adapters[adapter] = _Rows(places, value.to(dtype, copy=True), base.clone(), bias)


def holders(model: nn.Module) -> dict[str, AddedRows]:
    """The added rows of a model by their table's name (empty where no token was added)."""
    return {_plain(n.removesuffix(".added_rows")): m for n, m in model.named_modules() if isinstance(m, AddedRows)}


@torch.no_grad()
def with_rows(layer: nn.Module, weight: Tensor) -> Tensor:
    """A table's `weight` (V, H) with the rows of the active adapters in it; `weight` itself where there are none."""
    beside = getattr(layer, "rows_beside", (layer,))[0]
    for rows in beside.added_rows.in_use() if hasattr(beside, "added_rows") else ():
        weight = weight.index_copy(0, rows.ids, rows.weight.to(weight.dtype))
    return weight


def rows_of(layer: nn.Module) -> list[nn.Parameter]:
    """The rows of all adapters of a table, or of the embedding that a tied head shares."""
    beside = getattr(layer, "rows_beside", (layer,))[0]
    return list(beside.added_rows.parameters()) if hasattr(beside, "added_rows") else []


def is_of_rows(name: str) -> bool:
    """Whether an entry of a state dict belongs to added rows."""
    return ".added_rows." in name


def to_file(model: nn.Module, adapter: str) -> tuple[dict[str, Tensor], list[int] | dict[str, list[int]] | None]:
    """An adapter's rows as peft names them in a file, and its setting trainable_token_indices; None without rows."""
    added = {name: rows.adapters[adapter] for name, rows in holders(model).items() if adapter in rows.adapters}
    state = {f"{_FILE_PREFIX}{name}{_FILE_SUFFIX}": rows.weight for name, rows in added.items()}
    ids = {name: rows.ids.tolist() for name, rows in added.items()}
    return state, (next(iter(ids.values())) if len(ids) == 1 else ids or None)


def from_file(model: nn.Module, adapter: str, indices: Sequence[int] | Mapping[str, Sequence[int]] | None,
              state: dict[str, Tensor], dtype: torch.dtype) -> bool:
    """Read the rows of `adapter` from `state`, whose entries of rows are removed; returns whether they fit."""
    added = {k: state.pop(k) for k in list(state) if k.endswith(_FILE_SUFFIX)}
    if not indices or not added:
        return not indices and not added
    known = tables(model)
    for key, value in added.items():
        name = key.removeprefix(_FILE_PREFIX).removesuffix(_FILE_SUFFIX)
        ids = next((v for k, v in indices.items() if name.endswith(k)), []) if isinstance(indices, Mapping) else indices
        if name not in known or value.shape != (len(ids), known[name].weight.shape[1]) or (
                max(ids, default=0) >= len(known[name].weight)):
            return False
        add_rows(model, adapter, list(ids), dtype, {name: value})
    return True
