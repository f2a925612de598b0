"""Tiny random models of many causal architectures, with weights wide enough that greedy tokens depend on attention."""

from __future__ import annotations

import inspect

import torch

VOCAB = 97
COMMON = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
              eos_token_id=2, tie_word_embeddings=False, sliding_window=4, decoder_layers=2, decoder_ffn_dim=48,
              decoder_attention_heads=4)
MOE = dict(moe_intermediate_size=16, n_group=1, topk_group=1, num_experts_per_tok=2)
MIXED = ["sliding_attention", "full_attention"]
# model type: settings beside COMMON. A sliding window of 4 is shorter than the prompts, so that it matters.
ARCHITECTURES: dict[str, dict] = {
    "llama": {}, "mistral": {}, "qwen2": dict(use_sliding_window=True, max_window_layers=1),
    "qwen3": dict(use_sliding_window=True, max_window_layers=1),
    "gemma2": dict(layer_types=MIXED, attn_logit_softcapping=2.0), "gemma3_text": dict(layer_types=MIXED),
    "phi3": {}, "opt": {}, "gpt2": {}, "gpt_neox": {}, "mixtral": {}, "qwen3_moe": dict(MOE, num_experts=4),
    "deepseek_v3": dict(MOE, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                        num_key_value_heads=4, n_routed_experts=4, first_k_dense_replace=1),
    "gpt_oss": dict(layer_types=MIXED, num_local_experts=4),  # attention sinks
    "falcon": dict(alibi=False, new_decoder_architecture=True), "bloom": {}, "mamba": dict(state_size=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=8, use_mamba_kernels=False),
}


def build(kind: str, seed: int = 0, **changes):
    """A random model of a type in ARCHITECTURES, in fp32 and evaluation mode."""
    return random_model(kind, ARCHITECTURES[kind] | changes, seed)


def roformer(**settings):
    """A random model that the engine leaves to transformers' generate: rotations of its own. Skips the test where
    the installed transformers has a RoFormer that cannot generate.
    """
    import pytest

    from tests.factories.releases import transformers_before

    if transformers_before("5.18"):
        pytest.skip("RoFormer of transformers before 5.18 also attends to the tokens after; the engine refuses it")
    return random_model("roformer", settings)


def configuration(kind: str, settings: dict):
    """A type's configuration: what of COMMON it knows the names of, changed by settings."""
    from transformers import AutoConfig

    config_class = type(AutoConfig.for_model(kind))
    known = set().union(*(getattr(c, "__annotations__", {}) for c in config_class.__mro__))
    known |= set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    settings = {k: v for k, v in COMMON.items() if k in known} | settings
    config = config_class(**{k: v for k, v in settings.items() if v is not None})
    if hasattr(config, "is_decoder"):  # what BERT's kin need to be causal
        config.is_decoder = True
    return config


def random_model(kind: str, settings: dict, seed: int = 0):
    """A random model of any causal type, in fp32 and evaluation mode: COMMON as far as its configuration knows the
    names, changed by settings (None: leave that one to the configuration).
    """
    from transformers import AutoModelForCausalLM

    config = configuration(kind, settings)
    torch.manual_seed(seed)
    capped = getattr(config, "attn_logit_softcapping", None)  # before transformers 5.21 its own choice caps nothing
    named = {"attn_implementation": "eager"} if capped else {}
    model = AutoModelForCausalLM.from_config(config, **named).float().eval()
    draws = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and "A_log" not in name:
            scale = 0.5 if any(part in name for part in ("embed", "wte", "wpe")) else 1.6 * weight.shape[-1] ** -0.5
            weight.data = torch.randn(weight.shape, generator=draws) * scale
        elif "bias" in name or "sink" in name:
            weight.data = torch.randn(weight.shape, generator=draws) * 0.1
    return model
