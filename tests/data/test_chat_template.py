"""One way of tokenizing: whole texts, parts found by offsets; what is trained on ends with EOS and is nobody else's."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import (
    CHATML,
    Rendered,
    SkipRow,
    compose,
    compose_all,
    compose_messages,
    encode,
    encode_all,
    encode_first,
    encode_prompt,
    ensure_template,
)
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.turns import render
from hybrid_rlhf.models import tokenizer as tokenizers_of_models
from hybrid_rlhf.training.registry import READS
from tests.factories.tiny import chatml_tokenizer, tiny_tokenizer
from tests.factories.trl_templates import names, tokenizer_of

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


def test_a_base_that_begins_every_text_with_bos_gets_it_once():
    tokenizer = with_bos(tiny_tokenizer())
    ensure_template(tokenizer)
    ids = encode(tokenizer, CHAT[:2], CHAT[2:3]).ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
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


# -- A prompt whose last message is the assistant's is continued: no end of turn, no new turn --------------------------


ASKED = {"role": "user", "content": "What is one and one?"}
PARTS = ("smolvlm", "idefics3", "llava_next")


def begun(text: str) -> list[dict]:
    return [ASKED, {"role": "assistant", "content": text}]


def by_transformers(tokenizer, messages: list[dict]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False))


@pytest.mark.parametrize("name", [n for n in names() if n not in PARTS])
def test_a_prompt_is_what_transformers_continues(name):
    tokenizer = tokenizer_of(name)
    messages = begun("Step by step.\n<think>")
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    assert encode_prompt(tokenizer, messages) == by_transformers(tokenizer, messages)
    row = encode(tokenizer, messages, [{"role": "assistant", "content": "\nAdd one.\n</think>\n\n2."}])
    prompt = encode_prompt(tokenizer, messages)
    assert row.ids[: len(prompt)] == prompt and row.num_prompt_tokens == len(prompt)
    said = tokenizer.decode(row.ids[len(prompt) :])
    assert said.startswith("\nAdd one.\n</think>\n\n2.") and all(row.loss_mask[len(prompt) :])
    whole = encode(tokenizer, [ASKED], "2.").ids  # it ends as every answer does
    assert row.ids[-1] == whole[-1] and row.ids.count(whole[-1]) == whole.count(whole[-1])


@pytest.mark.parametrize(("name", "prompt"), [
    ("qwen3", "<|im_start|>assistant\n<think>\nSo"), ("qwen3_5_think", "<|im_start|>assistant\n<think>\nSo")])
def test_a_thought_that_is_begun_stands_where_the_model_writes_one(name, prompt):
    tokenizer = tokenizer_of(name)
    text = tokenizer.decode(encode_prompt(tokenizer, begun("<think>\nSo")))
    assert text.endswith(prompt) and text.count("<think>") == 1
    row = encode(tokenizer, begun("<think>\nSo"), " it is.\n</think>\n\n2.")
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :]) == " it is.\n</think>\n\n2.<|im_end|>"


def test_turns_behind_a_begun_answer_are_trained_too():
    tokenizer = chatml_tokenizer()
    rest = [{"role": "assistant", "content": " two."}, {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Three."}]
    row, = encode_all(tokenizer, compose_all(tokenizer, begun("One,"), rest))
    text = tokenizer.decode(row.ids)
    assert "One, two.<|im_end|>" in text and text.endswith("Three.<|im_end|>")
    assert tokenizer.decode([i for i, m in zip(row.ids, row.loss_mask, strict=True) if m]) == (
        " two.<|im_end|>Three.<|im_end|>")


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "glm4moe", "llama3"])
def test_an_answer_that_says_nothing_yet_is_not_begun(name):
    tokenizer = tokenizer_of(name)
    prompt = list(tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False))
    assert encode_prompt(tokenizer, begun("")) == encode_prompt(tokenizer, begun(" \n")) == prompt
    assert encode(tokenizer, begun(" "), "2.") == encode(tokenizer, [ASKED], "2.")


# -- Large files and long texts: no more of them is read or tokenized than counts --------------------------------------


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's kind: no pre-tokenizer, so that merges run over the whole text; bytes for what no piece says."""
    vocab = {"<eos>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "\u2581": 257, "r": 258, "e": 259, "d": 260,
             "re": 261, "red": 262, "\u2581red": 263, "\u2581" * 2: 264, "\u2581" * 4: 265, "\u2581" * 8: 266}
    merges = [("r", "e"), ("re", "d"), ("\u2581", "red"), *pairwise(["\u2581", "\u2581"])]
    merges += [("\u2581" * n, "\u2581" * n) for n in (2, 4)]
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<0x00>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    return wrapped(backend)


