"""How much of a model an engine trains."""

from __future__ import annotations

from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.train.zero import size_of


def count_parameters(engine: HybridEngine) -> tuple[int, int]:
    """(trained, all) weights of the engine's module, whole ones where ZeRO 3 or a quantisation has them in parts."""
    trained = engine.training.parameters.values() if engine.training else ()
    return sum(map(size_of, trained)), sum(map(_size, engine.module.parameters()))


def _size(parameter) -> int:  # noqa: ANN001
    quantised = getattr(parameter, "quant_state", None)  # 4 bits: two weights are one element
    return quantised.shape.numel() if quantised is not None else size_of(parameter)
