"""The config.json of published checkpoints: nested and worded as published, with tiny sizes.

`Id("<token>")` stands for that token's id, which the tiny vocabulary has elsewhere. What a publisher leaves out (often
pad_token_id) is left out here.
"""

from __future__ import annotations


class Id(str):
    """A token, where the configuration has its id."""


SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             intermediate_size=48, initializer_range=0.02, rms_norm_eps=1e-06, vocab_size=512)
BF16 = {"dtype": "bfloat16", "transformers_version": "4.57.1"}

# -- Qwen --------------------------------------------------------------------------------------------------------------

_LINEAR = dict(full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
               linear_num_key_heads=2, linear_num_value_heads=4, mamba_ssm_dtype="float32", attn_output_gate=True,
               layer_types=["linear_attention", "full_attention"])
_MROPE = dict(mrope_interleaved=True, mrope_section=[1, 0, 0])
_QWEN3_5_TEXT = SIZES | _LINEAR | dict(
    attention_bias=False, attention_dropout=0.0, dtype="bfloat16", eos_token_id=Id("<|endoftext|>"), hidden_act="silu",
    max_position_embeddings=262144, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, use_cache=True,
    rope_parameters=_MROPE | dict(rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25))
_QWEN_VISION = dict(deepstack_visual_indexes=[], depth=2, hidden_act="gelu_pytorch_tanh", hidden_size=32, in_channels=3,
                    initializer_range=0.02, intermediate_size=48, num_heads=4, num_position_embeddings=16,
                    out_hidden_size=32, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
_QWEN_IMAGES = dict(image_token_id=Id("<|image_pad|>"), video_token_id=Id("<|video_pad|>"),
                    vision_start_token_id=Id("<|vision_start|>"), vision_end_token_id=Id("<|vision_end|>"))
QWEN3_5 = _QWEN_IMAGES | dict(
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=True,
    text_config=_QWEN3_5_TEXT | dict(model_type="qwen3_5_text", tie_word_embeddings=True),
    vision_config=_QWEN_VISION | dict(model_type="qwen3_5"), transformers_version="4.57.0.dev0")
QWEN3_5_MOE = _QWEN_IMAGES | dict(
    architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", tie_word_embeddings=False,
    text_config={k: v for k, v in _QWEN3_5_TEXT.items() if k != "intermediate_size"} | dict(
        model_type="qwen3_5_moe_text", moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        output_router_logits=False, router_aux_loss_coef=0.001, shared_expert_intermediate_size=16),
    vision_config=_QWEN_VISION | dict(model_type="qwen3_5_moe"), transformers_version="4.57.0.dev0")
QWEN3_VL = _QWEN_IMAGES | dict(
    architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", tie_word_embeddings=True,
    text_config=SIZES | dict(
        attention_bias=False, attention_dropout=0.0, bos_token_id=Id("<|endoftext|>"), dtype="bfloat16",
        eos_token_id=Id("<|im_end|>"), hidden_act="silu", max_position_embeddings=262144, model_type="qwen3_vl_text",
        rope_scaling=dict(mrope_interleaved=True, mrope_section=[2, 1, 1], rope_type="default"), rope_theta=5000000,
        tie_word_embeddings=True, use_cache=True),
    vision_config=_QWEN_VISION | dict(model_type="qwen3_vl", deepstack_visual_indexes=[0]),
    transformers_version="4.57.0.dev0")
QWEN3_MOE = SIZES | BF16 | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0,
    bos_token_id=Id("<|endoftext|>"), eos_token_id=Id("<|im_end|>"), decoder_sparse_step=1, hidden_act="silu",
    max_position_embeddings=40960, max_window_layers=2, mlp_only_layers=[], moe_intermediate_size=16,
    norm_topk_prob=True, num_experts=4, num_experts_per_tok=2, output_router_logits=False, rope_scaling=None,
    rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_cache=True,
    use_sliding_window=False)
QWEN2_5 = {k: v for k, v in SIZES.items() if k != "head_dim"} | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", attention_dropout=0.0, bos_token_id=Id("<|endoftext|>"),
    eos_token_id=Id("<|im_end|>"), hidden_act="silu", max_position_embeddings=32768, max_window_layers=2,
    rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False, torch_dtype="float16",
    transformers_version="4.41.1", use_cache=True, use_sliding_window=False)

