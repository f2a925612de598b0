"""Bytes that a model's training and scoring keep, counted by running its own code on tensors without memory.

Nothing is estimated from sizes: the forward and backward of the model itself, with its adapters, its checkpointing, the
fused operations of training and our chunked log-probabilities, run on fake tensors, and every storage that they make is
counted while it lives. How far measured peaks are from the counts: docs/results/memory.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.algorithms import likelihood
from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs_and
from hybrid_rlhf.core import torch_compat
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine.train.patches import attention_by
from hybrid_rlhf.kernels.fusions import Fusions, find_fusions
from hybrid_rlhf.kernels.shape_ops import TRIAL, flash, shape_ops, telling
from hybrid_rlhf.memory_plan.operations import Recorder, Tally, Work
from hybrid_rlhf.models import shapes
from hybrid_rlhf.models.backbone import hidden_states, own_head, reads_text
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, plain_linear_layers
from hybrid_rlhf.models.lora_products import fused_adapters
from hybrid_rlhf.models.quantize import Packed, pack
from hybrid_rlhf.models.transformers_compat import sdpa_replaced

# A deep model is extrapolated from two shallow ones: of one and two layers where all layers are alike; else, beyond
# MAX_TRACED layers, of depths whose difference is a multiple of the periods in use (1, 2, 3, 6), the smaller with more
# layers than models keep dense before their experts.
EQUAL, MAX_TRACED, SHALLOW = (1, 2), 16, (4, 10)


def _remembered(function: Callable) -> Callable:
    """Cache results by the printed arguments, of which the first is a model: its settings hold lists (not hashable)."""
    kept: dict[str, object] = {}

    @wraps(function)
    def call(model: ModelConfig, *others: object, **named: object):  # noqa: ANN202 - the function's own
        key = repr((model, shapes.edition(model), others, sorted(named.items())))
        if key not in kept:
            kept[key] = function(model, *others, **named)
        return kept[key]

    return call


@dataclass(frozen=True)
class Sizes:
    """Counts of one model. weight_bytes: of all that is not an adapter; adapter_bytes: of adapters and of the scalar
    head beside them; trained, trained_dtype: elements that an optimizer steps; vocab: rows of its head; itemsize: bytes
    of one element of its dtype; largest: bytes of the largest weight; widest: elements of the largest linear layer that
    may have an adapter; num_layers: of its backbone; has_towers: whether it reads images."""

    weight_bytes: int
    adapter_bytes: int
    trained: int
    trained_dtype: torch.dtype | None
    vocab: int
    itemsize: int
    largest: int = 0
    widest: int = 0
    num_layers: int = 1
    has_towers: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes of a backbone on rows of one length. saved: what a forward with gradients saves for the backward; peak: the
    most in either, without gradients of parameters; scoring: the most of a forward without gradients. score_work,
    train_work: the operations of a forward without gradients, and of a forward and backward (empty where rows were
    interpolated)."""

    saved: int
    peak: int
    scoring: int
    score_work: Work = field(default=Work(), compare=False)
    train_work: Work = field(default=Work(), compare=False)


def _plain(model: ModelConfig) -> ModelConfig:
    return replace(model, lora=LoraConfig())


def _depths(model: ModelConfig) -> tuple[int, ...]:
    """Depths to trace: the model's own, or two shallow ones. A frozen pattern may name layers that those lack."""
    layers = shapes.read_config(model).get_text_config().num_hidden_layers
    if model.freeze or layers <= EQUAL[1]:
        return (layers,)
    if _has_equal_layers(replace(_plain(model), load_in_4bit=False, load_in_8bit=False)):
        return EQUAL
    return (layers,) if layers <= MAX_TRACED else SHALLOW


@_remembered
def _has_equal_layers(model: ModelConfig) -> bool:
    return shapes.has_equal_layers(shapes.empty_model(shapes.read_config(model), model, torch.device("cpu"),
                                                      is_scalar=False))


def _deeper(values: list[float], depths: tuple[int, ...], layers: int) -> int:
    """Extrapolate to `layers` what grows linearly with the depth, from its values at `depths`."""
    if len(depths) == 1:
        return round(values[0])
    return round(values[1] + (values[1] - values[0]) / (depths[1] - depths[0]) * (layers - depths[1]))


