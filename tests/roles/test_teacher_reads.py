"""What a teacher is asked and what is kept of it: its words against transformers' own logits, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.tensors import KeptSets, SequenceBatch, length_mask, pad_right
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.backbone import own_head
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.roles import PolicyModule, Teacher
from hybrid_rlhf.roles.teacher import WHOLE_HEAD, check_top_k, head_tensors
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.tiny import tiny_causal_lm

ROWS, STARTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]], [2, 1, 1]  # where the loss tokens begin
KIND = Divergence("reverse_kl", temperature=0.7)


def batch() -> SequenceBatch:
    real = length_mask([len(row) for row in ROWS])
    return SequenceBatch(pad_right(ROWS, 0), real, real & ~length_mask(STARTS, 4))


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm(7, initializer_range=0.2)


def teacher_of(model, max_tokens: int = 8192) -> Teacher:
    return Teacher(HybridEngine(PolicyModule(model), model), max_tokens)


@torch.no_grad()
def plain(model, temperature: float) -> list[torch.Tensor]:
    """Of each row the log-probabilities (n, V) that predict its loss tokens, by the model's own forward alone."""
    return [(model(torch.tensor([row])).logits[0, start - 1: -1] / temperature).log_softmax(-1)
            for row, start in zip(ROWS, STARTS, strict=True)]