# -- Gemma -------------------------------------------------------------------------------------------------------------

GEMMA3 = dict(
    architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", boi_token_index=Id("<start_of_image>"),
    eoi_token_index=Id("<end_of_image>"), eos_token_id=[Id("<eos>"), Id("<end_of_turn>")],
    image_token_index=Id("<image_soft_token>"), initializer_range=0.02, mm_tokens_per_image=4, torch_dtype="bfloat16",
    text_config=dict(hidden_size=32, intermediate_size=48, model_type="gemma3_text", num_attention_heads=4,
                     num_hidden_layers=2, num_key_value_heads=2, head_dim=8, sliding_window=4, vocab_size=512,
                     sliding_window_pattern=2, query_pre_attn_scalar=8,
                     rope_scaling=dict(factor=8.0, rope_type="linear")),
    transformers_version="4.50.0.dev0",
    vision_config=dict(hidden_size=32, image_size=16, intermediate_size=48, model_type="siglip_vision_model",
                       num_attention_heads=4, num_hidden_layers=2, patch_size=4, vision_use_head=False))
_GEMMA4_TEXT = SIZES | dict(
    attention_bias=False, attention_dropout=0.0, attention_k_eq_v=False, bos_token_id=Id("<bos>"), dtype="bfloat16",
    enable_moe_block=False, eos_token_id=Id("<eos>"), expert_intermediate_size=None, final_logit_softcapping=30.0,
    global_head_dim=16, hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=8, num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=131072, model_type="gemma4_text",
    num_experts=None, num_global_key_value_heads=None, num_kv_shared_layers=2, pad_token_id=Id("<pad>"),
    rope_parameters={"full_attention": dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
                     "sliding_attention": dict(rope_theta=10000.0, rope_type="default")},
    sliding_window=4, tie_word_embeddings=True, top_k_experts=None, use_bidirectional_attention=None, use_cache=True,
    use_double_wide_mlp=False, vocab_size_per_layer_input=512)
_GEMMA4_IDS = dict(
    boi_token_id=Id("<|image>"), eoi_token_id=Id("<image|>"), image_token_id=Id("<|image|>"),
    boa_token_id=Id("<|audio>"),
    eoa_token_index=Id("<audio|>"), audio_token_id=Id("<|audio|>"), video_token_id=Id("<|video|>"),
    eos_token_id=[Id("<eos>"), Id("<turn|>"), Id("<|tool_response>")], initializer_range=0.02, dtype="bfloat16",
    tie_word_embeddings=True, transformers_version="5.5.0.dev0")
GEMMA4 = _GEMMA4_IDS | dict(
    architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", text_config=_GEMMA4_TEXT,
    audio_config=dict(model_type="gemma4_audio", hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                      hidden_act="silu", subsampling_conv_channels=[8, 4], conv_kernel_size=3, residual_weight=0.5,
                      attention_chunk_size=4, attention_context_left=5, attention_context_right=0,
                      attention_logit_cap=50.0, attention_invalid_logits_value=-1000000000.0, dtype="bfloat16",
                      use_clipped_linears=True, rms_norm_eps=1e-06, gradient_clipping=10000000000.0,
                      output_proj_dims=32),
    vision_config=dict(model_type="gemma4_vision", hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                       num_attention_heads=4, num_key_value_heads=4, head_dim=8, global_head_dim=8, dtype="bfloat16",
                       hidden_activation="gelu_pytorch_tanh", patch_size=4, pooling_kernel_size=3,
                       position_embedding_size=64, rms_norm_eps=1e-06, use_clipped_linears=True, standardize=False,
                       rope_parameters=dict(rope_theta=100.0, rope_type="default"), max_position_embeddings=131072))
