"""Several adapters on one base: each gives its own numbers, and no gradient goes astray."""

import copy

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.models.lora import Adapters, LoraConfig, add_lora, load_adapter, lora_layers, save_adapter
from tests.factories.adapters import base_with
from tests.factories.tiny import tiny_causal_lm

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


def test_blocks_do_not_nest_and_a_forward_needs_one():
    model = base_with("actor", "critic")
    adapters = Adapters(model)
    with pytest.raises(RuntimeError, match="outside use"):
        numbers(model)
    with adapters.use("actor"):
        with pytest.raises(RuntimeError, match="take turns"), adapters.use("critic"):
            pass
        numbers(model)  # and the outer block is still good
    with pytest.raises(RuntimeError, match="outside use"):
        numbers(model)
    with pytest.raises(RuntimeError, match="there is no adapter 'ref'"), adapters.use("ref"):
        pass


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


def test_an_adapter_of_another_model_or_of_another_kind_is_refused_in_one_line(tmp_path):
    model = base_with("critic")
    save_adapter(model, tmp_path / "a")
    for folder, into in (("a", tiny_causal_lm(hidden_size=64)), ("a", tiny_causal_lm(num_hidden_layers=1)),
                         ("nothing", tiny_causal_lm()), ("a", tiny_causal_lm(kind="gpt2"))):
        with pytest.raises(UserError) as caught:
            load_adapter(into, tmp_path / folder, "reward")
        assert "\n" not in str(caught.value) and folder in str(caught.value)


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