def said(logprobs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the loss tokens themselves."""
    return [found.gather(1, torch.tensor(row[start:])[:, None])[:, 0]
            for found, row, start in zip(logprobs, ROWS, STARTS, strict=True)]


@pytest.mark.parametrize("max_tokens", [1, 8192])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_it_says_of_the_tokens_is_at_the_temperature_asked_for_and_its_states_give_its_logits(
        model, max_tokens, temperature):
    targets, logprobs = teacher_of(model, max_tokens).read(batch(), KIND, temperature=temperature)
    for mine, theirs in zip(logprobs, said(plain(model, temperature)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for states, theirs in zip(targets.rows, plain(model, 1.0), strict=True):
        torch.testing.assert_close(targets.head(states).log_softmax(-1), theirs, rtol=1e-4, atol=1e-5)
        assert not states.requires_grad
    assert targets.kind is KIND and targets.ids is None


@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_the_likeliest_words_are_at_the_divergence_s_temperature_and_the_tokens_at_their_own(model, max_tokens):
    targets, logprobs = teacher_of(model, max_tokens).read(batch(), KIND, 3, temperature=0.5)
    for i, theirs in enumerate(plain(model, 0.7)):
        values, ids = theirs.topk(3)
        assert torch.equal(targets.ids[i], ids)
        torch.testing.assert_close(targets.rows[i], values, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(logprobs, said(plain(model, 0.5)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert targets.kind is KIND and targets.head is None


def rollout(**given) -> Rollout:
    made = Rollout.from_responses(Prompts([row[:n] for row, n in zip(ROWS, STARTS, strict=True)], [""] * 3),
                                  [row[n:] for row, n in zip(ROWS, STARTS, strict=True)], [True] * 3, 0, [""] * 3,
                                  temperature=0.5)
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_a_rollout_is_scored_at_its_temperature_and_among_the_words_kept_that_the_teacher_has(model):
    made = teacher_of(model).logprobs(rollout())
    expected = said(plain(model, 0.5))
    assert made.shape == (3, 2) and made[1, 1] == 0
    torch.testing.assert_close(made[made != 0], torch.cat(expected), rtol=1e-4, atol=1e-5)
    words = [[[7, 20, 301], [8]], [[10, 40]], [[12, 300], [13, 14, 15]]]  # of which it has those below 300
    kept = KeptSets.of_rows([[torch.tensor(each, dtype=torch.int32) for each in row] for row in words])
    among = teacher_of(model).logprobs(rollout(kept=kept))
    for i, (row, found) in enumerate(zip(words, plain(model, 0.5), strict=True)):
        for j, each in enumerate(row):
            own = found[j, [word for word in each if word < 300]]
            assert float(among[i, j]) == pytest.approx(float(own[0] - own.logsumexp(0)), abs=1e-5)


def test_a_token_that_it_does_not_have_is_refused(model):
    teacher = teacher_of(model)
    for number in (299, 300):
        rows = batch()
        rows.input_ids[0, 3] = number
        made = rollout()
        made.response_ids[0, 1] = number
        for asked in (lambda: teacher.read(rows, KIND), lambda: teacher.logprobs(made)):  # noqa: B023 - asked at once
            if number == 299:
                asked()
                continue
            with pytest.raises(UserError) as found:
                asked()
            assert str(found.value) == ("roles.teacher: token 300 is none of its 300: the student's vocabulary is "
                                        "larger; take a teacher with the student's own tokenizer")


def test_more_words_than_it_has_are_refused(model):
    check_top_k(300, 300)
    teacher_of(model).check(300)
    with pytest.raises(UserError) as found:
        teacher_of(model).read(batch(), KIND, 301)
    assert str(found.value) == ("distill.top_k is 301, and the teacher's vocabulary has 300 words; give fewer (such as "
                                "64), or 0 for all of them")


def test_weights_in_parts_have_no_whole_head_and_need_none_for_the_likeliest_words():
    model = tiny_causal_lm(7)
    next(model.parameters()).ds_id = 0  # as ZeRO 3 marks weights that are in parts
    with pytest.raises(UserError) as found:
        teacher_of(model).check(0)
    assert str(found.value) == WHOLE_HEAD
    teacher_of(model).check(1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_its_head_reads_is_the_head_and_what_is_not_the_backbone_s(is_tied):
    model = tiny_causal_lm(7, tie_word_embeddings=is_tied)
    model.scale = torch.nn.Parameter(torch.ones(1))
    model.register_buffer("shift", torch.zeros(1))
    found = {id(tensor) for tensor in head_tensors(model)}
    assert found == {id(model.scale), id(model.shift), id(model.get_output_embeddings().weight)}
    model.get_output_embeddings = lambda: None
    assert {id(model.scale), id(model.shift)} <= {id(t) for t in head_tensors(model)}


# --- A teacher's targets on their way through the policy: module, micro-batches, shared beginnings and packed rows

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [21, 22, 23]]
RESPONSES = [[31, 32, 33], [34], [35, 36, 37, 38, 39, 40, 41], [42, 43], [44], [45, 46]]
REVERSE_KL = Divergence("reverse_kl")


def batch_of(prompts=PROMPTS, responses=RESPONSES) -> SequenceBatch:
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    real = length_mask([len(r) for r in rows])
    return SequenceBatch(pad_right(rows, 0), real, real & ~length_mask([len(p) for p in prompts], real.shape[1]))


def teacher_model(**changes):
    return tiny_causal_lm(7, initializer_range=0.2, **changes)


@torch.no_grad()
def targets_of(model, batch, kind=REVERSE_KL, top_k=0) -> TeacherTargets:
    counts = batch.loss_mask[:, 1:].sum(1).tolist()
    module = PolicyModule(model)
    if top_k:
        found = module(batch, temperature=kind.temperature, top_k=top_k)
        return TeacherTargets(kind, list(found.top_logprobs.split(counts)), list(found.top_ids.split(counts)))
    return TeacherTargets(kind, list(module.states(batch).rows.split(counts)), head=own_head(model))


def plain_divergence(student, teacher, batch, kind=REVERSE_KL) -> torch.Tensor:
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
    expected = plain_divergence(twin, teacher.requires_grad_(False), batch, kind)
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
    expected = plain_divergence(module.model, teacher, alone)
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-4, atol=1e-5)
    assert len(expected) == 30


def test_a_teacher_of_other_tokens_is_refused():
    targets = targets_of(teacher_model(), batch_of())
    with pytest.raises(ValueError, match="16 hidden states for 16, 15 targets"):
        PolicyModule(tiny_causal_lm(3))(batch_of(), teacher=targets._replace(rows=[targets.rows[0][1:],
                                                                                   *targets.rows[1:]]))


@pytest.mark.parametrize(("tied", "whose", "targets", "added"), [
    (False, "actor", ["q_proj"], [5, 7]), (True, "teacher", ["q_proj"], [5, 7]), (False, "teacher", ["lm_head"], [])],
    ids=["rows", "rows of a tied head", "adapter"])
def test_adapters_and_rows_of_added_tokens_on_the_teachers_head_are_refused(tied, whose, targets, added):
    """They are those of whose turn it is: in the student's update, not the teacher's."""
    model = tiny_causal_lm(3, tie_word_embeddings=tied)
    add_lora(model, LoraConfig(r=2, target_modules=targets), whose, added)
    teacher = Teacher(HybridEngine(PolicyModule(model), model))
    with pytest.raises(UserError, match="an adapter is on the output head of its base"):
        teacher.check(top_k=0)
    teacher.check(top_k=8)
    with pytest.raises(UserError, match=r"distill\.top_k is 301, and the teacher's vocabulary has 300 words"):
        teacher.check(top_k=301)


def test_sixteen_bit_students_and_teachers():
    batch, teacher = batch_of(), teacher_model().bfloat16()
    module = PolicyModule(tiny_causal_lm(3, initializer_range=0.2).bfloat16())
    found = module(batch, teacher=targets_of(teacher, batch)).divergence
    found.sum().backward()
    assert found.dtype == torch.float32 and all(torch.isfinite(p.grad).all() for p in module.parameters())
    expected = plain_divergence(module.model.float(), teacher.float(), batch)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
