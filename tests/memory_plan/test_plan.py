"""The memory plan: formulas by hand, counts against real tensors, and the command line."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.engine.train.patches import training_forms
from hybrid_rlhf.kernels import cuda
from hybrid_rlhf.kernels.shape_ops import shape_ops, telling
from hybrid_rlhf.memory_plan import table, trace
from hybrid_rlhf.memory_plan.amounts import parse_bytes, size_text
from hybrid_rlhf.memory_plan.plan import LIBRARIES, Generation, Line, Plan, Role, make_plan
from hybrid_rlhf.memory_plan.rates import Calibration, read_calibration
from hybrid_rlhf.memory_plan.trace import Activations, Sizes
from hybrid_rlhf.models.backbone import hidden_states
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.training import memory_options
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_config, tiny_tokenizer

CPU, CARD = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder with config.json and nothing else: whoever looks for weights fails."""
    path = tmp_path_factory.mktemp("only_config")
    tiny_config().save_pretrained(path)
    return str(path)


def model_of(folder: str, **changes: object) -> ModelConfig:
    return ModelConfig(model_name_or_path=folder, dtype="float32", **changes)


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("1.5g", 3 * 2**29),
                                            ("800MiB", 800 * 2**20), ("12000000000", 12 * 10**9)])
def test_amounts_of_memory_are_read_with_their_units(text, size) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "24 Gigs", "-1GiB", "0GiB", "24"])
def test_an_amount_that_cannot_be_meant_is_one_clear_line(text) -> None:
    with pytest.raises(UserError, match="--memory") as caught:
        parse_bytes(text, "--memory")
    assert "GiB" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (1536, 300 * 2**20, 3 * 2**29, 250 * 2**30)] == [
        "2 KiB", "300 MiB", "1.5 GiB", "250 GiB"]


def test_weights_and_adapters_are_those_of_the_model(folder) -> None:
    plain = trace.sizes(model_of(folder), CPU)
    real = tiny_causal_lm()
    assert plain.weight_bytes == sum(t.numel() * 4 for t in [*real.parameters(), *real.buffers()])
    assert plain.trained == sum(p.numel() for p in real.parameters())
    lora = LoraConfig(r=4)
    add_lora(real, lora)
    adapted = trace.sizes(model_of(folder, lora=lora), CPU)
    trained = sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert (adapted.adapter_bytes, adapted.trained, adapted.weight_bytes) == (trained * 4, trained, plain.weight_bytes)
    scalar = trace.sizes(model_of(folder, lora=lora), CPU, is_scalar=True)
    assert scalar.trained == trained + 32  # the head
    assert scalar.weight_bytes == plain.weight_bytes - 300 * 32 * 4


def test_a_quantised_base_takes_what_its_blocks_take(folder) -> None:
    """Linear layers of the tiny model by hand: q 32x32, k and v 16x32, o 32x32, three of 64x32; two layers."""
    lora = LoraConfig(r=4)
    numbers = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    plain, in_4, in_8 = (trace.sizes(model_of(folder, lora=lora, **q), CPU).weight_bytes
                         for q in ({}, {"load_in_4bit": True}, {"load_in_8bit": True}))
    assert plain - in_4 == 4 * numbers - numbers // 2 - 4 * numbers // 64
    assert plain - in_8 == 4 * numbers - numbers - 4 * rows


def test_the_cache_of_a_token_is_layers_times_heads_times_their_size(folder) -> None:
    per_token, per_sequence = trace.cache_bytes(model_of(folder), CPU)
    assert (per_token, per_sequence) == (2 * 2 * 8 * 2 * 4, 0)  # layers, key-value heads, head size, both, fp32
    model = tiny_causal_lm()
    model.generation_config.eos_token_id = None
    engine = HybridEngine.for_inference(model, tiny_tokenizer())
    engine.eos_ids = []
    with engine.inference():
        engine.generate([[5, 6, 7], [8, 9, 10]], SamplingConfig(max_new_tokens=4))
    assert engine.kv_bytes == 2 * (3 + 4) * per_token


