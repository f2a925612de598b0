"""One way of tokenizing: whole texts, parts found by offsets; what is trained on ends with EOS and is nobody else's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import (
    CHATML,
    Encoded,
    Rendered,
    SkipRow,
    compose,
    compose_messages,
    encode,
    encode_all,
    encode_prompt,
    ensure_template,
)
from hybrid_rlhf.data.turns import render
from tests.factories.tiny import tiny_tokenizer

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is red?"},
        {"role": "assistant", "content": "A fox."}, {"role": "user", "content": "And cat?"},
        {"role": "assistant", "content": "You are welcome!"}]

LLAMA3 = ("{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}{{ eos_token }}"
          "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}")
LLAMA2 = ("{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% else %}"
          "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}")
NO_END = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
          "{% if add_generation_prompt %}assistant:{% endif %}")
THINKING = CHATML.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")  # says more than history
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA3, "llama 2": LLAMA2, "no end marker": NO_END, "thinking": THINKING}


@pytest.fixture
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    ensure_template(tokenizer)
    return tokenizer


class Slow:
    """The same tokenizer as one that knows no offsets."""

    is_fast = False

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self):
        return len(self.tokenizer)

    def __call__(self, text, add_special_tokens=True, **more):
        assert not more
        return self.tokenizer(text, add_special_tokens=add_special_tokens)


def trained(tokenizer, encoded) -> str:
    return tokenizer.decode([i for i, m in zip(encoded.ids, encoded.loss_mask, strict=True) if m])


def test_chatml_marks_each_answer_and_its_end_and_nothing_else(tokenizer):
    row = encode_all(tokenizer, compose_messages(tokenizer, CHAT))[0]
    assert trained(tokenizer, row) == "A fox.<|im_end|>You are welcome!<|im_end|>"
    assert tokenizer.decode(row.ids) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\n"
        "A fox.<|im_end|>\n<|im_start|>user\nAnd cat?<|im_end|>\n<|im_start|>assistant\nYou are welcome!<|im_end|>")
    before = tokenizer.decode(row.ids[: row.num_prompt_tokens])
    assert before.endswith("What is red?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_under_any_template_only_answers_are_trained_and_eos_ends_the_sequence_once(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    eos = tokenizer.eos_token_id
    for row in (encode_all(tokenizer, compose_messages(tokenizer, CHAT))[-1], encode(tokenizer, CHAT[:4], CHAT[4:])):
        text = trained(tokenizer, row)
        assert "You are welcome!" in text
        for prompt_part in ("Be kind", "red", "And cat", "user", "system"):
            assert prompt_part not in text
        assert (row.ids[-1], row.loss_mask[-1]) == (eos, True)
        assert row.ids[-2] != eos
    assert "A fox." not in text  # the second row: earlier turns belong to the prompt


@pytest.mark.parametrize("name", ["chatml", "llama 3"])
def test_the_prompt_alone_is_the_beginning_of_the_sequence(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    row = encode(tokenizer, CHAT[:4], CHAT[4:])
    assert encode_prompt(tokenizer, CHAT[:4]) == row.ids[: row.num_prompt_tokens]
    assert not any(row.loss_mask[: row.num_prompt_tokens])
    assert all(row.loss_mask[row.num_prompt_tokens :])


def test_a_template_that_brings_bos_gives_it_once(tokenizer):
    tokenizer.chat_template = LLAMA3
    assert encode(tokenizer, CHAT[:2], CHAT[2:3]).ids.count(tokenizer.bos_token_id) == 1
    assert encode_prompt(tokenizer, CHAT[:2]).count(tokenizer.bos_token_id) == 1


def test_plain_text_gets_the_bos_that_the_tokenizer_adds_by_itself_once():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 1), ("<|im_end|>", 3)])
    row = encode(tokenizer, "What is", " red")
    assert row.ids[0] == 1
    assert row.ids.count(3) == 1
    assert tokenizer.decode(row.ids) == "<|endoftext|>What is red<|im_end|>"
    assert trained(tokenizer, row) == " red<|im_end|>"
    assert encode_prompt(tokenizer, "What is") == row.ids[: row.num_prompt_tokens]  # and no eos behind a prompt


def test_a_merge_over_the_boundary_belongs_to_the_response(tokenizer):
    whole, alone = tokenizer("What is")["input_ids"], tokenizer("What i")["input_ids"]
    assert tokenizer.decode(whole[-1:]) == " is"  # " is" is one token, so "What i" + "s" has no boundary at "i"
    row = encode(tokenizer, "What i", "s")
    assert row.ids == [*whole, tokenizer.eos_token_id]
    assert row.loss_mask == [False] * (len(whole) - 1) + [True, True]
    assert row.num_prompt_tokens == len(whole) - 1
    assert encode_prompt(tokenizer, "What i") == alone != whole[: len(alone)]


TEXT = st.text(st.sampled_from("What is red?\n é☃😀 word"), max_size=12)


@settings(max_examples=200, deadline=None)
@given(prompt=TEXT, completion=TEXT.filter(bool), as_slow=st.booleans())
def test_tokens_are_those_of_the_whole_text_and_the_boundary_is_the_last_one_possible(prompt, completion, as_slow):
    tokenizer = tiny_tokenizer()
    row = encode(Slow(tokenizer) if as_slow else tokenizer, prompt, completion)
    assert row.ids == [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
    n, size = row.num_prompt_tokens, len(prompt.encode())
    assert len(bytes_of(tokenizer, row.ids[:n])) <= size
    assert as_slow or len(bytes_of(tokenizer, row.ids[: n + 1])) > size
    assert row.loss_mask == [i >= n for i in range(len(row.ids))]


def bytes_of(tokenizer, ids: list[int]) -> bytes:
    """The bytes behind byte-level tokens: every character of the vocabulary stands for one byte."""
    return b"".join(b"." * len(t) for t in tokenizer.convert_ids_to_tokens(ids))


def test_a_tokenizer_without_offsets_finds_the_same_turns(tokenizer):
    rows = [*compose_messages(tokenizer, CHAT), compose(tokenizer, "What is", " red")]
    assert encode_all(Slow(tokenizer), rows) == encode_all(tokenizer, rows)


def test_strings_beside_messages_are_one_turn(tokenizer):
    assert compose(tokenizer, CHAT[:2], "A fox.") == compose(tokenizer, CHAT[:2], CHAT[2:3])
    assert compose(tokenizer, "What is red?", CHAT[2:3]) == compose(tokenizer, CHAT[1:2], "A fox.")


def test_chatml_is_written_only_where_there_is_no_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LLAMA3
    assert ensure_template(tokenizer, set_eos=True) is False
    assert tokenizer.chat_template == LLAMA3
    tokenizer.chat_template = None
    assert ensure_template(tokenizer) is False  # its two markers are in this vocabulary already
    assert render(tokenizer, CHAT[1:2], True) == "<|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\n"


def bare_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


@pytest.mark.parametrize(("set_eos", "eos", "end"), [(False, "</s>", "<|im_end|>"),
                                                     (True, "<|im_end|>", "<|im_end|>")])
def test_markers_become_single_special_tokens_and_eos_changes_only_when_asked(set_eos, eos, end, tmp_path):
    tokenizer = bare_tokenizer()
    size = len(tokenizer)
    assert ensure_template(tokenizer, set_eos=set_eos) is True
    assert (len(tokenizer), tokenizer.eos_token) == (size + 2, eos)
    row = encode(tokenizer, CHAT[:2], CHAT[2:3])
    assert trained(tokenizer, row) == "A fox." + end
    assert tokenizer.decode(row.ids, skip_special_tokens=True).endswith("A fox.")
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == CHATML
    assert encode(loaded, CHAT[:2], CHAT[2:3]) == row


def test_a_template_comes_as_text_or_as_a_file_and_a_broken_one_is_named(tmp_path, tokenizer):
    (tmp_path / "t.jinja").write_text(NO_END)
    ensure_template(tokenizer, str(tmp_path / "t.jinja"))
    assert tokenizer.chat_template == NO_END
    ensure_template(tokenizer, CHATML)
    assert tokenizer.chat_template == CHATML
    with pytest.raises(UserError, match=r"data.chat_template nowhere.jinja is not a file"):
        ensure_template(tokenizer, "nowhere.jinja")
    with pytest.raises(UserError, match=r"data.chat_template line 2: Encountered unknown tag 'fro'"):
        ensure_template(tokenizer, "\n{% fro m in messages %}")


def test_a_row_that_the_template_cannot_show_is_refused_with_the_reason(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system\nmessages') }}"
    with pytest.raises(SkipRow, match=r"^the chat template refuses it .no system messages.$"):
        encode(tokenizer, CHAT[:1], "x")
    tokenizer.chat_template = "{{ messages[-1].content }}{{ messages[0].content }}"
    with pytest.raises(SkipRow, match="the chat template rewrites earlier turns"):
        encode(tokenizer, CHAT[:2], "x")
    with pytest.raises(SkipRow, match="no assistant turn"):
        compose_messages(tokenizer, CHAT[:2])


def with_bos(tokenizer):
    """The tokenizer as one that begins every text with BOS, as Gemma's and Llama 3's do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|endoftext|>"
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def test_chatml_for_a_base_that_begins_every_text_with_bos_begins_with_it_too_and_once():
    tokenizer = with_bos(tiny_tokenizer())
    ensure_template(tokenizer)
    ids = encode(tokenizer, CHAT[:2], CHAT[2:3]).ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_a_plain_text_that_was_rendered_already_and_begins_with_bos_gets_no_second_one():
    tokenizer = with_bos(tiny_tokenizer())
    for prompt in ("What is", "<|endoftext|>What is"):
        row = encode(tokenizer, prompt, " red")
        assert row.ids[0] == tokenizer.bos_token_id and row.ids.count(tokenizer.bos_token_id) == 1
        assert encode_prompt(tokenizer, prompt).count(tokenizer.bos_token_id) == 1


