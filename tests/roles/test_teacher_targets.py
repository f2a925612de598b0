"""A teacher's targets on their way through the policy: module, micro-batches, shared beginnings and packed rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets, top_k_divergence
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.models.backbone import own_head
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.roles import Actor, PolicyModule, Teacher
from hybrid_rlhf.roles.actor import AuxiliaryLoss
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.tiny import tiny_causal_lm
from tests.factories.trainers import policy, trained, weights

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [21, 22, 23]]
RESPONSES = [[31, 32, 33], [34], [35, 36, 37, 38, 39, 40, 41], [42, 43], [44], [45, 46]]
KIND = Divergence("reverse_kl")


def batch_of(prompts=PROMPTS, responses=RESPONSES) -> SequenceBatch:
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    real = length_mask([len(r) for r in rows])
    return SequenceBatch(pad_right(rows, 0), real, real & ~length_mask([len(p) for p in prompts], real.shape[1]))


def teacher_model(**changes):
    return tiny_causal_lm(7, initializer_range=0.2, **changes)


@torch.no_grad()
def targets_of(model, batch, kind=KIND, top_k=0) -> TeacherTargets:
    counts = batch.loss_mask[:, 1:].sum(1).tolist()
    module = PolicyModule(model)
    if top_k:
        found = module(batch, temperature=kind.temperature, top_k=top_k)
        return TeacherTargets(kind, list(found.top_logprobs.split(counts)), list(found.top_ids.split(counts)))
    return TeacherTargets(kind, list(module.states(batch).rows.split(counts)), head=own_head(model))


def plain(student, teacher, batch, kind=KIND) -> torch.Tensor:
    """KL(student || teacher) of all loss tokens, from each row's whole logits alone by torch's own functions."""
    found = []
    for ids, real, marked in zip(batch.input_ids, batch.attention_mask, batch.loss_mask, strict=True):
        s, t = (m(ids[real][None]).logits[0, :-1][marked[real][1:]] / kind.temperature for m in (student, teacher))
        found.append(kl_div(t.log_softmax(-1), s.log_softmax(-1), log_target=True, reduction="none").sum(-1))
    return torch.cat(found)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_divergence_and_gradients_are_those_of_every_row_alone(is_shared, chunk, monkeypatch):
    monkeypatch.setattr("hybrid_rlhf.roles.policy_module.chunk_rows", lambda *_: chunk)
    kind, teacher = Divergence(temperature=0.7), teacher_model(hidden_size=24, intermediate_size=40)
    model, twin = (tiny_causal_lm(3, initializer_range=0.2) for _ in range(2))
    module, batch = PolicyModule(model), batch_of()
    assert not is_shared or module.can_share()
    found = module(batch, with_entropy=True, teacher=targets_of(teacher, batch, kind))
    expected = plain(twin, teacher.requires_grad_(False), batch, kind)
    torch.testing.assert_close(found.divergence, expected, rtol=1e-4, atol=1e-5)
    order = torch.linspace(-1, 2, len(expected))
    (found.divergence * order).sum().backward()
    (expected * order).sum().backward()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-3, atol=1e-4), name
    assert all(p.grad is None for p in teacher.parameters())


def test_packed_rows_have_the_divergence_of_their_documents():
    rows = [{"input_ids": torch.randint(4, 290, (n,), generator=torch.Generator().manual_seed(n)).tolist(),
             "loss_mask": [j > 0 for j in range(n)]} for n in (9, 3, 6, 2, 11, 5)]
    packed, alone = collate_sft(rows, 0, packing_length=20), collate_sft(rows, 0)
    teacher, module = teacher_model(), PolicyModule(tiny_causal_lm(3, initializer_range=0.2))
    assert module.can_share() and len(packed) < len(alone)
    found = module(packed, teacher=targets_of(teacher, packed)).divergence
    expected = plain(module.model, teacher, alone)
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-4, atol=1e-5)
    assert len(expected) == 30


@torch.no_grad()
def test_the_likeliest_words_of_a_teacher_are_those_of_its_whole_logits(monkeypatch):
    monkeypatch.setattr("hybrid_rlhf.roles.policy_module.chunk_rows", lambda *_: 4)
    batch, teacher = batch_of(), teacher_model()
    targets = targets_of(teacher, batch, Divergence(temperature=0.5), top_k=3)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = teacher(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs, ids = (logits / 0.5).log_softmax(-1).topk(3)
        assert torch.equal(targets.ids[i], ids)
        torch.testing.assert_close(targets.rows[i], logprobs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_teacher_of_named_words_is_measured_over_those_and_the_rest():
    batch, student = batch_of(), tiny_causal_lm(3, initializer_range=0.2)
    targets = targets_of(teacher_model(), batch, top_k=5)
    found = PolicyModule(student)(batch, teacher=targets).divergence
    expected = [top_k_divergence(student(torch.tensor([p + r])).logits[0, len(p) - 1 : -1], ids, rows, KIND)
                for p, r, ids, rows in zip(PROMPTS, RESPONSES, targets.ids, targets.rows, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert (found < plain(student, teacher_model(), batch) + 1e-5).all() and (found > 0).all()


def test_without_a_teacher_there_is_no_divergence_and_with_one_the_scores_are_the_same():
    batch, module = batch_of(), PolicyModule(tiny_causal_lm(3))
    alone = module(batch, with_entropy=True, temperature=0.7)
    taught = module(batch, with_entropy=True, temperature=0.7, teacher=targets_of(teacher_model(), batch))
    assert alone.divergence is None and alone.top_ids is None
    for name in ("logprobs", "entropy", "correct"):
        assert torch.equal(getattr(alone, name), getattr(taught, name))


def test_a_teacher_of_other_tokens_is_refused():
    targets = targets_of(teacher_model(), batch_of())
    with pytest.raises(ValueError, match="16 hidden states for 16, 15 targets"):
        PolicyModule(tiny_causal_lm(3))(batch_of(), teacher=targets._replace(rows=[targets.rows[0][1:],
                                                                                   *targets.rows[1:]]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("whose", ["actor", "teacher"])
def test_rows_of_added_tokens_on_the_teachers_head_are_refused(tied, whose):
    """They are those of whose turn it is: in the student's update, not the teacher's."""
    model = tiny_causal_lm(3, tie_word_embeddings=tied)
    add_lora(model, LoraConfig(r=2), whose, [5, 7])
    teacher = Teacher(HybridEngine(PolicyModule(model), model))
    with pytest.raises(UserError, match="an adapter is on the output head of its base"):
        teacher.check(top_k=0)
    teacher.check(top_k=8)
    with pytest.raises(UserError, match=r"distill\.top_k is 301, and the teacher's vocabulary has 300 words"):
        teacher.check(top_k=301)


def divergence_loss(scores, count):
    size = scores.divergence.numel()
    return (scores.divergence.sum() / count, {"divergence": (scores.divergence.detach().mean(), size)})


def rollout() -> Rollout:
    return Rollout.from_responses(Prompts(PROMPTS, [""] * 6), RESPONSES, [False] * 6, 0, [""] * 6, temperature=0.8)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("shares", [False, True])
def test_micro_batches_of_an_update_get_their_own_rows(top_k, shares):
    """Budgets of one row, of two and of all: the same divergence and, to 1e-6, the same step."""
    results = []
    for budget in (13, 24, 8192):
        engine = policy(3, initializer_range=0.2)
        engine.prepare_training(OptimizerConfig(learning_rate=0.1, optim="sgd", max_grad_norm=1e9), lambda step: 1.0,
                                ZeroConfig())
        engine.module._can_share = shares
        actor = Actor(engine, None, budget)
        minibatch = rollout()
        batch = minibatch.sequences(0)
        targets = targets_of(teacher_model(), batch, top_k=top_k)
        before = actor.score_tokens(batch, teacher=targets, temperature=0.8)
        auxiliary = AuxiliaryLoss(batch_of(PROMPTS[:2], RESPONSES[:2]), lambda s, n: (-s.logprobs.sum() / n, {}), 0.1)
        found = actor.update(minibatch, lambda s, rows, totals: divergence_loss(s, totals.num_actions), auxiliary,
                             teacher=targets).compute()
        again = actor.fit_tokens(batch, divergence_loss, teacher=targets).compute()
        mean = torch.cat([scores.divergence for scores in before]).mean()
        assert found["divergence"] == pytest.approx(float(mean), rel=1e-5)
        assert again["divergence"] < found["divergence"]
        results.append((found["divergence"], found["grad_norm"], again["divergence"], weights(engine)))
    for other in results[1:]:
        assert other[:3] == pytest.approx(results[0][:3], rel=1e-5)
        for mine, theirs in zip(other[3], results[0][3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_student_that_follows_its_teacher_becomes_it():
    engine, teacher = trained(policy(3), rate=3e-2), teacher_model()
    actor, batch = Actor(engine, None), batch_of()
    targets = targets_of(teacher, batch)
    found = [actor.fit_tokens(batch, divergence_loss, teacher=targets).compute()["divergence"] for _ in range(60)]
    assert found[-1] < 0.1 * found[0]


def test_sixteen_bit_students_and_teachers():
    batch, teacher = batch_of(), teacher_model().bfloat16()
    module = PolicyModule(tiny_causal_lm(3, initializer_range=0.2).bfloat16())
    found = module(batch, teacher=targets_of(teacher, batch)).divergence
    found.sum().backward()
    assert found.dtype == torch.float32 and all(torch.isfinite(p.grad).all() for p in module.parameters())
    torch.testing.assert_close(found, plain(module.model.float(), teacher.float(), batch), rtol=0.1, atol=0.1)