GEMMA4_UNIFIED = _GEMMA4_IDS | dict(
    architectures=["Gemma4UnifiedForConditionalGeneration"], model_type="gemma4_unified",
    text_config={k: v for k, v in _GEMMA4_TEXT.items() if "per_layer_input" not in k and "expert" not in k
                 and k != "enable_moe_block"} | dict(model_type="gemma4_unified_text", num_kv_shared_layers=0,
                                                     use_bidirectional_attention="vision"),
    audio_config=dict(model_type="gemma4_unified_audio", audio_embed_dim=16, rms_norm_eps=1e-06),
    vision_config=dict(model_type="gemma4_unified_vision", patch_size=4, pooling_kernel_size=3, mm_embed_dim=32,
                       mm_posemb_size=16, rms_norm_eps=1e-06, output_proj_dims=32))

# -- Llama, Mistral ----------------------------------------------------------------------------------------------------

LLAMA4 = dict(
    architectures=["Llama4ForConditionalGeneration"], model_type="llama4", boi_token_index=Id("<|image_start|>"),
    eoi_token_index=Id("<|image_end|>"), image_token_index=Id("<|patch|>"), tie_word_embeddings=False,
    torch_dtype="bfloat16", transformers_version="4.51.0.dev0",
    text_config=SIZES | dict(
        architectures=None, attention_bias=False, attention_chunk_size=4, attention_dropout=0.0, attn_scale=0.1,
        attn_temperature_tuning=True, bos_token_id=Id("<|begin_of_text|>"), floor_scale=8192, for_llm_compressor=False,
        eos_token_id=[Id("<|end_of_text|>"), Id("<|eom|>"), Id("<|eot|>")], hidden_act="silu",
        interleave_moe_layer_step=1, intermediate_size_mlp=48, max_position_embeddings=10485760,
        model_type="llama4_text", no_rope_layers=[1, 0], num_experts_per_tok=1, num_local_experts=4,
        output_router_logits=False, pad_token_id=Id("<|finetune_right_pad|>"), rope_theta=500000.0,
        rope_scaling=dict(factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, rope_type="llama3",
                          original_max_position_embeddings=8192),
        router_aux_loss_coef=0.001, router_jitter_noise=0.0, torch_dtype="bfloat16", use_cache=True, use_qk_norm=True),
    vision_config=dict(
        attention_dropout=0.0, hidden_act="gelu", hidden_size=32, image_size=16, initializer_range=0.02,
        intermediate_size=128, model_type="llama4_vision_model", multi_modal_projector_bias=False, norm_eps=1e-05,
        num_attention_heads=4, num_channels=3, num_hidden_layers=1, patch_size=4, pixel_shuffle_ratio=0.5,
        projector_dropout=0.0, projector_input_dim=32, projector_output_dim=32, rope_theta=10000, vision_output_dim=32,
        vision_feature_layer=-1, vision_feature_select_strategy="default"))
_LLAMA3 = SIZES | dict(
    architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, attention_dropout=0.0,
    bos_token_id=Id("<|begin_of_text|>"), hidden_act="silu", max_position_embeddings=131072, mlp_bias=False,
    pretraining_tp=1, rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True,
    rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3",
                      original_max_position_embeddings=8192))
LLAMA3_2 = _LLAMA3 | dict(eos_token_id=[Id("<|end_of_text|>"), Id("<|eom_id|>"), Id("<|eot_id|>")],
                          transformers_version="4.45.0.dev0")
LLAMA3_2_BNB = _LLAMA3 | dict(
    _name_or_path="meta-llama/Llama-3.2-1B-Instruct", eos_token_id=Id("<|eot_id|>"), hidden_size=64,
    intermediate_size=128, head_dim=16, pad_token_id=Id("<|finetune_right_pad_id|>"), unsloth_fixed=True,
    transformers_version="4.52.0.dev0",
    quantization_config=dict(
        _load_in_4bit=True, _load_in_8bit=False, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_storage="uint8",
        bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_enable_fp32_cpu_offload=False,
        llm_int8_has_fp16_weight=False, llm_int8_skip_modules=None, llm_int8_threshold=6.0, load_in_4bit=True,
        load_in_8bit=False, quant_method="bitsandbytes"))
_PIXTRAL = dict(attention_dropout=0.0, head_dim=8, hidden_act="gelu", hidden_size=32, image_size=16,
                initializer_range=0.02, intermediate_size=48, model_type="pixtral", num_attention_heads=4,
                num_channels=3, num_hidden_layers=1, patch_size=4)
