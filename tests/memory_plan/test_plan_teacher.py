"""The memory plan of a run with a teacher: what of it is where, by hand, and a real update beside its logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.algorithms.divergence import Divergence
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import OptimizerConfig, ZeroConfig
from hybrid_rlhf.memory_plan import trace
from hybrid_rlhf.memory_plan.plan import LIBRARIES, Generation, Plan, Role, make_plan
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Actor, Teacher
from hybrid_rlhf.training import builders
from tests.factories.tiny import save_tiny, tiny_config, tiny_tokenizer

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def lines_of(plan: Plan, role: str) -> dict[str, dict[str, int]]:
    return {line.kind: line.phases for line in plan.lines if line.role == role}


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
    """300 words; 20 slots are 32 rows of a card's buffers, of 8 steps; on a CPU the host looks at every step."""
    tiny_config().save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), dtype="bfloat16")
    for keeps in (True, False):
        actor = Role("actor", model, 24, 4, predicted=8, trains=True,
                     generation=Generation(20, 16, 8, sequences=40, keeps=keeps))
        for device, size in ((CARD, 8 * 32 * 300), (CPU, 20 * 300)):
            found = lines_of(make_plan("grpo", [actor], device, None), "actor")
            assert found.get("kept words") == ({"generate": size} if keeps else None)


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