@_remembered
def sizes(model: ModelConfig, device: torch.device, *, is_scalar: bool = False) -> Sizes:
    """Sizes of the model that `model` describes; reads its configuration only."""
    config = shapes.read_config(model)
    plain = shapes.empty_model(config, _plain(model), device, is_scalar=is_scalar)
    weights = sum(map(_bytes, [*plain.parameters(), *plain.buffers()])) - _packed_away(plain, model)
    facts = (config.get_text_config().vocab_size, plain.dtype.itemsize, max(map(_bytes, plain.parameters())))
    layers, reads = config.get_text_config().num_hidden_layers, hasattr(config, "vision_config")
    if not model.lora.r:
        trained = [p for p in plain.parameters() if p.requires_grad]
        return Sizes(weights, 0, sum(p.numel() for p in trained), trained[0].dtype, *facts, num_layers=layers,
                     has_towers=reads)
    head = plain.score.weight if is_scalar else None
    count, size, dtype = _adapters(model, device)
    more = (head.numel(), _bytes(head)) if is_scalar else (0, 0)
    widest = max((plain.get_submodule(n).weight.numel() for n in plain_linear_layers(plain)), default=0)
    return Sizes(weights - more[1], size + more[1], count + more[0], dtype, *facts, widest, layers, reads)


@_remembered
def classifier_bytes(model: ModelConfig, device: torch.device, labels: int, rows: int, length: int) -> tuple[int, int]:
    """(weights, activations) of a sequence-classification model, encoder or decoder, with so many labels, that reads
    `rows` padded texts of `length` tokens at once, or of its number of positions if that is smaller."""
    config = shapes.read_config(model)
    empty = shapes.empty_classifier(config, model, device, labels)
    weights = sum(map(_bytes, [*empty.parameters(), *empty.buffers()]))
    length = min(length, getattr(config.get_text_config(), "max_position_embeddings", None) or length)
    with shapes.without_memory(device), counting(shapes.on_device(empty).eval()) as live, torch.no_grad():
        ids = torch.zeros(rows, length, dtype=torch.long)
        empty(input_ids=ids, attention_mask=torch.ones_like(ids, dtype=torch.bool))
    return weights, live.peak


@_remembered
def _adapters(model: ModelConfig, device: torch.device) -> tuple[int, int, torch.dtype]:
    """(elements, bytes, dtype) of the adapters of `model`."""
    config = shapes.read_config(model)
    depths, parameters = _depths(model), []
    for depth in depths:
        empty = shapes.empty_model(shapes.shallow(config, depth), model, device, is_scalar=False)
        parameters.append([p for p in empty.parameters() if p.requires_grad])
    layers = config.get_text_config().num_hidden_layers
    count, size = (_deeper([sum(f(p) for p in group) for group in parameters], depths, layers)
                   for f in (torch.Tensor.numel, _bytes))
    return count, size, parameters[0][0].dtype


@_remembered
def cache_bytes(model: ModelConfig, device: torch.device) -> tuple[int, int]:
    """(bytes per token, bytes per sequence) of the cache that one sequence of `model` fills."""
    config, plain, sizes = shapes.read_config(model), _plain(model), []
    layers = config.get_text_config().num_hidden_layers
    depths = EQUAL if _depths(plain) == EQUAL else (layers,)
    for depth in depths:
        empty = shapes.empty_model(shapes.shallow(config, depth), plain, device, is_scalar=False)
        with shapes.without_memory(device):
            sizes.append(shapes.cache_bytes(shapes.on_device(empty).eval()))
    per_token, per_sequence = (_deeper(list(values), depths, layers) for values in zip(*sizes, strict=True))
    return per_token, per_sequence


_traced: dict[str, dict[int, Activations]] = {}


def activations(model: ModelConfig, device: torch.device, rows: int, length: int, *, dropout: bool = False,
                trains: bool = True, is_exact: bool = True, is_partitioned: bool = False) -> Activations:
    """Activations of the backbone on `rows` rows of `length` tokens. trains: whether training is counted too;
    is_partitioned: whether under ZeRO 3, whose layers run without our fused operations.

    A scalar model has the same backbone; its head adds one fp32 copy of the hidden states, which is not part of a peak.
    is_exact False: counts between two that were traced are interpolated linearly, for a quick search.
    """
    packed = replace(model, load_in_4bit=False, load_in_8bit=bool(model.quantize))  # 4 or 8 bits are traced alike
    key = (packed, shapes.edition(model), device, length, dropout, is_partitioned)
    both = _traced.setdefault(repr((*key, True)), {})
    if not trains and rows in both:
        return both[rows]
    known = both if trains else _traced.setdefault(repr((*key, False)), {})
    if rows not in known:
        below, above = ([n for n in known if n < rows], [n for n in known if n > rows])
        if below and above and not is_exact:
            return _between(rows, known, max(below), min(above))
        known[rows] = _traced_model(model, device, rows, length, dropout, trains, is_partitioned)
    return known[rows]