@pytest.mark.parametrize("kind", ["llama", "opt", "mamba"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_saved_activations_are_those_that_autograd_saves(tmp_path, kind, checkpointing) -> None:
    """On the real model in training's forms: the storages that pass autograd's hooks, each once, weights aside, and the
    result."""
    changes = dict(kind=kind) if kind != "mamba" else dict(kind=kind, state_size=8)
    tiny_config(**changes).save_pretrained(tmp_path)
    settings = model_of(str(tmp_path), gradient_checkpointing=checkpointing)
    predicted = trace.activations(settings, CPU, 4, 24).saved
    model = tiny_causal_lm(**changes).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}
    ids = torch.zeros(4, 24, dtype=torch.long)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with training_forms(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        keep(hidden_states(model, SequenceBatch(ids, ids.bool(), ids.bool())))
    saved = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights)
    assert predicted == pytest.approx(saved, rel=0.1)


def test_another_model_in_the_same_folder_is_another_plan(tmp_path) -> None:
    tiny_config().save_pretrained(tmp_path)
    before = trace.activations(model_of(str(tmp_path)), CPU, 4, 24), trace.sizes(model_of(str(tmp_path)), CPU)
    tiny_config(num_hidden_layers=4).save_pretrained(tmp_path)
    after = trace.activations(model_of(str(tmp_path)), CPU, 4, 24), trace.sizes(model_of(str(tmp_path)), CPU)
    assert after[0].saved > 1.8 * before[0].saved and (before[1].num_layers, after[1].num_layers) == (2, 4)


def test_layers_that_training_skips_at_random_are_counted(tmp_path) -> None:
    tiny_config(kind="opt", layerdrop=0.9).save_pretrained(tmp_path)
    settings = model_of(str(tmp_path))
    with_drop, without = (trace.activations(settings, CPU, 4, 24, dropout=each).saved for each in (True, False))
    assert without <= with_drop < 2 * without  # its masks too


def test_logits_are_counted_as_chunks(folder) -> None:
    """Beyond one chunk of 128 MiB more tokens take no more logits: only their hidden states' gradients and numbers."""
    chunk = 2**27 // (300 * 4)
    one, four = (trace.logit_bytes(model_of(folder), CPU, n * chunk, trains=False) for n in (1, 4))
    assert one > 2**26
    assert four - one < 3 * chunk * 160


def test_roles_score_in_turns_and_stay_side_by_side() -> None:
    plan = Plan("t", ("score",), (Line("a", "weights", {"score": 10}), Line("a", "activations", {"score": 5}),
                                  Line("a", "logits", {"score": 2}), Line("b", "weights", {"score": 10}),
                                  Line("b", "activations", {"score": 6})), available=25)
    assert plan.total("score") == 10 + 10 + 7
    assert plan.short == 2
    assert "short by 0 KiB" in table.verdict(plan)


@pytest.mark.parametrize("kind", [None, "4bit", "8bit"])
def test_an_export_of_adapters_takes_three_fp32_copies_of_one_layer_and_on_a_cpu_a_file(folder, kind) -> None:
    """The largest adapted layer is 32 x 64; the whole model is less than a file."""
    settings = {f"load_in_{kind}": True} if kind else {}
    role = Role("policy", model_of(folder, lora=LoraConfig(r=4), **settings), 24, 2, predicted=23, trains=True)
    for device, more in ((torch.device("cuda"), 0), (CPU, trace.sizes(role.model, CPU).weight_bytes)):
        plan = make_plan("sft", [role], device, None)
        (found,) = [line.phases["export"] for line in plan.lines if line.kind == "gathered"]
        assert found == 3 * 4 * 32 * 64 + more
        assert plan.total("export") < plan.total("train policy") + more
    critic = Role("critic", role.model, 24, 2, trains=True, waits=True)
    plan = make_plan("ppo", [role, critic], torch.device("cuda"), None)
    assert not [line for line in plan.lines if line.role == "critic" and line.phases.get("export")]


def test_a_plan_adds_up(folder) -> None:
    """One role, by hand where a hand can count."""
    role = Role("actor", model_of(folder), length=24, rows=2, predicted=8, trains=True, zero_stage=0,
                generation=Generation(slots=4, prompt=16, response=8))
    plan = make_plan("ppo", [role], CPU, available=10**9)
    lines = {line.kind: line.phases for line in plan.lines}
    count = trace.sizes(model_of(folder), CPU).trained
    assert plan.phases == ("generate", "score", "train actor", "step actor", "export")
    assert lines["optimizer"] == dict.fromkeys(plan.phases, 8 * count)
    assert lines["gradients"]["step actor"] == 4 * count
    assert lines["KV cache"] == {"generate": 4 * 24 * 256}
    assert lines["logits"]["generate"] == 4 * 300 * 8
    assert plan.total("step actor") == lines["weights"]["step actor"] + 12 * count + LIBRARIES["cpu"]
    assert table.verdict(plan).startswith("fits: needs ")


def test_pages_of_a_card_hold_more_sequences_than_whole_slots() -> None:
    """64 slots of 512 tokens; a sequence takes its 256, and an eighth of its group's prompt of 256: 288."""
    drawn, card = Generation(slots=64, prompt=256, response=256, sequences=1000), torch.device("cuda")
    assert drawn.at_once(card, group=8, has_states=False) == 64 * 512 // 288 == 113
    assert drawn.at_once(card, group=8, has_states=True) == drawn.at_once(CPU, group=8, has_states=False) == 64
    assert replace(drawn, sequences=100).at_once(card, group=8, has_states=False) == 100
    assert Generation(slots=64, prompt=2048, response=16, sequences=1000).at_once(card, 64, has_states=False) == 256
    assert Generation(slots=64, prompt=64, response=64, sequences=1000).at_once(card, 8, has_states=False) == 256


def test_a_table_is_plain_where_nobody_looks_and_rich_where_somebody_does(folder) -> None:
    role = Role("policy", model_of(folder), 16, 2, 15, trains=True, scores=False)
    plan = make_plan("sft: a title", [role], CPU, 10**9)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, rich = io.StringIO(), Terminal()
    for stream in (plain, rich):
        table.show(plan, stream=stream)
    assert "│" not in plain.getvalue()
    assert "│" in rich.getvalue()
    for text in (plain.getvalue(), rich.getvalue()):
        for word in ("sft: a title", "policy", "optimizer", "train policy", "total", "fits: needs"):
            assert word in text


def test_a_real_update_takes_what_the_plan_says(tmp_path) -> None:
    """The tiny model really trained by an engine, in the fused forms that it finds, all storages counted."""
    from hybrid_rlhf.roles import Actor
    from hybrid_rlhf.training import builders

    path = save_tiny(tmp_path / "model")
    settings = model_of(path)
    tokenizer = tiny_tokenizer()
    model = builders.open_policy(settings, tokenizer, 0, dropout=False)
    known = [*model.parameters(), *model.buffers()]
    ids = torch.randint(4, 300, (16, 96))
    batch = SequenceBatch(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool))
    with trace.LiveBytes(tuple(known)) as live:
        engine = builders.policy_engine(model, tokenizer)
        engine.prepare_training(OptimizerConfig(), lambda _: 1.0, ZeroConfig())
        actor = Actor(engine, tokenizer, 8 * 96)
        for _ in range(2):
            live.peak = live.now
            actor.fit_tokens(batch, lambda tokens, count: (-tokens.logprobs.sum() / count, {}))
    role = Role("policy", settings, 96, 8, predicted=95, trains=True, scores=False)
    plan = make_plan("sft", [role], CPU, None)
    weights = trace.sizes(settings, CPU).weight_bytes
    assert live.peak <= plan.total("train policy") - weights - LIBRARIES["cpu"] <= 1.15 * live.peak


