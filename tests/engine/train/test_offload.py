"""Roles that wait in the CPU's memory: once there and back for an update, in one block that stays, and nothing lost."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import offload
from hybrid_rlhf.engine.train.offload import HostBlock, IdleOffload, pinned_like, saved_on_cpu
from tests.factories.tiny import optimizer_step, tiny_causal_lm
from tests.factories.trainers import PROMPTS, count_of, ppo, settings, weights
from tests.simulated_card import simulated_card

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def offloaded(trainer):
    """The offloads of the trainer's roles, by name."""
    engines = {name: role.engine for name, role in vars(trainer.roles).items() if role}
    return {name: engine.offload_when_idle(is_forced=True)._activation.offload for name, engine in engines.items()}


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_ppo_step_brings_each_role_once_to_each_phase_and_each_update_and_changes_no_bit(minibatches):
    plain, away = (ppo(settings(num_minibatches=minibatches), count_of(42)) for _ in range(2))
    offloads = offloaded(away)
    for trainer in (plain, away):
        trainer.step(PROMPTS)
    # the actor to sample and be scored, and to each update; the reference to score; the critic for values and updates
    assert {name: offload.num_moves for name, offload in offloads.items()} == {
        "actor": 1 + minibatches, "ref": 1, "critic": 1 + minibatches}
    for name, role in ((n, r) for n, r in vars(away.roles).items() if r):
        with role.engine.active():
            ours, theirs = weights(role.engine), weights(getattr(plain.roles, name).engine)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), name


def test_a_checkpoint_of_a_role_that_is_away_has_its_numbers_and_brings_nothing_back():
    """Its tensors have no memory meanwhile: a checkpoint of them was empty."""
    plain, away = (ppo(settings(ema=True), count_of(42)) for _ in range(2))
    offloads = offloaded(away)
    for trainer in (plain, away):
        trainer.step(PROMPTS)
    moves = [offload.num_moves for offload in offloads.values()]
    ours, theirs = away.state(), plain.state()
    for role in ("actor", "critic"):
        torch.testing.assert_close(ours[role]["optimizer"], theirs[role]["optimizer"], rtol=0, atol=0)
        torch.testing.assert_close(ours[role]["weights"], theirs[role]["weights"], rtol=0, atol=0)
        assert ours[role]["weights"]
    assert [offload.num_moves for offload in offloads.values()] == moves
    resumed = ppo(settings(ema=True), count_of(42))
    offloaded(resumed)
    resumed.load_state(ours)
    with resumed.roles.actor.engine.active():
        assert all(torch.equal(a, b) for a, b in zip(weights(resumed.roles.actor.engine),
                                                     weights(plain.roles.actor.engine), strict=True))


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 7)).bfloat16()
    module[0].requires_grad_(False)
    return module


def test_weights_that_nothing_trains_are_written_to_the_block_once_and_those_that_change_at_every_turn():
    module = half_frozen()
    engine = HybridEngine(module).prepare_training(OptimizerConfig(), lambda _: 1.0, ZeroConfig())
    offload = engine.offload_when_idle(is_forced=True)._activation.offload
    frozen, bias = module[0].weight, module[1].bias
    block, before = offload._block, frozen.numel()
    with engine.active():
        block.bytes.zero_()  # what is written from here on is not zero
        with torch.no_grad():
            bias.fill_(3)
    assert offload._block is block
    assert not offload.readable(frozen).any() and (offload.readable(bias) == 3).all()
    with engine.active(), torch.no_grad():
        frozen.fill_(5)  # somebody did write to it: torch counts that
    assert (offload.readable(frozen) == 5).all() and frozen.numel() == before
    with engine.active():
        assert (frozen == 5).all() and (bias == 3).all()


def test_the_block_is_as_large_as_what_it_holds_and_grows_where_that_does():
    tensors = [torch.full((1000,), 1.0), torch.full((3,), 2.0)]
    offload = IdleOffload(lambda: tensors, CPU, is_forced=True)
    offload.leave()
    assert len(offload._block.bytes) == 4096 + 512  # 4000 and 12 bytes, each at a multiple of 512
    assert [t.untyped_storage().nbytes() for t in tensors] == [0, 0] and offload.num_bytes_away == 4012
    offload.leave()  # away already
    offload.come_back()
    tensors.append(torch.full((500,), 3.0))
    offload.leave()
    assert len(offload._block.bytes) == 4096 + 512 + 2048
    offload.come_back()
    assert [float(t.mean()) for t in tensors] == [1, 2, 3] and offload.num_bytes_away == 0


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's functions that lock memory: answers holds the next results, calls what was asked."""
    asked = SimpleNamespace(answers=[], calls=[], cleared=0)

    def register(place, size, flags):
        asked.calls.append(("lock", place, size, flags))
        return asked.answers.pop(0)

    def cleared():
        asked.cleared += 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda place: asked.calls.append(("unlock", place))))
    monkeypatch.setattr(offload, "_forget_error", cleared)
    monkeypatch.setattr(offload, "_reasons", set())
    return asked