_MISTRAL3 = dict(architectures=["Mistral3ForConditionalGeneration"], image_token_index=Id("[IMG]"),
                 model_type="mistral3", multimodal_projector_bias=False, projector_hidden_act="gelu",
                 spatial_merge_size=2, vision_feature_layer=-1)
MISTRAL_SMALL = _MISTRAL3 | dict(
    torch_dtype="bfloat16", transformers_version="4.50.0.dev0",
    text_config=SIZES | dict(attention_dropout=0.0, hidden_act="silu", max_position_embeddings=131072,
                             model_type="mistral", rms_norm_eps=1e-05, rope_theta=1000000000.0, sliding_window=None,
                             use_cache=True),
    vision_config=_PIXTRAL | dict(rope_theta=10000.0))
_MINISTRAL_TEXT = SIZES | dict(
    attention_dropout=0.0, hidden_act="silu", max_position_embeddings=262144, model_type="ministral3",
    rms_norm_eps=1e-05, sliding_window=None, tie_word_embeddings=True, use_cache=True,
    rope_parameters=dict(beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0,
                         mscale_all_dim=1.0, original_max_position_embeddings=16384, rope_theta=1000000.0,
                         rope_type="yarn", type="yarn"))
MINISTRAL = _MISTRAL3 | dict(
    dtype="bfloat16", text_config=_MINISTRAL_TEXT, transformers_version="5.0.0.dev0", tie_word_embeddings=True,
    vision_config=_PIXTRAL | dict(rope_parameters=dict(rope_theta=10000.0, rope_type="default")))
MINISTRAL_FP8 = MINISTRAL | dict(quantization_config=dict(
    activation_scheme="static", dequantize=False, modules_to_not_convert=[
        "model.vision_tower", "model.multi_modal_projector", "lm_head"], quant_method="fp8", weight_block_size=None))

# -- experts, states, and the rest -------------------------------------------------------------------------------------

GPT_OSS = SIZES | dict(
    architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, attention_dropout=0.0,
    eos_token_id=Id("<|return|>"), experts_per_token=2, hidden_act="silu", hidden_size=64, head_dim=16,
    initial_context_length=4096, intermediate_size=64, layer_types=["sliding_attention", "full_attention"],
    max_position_embeddings=131072, num_experts_per_tok=2, num_local_experts=4, output_router_logits=False,
    pad_token_id=Id("<|endoftext|>"), rms_norm_eps=1e-05, rope_theta=150000, router_aux_loss_coef=0.9,
    rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                      rope_type="yarn", truncate=False),
    sliding_window=4, swiglu_limit=7.0, tie_word_embeddings=False, transformers_version="4.55.0.dev0", use_cache=True)
GPT_OSS_BF16 = GPT_OSS | dict(torch_dtype="bfloat16")
GPT_OSS_MXFP4 = GPT_OSS | dict(quantization_config=dict(
    modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    quant_method="mxfp4"))
DEEPSEEK_V3 = {k: v for k, v in SIZES.items() if k != "head_dim"} | dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config",
              "AutoModel": "modeling_deepseek.DeepseekV3Model",
              "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    bos_token_id=Id("<｜begin▁of▁sentence｜>"), eos_token_id=Id("<｜end▁of▁sentence｜>"), ep_size=1,
    first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=16, max_position_embeddings=163840,
    moe_intermediate_size=16, moe_layer_freq=1, n_group=2, n_routed_experts=4, n_shared_experts=1, norm_topk_prob=True,
    num_experts_per_tok=2, num_key_value_heads=4, num_nextn_predict_layers=1, q_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, type="yarn",
                      original_max_position_embeddings=4096),
    topk_group=1, topk_method="noaux_tc", torch_dtype="bfloat16", transformers_version="4.33.1", use_cache=True,
    v_head_dim=8)
