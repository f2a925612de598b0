"""What a teacher is asked and what is kept of it: its words against transformers' own logits, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.algorithms.divergence import Divergence
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.tensors import KeptSets, SequenceBatch, length_mask, pad_right
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.roles import PolicyModule, Teacher
from hybrid_rlhf.roles import teacher as teacher_module
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


def test_targets_alone_take_no_head_to_the_states(model, monkeypatch):
    monkeypatch.setattr(teacher_module, "token_logprobs", None)
    teacher = teacher_of(model)
    targets = teacher.targets(batch(), KIND)
    assert [rows.shape for rows in targets.rows] == [(2, 32), (1, 32), (2, 32)] and targets.kind is KIND
    assert [x.tolist() for x in teacher.read(batch(), KIND, temperature=None)[1]] == [[0, 0], [0], [0, 0]]
    assert [ids.shape for ids in teacher.targets(batch(), KIND, 3).ids] == [(2, 3), (1, 3), (2, 3)]


def test_unless_told_otherwise_its_words_and_its_tokens_are_at_temperature_one(model):
    for top_k in (0, 3):
        for mine, theirs in zip(teacher_of(model).read(batch(), KIND, top_k)[1], said(plain(model, 1.0)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_of_no_rows_there_is_nothing_to_say(model):
    none = batch().rows(torch.arange(0))
    for top_k in (0, 3):
        targets, logprobs = teacher_of(model).read(none, KIND, top_k)
        assert targets.rows == [] and logprobs == [] and targets.ids == ([] if top_k else None)


def test_the_device_s_own_kernel_scores_the_tokens_chunk_by_chunk(model, monkeypatch):
    sizes = []

    def scored(logits, ids, temperature, with_entropy):
        sizes.append(len(ids))
        return ids.float() * temperature, None, ids > 0

    monkeypatch.setattr(teacher_module, "ops_for", lambda kind: SimpleNamespace(token_scores=scored) if kind == "cpu"
                        else None)
    monkeypatch.setattr(teacher_module, "chunk_rows", lambda size, dtype: 2 if (size, dtype) == (
        300, torch.float32) else 99)
    _, logprobs = teacher_of(model).read(batch(), KIND, temperature=0.5)
    assert [found.tolist() for found in logprobs] == [[3.5, 4.0], [5.0], [6.0, 6.5]] and sizes == [2, 2, 1]


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


@pytest.mark.parametrize(("place", "mark"), [("own", "lora_A"), ("base", "rows_beside"), ("own", "rows_beside")])
def test_an_adapter_on_its_head_is_refused_and_needed_by_no_likeliest_words(place, mark):
    model = tiny_causal_lm(7)
    head = model.get_output_embeddings()
    head.base_layer = torch.nn.Identity() if place == "base" else head
    setattr(head.base_layer if place == "base" else head, mark, "there")
    with pytest.raises(UserError, match=r"^roles\.teacher: an adapter is on the output head of its base"):
        teacher_of(model).check(0)
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
