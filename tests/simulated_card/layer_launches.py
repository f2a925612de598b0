"""Kernel launches of a decode step for each decoder layer, nothing recorded: two models that differ by a layer, ten
steps. Prints them as JSON, by case.
"""

from __future__ import annotations

import json
import tempfile

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.tiny import save_tiny
from tests.simulated_card import Card, simulated_card

CASES = ("llama", "llama, lora", "opt", "llama, 4bit", "llama, 4bit, lora")


def of_layer(case: str) -> float:
    """Launches of one step and layer."""
    counts = [_of_ten_steps(case, layers) for layers in (2, 3)]
    return (counts[1] - counts[0]) / 10


def _of_ten_steps(case: str, layers: int) -> int:
    kind, is_4bit = case.split(",")[0], "4bit" in case
    more = dict(ffn_dim=64, word_embed_proj_dim=64) if kind == "opt" else {}
    with tempfile.TemporaryDirectory() as folder, simulated_card() as card:
        path = save_tiny(folder, kind=kind, num_hidden_layers=layers, hidden_size=64, **more)
        model = load_causal_lm(ModelConfig(path, dtype="bfloat16", load_in_4bit=is_4bit), "cuda")
        if "lora" in case:
            add_lora(model, LoraConfig(r=4))
        engine = HybridEngine(model, model, capture=None, max_batch=8)
        with engine.inference():
            return _launches(engine, card, 11) - _launches(engine, card, 1)


def _launches(engine: HybridEngine, card: Card, tokens: int) -> int:
    card.reset()
    engine.generate([[5, 6, 7]] * 8, SamplingConfig(max_new_tokens=tokens, min_new_tokens=tokens))
    return sum(card.launches.values())


if __name__ == "__main__":
    print(json.dumps({case: of_layer(case) for case in CASES}))
