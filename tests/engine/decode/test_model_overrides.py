"""Decoders that need a hand to run over slots (positions, attention or a cache of their own) say what their plain
forward says, and are untouched outside the mode."""

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from tests.factories.architectures import random_model

PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(n)] for i, n in enumerate((7, 1, 9, 2, 5))]
GREEDY = SamplingConfig(max_new_tokens=8, temperature=0)
KINDS = {
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=4, num_layers=2, num_heads=4,
                    num_hidden_layers=None, num_attention_heads=None),
    "openai-gpt": {}, "marian": {}, "mbart": {}, "whisper": {},
    "minimax": dict(layer_types=["linear_attention", "full_attention"], block_size=4, num_local_experts=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_over_slots_are_those_of_the_plain_forward(kind):
    model = random_model(kind, KINDS[kind])
    engine = HybridEngine(model, model, eos_ids=[2], max_batch=3)
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    with engine.inference():
        drawn = engine.generate([p for p in PROMPTS for _ in range(2)], GREEDY).tokens
        again = list(engine.stream(PROMPTS[0] + [8, 9], GREEDY))
        whole = engine.generate([PROMPTS[0] + [8, 9]], GREEDY).tokens[0]
    assert engine.describe()["path"] == "native"
    assert again == [t for t in whole if t != 2]
    assert {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()} == hooks
    assert not any("_attn" in vars(m) for m in model.modules())
    for prompt, tokens in zip([p for p in PROMPTS for _ in range(2)], drawn, strict=True):
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
    assert len({tuple(t) for t in drawn}) > 3
