"""Which layers get an adapter: what "all-linear" means, and what is refused because no adapter can be merged there."""

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.train.parameters import without_adapter
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora, load_adapter, lora_layers
from tests.factories.architectures import ARCHITECTURES, MOE, random_model
from tests.factories.tiny import save_tiny, tiny_causal_lm

EXPERTS = dict(kind="mixtral", num_local_experts=4, num_experts_per_tok=2)


def adapted(kind: str, **changes: object) -> set[str]:
    """The last two parts of the names of the layers that "all-linear" adapts."""
    model = random_model(kind, ARCHITECTURES.get(kind, {}) | changes)
    add_lora(model, LoraConfig(r=2))
    return {".".join(name.split(".")[-2:]) for name in lora_layers(model)}


@pytest.mark.parametrize("kind, changes, one", [
    ("falcon_h1", dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8, mamba_d_ssm=64),
     "mamba.in_proj"),
    ("mamba", {}, "mixer.x_proj")])
def test_all_linear_leaves_out_the_layers_whose_weights_a_state_space_kernel_reads_by_itself(kind, changes, one):
    found = adapted(kind, **changes)
    assert one in found and not any("out_proj" in name for name in found)


@pytest.mark.parametrize("kind, changes, kept", [
    ("afmoe", dict(MOE, num_experts=4, num_dense_layers=1), {"mlp.gate_proj", "self_attn.gate_proj"}),
    ("jetmoe", dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=8), {"self_attention.kv_proj"})])
def test_all_linear_leaves_out_routers_that_are_linear_layers_and_no_gate_of_a_layer(kind, changes, kept):
    found = adapted(kind, **changes)
    assert kept <= found and not any("router" in name for name in found)


def test_what_peft_refuses_is_said_in_its_own_words():
    with pytest.raises(UserError, match=r"\['out_proj'\]: peft refuses MambaForCausalLM .*'out_proj' is incompat.*; "
                                        "choose others of"):
        add_lora(random_model("mamba", ARCHITECTURES["mamba"]), LoraConfig(r=2, target_modules=["out_proj"]))


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_only_linear_layers_and_experts_are_targets_and_no_matrix_that_is_the_embedding_too(experts, tmp_path):
    """Refused from the configuration alone, before weights are read."""
    folder = save_tiny(tmp_path, tie_word_embeddings=True, **experts)
    for target, said in (("embed_tokens", "embed_tokens of .* is Embedding, not a linear layer; there are .*q_proj"),
                         ("self_attn", "layers.0.self_attn of .* not a linear layer"),
                         ("lm_head", "lm_head of .* is the embedding's own matrix")):
        with pytest.raises(UserError, match=said):
            load.check_lora(ModelConfig(folder, lora=LoraConfig(r=2, target_modules=["q_proj", target])))
    model = tiny_causal_lm(tie_word_embeddings=False)
    for name in ("one", "two"):  # beside the adapters of another role too
        add_lora(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]), name)
    assert "lm_head" in lora_layers(model) and len(lora_layers(model)) == 3


def test_the_head_of_a_model_with_experts_is_adapted_where_it_is_named():
    model = random_model("mixtral", MOE | {"tie_word_embeddings": False})
    add_lora(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    assert "lm_head" in lora_layers(model)


@pytest.mark.parametrize("kind, share, names", [
    ("mixtral", 0.0, None), ("gpt2", 0.0, None), ("llama", 0.0, None), ("dbrx", 0.5, ["v1", "w1", "w2"])])
def test_weights_that_no_adapter_serves_are_counted(kind, share, names):
    """DBRX holds the experts' weights as one matrix, which peft does not adapt."""
    model = random_model(kind, dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=128, hidden_size=None,
                                    num_attention_heads=None, num_hidden_layers=None, max_position_embeddings=None,
                                    num_key_value_heads=None,
                                    attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
                                    ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2, hidden_size=32)
                                    ) if kind == "dbrx" else ARCHITECTURES[kind])
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight  # a head that counts
    add_lora(model, LoraConfig(r=2))
    found, left = without_adapter(model)
    assert (found > share and left == names) if names else found < 0.05


def test_gpt2s_layers_are_named_where_none_matches_and_a_broken_expression_is_one_line():
    model = random_model("gpt2", ARCHITECTURES["gpt2"])
    with pytest.raises(UserError, match="matches no layer of GPT2LMHeadModel; its linear layers are c_attn, c_fc, c_p"):
        add_lora(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"target_modules '\*q_proj' is not a regular expression \(nothing to repeat"):
        LoraConfig(r=2, target_modules="*q_proj")


def test_an_adapter_with_biases_is_refused_since_a_merge_would_lose_them(tmp_path):
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    peft.get_peft_model(tiny_causal_lm(), settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not a plain LoRA adapter"):
        load_adapter(tiny_causal_lm(), tmp_path, "default")