DEEPSEEK_V3_FP8 = DEEPSEEK_V3 | dict(quantization_config=dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]))
GLM4_6 = SIZES | dict(
    architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", attention_bias=True, attention_dropout=0.0,
    dtype="bfloat16", eos_token_id=[Id("<|endoftext|>"), Id("<|user|>"), Id("<|observation|>")], hidden_act="silu",
    first_k_dense_replace=1, max_position_embeddings=202752, moe_intermediate_size=16, n_group=1, n_routed_experts=4,
    n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=2, num_nextn_predict_layers=1,
    pad_token_id=Id("<|endoftext|>"), partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_scaling=None,
    rope_theta=1000000, routed_scaling_factor=2.5, tie_word_embeddings=False, topk_group=1, use_cache=True,
    use_qk_norm=True, transformers_version="4.57.0.dev0")
SMOLLM3 = {k: v for k, v in SIZES.items() if k != "head_dim"} | dict(
    architectures=["SmolLM3ForCausalLM"], model_type="smollm3", attention_bias=False, attention_dropout=0.0,
    bos_token_id=Id("<|begin_of_text|>"), eos_token_id=Id("<|im_end|>"), hidden_act="silu",
    layer_types=["full_attention"] * 2, max_position_embeddings=65536, max_window_layers=28, mlp_bias=False,
    no_rope_layer_interval=4, no_rope_layers=[1, 0], pad_token_id=Id("<|finetune_right_pad_id|>"), pretraining_tp=2,
    rope_scaling=None, rope_theta=5000000.0, sliding_window=None, torch_dtype="bfloat16", use_cache=False,
    use_sliding_window=False, transformers_version="4.54.0.dev0")
PHI4_MINI = {k: v for k, v in SIZES.items() if k != "head_dim"} | dict(
    architectures=["Phi3ForCausalLM"], model_type="phi3", attention_bias=False, attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    bos_token_id=Id("<|endoftext|>"), embd_pdrop=0.0, eos_token_id=Id("<|endoftext|>"), full_attn_mod=1,
    hidden_act="silu", hidden_size=64, interpolate_factor=1, lm_head_bias=False, max_position_embeddings=131072,
    mlp_bias=False, original_max_position_embeddings=4096, pad_token_id=Id("<|endoftext|>"),
    partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=262144,
    rope_scaling=dict(type="longrope", long_factor=[1, 1.1, 1.4, 2.2, 5.0, 20.0], short_factor=[1.0] * 6),
    tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.45.0", use_cache=True)
GRANITE4 = {k: v for k, v in SIZES.items() if k not in ("head_dim", "rms_norm_eps")} | dict(
    architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid", attention_bias=False,
    attention_dropout=0.0, attention_multiplier=0.0078125, bos_token_id=Id("<|end_of_text|>"), dtype="bfloat16",
    embedding_multiplier=12, eos_token_id=Id("<|end_of_text|>"), hidden_act="silu", layer_types=["mamba", "attention"],
    logits_scaling=8, mamba_chunk_size=8, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=16, mamba_d_state=8,
    mamba_expand=2, mamba_n_groups=1, mamba_n_heads=4, mamba_proj_bias=False, max_position_embeddings=131072,
    normalization_function="rmsnorm", num_experts_per_tok=2, num_local_experts=4, output_router_logits=False,
    pad_token_id=Id("<|pad|>"), position_embedding_type="nope", residual_multiplier=0.22, rms_norm_eps=1e-05,
    rope_scaling=None, rope_theta=10000, router_aux_loss_coef=0.01, shared_intermediate_size=32,
    tie_word_embeddings=True, transformers_version="4.56.0", use_cache=True)
LFM2 = dict(
    architectures=["Lfm2ForCausalLM"], model_type="lfm2", block_auto_adjust_ff_dim=True, block_dim=32,
    block_ff_dim=48, block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=16, block_norm_eps=1e-05,
    block_out_init_scale=1.0, block_use_swiglu=True, block_use_xavier_init=True, bos_token_id=Id("<|startoftext|>"),
    conv_L_cache=3, conv_bias=False, conv_dim=32, conv_dim_out=32, conv_use_xavier_init=True,
    eos_token_id=Id("<|im_end|>"), full_attn_idxs=[1], hidden_size=32, initializer_range=0.02,
    max_position_embeddings=128000, norm_eps=1e-05, num_attention_heads=4, num_heads=4, num_hidden_layers=2,
    num_key_value_heads=2, pad_token_id=Id("<|pad|>"), rope_theta=1000000.0, torch_dtype="bfloat16",
    transformers_version="4.54.0.dev0", use_cache=True, use_pos_enc=True, vocab_size=512)
OLMO3 = {k: v for k, v in SIZES.items() if k != "head_dim"} | dict(
    architectures=["Olmo3ForCausalLM"], model_type="olmo3", attention_bias=False, attention_dropout=0.0,
    dtype="bfloat16", eos_token_id=Id("<|endoftext|>"), hidden_act="silu", max_position_embeddings=65536,
    layer_types=["sliding_attention", "full_attention"], pad_token_id=Id("<|pad|>"),
    rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
                      original_max_position_embeddings=8192, rope_type="yarn"),
    rope_theta=500000, sliding_window=4, tie_word_embeddings=False, transformers_version="4.57.0.dev0", use_cache=False)
