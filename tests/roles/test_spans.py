"""A teacher with tokens of its own: the spans that both share, against TRL's alignment and transformers' own logits."""

from __future__ import annotations

import random

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.roles import PolicyModule, Teacher
from hybrid_rlhf.roles.spans import OwnTokens, Span, spans_of, text_and_ends
from hybrid_rlhf.roles.teacher import TeacherPrompt
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.tiny import chatml_tokenizer, other_tokenizer, tiny_causal_lm, tiny_tokenizer

TEXTS = ["The answer is cat.", " a little red fox", "cat 🦊 fox é", "wood wood\n\nwood", "12 + 34 = 46"]


@pytest.mark.parametrize(("student", "teacher", "wanted"), [
    ([3, 6, 9], [3, 6, 9], [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3)]),
    ([3, 6, 9], [6, 9], [(0, 2, 0, 1), (2, 3, 1, 2)]),
    ([4, 9], [2, 3, 9], [(0, 2, 0, 3)]),
    ([None, None, 1, 4], [1, 2, 4], [(0, 3, 0, 1), (3, 4, 1, 3)]),  # a character of three tokens
    ([3, 5], [3, 6], [(0, 1, 0, 1)]), ([], [2], [])])
def test_spans_end_where_a_token_of_both_ends(student, teacher, wanted) -> None:
    assert spans_of(student, teacher) == [Span(slice(a, b), slice(c, d)) for a, b, c, d in wanted]


def test_the_spans_are_those_of_trl_where_no_character_is_split() -> None:
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    draw = random.Random(0)
    for _ in range(200):
        length = draw.randint(1, 30)
        ends = [sorted({*draw.sample(range(1, length + 1), draw.randint(1, length)), length}) for _ in range(2)]
        theirs = gold.ULDLoss._align_by_byte_offsets(*([(0, end) for end in each] for each in ends))
        mine = [[list(range(s.start, s.stop)) for s in side] for side in zip(*spans_of(*ends), strict=True)]
        assert mine == [list(side) for side in theirs]


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_ends_where_the_text_of_all_until_it_ends(text) -> None:
    tokenizer = tiny_tokenizer()
    ids = [token for char in text for token in tokenizer(char, add_special_tokens=False)["input_ids"]]  # not merged
    found, ends = text_and_ends(tokenizer, ids)
    parts = [tokenizer.decode(ids[:i + 1], skip_special_tokens=False) for i in range(len(ids))]
    assert found == text and ends == [None if "\ufffd" in part else len(part) for part in parts]
    cut = tokenizer("a 🦊", add_special_tokens=False)["input_ids"][:-1]
    assert text_and_ends(tokenizer, cut)[0] == "a " and text_and_ends(tokenizer, cut)[1][-1] is None


def rollout_of(student, texts: list[str], has_eos: list[bool]) -> Rollout:
    answers = [student(text, add_special_tokens=False)["input_ids"] + [student.eos_token_id] * ended
               for text, ended in zip(texts, has_eos, strict=True)]
    prompts = Prompts([[5, 6, 7]] * len(texts), [f"say {i}" for i in range(len(texts))])
    found = Rollout.from_responses(prompts, answers, has_eos, student.pad_token_id, texts, temperature=0.8)
    torch.manual_seed(1)
    found.logprobs = -torch.rand(found.action_mask.shape).masked_fill(~found.action_mask, 0)
    return found


def teacher_of(tokenizer, student, model) -> Teacher:
    return Teacher(HybridEngine(PolicyModule(model), model, pad_id=tokenizer.pad_token_id), prompt=TeacherPrompt(
        None, tokenizer), own_tokens=OwnTokens(tokenizer, student))


