"""Engines on one base: each generates and trains with its own adapter; idle ones may leave the device."""

import copy

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.lora import Adapters
from hybrid_rlhf.roles import PolicyModule
from tests.factories.adapters import base_with
from tests.factories.tiny import optimizer_step, tiny_causal_lm, tiny_scalar_model

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15]]
ROWS = [[5, 6, 7, 8, 3], [9, 10, 11, 3]]
MASK = length_mask([5, 4])
BATCH = SequenceBatch(pad_right(ROWS, 0), MASK, MASK)


def engine_of(model, adapters, name, **named) -> HybridEngine:
    return HybridEngine(PolicyModule(model), model, eos_ids=[3], adapter=lambda: adapters.use(name), **named)


def trained(engine, names=None, stage=None, **optimizer) -> HybridEngine:
    return engine.prepare_training(OptimizerConfig(**({"learning_rate": 1e-2} | optimizer)), lambda step: 1.0,
                                   ZeroConfig(stage), names)


def test_each_adapter_of_one_base_generates_its_own_greedy_tokens_as_transformers_does():
    model = base_with("actor", "critic")
    adapters = Adapters(model)
    answers = {}
    for name in ("actor", "critic", None):
        engine = engine_of(model, adapters, name)
        with engine.inference():
            answers[name] = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=10, temperature=0)).tokens
        assert engine.describe()["path"] == "native"
        for prompt, tokens in zip(PROMPTS, answers[name], strict=True):
            with adapters.use(name), torch.no_grad():
                theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, eos_token_id=3,
                                        pad_token_id=0)[0, len(prompt):]
            assert tokens == theirs.tolist()
    assert answers["actor"] != answers["critic"] != answers[None] != answers["actor"]


def test_while_one_role_generates_no_other_computes_on_the_same_base():
    model = base_with("actor")
    adapters = Adapters(model)
    actor, ref = engine_of(model, adapters, "actor"), engine_of(model, adapters, None)
    with actor.inference(), pytest.raises(RuntimeError, match="take turns"):
        ref(BATCH)
    ref(BATCH)


def _loss(engine):
    return lambda rows: -engine(BATCH.rows(rows)).logprobs.sum() / 7


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_engines_on_one_module_step_as_two_models_do_under_plain_torch(stage):
    """Actor and critic in turn, three steps: each adapter ends where a base with that adapter alone takes it."""
    model = base_with("actor", "critic")
    adapters = Adapters(model)
    adapters.train_only(["actor", "critic"])
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}
    engines = {name: trained(engine_of(model, adapters, name), adapters.parameters(name), stage, max_grad_norm=0.5)
               for name in ("actor", "critic")}
    pieces = [torch.tensor([0]), torch.tensor([1])]
    norms = {name: [] for name in engines}
    for _ in range(3):
        for name, engine in engines.items():
            norms[name].append(optimizer_step(engine, pieces, _loss(engine)))
    for name in engines:
        twin = base_with("actor", "critic")
        twin._peft_wrapper.set_adapter(name)
        parameters = {n: p for n, p in twin.named_parameters() if p.requires_grad}
        optimizer, module = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0), PolicyModule(twin)
        for step in range(3):
            optimizer.zero_grad()
            (-module(BATCH).logprobs.sum() / 7).backward()
            norm = nn.utils.clip_grad_norm_(parameters.values(), 0.5)
            assert norms[name][step] == pytest.approx(float(norm), rel=1e-5)
            optimizer.step()
        for place, parameter in parameters.items():
            torch.testing.assert_close(model.get_parameter(place), parameter, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters() if n in before)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_engine_that_leaves_the_device_between_phases_trains_to_the_same_bits(stage):
    engines = [trained(HybridEngine(ScalarModel(tiny_scalar_model())), stage=stage) for _ in range(2)]
    engines[1].offload_when_idle(is_forced=True)
    pieces = [torch.tensor([0]), torch.tensor([1])]
    for _ in range(3):
        norms = []
        for engine in engines:
            norms.append(optimizer_step(
                engine, pieces, lambda rows, engine=engine: engine(BATCH.rows(rows)).square().mean()))
            with torch.no_grad():
                engine(BATCH)
        assert norms[0] == norms[1]
        away = engines[1]._activation.offload
        assert away.num_bytes_away >= 3 * 4 * sum(p.numel() for p in engines[1].training.parameters.values())
        assert all(p.untyped_storage().nbytes() == 0 for p in engines[1].module.parameters())
    with engines[1].active():
        for plain, moved in zip(engines[0].module.parameters(), engines[1].module.parameters(), strict=True):
            assert torch.equal(plain, moved)


def test_a_round_trip_keeps_bits_and_ties_and_an_exception_leaves_the_engine_usable():
    model = tiny_causal_lm(tie_word_embeddings=True)
    kept = copy.deepcopy(model.state_dict())
    engine = HybridEngine(PolicyModule(model), model, eos_ids=[3]).offload_when_idle(is_forced=True)
    with pytest.raises(ZeroDivisionError), engine.inference():
        1 / 0  # noqa: B018
    with engine.inference():
        engine.generate(PROMPTS, SamplingConfig(max_new_tokens=3))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with engine.active():
        assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_8_bit_optimizer_runs_at_every_stage_near_adamw_and_its_moments_are_in_the_state(stage):
    ends = {}
    for optim in ("adamw", "adamw_8bit"):
        engine = trained(HybridEngine(ScalarModel(tiny_scalar_model())), stage=stage, optim=optim)
        start = [p.detach().clone() for p in engine.module.parameters()]
        for _ in range(3):
            optimizer_step(engine, [torch.tensor([0, 1])], lambda _rows, engine=engine: engine(BATCH).square().mean())
        ends[optim] = torch.cat([(p - q).flatten() for p, q in zip(engine.module.parameters(), start, strict=True)])
    assert (ends["adamw"] - ends["adamw_8bit"]).norm() < 0.15 * ends["adamw"].norm()
    moments = engine.training.state()["own"]
    assert moments and any(v.dtype == torch.uint8 for each in moments for v in each.values() if torch.is_tensor(v))
