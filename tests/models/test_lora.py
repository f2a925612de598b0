"""Several adapters on one base: each gives its own numbers, and no gradient goes astray."""


import copy

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.train.parameters import without_adapter
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import Adapters, LoraConfig, add_lora, load_adapter, lora_layers, save_adapter
from tests.factories.adapters import base_with
from tests.factories.architectures import ARCHITECTURES, MOE, random_model
from tests.factories.tiny import save_tiny, tiny_causal_lm

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def numbers(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def test_each_adapter_gives_the_numbers_it_has_alone_on_its_own_base_and_none_gives_the_base_s():
    shared = base_with("actor", "critic")
    adapters = Adapters(shared)
    for name, index in (("actor", 100), ("critic", 101), (None, 0)):
        alone = tiny_causal_lm()
        if name:
            torch.manual_seed(index)
            add_lora(alone, LoraConfig(r=4))
            for layer in lora_layers(alone).values():
                torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
        with adapters.use(name):
            torch.testing.assert_close(numbers(shared), numbers(alone), rtol=0, atol=0)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_backward_reaches_its_own_adapter_only_with_the_gradients_of_a_base_that_has_no_other(checkpointing):
    model = base_with("actor", "critic", "reward")
    twin = base_with("actor", "critic")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    adapters = Adapters(model)
    adapters.train_only(["actor", "critic"])
    twin._peft_wrapper.set_adapter("critic")
    (numbers(twin) ** 2).mean().backward()
    expected = {n: g for n, g in gradients(twin).items() if ".critic." in n}
    with adapters.use("actor"):
        numbers(model)  # a forward of another role before it must not matter
    with adapters.use("critic"):
        (numbers(model) ** 2).mean().backward()
    found = gradients(model)
    assert found.keys() == expected.keys() and len(found) == 28  # 2 layers of 7 linears, A and B
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8)
        assert gradient.abs().sum() > 0


EXPERTS = dict(kind="mixtral", num_local_experts=4, num_experts_per_tok=2)


def test_several_adapters_on_fused_experts_each_give_their_own_numbers_and_get_their_own_gradients():
    shared = base_with("actor", "critic", "reward", **EXPERTS)
    adapters = Adapters(shared)
    adapters.train_only(["actor", "critic"])
    names = {n for n in lora_layers(shared) if "experts" in n}
    assert len(names) == 4  # gate_up_proj and down_proj of two layers
    for number, name in enumerate(("actor", "critic")):
        alone = tiny_causal_lm(**EXPERTS)
        torch.manual_seed(100 + number)
        add_lora(alone, LoraConfig(r=4), name)
        for layer in lora_layers(alone).values():
            torch.nn.init.normal_(layer.lora_B[name].weight, std=0.2)
        (numbers(alone) ** 2).mean().backward()
        shared.zero_grad()
        with adapters.use(name):
            found = numbers(shared)
            (found ** 2).mean().backward()
        torch.testing.assert_close(found, numbers(alone), rtol=0, atol=0)
        expected = gradients(alone)
        assert gradients(shared).keys() == {n for n in expected if ".lora_" in n} and len(expected) >= 24
        for place, gradient in gradients(shared).items():
            torch.testing.assert_close(gradient, expected[place], rtol=1e-5, atol=1e-8)
            assert gradient.abs().sum() > 0 or "experts" in place
    with adapters.use(None), torch.no_grad():
        torch.testing.assert_close(numbers(shared), numbers(tiny_causal_lm(**EXPERTS)), rtol=0, atol=0)


def test_a_switch_between_forward_and_backward_is_refused_whoever_made_it():
    model = base_with("actor", "critic")
    adapters = Adapters(model)
    adapters.train_only(["actor", "critic"])
    with adapters.use("actor"):
        loss = numbers(model).sum()
    with pytest.raises(RuntimeError, match="outside the block of its forward"), adapters.use("critic"):
        loss.backward()
    with adapters.use("actor"):
        loss = numbers(model).sum()
    with pytest.raises(RuntimeError, match="outside the block of its forward"):
        loss.backward()
    with adapters.use("actor"):  # peft's own switch, which raises nothing and loses the gradients
        loss = numbers(model).sum()
        model._peft_wrapper.set_adapter("critic")
        with pytest.raises(RuntimeError, match="behind the back"):
            loss.backward()
    assert not gradients(model)


def test_switching_never_touches_requires_grad():
    model = base_with("actor", "critic", "reward")
    adapters = Adapters(model)
    adapters.train_only(["actor", "critic"])
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if ".actor." in n or ".critic." in n}
    for name in ("reward", None, "actor", "critic"):
        with adapters.use(name):
            assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    assert set(adapters.parameters("actor")) == {n.replace(".actor", "") for n in trained if ".actor." in n}


@torch.no_grad()
def test_an_adapter_saved_and_loaded_beside_others_gives_the_same_numbers(tmp_path):
    model = base_with("actor", "critic")
    adapters = Adapters(model)
    save_adapter(model, tmp_path / "a", "critic")
    with adapters.use("critic"):
        expected = numbers(model)
    again = base_with("actor")
    load_adapter(again, tmp_path / "a", "reward")
    with Adapters(again).use("reward"):
        assert torch.equal(numbers(again), expected)
    import peft

    plain = peft.PeftModel.from_pretrained(tiny_causal_lm(), tmp_path / "a")
    assert torch.equal(numbers(plain), expected)


def test_a_copied_adapter_starts_equal_and_moves_alone():
    from hybrid_rlhf.models.lora import copy_adapter

    model = base_with("reward")
    copy_adapter(model, "reward", "critic")
    adapters = Adapters(model)
    adapters.train_only(["critic"])
    before = copy.deepcopy(adapters.parameters("reward"))
    with adapters.use("reward"):
        reward = numbers(model).detach()
    with adapters.use("critic"):
        torch.testing.assert_close(numbers(model), reward, rtol=0, atol=0)
        numbers(model).sum().backward()
    with torch.no_grad():
        for parameter in adapters.parameters("critic").values():
            parameter -= 0.1 * parameter.grad
    assert all(torch.equal(before[n], p) for n, p in adapters.parameters("reward").items())


# -- Which layers get an adapter ---------------------------------------------------------------------------------------


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
