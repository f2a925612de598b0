"""The memory plan over processes, offload, 8-bit Adam and further reward models; the settings that make a run fit."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.algorithms.divergence import Divergence
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import ZeroTraining
from hybrid_rlhf.memory_plan import table, trace
from hybrid_rlhf.memory_plan.plan import (
    LIBRARIES,
    Generation,
    Line,
    Plan,
    Role,
    StateBytes,
    make_plan,
    state_bytes,
)
from hybrid_rlhf.memory_plan.search import choose
from hybrid_rlhf.memory_plan.trace import Activations, Sizes
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.roles import Actor, Teacher
from hybrid_rlhf.run.train_config import TrainConfig
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.training import builders, step1_sft, step3_ppo
from tests.factories.tiny import save_tiny, tiny_config, tiny_tokenizer

CPU, CARD = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("only_config")
    tiny_config().save_pretrained(path)
    return str(path)


@pytest.fixture
def counted(monkeypatch) -> ModelConfig:
    """A model of 40 layers and 20,000 bf16 weights, the largest 9,600, whose activations a hand can add up."""
    monkeypatch.setattr(trace, "sizes", lambda *_args, **_named: Sizes(40_000, 0, 20_000, BF16, 300, 2, 19_200, 0, 40))
    monkeypatch.setattr(trace, "activations", lambda *_args, **_named: Activations(5000, 6000, 700))
    monkeypatch.setattr(trace, "logit_bytes", lambda *_args, **_named: 100)
    monkeypatch.setattr(trace, "cache_bytes", lambda *_args: (256, 0))
    return ModelConfig("somewhere", dtype="bfloat16")


def model_of(folder: str, **changes: object) -> ModelConfig:
    return ModelConfig(model_name_or_path=folder, dtype="bfloat16", **changes)


def lines_of(plan: Plan, role: str) -> dict[str, dict[str, int]]:
    return {line.kind: line.phases for line in plan.lines if line.role == role}


def on_card(tensors: int) -> int:
    """With 1.2 GiB of CUDA's and the libraries', and 7% that the allocator cannot use."""
    return tensors + round(0.07 * tensors) + 1288490188


@pytest.mark.parametrize(("given", "expected"), [
    ((FP32, None), StateBytes(8000, 4000, 4000, 4000)),
    ((BF16, None), StateBytes(16000, 0, 0, 0)),
    ((BF16, 1, 4), StateBytes(3000, 4000, 4000, 2000)),
    ((BF16, 2, 4), StateBytes(3000, 500, 4500, 2000)),
    ((BF16, 3, 4), StateBytes(3000 + 500 + 2000, 0, 4000, 1500)),
    ((BF16, 2, 4, "adamw", ["optimizer"]), StateBytes(0, 0, 2000, 0, 3000 + 1000 + 1000))])
def test_state_bytes_of_a_thousand_parameters(given, expected) -> None:
    assert state_bytes(1000, *given) == expected


@pytest.mark.parametrize(("dtype", "stage", "optim", "offload"), [
    (FP32, 0, "adamw", []), (FP32, 1, "adamw", []), (FP32, 2, "adamw", []), (FP32, 3, "adamw", []),
    (BF16, 0, "adamw", []), (BF16, 1, "adamw", []), (BF16, 2, "adamw", []), (BF16, 3, "adamw", []),
    (FP32, 0, "adamw_8bit", []), (BF16, 1, "adamw_8bit", []), (FP32, 0, "sgd", []), (BF16, 1, "sgd", []),
    (BF16, 1, "adamw", ["optimizer"]), (FP32, 2, "adamw", ["optimizer"]), (BF16, 2, "adamw", ["optimizer"]),
    (BF16, 3, "adamw", ["optimizer"]), (BF16, 3, "adamw", ["optimizer", "parameters"])])
def test_state_bytes_are_those_of_deepspeed(dtype, stage, optim, offload) -> None:
    """Every storage that training makes, counted while it lives; activations of one row do not matter here."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    module = torch.nn.Sequential(*[torch.nn.Linear(128, 128, bias=False) for _ in range(16)]).to(dtype)
    count = 16 * 128 * 128
    expected = state_bytes(count, dtype, stage, 1, optim, offload)
    weights = dtype.itemsize * {0: 0, 1: 2, 2: 2, 3: 1}[stage]  # that DeepSpeed moves, with a copy of them below ZeRO 3
    with trace.LiveBytes(tuple(module.parameters())) as live:
        training = ZeroTraining(module, OptimizerConfig(optim=optim), lambda _: 1.0,
                                ZeroConfig(zero_stage=stage, offload=offload))

        def backward(is_last: bool) -> None:
            training.backward(training.engine(torch.ones(1, 128, dtype=dtype)).float().sum(), is_last)

        def peak_of(act, *given) -> float:
            live.peak = live.now
            act(*given)
            return live.peak / count - weights

        for _ in range(2):  # the first step makes the moments
            backward(False)
            accumulated = live.now / count - weights
            closing = peak_of(backward, True)
            stepping = peak_of(training.step)
        resident = live.now / count - weights
    found = [resident, accumulated - resident, closing - resident, stepping - resident]
    assert found == pytest.approx([(expected.optimizer + expected.host) / count, expected.gradients / count,
                                   expected.closing / count, expected.stepping / count], rel=0.08, abs=0.6)