@pytest.mark.parametrize("kind", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(r=4)},
                                      {"lora": LoraConfig(r=4), "gradient_checkpointing": True}])
def test_two_layers_say_what_all_of_them_take(tmp_path, monkeypatch, kind, settings) -> None:
    """Layers that are alike are counted from one and two; the whole model traced is the oracle, to the byte."""
    tiny_config(kind=kind, num_hidden_layers=5).save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16", **settings)
    assert trace._depths(model) == trace.EQUAL
    quick = trace._traced_model(model, CPU, 4, 32, False, True), trace.cache_bytes.__wrapped__(model, CPU)
    monkeypatch.setattr(trace, "_depths", lambda _: (5,))
    assert quick == (trace._traced_model(model, CPU, 4, 32, False, True),
                     trace.cache_bytes.__wrapped__(model, CPU))


def test_layers_that_differ_are_not_counted_from_two(tmp_path) -> None:
    tiny_config(kind="qwen2", num_hidden_layers=6, sliding_window=8, use_sliding_window=True,
                layer_types=["full_attention", "sliding_attention"] * 3).save_pretrained(tmp_path)
    assert trace._depths(ModelConfig(str(tmp_path))) == (6,)


@pytest.mark.parametrize("device", [CPU, CARD], ids=str)
def test_a_plan_traces_every_fused_operation_of_training(folder, device) -> None:
    """Two layers of Llama's form: five norms, two gates and two rotary positions, each with its backward."""
    names: Counter[str] = Counter()
    empty = trace._made(model_of(folder), 2, device)
    with empty as model, telling(lambda name, _given, _made: names.update([name])):
        hidden = hidden_states(model, trace._batch(2, 16))
        hidden.backward(torch.zeros_like(hidden))
    assert (names["rms_norm"], names["rms_norm_backward"], names["gated"], names["gated_backward"]) == (5, 5, 2, 2)
    assert names["rotary"] == 4  # whose backward is a rotation back