def test_the_generation_block_of_transformers_is_no_mistake_and_another_unknown_tag_is(tokenizer):
    given = CHATML.replace("{{- '<|im_start|>'", "{% generation %}{% endgeneration %}{{- '<|im_start|>'", 1)
    ensure_template(tokenizer, given)
    assert tokenizer.chat_template == given
    with pytest.raises(UserError, match=r"data\.chat_template line 1: Encountered unknown tag 'think'"):
        ensure_template(tokenizer, "{% think %}")


def test_an_end_that_the_tokenizer_puts_behind_whatever_it_reads_is_no_part_of_a_prompt():
    tokenizer = SimpleNamespace(eos_token_id=3, eos_token="</s>")
    assert chat._mark(tokenizer, Rendered("hi", [], True), [5, 3], {}) == Encoded([5], [False], 1)
    for written in (Rendered("hi</s>", [], True), Rendered("hi", [], False)):
        assert chat._mark(tokenizer, written, [5, 3], {}) == Encoded([5, 3], [False, False], 2)


def test_the_end_of_a_turn_ends_an_answer_of_messages_and_no_plain_text(monkeypatch):
    monkeypatch.setattr(chat, "turn_ends", lambda tokenizer: [9])
    tokenizer, places = SimpleNamespace(eos_token_id=3, eos_token="</s>"), {1: 1, 3: 2}
    for is_plain, ids, mask in ((False, [4, 5, 9], [False, True, True]),
                                (True, [4, 5, 9, 3], [False, True, False, True])):
        found = chat._mark(tokenizer, Rendered("abc", [(1, 3)], is_plain), [4, 5, 9], places)
        assert found == Encoded(ids, mask, 1)
    bare = chat._mark(tokenizer, Rendered("abc", [(1, 3)], True), [4, 5], places, False)
    assert bare == Encoded([4, 5], [False, True], 1)
    with pytest.raises(UserError, match="no eos_token"):
        chat._mark(SimpleNamespace(eos_token_id=None), Rendered("abc", [(1, 3)], True), [4, 5], places)