def test_zero_3_holds_a_part_of_every_weight_and_gathers_what_it_computes_with(counted) -> None:
    role = Role("actor", counted, 24, 2, predicted=8, trains=True, zero_stage=3, generation=Generation(4, 16, 8))
    one, four = (lines_of(make_plan("ppo", [role], CPU, None, world), "actor") for world in (1, 4))
    assert set(one["weights"].values()) == {40_000}
    assert "gathered" not in one
    assert set(four["weights"].values()) == {10_000}
    all_three = {"generate": 40_000, "score": 40_000, "train actor": 40_000}  # under a billion weights
    assert four["gathered"] == all_three | {"export": 40_000}  # a file of it
    assert four["optimizer"]["score"] == 12 * 5000 + 2 * 5000 + 2 * 20_000  # state, gradients, a bucket
    assert four["gradients"]["step actor"] == 6 * 5000


def test_an_offloaded_optimizer_is_in_the_cpus_memory_and_on_a_cpu_where_it_was(counted) -> None:
    role = Role("policy", counted, 24, 2, predicted=8, trains=True, scores=False, offload=("optimizer",))
    there, here = (make_plan("sft", [role], device, None) for device in (CARD, CPU))
    assert there.host == 18 * 20_000
    assert "optimizer" not in lines_of(there, "policy")
    assert lines_of(here, "policy")["optimizer"]["train policy"] == 18 * 20_000
    assert here.host == 0


def test_offloaded_parameters_and_activations_leave_a_layer_on_the_card(counted) -> None:
    plain = Role("policy", counted, 64, 8, predicted=63, trains=True, scores=False, zero_stage=3, is_shared=True)
    away = replace(plain, offload=("optimizer", "parameters", "activations"))
    before, after = (make_plan("sft", [role], CARD, None) for role in (plain, away))
    assert "weights" not in lines_of(after, "policy")
    tables_and_layer = 2 * 19_200 + 40_000 // 40
    assert lines_of(after, "policy")["gathered"] == {"train policy": 19_200,  # its largest weight
                                                     "export": tables_and_layer}
    assert after.host == 40_000 + 5000 + 18 * 20_000
    assert lines_of(before, "policy")["activations"] == {"train policy": 5900}  # 6000 with logits, which are 100
    assert lines_of(after, "policy")["activations"] == {"train policy": 1000}


def test_under_zero_3_an_export_gathers_the_tables_of_words_and_a_layer(counted) -> None:
    role = Role("policy", counted, 64, 8, predicted=63, trains=True, scores=False, zero_stage=3)
    plan = make_plan("sft", [role], CARD, 39_999, world=4)
    assert lines_of(plan, "policy")["gathered"]["export"] == 2 * 19_200 + 40_000 // 40 and not plan.notes
    here = make_plan("sft", [role], CPU, None, world=4)
    assert lines_of(here, "policy")["gathered"]["export"] == 40_000  # a file of it waits, which is all
    whole = make_plan("sft", [replace(role, zero_stage=2)], CARD, None, world=4)
    assert "gathered" not in lines_of(whole, "policy")


