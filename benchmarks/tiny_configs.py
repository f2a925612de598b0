"""Tiny random models of every causal type of transformers, for the sweeps over all of them (architecture_sweep.py and
tensor_parallel.py), with the settings of those that the common ones do not fit.

The common settings (hidden size 32, 2 layers, 4 heads, vocabulary 97, sliding window 4) and the builder are those of
tests/factories/architectures.py. A row here says what a type needs beside them: the names it has for its sizes, and
layers of every kind it can mix, so that no kind goes untested. None leaves a common setting out. "type:variant" is a
second configuration of the same type that takes other code.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.factories.architectures import ARCHITECTURES, MIXED, MOE, configuration, random_model

# ragged, for a few slots; tokens within every vocabulary
PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(n)] for i, n in enumerate((7, 1, 9, 2, 5))]

EXPERTS = dict(MOE, n_routed_experts=4)  # routed in groups, as DeepSeek does
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8,
              num_key_value_heads=4)  # latent attention
INDEXED = dict(index_topk=4, index_head_dim=16, index_n_heads=16)  # sparse attention by an indexer
STATE_SPACE = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
DELTA = dict(LINEAR, layer_types=["linear_attention", "full_attention"])
DELTA_EXPERTS = dict(DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                     shared_expert_intermediate_size=16)
PER_LAYER = dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=MIXED * 2, vocab_size_per_layer_input=97,
                 hidden_size_per_layer_input=8)
SPARSE_SECOND = dict(mlp_layer_types=["dense", "sparse"])
HYBRID_FOUR = dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, num_key_value_heads=4,
                   mamba_d_state=8, use_mamba_kernels=False)

SETTINGS: dict[str, dict] = {
    # experts and latent attention
    **{kind: LATENT | EXPERTS | dict(first_k_dense_replace=1) for kind in ("deepseek_v2", "glm4_moe_lite")},
    **{kind: LATENT | EXPERTS | INDEXED | dict(first_k_dense_replace=1) for kind in ("deepseek_v32", "glm_moe_dsa")},
    "sarvam_mla": LATENT | EXPERTS | dict(first_k_dense_replace=1),
    "axk1": LATENT | EXPERTS, "axk2": LATENT | EXPERTS | INDEXED, "youtu": LATENT, "minicpm3": LATENT,
    "longcat_flash": LATENT | dict(num_layers=1, num_hidden_layers=None, ffn_hidden_size=48, expert_ffn_hidden_size=16,
                                   n_routed_experts=4, zero_expert_num=2, moe_topk=2),
    "kimi_linear": LATENT | MOE | SPARSE_SECOND | dict(num_local_experts=4, layer_types=DELTA["layer_types"],
                                                       linear_head_dim=8, linear_num_heads=4),
    "bailing_hybrid": LATENT | MOE | SPARSE_SECOND | dict(num_local_experts=4, layer_types=DELTA["layer_types"],
                                                          first_k_dense_replace=1, num_mtp_layers=0),
    "dots1": dict(EXPERTS, n_shared_experts=1), "solar_open": EXPERTS, "hy_v3": dict(MOE, num_experts=4),
    "hy_v4": dict(MOE, num_experts=4, index_topk=4),
    "kolibri1": dict(EXPERTS, num_experts=4, num_local_experts=4),
    "mimo_v2_flash": EXPERTS | SPARSE_SECOND | dict(v_head_dim=8, layer_types=MIXED[::-1]),
    "dbrx": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=128, hidden_size=None, num_attention_heads=None,
                 num_hidden_layers=None, max_position_embeddings=None, num_key_value_heads=None,
                 attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
                 ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, hidden_size=32)),
    # windows, chunks and layers that share
    **{kind: dict(layer_types=MIXED) for kind in ("cohere2", "exaone4", "olmo3")},
    "vaultgemma": dict(layer_types=MIXED, attn_logit_softcapping=2.0),
    "gemma3n_text": dict(PER_LAYER, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4),
    "gemma4_text": dict(PER_LAYER, global_head_dim=8),
    "llama4_text": dict(attention_chunk_size=4, num_local_experts=4, intermediate_size_mlp=48,
                        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0]),
    "smollm3": dict(no_rope_layers=[1, 0], layer_types=["full_attention"] * 2),
    **{kind: dict(unpadded_vocab_size=97) for kind in ("inkling2_text", "inkling2_loop_text")},
    # states
    "falcon_mamba": dict(state_size=8), "mamba2": dict(num_heads=4, head_dim=16, n_groups=1, state_size=8,
                                                       chunk_size=8),
    "bamba": dict(STATE_SPACE, attn_layer_indices=[1]), "falcon_h1": dict(STATE_SPACE, mamba_d_ssm=64),
    "granitemoehybrid": dict(STATE_SPACE, layer_types=["mamba", "attention"], shared_intermediate_size=32,
                             num_local_experts=4),
    "zamba": dict(HYBRID_FOUR, attention_head_dim=None, head_dim=None),
    "zamba2": dict(HYBRID_FOUR, n_mamba_heads=4, chunk_size=8),
    "nemotron_h": dict(layers_block_type=["mamba", "attention", "moe", "mlp"], num_hidden_layers=None,
                       ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=1, chunk_size=8,
                       n_routed_experts=4, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
                       use_mamba_kernels=False),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], moe_intermediate_size=16, num_experts=4,
                     num_experts_per_tok=2, num_dense_layers=1),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=4, num_key_value_heads=1,
                            lru_width=32),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text"), DELTA_EXPERTS),
    "qwen3_5_text": DELTA, "olmo_hybrid": dict(DELTA, linear_num_key_heads=4),
    "minimax": dict(layer_types=DELTA["layer_types"], block_size=4, num_local_experts=4),
    # older names
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=4, num_layers=2, num_heads=4,
                    num_hidden_layers=None, num_attention_heads=None),
    "gptj": dict(rotary_dim=4), "codegen": dict(rotary_dim=4, n_ctx=128), "persimmon": dict(partial_rotary_factor=0.5),
    "xlm": dict(asm=False, causal=True), "xmod": dict(default_language="en_XX"),
    "xlnet": dict(d_model=32, n_head=4, d_head=8, hidden_size=None, num_attention_heads=None, head_dim=None),
    # the same types by other code
    "falcon:alibi": dict(alibi=True, new_decoder_architecture=False, multi_query=False),
    "falcon:multi_query": dict(alibi=False, new_decoder_architecture=False, multi_query=True),
    "gpt2:upcast": dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "opt:post_norm": dict(do_layer_norm_before=False, word_embed_proj_dim=16),
    "stablelm:parallel": dict(use_parallel_residual=True, qk_layernorm=True),
    "granitemoehybrid:no_positions": dict(STATE_SPACE, layer_types=["mamba", "attention"], shared_intermediate_size=32,
                                          num_local_experts=4, position_embedding_type=None),
}


def all_types() -> list[str]:
    """Every causal-LM type of the installed transformers, and our variants of some."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(name for name in SETTINGS if ":" in name)})


def tiny_model(name: str, max_parameters: float = 3e7):
    """A tiny random model of a type (or "type:variant"). Raises whatever its configuration or constructor raises, and
    ValueError where it would not be tiny: its sizes have names that no row here gives.
    """
    from transformers import AutoModelForCausalLM

    kind, settings = name.split(":")[0], SETTINGS.get(name, ARCHITECTURES.get(name, {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(configuration(kind, settings)).parameters())
    if size > max_parameters:
        raise ValueError(f"{size / 1e6:.0f}M parameters: not tiny under the common settings")
    return random_model(kind, settings)


def versions() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__, "python": platform.python_version()}