def test_norms_that_a_cards_kernel_does_not_take_are_traced_as_the_models_own() -> None:
    fused, names = shape_ops("cuda").fused, []
    with telling(lambda name, _given, _made: names.append(name)):
        for size in (8192, 8194):
            x = torch.ones(2, size)
            out = fused.rms_norm(x, torch.ones(size), 1e-6)
            assert out.shape == x.shape and names == ["rms_norm"]


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_on_a_card_hold_logits_and_their_gradient_and_nothing_in_fp32(folder, entropy) -> None:
    """By hand: 1,000 tokens of 300 words in bf16 are 600,000 bytes, and so is their gradient; a few numbers a token."""
    model = ModelConfig(folder, dtype="bfloat16", lora=LoraConfig(r=4))
    logits, vectors = 600_000, 1000 * 60  # targets, scores, normalisers and their gradients
    hidden = 1000 * tiny_config().hidden_size * 2  # and its gradient
    scoring, training = (trace.logit_bytes(model, CARD, 1000, trains=trains, entropy=entropy)
                         for trains in (False, True))
    assert logits <= scoring <= logits + hidden + vectors
    assert 2 * logits <= training <= 2 * (logits + hidden) + vectors


def test_without_triton_a_plan_counts_torchs_blocks_in_fp32(folder, monkeypatch) -> None:
    """The card that is here takes what it has: with an entropy two copies of the logits in fp32, and no fused forms."""
    model = ModelConfig(folder, dtype="bfloat16", lora=LoraConfig(r=4))
    monkeypatch.setattr(cuda, "can_load", lambda: False)
    found = trace.logit_bytes.__wrapped__(model, CARD, 1000, trains=False, entropy=True)
    few = 1000 * (2 * tiny_config().hidden_size + 60)  # hidden states; targets, scores and sums
    assert 600_000 + 2 * 1_200_000 <= found <= 600_000 + 2 * 1_200_000 + few
    assert shape_ops("cuda").fused is None


@pytest.mark.parametrize(("has_card", "spec", "missing", "expected"), [
    (False, None, ["gcc"], True), (True, "found", [], True), (True, None, [], False), (True, "found", ["gcc"], False)])