def test_a_role_that_waits_elsewhere_counts_in_its_own_phases(counted) -> None:
    actor = Role("actor", counted, 24, 2, predicted=8, trains=True, generation=Generation(4, 16, 8))
    ref = Role("ref", counted, 24, 2, predicted=8, waits=True)
    plan = make_plan("ppo", [actor, ref], CARD, None)
    assert lines_of(plan, "ref")["weights"] == {"score": 40_000}
    assert plan.host == 40_000
    both = make_plan("ppo", [replace(actor, waits=True), ref], CARD, None)
    assert both.total("score") == on_card(40_000 + 12 * 20_000 + 700 + 100)  # in turns
    cache, prefill, logits = 4 * 24 * 256, 700 * 64 // 48, 4 * 300 * 6
    assert both.total("generate") == on_card(40_000 + 12 * 20_000 + cache + prefill + logits)
    stream = io.StringIO()
    table.show(both, (), stream)
    assert "kept in the CPU's memory for each process: 0.3 MiB" in stream.getvalue()
    assert set(lines_of(make_plan("ppo", [actor, ref], CPU, None), "ref")["weights"].values()) == {40_000}


def test_adapters_are_counted_in_the_dtype_they_are_made_in(folder) -> None:
    """bf16, with masters, moments and sums in fp32 also where processes are several, for they are few."""
    model = model_of(folder, lora=LoraConfig(r=1, target_modules=["q_proj"]))
    found = trace.sizes(model, CPU)
    assert (found.trained_dtype, found.adapter_bytes) == (BF16, 2 * found.trained)
    role = Role("policy", model, 24, 2, predicted=8, trains=True, scores=False)
    plan = make_plan("sft", [role], CPU, None, world=2)
    assert lines_of(plan, "policy")["optimizer"]["step policy"] == 16 * found.trained
    averaged = make_plan("sft", [replace(role, has_average=True)], CPU, None, world=2)
    assert lines_of(averaged, "policy")["optimizer"]["step policy"] == 20 * found.trained


def test_models_among_the_reward_sources_are_counted(tmp_path, folder) -> None:
    """A judge by hand: vocabulary 300 x 32, two layers, and a head of 32 x 2 numbers."""
    from transformers import AutoModelForSequenceClassification

    config = tiny_config()
    config.num_labels = 2
    judge = AutoModelForSequenceClassification.from_config(config)
    config.save_pretrained(tmp_path)
    role = Role("reward judge", ModelConfig(str(tmp_path)), 1, 1, labels=2)
    actor = Role("actor", model_of(folder), 24, 2, predicted=8, trains=True)
    plan = make_plan("ppo", [actor, role], CPU, None)
    expected = 4 * sum(t.numel() for t in [*judge.parameters(), *judge.buffers()])
    assert lines_of(plan, "reward judge")["weights"] == dict.fromkeys(plan.phases, expected)


# -- settings that fit -------------------------------------------------------------------------------------------------


def ppo_of(**model: object) -> step3_ppo.Config:
    return step3_ppo.Config(model=ModelConfig("somewhere", **model), train=TrainConfig(per_device_train_batch_size=8),
                            ppo=PPOConfig(num_ppo_epochs=1, num_minibatches=1, kl_coef=0.1))


def priced(config: object, *, is_exact: bool = True) -> list[Plan]:
    """Bytes that a hand can count: 100 for weights, 64 for 8192 tokens (half with checkpointing), 40 for an optimizer,
    20 for each of the other three roles; quantised weights take 50 or 25."""
    weights = {None: 100, "8bit": 50, "4bit": 25}[config.model.quantize] * ("parameters" not in config.engine.offload)
    tokens = config.engine.micro_batch_tokens // 128 // (2 if config.model.gradient_checkpointing else 1)
    tokens = 0 if "activations" in config.engine.offload else tokens
    roles = getattr(config, "roles", None)
    others = sum(20 for r in ("ref", "critic", "reward") if not getattr(roles, r).offload) if roles else 0
    total = weights + tokens + 40 * ("optimizer" not in config.engine.offload) + others
    return [Plan("t", ("p",), (Line("a", "weights", {"p": total}),), available=AVAILABLE[0])]


AVAILABLE = [0]


@pytest.mark.parametrize(("available", "tokens"), [(232, 4096), (202, 256)])  # 100 + 40 + 60, and 32 or 2
@pytest.mark.parametrize("has_host", [False, True])
def test_smaller_micro_batches_come_first(available, has_host, tokens) -> None:
    AVAILABLE[0] = available
    assert choose(ppo_of(), priced, has_host=has_host).flags == [f"--engine.micro_batch_tokens {tokens}"]


