"""Packed rows: documents attend one by one, with the numbers and gradients of the masked forward, in linear memory."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from hybrid_rlhf.core.tensors import predicting
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.memory_plan.trace import counting
from hybrid_rlhf.models.backbone import hidden_states
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.models.shared_prefix import documents
from hybrid_rlhf.roles import Actor, PolicyModule
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.tiny import tiny_causal_lm
from tests.factories.trainers import policy, trained, weights

LENGTHS = (9, 3, 14, 1, 6, 2, 11, 5)
ROWS = [{"input_ids": torch.randint(4, 290, (n,), generator=torch.Generator().manual_seed(i)).tolist(),
         "loss_mask": [j > 0 for j in range(n)]} for i, n in enumerate(LENGTHS)]


def packed(length: int = 20):
    return collate_sft(ROWS, 0, packing_length=length)


def test_documents_are_found_by_their_positions():
    """Worked out by hand: two rows, of documents of 3 and 2 tokens and of 4; one of padding."""
    rows = [{"input_ids": [*range(10 * n, 10 * n + n)], "loss_mask": [1] * n} for n in (4, 3, 2)]
    found = documents(collate_sft(rows, 0, packing_length=5))
    assert found.source.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert found.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert found.index.tolist() == [[0, 1, 2, 3, 0], [4, 5, 6, 7, 8]]
    assert sorted(found.spread[found.home].tolist()) == list(range(9))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_states_and_gradients_are_those_of_the_masked_forward(kind, dtype, bound):
    batch = packed()
    model = tiny_causal_lm(kind=kind).to(dtype)
    masked = copy.deepcopy(model)
    module = PolicyModule(model)
    assert module.can_share()
    ours, theirs = module.states(batch).rows, predicting(hidden_states(masked, batch), batch)
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    for states in (ours, theirs):
        (states.float() * weight).sum().backward()
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
    for (name, own), other in zip(model.named_parameters(), masked.parameters(), strict=True):
        if other.grad is not None:
            assert (own.grad - other.grad).float().norm() <= bound * other.grad.float().norm() + 1e-6, name


def test_training_on_packed_rows_makes_no_mask_and_the_weights_of_rows_alone(monkeypatch):
    from transformers import masking_utils

    made = []  # of whose position ids restart
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices",
                        lambda ids: made.append(bool((ids.diff() != 1).any())))
    engines = [trained(policy()) for _ in range(2)]
    for engine, batch in zip(engines, (packed(), collate_sft(ROWS, 0)), strict=True):
        SFTTrainer(Actor(engine, None)).step(batch)
    assert not any(made)
    for ours, theirs in zip(*map(weights, engines), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("saves", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("window", [6, 40], ids=["shorter than a document", "shorter than the row"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])  # one kind of layer; windows in turn with whole attention
def test_windows_are_those_of_documents(kind, window, saves, monkeypatch):
    options = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3_text" else {}
    model = tiny_causal_lm(kind=kind, sliding_window=window, **options)
    assert model.config.sliding_window == window
    if saves:
        checkpointed(model)
    masked, batch = copy.deepcopy(model), packed(64)
    module = PolicyModule(model)
    assert module.can_share()
    model.train(saves)
    theirs = predicting(hidden_states(masked, batch), batch)
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (theirs * weight).sum().backward()
    masks = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *given, **named: (
        masks.append(named.get("attn_mask")), original(*given, **named))[1])
    ours = module.states(batch).rows
    (ours * weight).sum().backward()
    assert {tuple(m.shape) for m in masks if m is not None} == ({(14, 14)} if window == 6 else set())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for (name, own), other in zip(model.named_parameters(), masked.parameters(), strict=True):
        if other.grad is not None:
            assert (own.grad - other.grad).norm() <= 1e-4 * other.grad.norm() + 1e-6, name


def test_rows_that_need_a_mask_of_another_kind_go_back_to_masks_and_it_is_said_once(caplog):
    model = tiny_causal_lm(kind="mistral", sliding_window=40, attention_chunk_size=64)  # no plain window, then
    module, batch = PolicyModule(model), packed(64)
    assert module.can_share()
    with caplog.at_level(logging.WARNING):
        found = [module.states(batch).rows for _ in range(2)]
    for states in found:
        torch.testing.assert_close(states, predicting(hidden_states(model, batch), batch))
    said = [r.getMessage() for r in caplog.records if "data.packing" in r.getMessage()]
    assert len(said) == 1 and "masks whose memory grows with the square of data.max_length" in said[0]


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@pytest.mark.parametrize("has_adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_layers_that_are_computed_again_are_spread_out_again(dtype, bound, has_adapters):
    """The gradients of the masked forward, which is checkpointed as well, from a backward pass outside the forward."""
    batch, model = packed(), checkpointed(tiny_causal_lm().to(dtype))
    if has_adapters:
        add_lora(model, LoraConfig(r=4))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which is 0 at first, and with it the gradient of lora_A
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    masked = copy.deepcopy(model)
    module = PolicyModule(model)
    assert module.can_share()
    model.train()
    num_attended = counted_attention(model)
    ours, theirs = module.states(batch).rows, predicting(hidden_states(masked, batch), batch)
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    for states in (ours, theirs):
        (states.float() * weight).sum().backward()
    assert num_attended() == 4, "two layers, each computed again"
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()
    trained_names = []
    for (name, own), other in zip(model.named_parameters(), masked.parameters(), strict=True):
        if other.grad is not None:
            trained_names.append(name)
            assert (own.grad - other.grad).float().norm() <= bound * other.grad.float().norm() + 1e-6, name
    assert has_adapters == all("lora" in name for name in trained_names)


def counted_attention(model):
    calls = []
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


def test_with_checkpointing_the_memory_of_packed_rows_grows_with_their_tokens_not_their_square():
    """Four times the documents of 16 tokens in one row: 4 times the bytes, where masks alone would take 16 times."""
    peaks, largest = [], []
    for num_documents in (16, 64, 256):
        rows = [{"input_ids": [5 + i % 200] * 16, "loss_mask": [1] * 16} for i in range(num_documents)]
        batch = collate_sft(rows, 0, packing_length=16 * num_documents)
        model = checkpointed(tiny_causal_lm(max_position_embeddings=4096))
        module = PolicyModule(model)
        assert module.can_share()
        model.train()
        sizes = []
        with counting(model, lambda _func, _given, _named, out, sizes=sizes: sizes.extend(
                leaf.untyped_storage().nbytes() for leaf in torch.utils._pytree.tree_leaves(out)
                if isinstance(leaf, torch.Tensor))) as live:
            module.states(batch).rows.sum().backward()
        peaks.append(live.peak)
        largest.append(max(sizes))
    assert peaks[2] < 4.1 * peaks[1] < 4.1 * 4.1 * peaks[0]
    assert largest[2] < 4096 * 4096  # bytes: less than one boolean mask


def test_a_checkpoint_that_takes_no_context_keeps_the_masks_and_it_is_said(caplog):
    """The backward pass would run the layers again where nobody spreads the rows out."""
    model = tiny_causal_lm()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    module, batch = PolicyModule(model.train()), packed()
    assert not module.can_share()
    with caplog.at_level(logging.WARNING):
        found = module.states(batch).rows
    torch.testing.assert_close(found, predicting(hidden_states(model, batch), batch))
    assert "masks whose memory grows" in caplog.text