def test_a_block_for_a_card_is_locked_as_it_is_and_unlocked_before_its_memory_goes(runtime):
    runtime.answers = [0]
    block = HostBlock(5000, CARD)
    place = block.bytes.data_ptr()
    assert block.is_locked and runtime.calls == [("lock", place, 5000, 0)]  # not 8192
    del block
    gc.collect()
    assert runtime.calls[1:] == [("unlock", place)] and runtime.cleared == 0


def test_where_nothing_can_be_locked_memory_is_ordinary_which_is_said_once(runtime, caplog):
    runtime.answers = [2, 2]
    with caplog.at_level(logging.WARNING):
        blocks = [HostBlock(2**20, CARD) for _ in range(2)]
    assert not any(block.is_locked for block in blocks) and runtime.cleared == 2
    assert len(caplog.messages) == 1 and "page-locked (CUDA error 2)" in caplog.messages[0]
    blocks[0].part(0, 3).copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert blocks[0].bytes[:3].tolist() == [1, 2, 3]
    del blocks
    gc.collect()
    assert not [call for call in runtime.calls if call[0] == "unlock"]
    assert not HostBlock(100, CPU).is_locked and not HostBlock(0, CARD).is_locked and len(runtime.calls) == 2


def test_activations_wait_in_ordinary_memory_where_none_can_be_locked(runtime, monkeypatch, caplog):
    empty = torch.empty

    def full(*shape, pin_memory=False, **named):
        if pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory\nmore")
        return empty(*shape, **named)

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING):
        kept = [pinned_like(torch.ones(3, 5, dtype=torch.bfloat16)) for _ in range(2)]
    assert [(tuple(t.shape), t.dtype) for t in kept] == [((3, 5), torch.bfloat16)] * 2
    assert len(caplog.messages) == 1 and "CUDA error: out of memory" in caplog.messages[0]


def test_on_a_card_nothing_of_a_role_that_waits_is_left_and_its_step_is_the_same():
    norms, states = [], []
    for waits in (False, True):
        with simulated_card() as card:
            ids = torch.tensor([[5, 6, 7, 8, 9, 10]], device="cuda")
            _ = ids.float() @ ids.float().mT  # takes cuBLAS's buffer, which stays
            rest = card.memory.allocated
            model = tiny_causal_lm().bfloat16().to("cuda")
            engine = HybridEngine(model, model, eos_ids=[3]).prepare_training(
                OptimizerConfig(learning_rate=1e-2), lambda _: 1.0, ZeroConfig())
            before = card.memory.allocated
            if waits:
                engine.offload_when_idle()
                assert card.memory.allocated == rest and engine._activation.offload._block.is_locked
            with engine.resident():
                norms.append(optimizer_step(engine, [ids, ids], lambda piece, engine=engine: engine(
                    input_ids=piece, labels=piece).loss))
            # masters and moments were there before; the sums of two micro-batches have gone again
            assert card.memory.allocated == (rest if waits else before)
            states.append({name: engine.readable(engine.training.shard())["optimizer"][name]["master"].cpu().clone()
                           for name in engine.training.parameters})
    assert norms[0] == norms[1]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


# -- activations that wait on the CPU come back as they were, and weights do not travel -------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_bit_equal_and_the_weights_stay_where_they_are(checkpointing):
    model, ids = tiny_causal_lm().train(), torch.arange(4, 36).view(2, 16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with saved_on_cpu(model, min_bytes=0) as moved:
        loss = model(input_ids=ids).logits.logsumexp(-1).sum()
    loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    states = 2 * 16 * 32 * 4  # one layer's input in bytes
    assert moved["bytes"] >= 2 * states
    if checkpointing:  # the inputs of two layers, and what lies outside them: final norm, head and loss
        assert moved["bytes"] < 8 * states + 2 * 2 * 16 * 300 * 4


@pytest.mark.parametrize(("rates", "is_kept"), [({}, False), ({"dropout": 0.1}, True),
                                               ({"attention_dropout": 0.1}, True)], ids=str)
def test_random_states_are_kept_for_recomputation_where_something_is_drawn(rates, is_kept, monkeypatch):
    from transformers import AutoModelForCausalLM, OPTConfig

    torch.manual_seed(0)
    config = OPTConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, ffn_dim=32, num_attention_heads=2,
                       word_embed_proj_dim=16, max_position_embeddings=32, **({"dropout": 0.0} | rates))
    model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = HybridEngine(model).prepare_training(OptimizerConfig(), lambda _step: 1.0, ZeroConfig())
    asked, state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or state())
    engine(input_ids=torch.arange(4, 20).view(2, 8))
    assert (len(asked) >= 2) == is_kept


def test_what_is_small_or_no_activation_stays():
    weight = torch.nn.Linear(64, 64)
    with saved_on_cpu(weight, min_bytes=10**6) as moved:
        weight(torch.randn(4, 64)).square().sum().backward()
    assert moved["bytes"] == 0
    with saved_on_cpu(weight, min_bytes=0) as moved:
        weight(torch.randn(4, 64, requires_grad=True)).sum().backward()  # saves the input and the weight
    assert moved["bytes"] == 4 * 64 * 4