def test_on_a_card_idle_roles_then_the_optimizer_then_activations_go_to_the_host() -> None:
    waits = [f"--roles.{r}.offload true" for r in ("actor", "critic", "ref", "reward")]
    for available, expected in ((190, waits), (120, [*waits, "--engine.offload [optimizer]"]),
                                (100, [*waits, "--engine.offload [optimizer,activations]"]),
                                (0, [*waits, "--engine.offload [optimizer,activations,parameters]"])):
        AVAILABLE[0] = available
        chosen = choose(ppo_of(), priced, has_host=True)
        assert chosen.fits
        assert {f for f in chosen.flags if "micro_batch" not in f} == {"--model.gradient_checkpointing true", *expected}


def test_on_a_cpu_nothing_is_offloaded_and_what_does_not_fit_does_not() -> None:
    AVAILABLE[0] = 120
    assert not choose(ppo_of(), priced, has_host=False).fits


def test_a_frozen_base_is_quantised_when_nothing_cheaper_fits() -> None:
    AVAILABLE[0] = 160
    chosen = choose(ppo_of(lora=LoraConfig(r=4)), priced, has_host=False)
    assert chosen.flags[-1] == "--model.load_in_8bit true"
    AVAILABLE[0] = 130
    assert choose(ppo_of(lora=LoraConfig(r=4)), priced, has_host=False).flags[-1] == "--model.load_in_4bit true"


def test_what_was_chosen_is_a_table_with_reasons() -> None:
    AVAILABLE[0] = 100
    stream = io.StringIO()
    table.show_changes(choose(step1_sft.Config(model=ModelConfig("somewhere")), priced, has_host=True).changes,
                       stream)
    rows = stream.getvalue().splitlines()
    assert rows[0].split() == ["setting", "given", "chosen", "why"]
    assert any(row.startswith("engine.offload") and "[optimizer" in row and "slower" in row for row in rows)


def test_sums_of_gradients_are_there_for_good_on_a_cpu_and_in_training_on_a_card(counted) -> None:
    assert state_bytes(1000, BF16, None, keeps_sums=False) == StateBytes(12_000, 4000, 4000, 4000)
    role = Role("actor", counted, 24, 2, predicted=8, trains=True, generation=Generation(4, 16, 8))
    here, there = (lines_of(make_plan("ppo", [role], place, None), "actor") for place in (CPU, CARD))
    assert set(here["optimizer"].values()) == {16 * 20_000} and "gradients" not in here
    assert set(there["optimizer"].values()) == {12 * 20_000}
    assert there["gradients"] == {"train actor": 80_000, "step actor": 80_000}


# -- the memory plan of a run with a teacher: what of it is where, by hand, and a real update beside its logits -------


def test_a_teacher_that_waits_leaves_its_head_and_its_states_wait_with_it(tmp_path) -> None:
    """Of 64 sequences of 8 answered tokens, states of 32 numbers in bf16: 64 * 8 * 32 * 2 bytes."""
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    teacher = Role("teacher", model, 24, 4, predicted=8, waits=True, keeps_head=True, scored=64)
    actor = Role("actor", model, 24, 4, predicted=8, trains=True, teacher=teacher)
    states, whole = 64 * 8 * 32 * 2, trace.sizes(model, CARD).weight_bytes
    on_card = make_plan("distill", [actor, teacher], CARD, None)
    assert lines_of(on_card, "teacher")["weights"] == {
        "score": whole, "train actor": 300 * 32 * 2, "step actor": 300 * 32 * 2, "export": 300 * 32 * 2}
    assert on_card.host == whole + states
    here = lines_of(make_plan("distill", [actor, teacher], CPU, None), "teacher")
    assert here["targets"] == {"score": states, "train actor": states}
    assert set(here["weights"].values()) == {whole}


def test_demonstrations_longer_than_samples_count_where_the_teacher_reads_them(tmp_path) -> None:
    """Micro-batches of 2 rows of 200 tokens, each of which but the first is predicted: 64 * 199 * 32 * 2 bytes wait."""
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    teacher, alone = (Role("teacher", model, length, rows, predicted=predicted, keeps_head=True, scored=64, texts=texts)
                      for length, rows, predicted, texts in ((24, 4, 8, (2, 200)), (200, 2, 199, None)))
    found, expected = (lines_of(make_plan("distill", [role], CPU, None), "teacher") for role in (teacher, alone))
    assert found == expected
    assert found["targets"]["score"] == 64 * 199 * 32 * 2


