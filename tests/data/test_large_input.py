"""Large files and long texts: no more of them is read or tokenized than counts."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat, files, sources
from hybrid_rlhf.data import datasets as stage_data
from hybrid_rlhf.data.chat import Rendered, encode_first
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.schema import format_of, read_row
from hybrid_rlhf.data.sources import Source, read
from hybrid_rlhf.models import tokenizer as tokenizers_of_models
from hybrid_rlhf.training.registry import READS
from tests.factories.tiny import tiny_tokenizer

EOS = 3


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
    for stage, dropped in (("sft", {}), ("reward", {"longer than max_length": 1}),
                           ("ppo", {"prompt longer than max_prompt_length": 1})):
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


def test_few_long_texts_are_tokenized_in_one_call(tmp_path, monkeypatch):
    sizes, encode = [], chat.encode_first
    monkeypatch.setattr(stage_data, "_CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(chat, "encode_first",
                        lambda tokenizer, texts, *rest: sizes.append(len(texts)) or encode(tokenizer, texts, *rest))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "red" * size}) + "\n" for size in (10, 20, 10, 40, 1)))
    config = DataConfig(sources=[str(path)], eval_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    assert len(build(config, READS["sft"], tiny_tokenizer(), 0).train) == 5
    assert sizes == [3, 1, 1]  # 30 + 60 + 30 characters, 120, 3


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_a_file_whose_rows_may_not_fit_into_memory_is_refused(tmp_path, monkeypatch, name):
    """The gz has 8 MiB in 8 KiB: it is refused as it unpacks."""
    content = b'{"text": "red"}\n' * 2**19
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(files, "free_host_bytes", lambda: 8 * 3 * 2**20)
    with pytest.raises(UserError, match=f"{name} has [0-9,]+ bytes or more, over 1/8 of the free memory"):
        read(Source(str(tmp_path / name)))
    for free in (8 * len(content), None):  # None: the system does not say
        monkeypatch.setattr(files, "free_host_bytes", lambda free=free: free)
        assert len(read(Source(str(tmp_path / name)))) == 2**19


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_lists_in_lists_beyond_what_python_reads_are_one_line(tmp_path, name):
    (tmp_path / name).write_text("[" * 2000)
    with pytest.raises(UserError, match=f"{name}.*: not valid JSON .nested too deeply"):
        read(Source(str(tmp_path / name)))


@pytest.mark.parametrize("column", ["chosen", "rejected", "prompt"])
def test_an_answer_of_opening_brackets_is_a_text(column):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} | {column: "[" * 2000}
    example = read_row(row, format_of([row], "a.jsonl"), "a.jsonl row 1")
    assert "[" * 2000 in str((example.prompt, example.answers))


def test_values_of_a_table_may_be_long_and_hold_ends_of_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text\r"red\rblue"\r\n\xe2\x80\xa8\n"a\n\r\nb"\n' + b"x" * 200_000)
    assert read(Source(str(tmp_path / "a.csv"))) == [
        {"text": "red\rblue"}, {"text": "\u2028"}, {"text": "a\n\r\nb"}, {"text": "x" * 200_000}]


def test_a_file_that_memory_cannot_hold_is_one_line(tmp_path, monkeypatch):
    def fails(path):  # noqa: ANN202
        raise MemoryError

    monkeypatch.setattr(sources, "read_file", fails)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"a\.jsonl does not fit into memory; free some"):
        read(Source(str(tmp_path / "a.jsonl")))


def test_a_tokenizer_is_trained_on_pieces_of_long_texts(monkeypatch):
    monkeypatch.setattr(tokenizers_of_models, "_PIECE", 4)
    vocab = tokenizers_of_models.train_tokenizer(["a" * 64, "abc"], 300).get_vocab()
    assert "aaaa" in vocab
    assert not any("a" * 5 in token for token in vocab)
