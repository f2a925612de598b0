"""A scalar model is compared with its export by several scores: one alone may be near zero."""

from __future__ import annotations

import torch

from hybrid_rlhf.export import folder as exported
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model, tiny_tokenizer


@torch.no_grad()
def test_a_reward_model_whose_first_score_is_near_zero_is_exported(tmp_path):
    """In bfloat16, with a head that gives the fixed row of the comparison 0: what is left there is rounding, which
    merging the adapters changes by more than a twentieth of it."""
    model = tiny_scalar_model().bfloat16()
    model.config.pad_token_id = 0
    add_lora(model, LoraConfig(r=4))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.1)
    hidden = model.model(input_ids=exported._row(model, tiny_tokenizer())).last_hidden_state[0, -1].float()
    head = model.score.weight
    head.copy_(head.float() - head.float() @ hidden[:, None] * hidden / hidden.square().sum())
    scores = exported._logits(model, tiny_tokenizer()).flatten()
    assert abs(scores[0]) < 0.05 * scores.abs().max()
    assert (export(model, tiny_tokenizer(), tmp_path / "model", [3]) / "model.safetensors").exists()


def test_the_comparison_keeps_no_activations():
    for model in (tiny_scalar_model(), tiny_causal_lm()):
        model.config.pad_token_id = 0
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not exported._logits(model, tiny_tokenizer()).requires_grad