def _between(rows: int, known: dict[int, Activations], low: int, high: int) -> Activations:
    share = (rows - low) / (high - low)
    return Activations(*(round(a + (b - a) * share) for a, b in zip(*(
        (known[n].saved, known[n].peak, known[n].scoring) for n in (low, high)), strict=True)))


def _traced_model(model: ModelConfig, device: torch.device, rows: int, length: int, dropout: bool,
                  trains: bool, is_partitioned: bool = False) -> Activations:
    depths, traces = _depths(model), []
    for depth in depths:
        with _made(model, depth, device, dropout, is_partitioned) as empty:
            traces.append(_trace(empty, rows, length, trains=trains))
    layers = shapes.read_config(model).get_text_config().num_hidden_layers
    saved = _deeper([f.saved for f in traces], depths, layers)
    on_top = traces[-1].peak - traces[-1].saved  # of one layer, or of the embeddings
    works = [Work(layers, depths, tuple(tally for f in traces for tally in getattr(f, name).tallies))
             for name in ("score_work", "train_work")]
    return Activations(saved, saved + on_top, traces[-1].scoring, *works)


@contextmanager
def _made(model: ModelConfig, depth: int, device: torch.device, dropout: bool = False,
          is_partitioned: bool = False) -> Iterator[nn.Module]:
    """The model with `depth` layers, on fake tensors, with the operations that it computes by."""
    ops = shape_ops(device.type)
    empty = shapes.empty_model(shapes.shallow(shapes.read_config(model), depth), model, device, is_scalar=False,
                               dropout=dropout)
    if model.quantize:
        pack(empty)
    fusions = Fusions() if is_partitioned else find_fusions(empty, ops.fused, TRIAL)
    attention = sdpa_replaced(flash) if device.type == "cuda" else attention_by(ops)
    with shapes.without_memory(device), attention, fusions.swapped():
        shapes.on_device(empty)
        with nullcontext() if is_partitioned else fused_adapters(empty):
            yield empty


@_remembered
def decode_work(model: ModelConfig, device: torch.device, slots: int) -> Work:
    """The operations of a backbone on one token of each of `slots` sequences, without attention to earlier tokens."""
    depths, tallies = _depths(model), []
    packed = replace(model, load_in_4bit=False, load_in_8bit=bool(model.quantize))
    for depth in depths:
        with _made(packed, depth, device) as empty:
            tallies.append(_recorded_forward(empty.eval(), _batch(slots, 1), is_fused=True)[1])
    return Work(shapes.read_config(model).get_text_config().num_hidden_layers, depths, tuple(tallies))


def _packed_away(empty: nn.Module, model: ModelConfig) -> int:
    """Bytes that quantisation saves: every linear layer but the head, in NF4 (half a byte, and an fp32 scale per block
    of 64 numbers: QLoRA, 2305.14314) or in int8 (a byte, and an fp32 scale per row)."""
    heads, is_of_text = {id(empty.get_output_embeddings()), id(getattr(empty, "score", None))}, reads_text(empty)
    saved = 0
    for name, module in empty.named_modules():
        if model.quantize and isinstance(module, nn.Linear) and id(module) not in heads and is_of_text(name):
            count = module.weight.numel()
            packed = count / 2 + 4 * count / 64 if model.quantize == "4bit" else count + 4 * module.out_features
            saved += round(_bytes(module.weight) - packed)
    return saved


def _batch(rows: int, length: int) -> SequenceBatch:
    ids = torch.zeros(rows, length, dtype=torch.long)
    return SequenceBatch(ids, ids.bool(), ids.bool())


def _trace(model: nn.Module, rows: int, length: int, *, trains: bool) -> Activations:
    batch = _batch(rows, length)
    scoring, scored = _recorded_forward(model.eval(), batch)
    score_work = Work(tallies=(scored,))
    if not trains:
        return Activations(0, 0, scoring, score_work)
    for parameter in model.parameters():  # as after a first micro-batch, so that only activations are counted
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for module in model.train().modules():
        if hasattr(module, "layerdrop"):  # it skips layers by random numbers, and there are none here: count all
            module.training = False
    recorder = Recorder(_packed(model))
    with counting(model, recorder.record) as training, telling(recorder.record_ours):
        hidden = hidden_states(model, batch)
        saved = training.now
        hidden.backward(torch.zeros_like(hidden))
    return Activations(saved, training.peak, scoring, score_work, Work(tallies=(recorder.tally,)))


