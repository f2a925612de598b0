"""Bytes that a model's training and scoring keep, counted by running its own code on tensors without memory.

Nothing is guessed from sizes: the forward and backward of the model itself, with its adapters, its checkpointing and
our chunked log-probabilities, run on fake tensors, and every storage that they make is counted while it lives. On a CPU
the peak measured in the process was within 2% of it where the allocator gives freed memory back (benchmarks/memory.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_rlhf.algorithms import likelihood
from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.backbone import hidden_states, own_head
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.tensors import SequenceBatch

# Beyond MAX_TRACED layers two shallow models stand for the deep one. The difference of their depths is a multiple of
# the periods in use (1, 2, 3, 6), and the smaller has more layers than models keep dense before their experts.
MAX_TRACED, SHALLOW = 16, (4, 10)


def _remembered(function: Callable) -> Callable:
    """Keep results by the printed arguments: settings hold lists, which have no hash."""
    kept: dict[str, object] = {}

    @wraps(function)
    def call(*given: object, **named: object):  # noqa: ANN202 - the function's own
        key = repr((given, sorted(named.items())))
        if key not in kept:
            kept[key] = function(*given, **named)
        return kept[key]

    return call


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make within the block, while they live. now, peak: bytes."""

    def __init__(self, known: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Callable, types, given=(), named=None):  # noqa: ANN001, ANN204
        out = func(*given, **(named or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return out

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


@dataclass(frozen=True)
class Sizes:
    """Counts of one model. weight_bytes: of all that is not an adapter; adapter_bytes: of adapters and of the scalar
    head beside them; trained, trained_dtype: elements that an optimizer moves; vocab: rows of its head; itemsize: bytes
    of one element of its dtype; largest: bytes of the largest weight."""

    weight_bytes: int
    adapter_bytes: int
    trained: int
    trained_dtype: torch.dtype | None
    vocab: int
    itemsize: int
    largest: int = 0


@dataclass(frozen=True)
class Activations:
    """Bytes of a backbone on rows of one length. saved: what a forward with gradients leaves for the backward; peak:
    the most in either, gradients of parameters aside; scoring: the most of a forward without gradients."""

    saved: int
    peak: int
    scoring: int


def _depths(config, model: ModelConfig) -> tuple[int, ...]:  # noqa: ANN001
    """Depths to trace: the model's own, or two shallow ones. A frozen pattern may name layers that those have not."""
    layers = config.get_text_config().num_hidden_layers
    return (layers,) if layers <= MAX_TRACED or model.freeze else SHALLOW


def _deeper(values: list[float], depths: tuple[int, ...], layers: int) -> int:
    """What grows evenly with the depth, at `layers`, from its values at `depths`."""
    if len(depths) == 1:
        return round(values[0])
    return round(values[1] + (values[1] - values[0]) / (depths[1] - depths[0]) * (layers - depths[1]))


@_remembered
def sizes(model: ModelConfig, device: torch.device, *, is_scalar: bool = False) -> Sizes:
    """Sizes of the model that `model` describes; reads its configuration only."""
    config = shapes.read_config(model)
    plain = shapes.empty_model(config, replace(model, lora=LoraConfig()), device, is_scalar=is_scalar)
    weights = sum(map(_bytes, [*plain.parameters(), *plain.buffers()])) - _packed_away(plain, model)
    facts = (config.get_text_config().vocab_size, plain.dtype.itemsize, max(map(_bytes, plain.parameters())))
    if not model.lora.r:
        trained = [p for p in plain.parameters() if p.requires_grad]
        return Sizes(weights, 0, sum(p.numel() for p in trained), trained[0].dtype, *facts)
    head = plain.score.weight if is_scalar else None
    count, size, dtype = _adapters(model, device)
    more = (head.numel(), _bytes(head)) if is_scalar else (0, 0)
    return Sizes(weights - more[1], size + more[1], count + more[0], dtype, *facts)


@_remembered
def classifier_bytes(model: ModelConfig, device: torch.device, labels: int) -> int:
    """Bytes of the weights of a sequence-classification model, encoder or decoder, with so many labels."""
    empty = shapes.empty_classifier(shapes.read_config(model), model, device, labels)
    return sum(map(_bytes, [*empty.parameters(), *empty.buffers()]))


@_remembered
def _adapters(model: ModelConfig, device: torch.device) -> tuple[int, int, torch.dtype]:
    """(elements, bytes, dtype) of the adapters of `model`."""
    config = shapes.read_config(model)
    depths, found = _depths(config, model), []
    for depth in depths:
        empty = shapes.empty_model(shapes.shallow(config, depth), model, device, is_scalar=False)
        found.append([p for p in empty.parameters() if p.requires_grad])
    layers = config.get_text_config().num_hidden_layers
    count, size = (_deeper([sum(f(p) for p in each) for each in found], depths, layers)
                   for f in (torch.Tensor.numel, _bytes))
    return count, size, found[0][0].dtype


@_remembered
def cache_bytes(model: ModelConfig, device: torch.device) -> tuple[int, int]:
    """(bytes per token, bytes per sequence) of the cache that one sequence of `model` fills."""
    empty = shapes.empty_model(shapes.read_config(model), replace(model, lora=LoraConfig()), device, is_scalar=False)
    with shapes.without_memory(device):
        return shapes.cache_bytes(shapes.on_device(empty).eval())


_traced: dict[str, dict[int, Activations]] = {}


def activations(model: ModelConfig, device: torch.device, rows: int, length: int, *, dropout: bool = False,
                trains: bool = True, is_exact: bool = True) -> Activations:
    """Activations of the backbone on `rows` rows of `length` tokens. trains: whether training is counted too.

    A scalar model has the same backbone; its head adds one fp32 copy of the hidden states, which no peak contains.
    is_exact False: counts between two that were traced are taken from the line through them, for a quick search.
    """
    plain = replace(model, load_in_4bit=False, load_in_8bit=False)  # holds its frozen weights in another way, no more
    known = _traced.setdefault(repr((plain, device, length, dropout, trains)), {})
    if rows not in known:
        below, above = ([n for n in known if n < rows], [n for n in known if n > rows])
        if below and above and not is_exact:
            return _between(rows, known, max(below), min(above))
        known[rows] = _traced_model(plain, device, rows, length, dropout, trains)
    return known[rows]


def _between(rows: int, known: dict[int, Activations], low: int, high: int) -> Activations:
    share = (rows - low) / (high - low)
    return Activations(*(round(a + (b - a) * share) for a, b in zip(*(
        (known[n].saved, known[n].peak, known[n].scoring) for n in (low, high)), strict=True)))


def _traced_model(model: ModelConfig, device: torch.device, rows: int, length: int, dropout: bool,
                  trains: bool) -> Activations:
    config = shapes.read_config(model)
    depths, found = _depths(config, model), []
    for i, depth in enumerate(depths if trains else depths[:1]):  # what scoring takes does not grow with the depth
        cut = shapes.shallow(config, depth)
        empty = shapes.empty_model(cut, model, device, is_scalar=False, dropout=dropout)
        with shapes.without_memory(device):
            found.append(_trace(shapes.on_device(empty), rows, length, scores=i == 0, trains=trains))
    layers = config.get_text_config().num_hidden_layers
    saved = _deeper([f.saved for f in found], depths[: len(found)], layers)
    on_top = found[-1].peak - found[-1].saved  # one layer's, or the embeddings' business
    return Activations(saved, saved + on_top, found[0].scoring)


def _packed_away(empty: nn.Module, model: ModelConfig) -> int:
    """Bytes that quantising saves: every linear layer but the head, in NF4 (half a byte, and an fp32 scale per block of
    64 numbers: QLoRA, 2305.14314) or in int8 (a byte, and an fp32 scale per row)."""
    heads = {id(empty.get_output_embeddings()), id(getattr(empty, "score", None))}
    saved = 0
    for module in empty.modules():
        if model.quantize and isinstance(module, nn.Linear) and id(module) not in heads:
            count = module.weight.numel()
            packed = count / 2 + 4 * count / 64 if model.quantize == "4bit" else count + 4 * module.out_features
            saved += round(_bytes(module.weight) - packed)
    return saved


def _trace(model: nn.Module, rows: int, length: int, *, scores: bool, trains: bool) -> Activations:
    ids = torch.zeros(rows, length, dtype=torch.long)
    batch = SequenceBatch(ids, ids.bool(), ids.bool())
    with _counting(model.eval()) as scoring, torch.no_grad():
        if scores:
            hidden_states(model, batch)
    if not trains:
        return Activations(0, 0, scoring.peak)
    for parameter in model.parameters():  # as after a first micro-batch, so that only activations are counted
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with _counting(model.train()) as training:
        hidden = hidden_states(model, batch)
        saved = training.now
        hidden.backward(torch.zeros_like(hidden))
    return Activations(saved, training.peak, scoring.peak)


@_remembered
def logit_bytes(model: ModelConfig, device: torch.device, num_tokens: int, *, trains: bool,
                entropy: bool = False) -> int:
    """Most bytes that log-probabilities of `num_tokens` tokens take beside their hidden states."""
    config = shapes.read_config(model)
    empty = _headed(config, model, device)
    with shapes.without_memory(device):
        shapes.on_device(empty)
        hidden = torch.zeros(num_tokens, config.get_text_config().hidden_size, dtype=empty.dtype, requires_grad=trains)
        targets = torch.zeros(num_tokens, dtype=torch.long)
        for parameter in empty.parameters():
            parameter.grad = torch.zeros_like(parameter) if trains and parameter.requires_grad else None
        with _counting(empty) as live, torch.set_grad_enabled(trains), _few_blocks():
            logprobs, spread, _ = token_logprobs(
                hidden, targets, own_head(empty), with_entropy=entropy,
                chunk_size=chunk_rows(config.get_text_config().vocab_size, hidden.dtype))
            if trains:
                (logprobs + 0 * spread if entropy else logprobs).sum().backward()
    return live.peak


def _headed(config, model: ModelConfig, device: torch.device) -> nn.Module:  # noqa: ANN001
    """The shallowest model that is traced: its backbone is not run here."""
    return shapes.empty_model(shapes.shallow(config, _depths(config, model)[0]), model, device, is_scalar=False)


@contextmanager
def _few_blocks() -> Iterator[None]:
    """Within the block log-probabilities go over two blocks of each chunk: all take the same, in the same buffers, and
    thousands of them would be most of the time that a plan takes."""
    original = likelihood._blocks
    likelihood._blocks = lambda logits: islice(original(logits), 2)
    try:
        yield
    finally:
        likelihood._blocks = original


@contextmanager
def _counting(model: nn.Module) -> Iterator[LiveBytes]:
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with LiveBytes(tuple(known)) as live:
        yield live


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