def of_words() -> PreTrainedTokenizerFast:
    """BERT's kind: white space vanishes, and a word that is not known is one token, however long."""
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "[UNK]": 1, "red": 2, "blue": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(backend)


TEXTS = {"words": "red blue " * 300, "one letter": "a" * 2000, "white space first": " " * 3000 + "red " * 400,
         "nothing but white space": "\n " * 900, "bytes": "\U0001f600red" * 300,
         "an unknown word": "x" * 3000 + " red" * 200, "short": "red", "spaces": (" " * 60 + "red") * 200}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("make", [tiny_tokenizer, with_byte_fallback, of_words])
def test_the_first_tokens_of_a_cut_text_are_those_of_the_whole(monkeypatch, make, text):
    monkeypatch.setattr(chat, "_CHARACTERS", 2)
    monkeypatch.setattr(chat, "_MARGIN", 8)
    tokenizer, middle = make(), len(text) // 2
    expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = expected["input_ids"] + [tokenizer.eos_token_id], [*expected["offset_mapping"], (0, len(text))]
    starts_at = next(i for i, (_, end) in enumerate(offsets) if end > middle)
    for count in (1, 20, 100):
        found, = encode_first(tokenizer, [Rendered(text, [(middle, len(text))], False)], count)
        assert found.ids[:count] == ids[:count]
        assert (len(found.ids) > count) == (len(ids) > count)
        assert found.loss_mask[:count] == [i >= starts_at for i in range(len(ids))][:count]
        assert min(found.num_prompt_tokens, count) == min(starts_at, count)


def test_no_more_of_a_long_text_is_tokenized_than_counts_and_it_is_counted_as_ever(tmp_path, monkeypatch):
    lengths, tokenize = [], chat._tokenize_texts

    def recorded(tokenizer, texts, *rest):  # noqa: ANN202
        lengths.append(sum(map(len, texts)))
        return tokenize(tokenizer, texts, *rest)

    monkeypatch.setattr(chat, "_tokenize_texts", recorded)
    long = "red " * 20_000
    rows = {"sft": [{"text": long}, {"text": "red"}],
            "reward": [{"prompt": "red", "chosen": long, "rejected": "no"},
                       {"prompt": "r", "chosen": "e", "rejected": "d"}],
            "ppo": [{"prompt": long}, {"prompt": "red"}]}
    for stage, dropped in (("sft", {}), ("reward", {"longer than data.max_length": 1}),
                           ("ppo", {"prompt longer than data.max_prompt_length": 1})):
        path = tmp_path / f"{stage}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[stage]))
        config = DataConfig(sources=[str(path)], eval_fraction=0.0, max_length=30, max_prompt_length=20, raw=True,
                            cache_dir=str(tmp_path / "cache"))
        found = build(config, READS[stage], tiny_tokenizer(), 0)
        assert found.report["dropped"] == dropped
        assert found.report["truncated"] == (stage == "sft")
        assert len(found.train) == (2 if stage == "sft" else 1)
        if stage == "sft":
            assert found.train[0]["input_ids"] == tiny_tokenizer()(long)["input_ids"][:30]
    assert max(lengths) < 2000


def test_a_tokenizer_is_trained_on_pieces_of_long_texts(monkeypatch):
    monkeypatch.setattr(tokenizers_of_models, "_PIECE", 4)
    vocab = tokenizers_of_models.train_tokenizer(["a" * 64, "abc"], 300).get_vocab()
    assert "aaaa" in vocab
    assert not any("a" * 5 in token for token in vocab)