NEMOTRON_H = {k: v for k, v in SIZES.items() if k not in ("num_hidden_layers", "rms_norm_eps")} | dict(
    architectures=["NemotronHForCausalLM"], model_type="nemotron_h", attention_bias=False, attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig",
              "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
    bos_token_id=Id("<s>"), chunk_size=8, conv_kernel=4, eos_token_id=Id("<|im_end|>"), expand=2, hidden_dropout=0.0,
    hybrid_override_pattern="ME*E", layer_norm_epsilon=1e-05, mamba_head_dim=16, mamba_hidden_act="silu",
    mamba_num_heads=4, mamba_proj_bias=False, max_position_embeddings=262144, mlp_bias=False, mlp_hidden_act="relu2",
    moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, n_group=1, n_groups=1, n_routed_experts=4,
    n_shared_experts=1, norm_eps=1e-05, norm_topk_prob=True, num_experts_per_tok=2, num_hidden_layers=4,
    num_logits_to_keep=1, pad_token_id=Id("<unk>"), partial_rotary_factor=1.0, rescale_prenorm_residual=True,
    residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=8,
    tie_word_embeddings=False, time_step_floor=0.0001, time_step_limit=[0.0, float("inf")], time_step_max=0.1,
    time_step_min=0.001, topk_group=1, torch_dtype="bfloat16", transformers_version="4.55.4", use_bias=False,
    use_cache=True, use_conv_bias=True, use_mamba_kernels=True)
FALCON_H1 = SIZES | dict(
    architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", attention_bias=False, attention_dropout=0.0,
    attention_in_multiplier=1.0, attention_out_multiplier=0.9375, attn_layer_indices=None,
    bos_token_id=Id("<|begin_of_text|>"), embedding_multiplier=5.656854249492381, eos_token_id=Id("<|end_of_text|>"),
    hidden_act="silu", key_multiplier=0.390625, lm_head_multiplier=0.0390625, mamba_chunk_size=8, mamba_conv_bias=True,
    mamba_d_conv=4, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=8, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=4,
    mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True,
    max_position_embeddings=16384, mlp_bias=False, mlp_expansion_factor=8, num_logits_to_keep=1,
    mlp_multipliers=[0.8838834764831844, 0.5859375], pad_token_id=Id("<|pad|>"), projectors_bias=False,
    rms_norm_eps=1e-05, rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25, torch_dtype="bfloat16",
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587, tie_word_embeddings=False, transformers_version="4.52.0.dev0",
    use_cache=True)
AWQ = QWEN2_5 | dict(hidden_size=128, intermediate_size=128, quantization_config=dict(
    bits=4, group_size=128, modules_to_not_convert=None, quant_method="awq", version="gemm", zero_point=True))
GPTQ = QWEN2_5 | dict(hidden_size=128, intermediate_size=128, quantization_config=dict(
    bits=4, batch_size=1, block_name_to_quantize=None, cache_block_outputs=True, damp_percent=0.01, dataset=None,
    desc_act=False, exllama_config={"version": 1}, group_size=128, max_input_length=None, model_seqlen=None,
    module_name_preceding_first_block=None, modules_in_block_to_quantize=None, pad_token_id=None, quant_method="gptq",
    sym=True, tokenizer=None, true_sequential=True, use_cuda_fp16=False, use_exllama=True))