@pytest.mark.parametrize("is_turn", [False, True])
def test_a_spans_ratio_is_that_of_both_sides_sums_by_transformers(is_turn) -> None:
    student, own = tiny_tokenizer(), other_tokenizer()
    if is_turn:
        own = chatml_tokenizer().__class__(tokenizer_object=own.backend_tokenizer, pad_token=own.pad_token,
                                           eos_token=own.eos_token, clean_up_tokenization_spaces=False)
        own.chat_template = chatml_tokenizer().chat_template
    model = tiny_causal_lm(3, vocab_size=len(own), initializer_range=0.3)
    rollout = rollout_of(student, TEXTS, [True, False, True, True, False])
    at_each, at_ends, num_outside = teacher_of(own, student, model).log_ratios(rollout)
    assert num_outside == 0
    for i, text in enumerate(TEXTS):
        asked = own.apply_chat_template([{"role": "user", "content": f"say {i}"}], add_generation_prompt=True,
                                        tokenize=False) if is_turn else f"say {i}"
        before = own(asked)["input_ids"]
        encoded = own(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"] + [own.eos_token_id] * bool(rollout.has_eos[i])
        with torch.no_grad():
            logits = model(torch.tensor([before + ids])).logits[0, len(before) - 1: -1] / 0.8
        said = logits.double().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        length = int(rollout.response_mask[i].sum())
        answer = rollout.response_ids[i, :length].tolist()
        until = [len(student.decode(answer[:k + 1], skip_special_tokens=False)) for k in range(length)]
        for k in range(length):  # the ends of whole characters only
            if "\ufffd" in student.decode(answer[:k + 1], skip_special_tokens=False):
                until[k] = -1
        ends = [end for _, end in encoded["offset_mapping"]]
        if rollout.has_eos[i]:
            until[-1], ends = len(text) + 1, [*ends, len(text) + 1]
        both, begin = sorted({*until} & {*ends}), 0
        assert both[-1] == max(ends)
        for end in both:
            mine = slice(begin, until.index(end) + 1)
            start = max((k + 1 for k, other in enumerate(ends) if begin and other <= until[begin - 1]), default=0)
            stop = max(k for k, other in enumerate(ends) if other == end) + 1
            ratio = said[start:stop].sum() - rollout.logprobs[i, mine].sum()
            torch.testing.assert_close(at_each[i, mine].double(), ratio.expand(mine.stop - begin), rtol=1e-4, atol=1e-4)
            assert at_ends[i, mine].count_nonzero() == 1 and at_ends[i, mine.stop - 1] == at_each[i, mine.stop - 1]
            begin = mine.stop
    if not is_turn:
        assert any(len(own(t, add_special_tokens=False)["input_ids"]) != len(
            student(t, add_special_tokens=False)["input_ids"]) for t in TEXTS)


def test_the_students_own_tokens_read_as_text_give_what_reading_them_gives() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm(3, initializer_range=0.3)
    rollout = rollout_of(tokenizer, TEXTS, [True, False, True, True, True])
    rollout.prompts = Prompts([tokenizer(text)["input_ids"] for text in rollout.prompts.texts], rollout.prompts.texts)
    reads = Teacher(HybridEngine(PolicyModule(model), model, pad_id=0))
    wanted, _, _ = reads.log_ratios(rollout)
    found, at_ends, num_outside = teacher_of(tokenizer, tokenizer, model).log_ratios(rollout)
    splits_a_character = [i for i, row in enumerate(rollout.response_ids) if None in text_and_ends(
        tokenizer, row[rollout.response_mask[i]].tolist())[1]]
    assert num_outside == 0 and splits_a_character == [2]
    for i in range(len(TEXTS)):
        if i not in splits_a_character:
            torch.testing.assert_close(found[i], wanted[i], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(at_ends[i].sum(), wanted[i].sum(), rtol=1e-4, atol=1e-4)


def test_what_the_teachers_tokenizer_changes_is_in_no_span() -> None:
    """A tokenizer that writes everything in small letters reads another text."""
    from tokenizers import normalizers

    student, own = tiny_tokenizer(), tiny_tokenizer()
    own.backend_tokenizer.normalizer = normalizers.Lowercase()
    rollout = rollout_of(student, ["The cat", "the cat"], [True, True])
    model = tiny_causal_lm(3)
    at_each, _, num_outside = teacher_of(own, student, model).log_ratios(rollout)
    assert num_outside == rollout.action_mask[0].sum() and at_each[0].count_nonzero() == 0
    assert at_each[1].count_nonzero() == rollout.action_mask[1].sum()


def sentencepiece_tokenizer():
    """Words with their space as Llama's: what decoding drops before a first token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "\u2581cat": 3}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    found.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<unk>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("of_student, of_teacher", [(True, False), (False, True), (True, True)])
def test_a_text_that_goes_on_keeps_its_space_where_a_tokenizer_drops_it(of_student, of_teacher) -> None:
    student, own = (sentencepiece_tokenizer() if each else tiny_tokenizer() for each in (of_student, of_teacher))
    asked, answer = ([2], [3]) if of_student else (student("the").input_ids, student(" cat").input_ids)
    rollout = Rollout.from_responses(Prompts([asked], ["the"]), [answer], [False], student.pad_token_id, ["cat"])
    read, spans = OwnTokens(own, student).read(rollout)
    wanted = [3] if of_teacher else own(" cat").input_ids
    assert read.response_ids.tolist() == [wanted]
    assert (spans[0][0].student.start, spans[0][-1].student.stop, spans[0][-1].teacher.stop) == (
        0, len(answer), len(wanted))
