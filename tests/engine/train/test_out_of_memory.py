"""A micro-batch that does not fit is split: the same gradient, the same numbers, and a word of what was learnt."""

import importlib
import logging

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.engine.decode.kv_cache import KeyValueRows
from hybrid_rlhf.engine.train import deepspeed_compat, passes
from hybrid_rlhf.roles import Actor, PolicyModule, Reward
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.shortage import little_memory, out_of_memory
from tests.factories.tiny import tiny_causal_lm
from tests.factories.trainers import PROMPTS, SFT_ROWS, scalar

# An epsilon that large makes Adam a smooth function of the gradient; else it turns the rounding of gradients near zero
# into whole steps.
SMOOTH = OptimizerConfig(learning_rate=1e-2, adam_epsilon=1.0)
CLOCKED = ("time/", "memory/", "engine/tokens_per_second", "micro_batch_tokens", "value/micro_batch_tokens")


def sft(stage=0, max_tokens=8192):
    model = tiny_causal_lm()
    engine = HybridEngine(PolicyModule(model), model, eos_ids=[3])
    engine.prepare_training(SMOOTH, lambda step: 1.0, ZeroConfig(stage))
    return SFTTrainer(Actor(engine, None, max_tokens))


def assert_equal_states(ours, theirs):
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        for name, value in theirs[key].items():
            torch.testing.assert_close(ours[key][name], value, rtol=1e-5, atol=1e-6, msg=f"{key} of {name}")


@pytest.mark.parametrize(("stage", "where"), [(0, "forward"), (0, "backward"), (1, "forward"), (2, "backward"),
                                              (3, "forward"), (3, "backward")])
