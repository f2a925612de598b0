"""Model types that decode natively with the tested releases: those rows of docs/results/architectures.md.

If a model of one of them takes a slower path, transformers has changed its forward or its configuration is unusual, and
the user is warned.
"""

from __future__ import annotations

from hybrid_rlhf.engine.decode.runner import Runner

NATIVE_TYPES = frozenset("""
    afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid bamba bart beam bert bert-generation
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small camembert codegen cohere cohere2 cohere2_moe ctrl cwm
    data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama dots1 electra ernie ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
    granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2
    lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 marian mbart mellum mimo_v2_flash minicpm3 minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe plbart qwen2
    qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next roberta roberta-prelayernorm roc_bert sarvam_mla
    sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma whisper xlm-roberta xlm-roberta-xl xmod youtu
    zamba zamba2 zaya
""".split())  # noqa: SIM905 - names are read more easily than a list of quotes


def why_not_native(runner: Runner) -> str | None:
    """Why a model of a native type does not decode natively; None where it does, or its type is not one of them."""
    config = runner.model.config
    types = {config.model_type, config.get_text_config().model_type}
    return None if runner.path == "native" or not types & NATIVE_TYPES else runner.reasons.get("native", "unknown")
