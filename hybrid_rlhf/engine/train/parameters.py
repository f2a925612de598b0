"""How much of a model an engine trains."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.train.deepspeed_compat import size_of
from hybrid_rlhf.models.added_rows import holders
from hybrid_rlhf.models.backbone import reads_text
from hybrid_rlhf.models.lora import lora_layers
from hybrid_rlhf.models.quantize import quantized_layers


def count_parameters(engine: HybridEngine) -> tuple[int, int]:
    """(trained, all) weights of the engine's module, at their full size under ZeRO 3 or quantisation. If it trains,
    `all` leaves out the adapters of other roles on its base (a teacher's)."""
    trained = list(engine.training.parameters.values()) if engine.training else []
    trained_ids = {id(p) for p in trained}
    others = {id(p) for p in _adapters(engine.module) if id(p) not in trained_ids} if trained else set()
    return sum(map(size_of, trained)), sum(_size(p) for p in engine.module.parameters() if id(p) not in others)


def _adapters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of all adapters, of any role."""
    for layer in lora_layers(module).values():
        yield from (*layer.lora_A.parameters(), *layer.lora_B.parameters())
    for rows in holders(module).values():
        yield from rows.adapters.parameters()


def share_unquantised(engine: HybridEngine) -> float:
    """Share of a quantised base that is not held in fewer bits: embeddings, norms, the head, and fused experts, which
    are not linear layers."""
    base = [p for name, p in engine.module.named_parameters() if ".lora_" not in name]
    packed = {id(layer.weight) for layer in quantized_layers(engine.module).values()}
    return sum(_size(p) for p in base if id(p) not in packed) / sum(map(_size, base))


def without_adapter(model: nn.Module) -> tuple[float, list[str]]:
    """Share of a transformers model's weights for text that are neither in a layer with an adapter nor in embeddings
    and the head, and their names' last parts: experts of models whose weights for all of them are one matrix, say."""
    is_of_text = reads_text(model)
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    served = [*lora_layers(model).values(), *(m for m in heads if m is not None),
              *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    served_ids = {id(p) for layer in served for p in layer.parameters()}
    weights = {name: p for name, p in model.named_parameters() if is_of_text(name)}
    left = {name: _size(p) for name, p in weights.items() if id(p) not in served_ids}
    most = {name.rsplit(".", 1)[-1] for name, size in left.items() if size >= max(left.values()) / 2}
    return sum(left.values()) / sum(map(_size, weights.values())), sorted(most)


def _size(parameter) -> int:  # noqa: ANN001
    quantised = getattr(parameter, "quant_state", None)  # 4 bits: two weights are one element
    return quantised.shape.numel() if quantised is not None else size_of(parameter)