def test_a_step_that_was_split_has_the_gradient_of_one_that_fitted(stage, where, caplog):
    plain, short = sft(stage), sft(stage)
    batch = collate_sft(SFT_ROWS, 0)  # rows of 8, 5 and 3 tokens: 24 with padding
    with caplog.at_level(logging.WARNING), little_memory(short.policy.engine.model, where, lambda n: n > 9):
        for _ in range(2):
            expected, found = plain.step(batch).compute(), short.step(batch).compute()
            for name in ("loss", "grad_norm", "mean_token_accuracy"):
                assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    assert_equal_states(short.policy.engine.training.state(), plain.policy.engine.training.state())
    assert short.policy.engine.oom_limits == {"update": 5} == short.state()["oom_limits"]  # 24 -> 12 -> 2 x 5 -> 5
    assert (expected["micro_batch_tokens"], found["micro_batch_tokens"]) == (8192, 5)
    told = [r.message for r in caplog.records]
    assert "the actor's update: a micro-batch of 24 tokens (3 x 8) does not fit; from now on at most 12" in told[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradients_of_micro_batches_before_the_failed_one_do_not_count_twice(stage):
    plain, short = sft(stage), sft(stage, max_tokens=10)  # [8], [5, 3]
    calls = []
    batch = collate_sft(SFT_ROWS, 0)
    with little_memory(short.policy.engine.model, "backward", lambda n: calls.append(n) or calls == [8, 10]):
        expected, found = plain.step(batch).compute(), short.step(batch).compute()
    assert calls == [8, 10, 8, 5, 3]
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert_equal_states(short.policy.engine.training.state(), plain.policy.engine.training.state())


def test_pairs_are_split_between_pairs_only():
    rows = [{"chosen_ids": [5, 6, 7, 3], "rejected_ids": [5, 6, 8, 9, 10, 3], "num_prompt_tokens": 2},
            {"chosen_ids": [11, 12, 13, 14, 3], "rejected_ids": [11, 3], "num_prompt_tokens": 1},
            {"chosen_ids": [15, 16, 3], "rejected_ids": [15, 17, 18, 3], "num_prompt_tokens": 1}]
    outcomes = []
    for is_full in (lambda n: False, lambda n: n > 12):
        engine = scalar().prepare_training(SMOOTH, lambda step: 1.0, ZeroConfig())
        with little_memory(engine.module.model, "backward", is_full):
            metrics = RewardTrainer(Reward(engine)).step(collate_pairs(rows, 0)).compute()
        outcomes.append((metrics, engine.training.state()))
    assert outcomes[1][0]["micro_batch_tokens"] == 18  # half of 3 pairs x 12
    for name in ("loss", "accuracy", "margin", "grad_norm"):
        assert outcomes[1][0][name] == pytest.approx(outcomes[0][0][name], rel=1e-6), name
    assert_equal_states(outcomes[1][1], outcomes[0][1])


def test_one_row_that_does_not_fit_is_an_error_that_names_its_tokens_and_what_to_change():
    trainer = sft()
    with little_memory(trainer.policy.engine.model, "backward", lambda n: n > 6), \
            pytest.raises(UserError, match=r"actor's update: a micro-batch of 8 tokens \(1 x 8\) is a single row.*"
                                           r"data\.max_length.*gradient_checkpointing"):
        trainer.step(collate_sft(SFT_ROWS, 0))
    assert all(p.grad is None for p in trainer.policy.engine.module.parameters())


def test_other_errors_pass_and_leave_no_gradient_behind():
    trainer = sft(stage=1)
    twin = sft(stage=1)
    model = trainer.policy.engine.model
    handle = model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.step(collate_sft(SFT_ROWS, 0))
    handle.remove()
    assert not trainer.policy.engine.oom_limits
    for each in (trainer, twin):
        each.step(collate_sft(SFT_ROWS, 0))
    assert_equal_states(trainer.policy.engine.training.state(), twin.policy.engine.training.state())


@pytest.mark.slow
def test_a_cache_that_cannot_be_allocated_gets_half_the_slots_and_draws_the_same(monkeypatch, caplog):
    model = tiny_causal_lm()
    prompts, sampling = PROMPTS.ids[:8], SamplingConfig(max_new_tokens=6)
    plain = HybridEngine(model, model, eos_ids=[3])
    with plain.inference():
        expected = plain.generate(prompts, sampling, seed=3)
    engine, allocate = HybridEngine(model, model, eos_ids=[3], name="actor"), KeyValueRows.allocate

    def failing(rows, key, value):
        if rows.owner.num_slots > 5:
            raise out_of_memory()
        allocate(rows, key, value)

    with engine.inference():
        monkeypatch.setattr(KeyValueRows, "allocate", failing)  # after the probe
        found = engine.generate(prompts, sampling, seed=3)
        again = engine.generate(prompts, sampling, seed=3)
        assert found.tokens == expected.tokens == again.tokens
        assert engine.oom_limits == {"slots": 4} and engine.describe()["slots"] == 4
        assert "while the actor generates: 8 slots of 10 tokens" in caplog.text
        monkeypatch.setattr(KeyValueRows, "allocate", lambda *_: (_ for _ in ()).throw(out_of_memory()))
        engine._cache = None
        with pytest.raises(UserError, match="cache of one request of 10 tokens does not fit"):
            engine.generate(prompts, sampling, seed=3)


def add_up(*sizes):
    for size in sizes:
        importlib.import_module("deepspeed.comm").all_reduce(torch.ones(size))


def short_after(*sizes):
    add_up(*sizes)
    raise out_of_memory()


@pytest.mark.parametrize("sizes", [(4, 5), (4,)])
def test_a_pass_that_failed_is_gone_through_again_without_what_it_has_met(sizes, monkeypatch):
    engine, met = sft(1).policy.engine, []
    monkeypatch.setattr(deepspeed_compat, "world_size", lambda: 2)  # of one process DeepSpeed's are not made
    plain = torch.distributed.all_reduce

    def least():
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **named: met.append(len(tensor)) or plain(
            tensor, **named))
        add_up(*sizes)

    error = passes.attempt(engine.module, lambda: short_after(4), least)
    assert isinstance(error, torch.OutOfMemoryError) and error.__traceback__ is None
    assert met == list(sizes[1:])


@pytest.mark.parametrize(("sizes", "what"), [((5,), r"all_reduce of \[5\] in place of all_reduce of \[4\]"),
                                             ((), "0 collectives in place of 1")])
def test_a_pass_that_comes_to_other_collectives_ends_with_a_line_and_does_not_wait_for_ever(sizes, what):
    engine = sft(1).policy.engine
    with pytest.raises(UserError, match=rf"out of memory, and this model's passes differ \({what}\).*"
                                        r"engine\.micro_batch_tokens"):
        passes.attempt(engine.module, lambda: short_after(4), lambda: add_up(*sizes))


def test_memory_that_runs_out_within_a_collective_ends_with_a_line_for_nobody_knows_who_has_met(monkeypatch):
    engine, asked = sft(1).policy.engine, []
    monkeypatch.setattr(deepspeed_compat, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda **_: (_ for _ in ()).throw(out_of_memory()))
    with pytest.raises(UserError, match=r"inside a collective.*engine\.micro_batch_tokens"):
        passes.attempt(engine.module, lambda: add_up(4), lambda: asked.append(1))
    assert not asked