def test_of_a_teacher_s_likeliest_words_ids_and_log_probabilities_wait(tmp_path) -> None:
    """Of 64 sequences of 8 answered tokens, 20 words of 8 + 4 bytes each. No head of it is read in the update."""
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    teacher = Role("teacher", model, 24, 4, predicted=8, top_k=20, scored=64)
    words = 64 * 8 * 20 * (8 + 4)
    assert lines_of(make_plan("distill", [teacher], CPU, None), "teacher")["targets"]["score"] == words
    on_card = make_plan("distill", [teacher], CARD, None)
    assert on_card.host == words and "targets" not in lines_of(on_card, "teacher")


def test_a_teacher_whose_states_alone_are_asked_for_takes_no_logits_when_it_is(tmp_path) -> None:
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    teacher = Role("teacher", model, 24, 4, predicted=8, keeps_head=True, scored=4)
    with_logits, without = (lines_of(make_plan("grpo", [role], CPU, None), "teacher")
                            for role in (teacher, replace(teacher, only_states=True)))
    assert "logits" in with_logits and with_logits.keys() - without.keys() == {"logits"}


def test_what_truncated_sampling_drew_from_takes_a_byte_a_word_and_slot(tmp_path) -> None:
    """300 words. On a card 40 sequences shorter than a page are decoded at once, in 48 rows of its buffers, of 8 steps;
    on a CPU 20, and the host looks at every step."""
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    for keeps in (True, False):
        actor = Role("actor", model, 24, 4, predicted=8, trains=True,
                     generation=Generation(20, 16, 8, sequences=40, keeps=keeps))
        for device, size in ((CARD, 8 * 48 * 300), (CPU, 20 * 300)):
            found = lines_of(make_plan("grpo", [actor], device, None), "actor")
            assert found.get("kept words") == ({"generate": size} if keeps else None)


def test_a_plan_that_is_short_asks_for_adapters_where_there_are_none(tmp_path) -> None:
    tiny_config().save_pretrained(tmp_path)
    for lora in (LoraConfig(), LoraConfig(r=4)):
        actor = Role("actor", ModelConfig(str(tmp_path), dtype="bfloat16", lora=lora), 24, 4, predicted=8, trains=True)
        verdict = table.verdict(make_plan("grpo", [actor], CARD, 1 << 20))
        assert verdict.startswith("short by") and ("--model.lora.r" in verdict) == (lora.r is None)


@pytest.mark.parametrize("words", [300, 5000])
def test_a_real_update_towards_a_teacher_takes_what_the_plan_says(tmp_path, words) -> None:
    settings = [ModelConfig(save_tiny(tmp_path / name, seed=seed, vocab_size=words, hidden_size=size), dtype="float32")
                for seed, (name, size) in enumerate((("student", 32), ("teacher", 64)))]
    tokenizer = tiny_tokenizer()
    student, model = (builders.open_policy(each, tokenizer, 0, dropout=False) for each in settings)
    ids = torch.randint(4, 300, (16, 96))
    batch = SequenceBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool))
    teacher = Teacher(builders.policy_engine(model, tokenizer), 8 * 96)
    with trace.LiveBytes(tuple(t for m in (student, model) for t in (*m.parameters(), *m.buffers()))) as live:
        targets = teacher.targets(batch, Divergence())
        engine = builders.policy_engine(student, tokenizer)
        engine.prepare_training(OptimizerConfig(), lambda _: 1.0, ZeroConfig())
        actor = Actor(engine, tokenizer, 8 * 96)
        for _ in range(2):
            live.peak = live.now
            actor.fit_tokens(batch, lambda tokens, count: (tokens.divergence.sum() / count, {}), teacher=targets)
    own = Role("teacher", settings[1], 96, 8, predicted=95, keeps_head=True, scored=16)
    plan = make_plan("distill", [Role("actor", settings[0], 96, 8, predicted=95, trains=True, scores=False,
                                      teacher=own), own], CPU, None)
    weights = sum(trace.sizes(each, CPU).weight_bytes for each in settings)
    planned = plan.total("train actor") - weights - LIBRARIES["cpu"]
    assert live.peak <= planned <= 1.25 * live.peak