def _recorded_forward(model: nn.Module, batch: SequenceBatch, is_fused: bool = False) -> tuple[int, Tally]:
    """(most bytes, operations) of a forward without gradients."""
    recorder = Recorder(_packed(model), is_fused)
    with counting(model, recorder.record) as scoring, telling(recorder.record_ours), torch.no_grad():
        hidden_states(model, batch)
    return scoring.peak, recorder.tally


def _packed(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, Packed)]


@_remembered
def logit_bytes(model: ModelConfig, device: torch.device, num_tokens: int, *, trains: bool,
                entropy: bool = False, teacher: ModelConfig | None = None) -> int:
    """Most bytes that log-probabilities of `num_tokens` tokens take beside their hidden states; with a teacher, its
    hidden states and the divergence from it too."""
    config = shapes.read_config(model)
    is_frozen = bool(model.lora.r) and model.lora.target_modules == "all-linear"  # the head has no adapter
    empty = _headed(_plain(model) if is_frozen else model, device)
    taught = _headed(_plain(teacher), device) if teacher else None
    if is_frozen:
        empty.requires_grad_(False)
    with shapes.without_memory(device):
        shapes.on_device(empty)
        known = nn.ModuleList([empty, *([shapes.on_device(taught)] if taught else [])])
        hidden = torch.zeros(num_tokens, config.get_text_config().hidden_size, dtype=empty.dtype, requires_grad=trains)
        targets = torch.zeros(num_tokens, dtype=torch.long)
        for parameter in empty.parameters():
            parameter.grad = torch.zeros_like(parameter) if trains and parameter.requires_grad else None
        with counting(known) as live, torch.set_grad_enabled(trains), _few_blocks(device):
            measure, beside = _divergence_from(taught, num_tokens) if taught else (None, ())
            (logprobs, spread, _), divergences = token_logprobs_and(
                measure, beside, hidden, targets, own_head(empty), with_entropy=entropy,
                chunk_size=chunk_rows(config.get_text_config().vocab_size, hidden.dtype),
                score_logits=shape_ops(device.type).token_scores)
            if trains:
                sum([logprobs, *([spread] if entropy else []), *divergences]).sum().backward()
    return live.peak


def _headed(model: ModelConfig, device: torch.device) -> nn.Module:
    """The model with the fewest layers, of which only the head counts."""
    config = shapes.shallow(shapes.read_config(model), _depths(model)[0])
    return shapes.empty_model(config, model, device, is_scalar=False)


def _divergence_from(teacher: nn.Module, num_tokens: int) -> tuple[Callable, tuple[Tensor]]:
    """A function that measures the divergence with the most memory, and the teacher's hidden states."""
    config: Any = teacher.config  # of transformers
    rows = torch.zeros(num_tokens, config.get_text_config().hidden_size, dtype=teacher.dtype)
    targets = TeacherTargets(Divergence("jsd"), [rows], head=own_head(teacher))
    return lambda logits, states: (targets.divergence(logits, states),), (rows,)


@contextmanager
def _few_blocks(device: torch.device) -> Iterator[None]:
    """Within the block log-probabilities go over two blocks of each chunk: all blocks take the same memory, in the same
    buffers, and thousands of them would take most of a plan's time. Blocks have the size that they have on `device`."""
    original = likelihood._blocks
    likelihood._blocks = lambda logits: islice(original(logits, device.type), 2)
    try:
        yield
    finally:
        likelihood._blocks = original


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- the bytes of storages while they live -----------------------------------------------------------------------------


class LiveBytes(torch_compat.dispatch_mode()):
    """Counts the storages that operations make within the block, while they live. now, peak: bytes. on_operation:
    called with each operation, its inputs (in place and by name) and its outputs."""

    def __init__(self, known: tuple[Tensor, ...] = (), on_operation: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._on_operation = on_operation
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {id(tensor.untyped_storage()) for tensor in known}
        for tensor in known:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Callable, types, inputs=(), named=None):  # noqa: ANN001, ANN204
        out = func(*inputs, **(named or {}))
        if self._on_operation:
            self._on_operation(func, inputs, named or {}, out)
        for leaf in torch_compat.leaves_of(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return out

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)  # which lives as long as its storage
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        if key not in self._known:
            self.now += size - self._sizes[key]  # resize_ lets a storage grow
            self._sizes[key] = size
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self._known.discard(key)
        self.now -= self._sizes.pop(key, 0)


@contextmanager
def counting(model: nn.Module, on_operation: Callable[..., None] | None = None) -> Iterator[LiveBytes]:
    """Count within the block what is made beside the model itself and its gradients. on_operation: as in LiveBytes."""
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with LiveBytes(tuple(known), on_operation) as live:
        yield live