def test_a_card_that_is_elsewhere_has_tritons_kernels_and_one_that_is_here_where_they_can_be_had(
        monkeypatch, has_card, spec, missing, expected) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda _name: spec)
    monkeypatch.setattr(cuda.launcher, "missing_tools", lambda: missing)
    assert cuda.can_load() is expected


def test_a_storage_that_grows_is_counted_as_grown() -> None:
    """By hand: 10 numbers of 4 bytes, then 100; a weight that was there before counts nothing."""
    weight = torch.zeros(1000)
    with trace.LiveBytes((weight,)) as live:
        spare = torch.empty(10)
        weight.add_(1)
        assert live.now == 40
        spare.resize_(100)
        assert (live.now, live.peak) == (400, 400)
        del spare
    assert (live.now, live.peak) == (0, 400)


def test_a_prefill_keeps_no_layers_keys() -> None:
    """What a prefill of four layers makes beside the cache does not grow by a layer's keys and values each."""
    peaks = []
    for depth in (2, 6):
        model = tiny_causal_lm(num_hidden_layers=depth)
        engine = HybridEngine.for_inference(model, tiny_tokenizer())
        with engine.inference(), trace.LiveBytes(tuple(model.parameters())) as live:
            cache = engine._runner.new_cache(4, 70)
            for _ in range(2):  # the first allocates the cache
                live.peak = before = live.now
                engine._runner.prefill(cache, [[5] * 64] * 4, range(4), range(4))
        peaks.append(live.peak - before)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


# -- what a plan adds to the tensors on a card, and the file that says it better --------------------------------------


GIB = 2**30


@pytest.fixture
def scorer(monkeypatch) -> Role:
    """10 GiB of weights that only score, with 1 GiB beside them."""
    monkeypatch.setattr(trace, "sizes",
                        lambda *_args, **_named: Sizes(10 * GIB, 0, 0, torch.bfloat16, 300, 2, GIB))
    monkeypatch.setattr(trace, "activations", lambda *_args, **_named: Activations(0, 0, GIB))
    return Role("reward", ModelConfig("somewhere", dtype="bfloat16"), 24, 2)


def test_a_card_has_libraries_and_fragmentation_and_a_cpu_as_much_as_ever(scorer):
    plan = make_plan("t", [scorer], CARD, None)
    lines = {line.kind: line.phases["score"] for line in plan.lines if line.role == "process"}
    assert lines == {"libraries": round(1.2 * GIB - 0.8), "fragmentation": round(0.07 * 11 * GIB)}
    assert plan.peak == 11 * GIB + sum(lines.values())
    assert make_plan("t", [scorer], CPU, None).peak == 11 * GIB + (64 << 20)


def test_what_was_measured_replaces_it_on_this_machine_and_not_on_others(scorer, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path))
    assert read_calibration() == Calibration(12 * GIB // 10, 0.07)
    stored = tmp_path / "calibration.json"
    stored.write_text(json.dumps({"libraries_bytes": 100, "fragmentation": 0.5, "matmul": 1e13}))
    assert read_calibration() == Calibration(100, 0.5)
    here, there = memory_options.Place.here(GIB), memory_options.Place.of(memory_options.Cards(1, 1, GIB))
    assert (here.calibration, there.calibration) == (Calibration(100, 0.5), None)
    assert make_plan("t", [scorer], CARD, None, calibration=here.calibration).peak == 11 * GIB * 3 // 2 + 100
    stored.write_text('{"fragmentation": 0}')
    assert read_calibration() == Calibration(fragmentation=0)


def test_windows_share_is_not_planned_with(monkeypatch):
    monkeypatch.setattr(memory_options, "free_bytes", lambda _: 100 * GIB)
    monkeypatch.setattr(memory_options, "device", lambda: CARD)
    assert memory_options.Place.here(None).available == 100 * GIB
    monkeypatch.setattr(memory_options, "is_wsl", lambda: True)
    assert memory_options.Place.here(None).available == 95 * GIB
    assert memory_options.Place.here(GIB).available == GIB
