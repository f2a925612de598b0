"""A stage's rows: dealt by prompt, cut without loss of answers, counted, and cached by everything that made them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import cache, chat, datasets
from hybrid_rlhf.data.chat import CHATML
from hybrid_rlhf.data.datasets import DataConfig, build, raw_texts
from hybrid_rlhf.data.loader import blend, deal, is_held_out
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.training import step1_sft
from hybrid_rlhf.training.registry import PTX, READS
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer():
    return chatml_tokenizer()


@pytest.fixture
def written(tmp_path):
    def write(rows: list[dict], name: str = "rows.jsonl", **more) -> Source:
        (tmp_path / name).write_text("\n".join(json.dumps(r) for r in rows))
        return Source(str(tmp_path / name), **more)

    return write


def whole(*given_sources: Source, **changes) -> DataConfig:
    return DataConfig(list(given_sources), **({"split": None, "eval_fraction": 0.0, "raw": True} | changes))


def pairs(count: int) -> list[dict]:
    return [{"prompt": f"What is {i}?", "chosen": f" It is {i}.", "rejected": " No."} for i in range(count)]


def test_no_prompt_is_seen_by_two_stages_or_both_trained_on_and_held_out_whatever_the_seed(written, tokenizer):
    as_strings = written(pairs(300), "a.jsonl")
    as_messages = written([{"messages": [{"role": "user", "content": r["prompt"]}, {
        "role": "assistant", "content": r["chosen"]}]} for r in pairs(300)], "b.jsonl")
    config = DataConfig([as_strings, as_messages], split=[2, 4, 4], eval_fraction=0.2)
    seen: dict[str, set] = {}
    for seed, stage in enumerate(("ppo", "sft", "reward", "sft")):
        data = build(config, READS[stage], tokenizer, seed)
        for part, rows in (("train", data.train), ("held_out", data.held_out)):
            for row in rows:
                ids = row.get("prompt_ids") or row.get("input_ids") or row["chosen_ids"]
                question = tokenizer.decode(ids).split("?")[0].split("What is ")[1]
                seen.setdefault(question, set()).add((stage, part))
    assert len(seen) == 300
    assert all(len(places) == 1 for places in seen.values())


def test_the_deal_is_by_sha256_of_the_text_in_the_given_shares():
    texts = [f"prompt {i}" for i in range(3000)]
    for text in texts[:50]:
        point = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64 * 10
        assert deal(text, [2, 4, 4]) == (0 if point < 2 else 1 if point < 6 else 2)
    counts = [sum(deal(t, [2, 4, 4]) == i for t in texts) for i in range(3)]
    assert all(abs(n / 3000 - share) < 0.03 for n, share in zip(counts, (0.2, 0.4, 0.4), strict=True))
    held_out = [t for t in texts if is_held_out(t, 0.1)]
    assert abs(len(held_out) / 3000 - 0.1) < 0.02
    assert {deal(t, [0, 1, 0]) for t in texts} == {1}
    assert {deal(t, [2, 4, 4]) for t in held_out} == {0, 1, 2}  # independent of the deal


def test_an_answer_too_long_loses_its_tail_and_a_prompt_too_long_loses_the_row(written, tokenizer):
    source = written([{"prompt": "2 2", "completion": " 3" * 20}, {"prompt": "2" + " 2" * 19, "completion": " 3 4"},
                      {"prompt": "2 2", "completion": " 3"}, {"prompt": "2", "completion": "  "}])
    data = build(whole(source, max_length=10), READS["sft"], tokenizer, 0)
    rows = [tokenizer.decode(r["input_ids"]) for r in data.train]
    sizes = [len(r["input_ids"]) for r in data.train]
    assert rows[1] == "2 2 3<|im_end|>"
    assert rows[0].startswith("2 2 3")
    assert (len(rows), sizes[0], rows[0].endswith("<|im_end|>")) == (2, 10, False)
    name = Path(source.path).name
    assert data.report == {"read": 4, "other_stages": 0, "truncated": 1, "usable": 2, "train": 2, "held_out": 0,
                           "rendered": {"prompts of plain text kept as they are (data.raw)": 4},
                           "dropped": {"no answer left within data.max_length": 1, "empty answer": 1},
                           "dropped_first": {"no answer left within data.max_length": [f"{name} row 2"],
                                             "empty answer": [f"{name} row 4"]}, "not_used": []}


def test_a_pair_with_one_side_too_long_is_dropped_and_counted(written, tokenizer):
    rows = pairs(3)
    rows[1]["rejected"] = " No." * 30
    data = build(whole(written(rows), max_length=30), READS["reward"], tokenizer, 0)
    assert len(data.train) == 2
    assert data.report["dropped"] == {"longer than data.max_length": 1}
    assert tokenizer.decode(data.train[1]["chosen_ids"]) == "What is 2? It is 2.<|im_end|>"


def test_a_prompt_too_long_to_sample_from_is_dropped_not_cut_and_columns_are_handed_on(written, tokenizer):
    source = written([{"question": "red " * 30, "answer": "x"}, {"question": "red", "answer": 42, "text": "theirs"}])
    source = replace(source, columns={"prompt": "question"})
    data = build(whole(source, max_prompt_length=20), READS["ppo"], tokenizer, 0)
    assert list(data.train) == [{"prompt_ids": tokenizer("red")["input_ids"], "text": "red", "prompt": "red",
                                 "answer": 42}]
    assert data.report["dropped"] == {"prompt longer than data.max_prompt_length": 1}


def test_only_the_response_is_trained_on_unless_all_is_asked_for(written, tokenizer):
    source = written([{"prompt": "What is it?", "completion": " red"}])
    row = build(whole(source), READS["sft"], tokenizer, 0).train[0]
    trained = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert tokenizer.decode(trained) == " red<|im_end|>"
    assert all(build(whole(source, train_on="all"), READS["sft"], tokenizer, 0).train[0]["loss_mask"])


def test_plain_text_goes_without_eos_when_told_and_messages_never_do(written, tokenizer):
    plain = written([{"prompt": "What is it?", "completion": " red"}])
    messages = written([{"question": "What is it?", "answer": "red"}], "b.jsonl")
    ends = {True: [" red<|im_end|>", "red<|im_end|>"], False: [" red", "red<|im_end|>"]}
    for append_eos, expected in ends.items():
        rows = build(whole(plain, messages, append_eos=append_eos), READS["sft"], tokenizer, 0).train
        trained = [[i for i, m in zip(r["input_ids"], r["loss_mask"], strict=True) if m] for r in rows]
        assert [tokenizer.decode(ids) for ids in trained] == expected


def test_ranked_answers_give_all_pairs_of_different_score_and_the_best_is_the_demonstration(written, tokenizer):
    source = written([{"prompt": "2", "completions": [" 5", " 6", " 7"], "scores": [1, 3, 1]}])
    data = build(whole(source), READS["reward"], tokenizer, 0)
    texts = [(tokenizer.decode(r["chosen_ids"]), tokenizer.decode(r["rejected_ids"])) for r in data.train]
    assert texts == [("2 6<|im_end|>", "2 5<|im_end|>"), ("2 6<|im_end|>", "2 7<|im_end|>")]
    assert tokenizer.decode(build(whole(source), READS["sft"], tokenizer, 0).train[0]["input_ids"]) == "2 6<|im_end|>"


def test_an_answer_labelled_bad_is_no_demonstration(written, tokenizer):
    rows = [{"prompt": "2", "completion": f" {i}", "label": i == 1} for i in range(3)]
    data = build(whole(written(rows)), READS["sft"], tokenizer, 0)
    assert [tokenizer.decode(r["input_ids"]) for r in data.train] == ["2 1<|im_end|>"]
    assert data.report["dropped"] == {"labelled as a bad answer": 2}


def test_a_stage_passes_over_sources_without_what_it_needs_but_not_over_one_that_names_it(written, tokenizer):
    prompts, both = written([{"prompt": "2"}], "p.jsonl"), written(pairs(2), "b.jsonl")
    assert len(build(whole(prompts, both), READS["reward"], tokenizer, 0).train) == 2
    for config in (whole(prompts), whole(replace(prompts, stages=["reward"]), both)):
        with pytest.raises(UserError, match=r"p.jsonl is prompt only data \(prompt\), which holds no pairs for stage"):
            build(config, READS["reward"], tokenizer, 0)
    with pytest.raises(UserError, match=r"no data source for stage sft: data.sources names other stages only"):
        build(whole(replace(prompts, stages=["ppo"])), READS["sft"], tokenizer, 0)


def test_no_usable_row_is_a_user_error_with_the_counts(written, tokenizer):
    with pytest.raises(UserError, match=r"^no usable row for stage sft: 3 rows read, 0 to train on, 0 held out, "
                                        r"3 prompts of plain text kept as they are \(data.raw\), "
                                        r"3 dropped: no answer left within data\.max_length \(\S+ row 1, \S+ row 2, "
                                        r"\S+ row 3\); raise data\.max_length, which is 3: of the first "
                                        r"3 rows the shortest has \d+ tokens, the longest \d+$"):
        build(whole(written(pairs(3)), max_length=3), READS["sft"], tokenizer, 0)
    with pytest.raises(UserError, match=r"3 assigned to other stages; data.split null gives every stage every row"):
        build(DataConfig([written(pairs(3))], split=[0, 1, 1]), READS["sft"], tokenizer, 0)


def key_of(tokenizer, rows=({"a": 1},), **settings) -> str:
    return cache.key(rows, tokenizer, settings)


def test_the_cache_key_ignores_nothing(tokenizer):
    keys = {key_of(tokenizer), key_of(tokenizer, ({"a": 2},)), key_of(tokenizer, ({"a": 1}, {"a": 1})),
            key_of(tokenizer, lengths=1), key_of(tokenizer, lengths=2)}
    for change in (dict(chat_template="{{ messages }}"), dict(eos_token="<|endoftext|>")):
        other = tiny_tokenizer()
        other.chat_template = CHATML
        for name, value in change.items():
            setattr(other, name, value)
        keys.add(key_of(other))
    other = tiny_tokenizer(290)
    other.chat_template = CHATML
    keys.add(key_of(other))
    added = tiny_tokenizer()
    added.chat_template = CHATML
    added.add_tokens(["<new>"])
    keys.add(key_of(added))
    assert len(keys) == 9
    assert key_of(tokenizer) == key_of(tokenizer)


def test_cached_rows_are_the_rows_and_those_of_other_content_are_others(written, tokenizer, tmp_path, monkeypatch):
    config = whole(written(pairs(20)), eval_fraction=0.3, cache_dir=str(tmp_path / "c"))
    for stage in ("sft", "reward", "ppo"):
        first = build(config, READS[stage], tokenizer, 0)
        with monkeypatch.context() as patch:
            patch.setattr(datasets, "_tokenize", lambda *_: pytest.fail("tokenized again"))
            second = build(config, READS[stage], tokenizer, 0)
        assert (list(first.train), list(first.held_out), first.report) == (
            list(second.train), list(second.held_out), second.report)
    assert not [p for p in (tmp_path / "c").rglob("*") if "pkl" in p.name or "pickle" in p.name]
    content = whole(written([*pairs(19), {**pairs(1)[0], "chosen": " Other."}]), cache_dir=str(tmp_path / "c"))
    assert " Other." in tokenizer.decode(build(content, READS["reward"], tokenizer, 0).train[-1]["chosen_ids"])


@pytest.mark.parametrize("name", ["counts.json", "train.jsonl", "train.npy"])
@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"damaged"),
                                    lambda p: p.write_bytes(p.read_bytes()[:-9])], ids=["gone", "other", "cut off"])
def test_cached_rows_that_a_power_cut_left_in_part_are_made_again(written, tokenizer, tmp_path, name, damage):
    config = whole(written(pairs(2)), cache_dir=str(tmp_path / "c"))
    first = build(config, READS["sft"], tokenizer, 0)
    rows = list(first.train)
    (entry,) = (tmp_path / "c").iterdir()
    damage(entry / name)
    again = build(config, READS["sft"], tokenizer, 0)
    assert (list(again.train), again.report) == (rows, first.report)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "_tokenize", lambda *_: pytest.fail("the cache was not mended"))
        assert list(build(config, READS["sft"], tokenizer, 0).train) == rows


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(written, tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert len(build(whole(written(pairs(2)), cache_dir=str(tmp_path / "file")), READS["sft"], tokenizer, 0).train) == 2


def test_without_weights_every_row_comes_once_and_with_them_the_shares_are_the_weights():
    big, small = [{"n": i} for i in range(90)], [{"n": -i} for i in range(1, 11)]
    assert list(blend([big, small], [None, None], 0)) == big + small
    mixed = [r["n"] for r in blend([big, small], [3.0, 1.0], seed=1)]
    assert (len(mixed), sum(n >= 0 for n in mixed)) == (100, 75)
    assert len(set(mixed)) == 75 + 10  # 75 different ones of the big table, each of the small one twice or thrice
    assert sorted({mixed.count(-i) for i in range(1, 11)}) == [2, 3]
    assert mixed == [r["n"] for r in blend([big, small], [3.0, 1.0], seed=1)]
    assert mixed != [r["n"] for r in blend([big, small], [3.0, 1.0], seed=2)]
    assert len(blend([big, small], [None, None], 0, max_samples=7)) == 7


def test_a_source_for_a_stage_that_there_is_not_is_refused():
    data = DataConfig([Source("a", stages=["pp"])])
    with pytest.raises(UserError, match=r"a names stage 'pp' \(did you mean ppo\?\); there are sft, reward, ppo, "):
        step1_sft.Config(data=data)


def test_raw_texts_are_those_of_the_stage_without_the_held_out_ones(written):
    config = DataConfig([written(pairs(200))], split=[2, 4, 4], eval_fraction=0.5)
    mine = [p["prompt"] for p in pairs(200) if deal(p["prompt"], [2, 4, 4]) == 0 and not is_held_out(p["prompt"], 0.5)]
    texts = list(raw_texts(config, READS["sft"]))
    assert [t for t in texts if t.startswith("What")] == mine
    assert len(texts) == 3 * len(mine)


@pytest.mark.parametrize(("change", "said"), [
    ({"split": [1, 2]}, "data.split is"), ({"split": [1, -1, 1]}, "data.split is"),
    ({"split": [0, 0, 0]}, "data.split is"),
    ({"eval_fraction": 1.0}, "data.eval_fraction is 1.0"), ({"max_length": 1}, "data.max_length is 1"),
    ({"train_on": "prompt"}, "choose response, all"), ({"max_samples": 0}, "data.max_samples is 0"),
    ({"sources": [Source("a", weight=1.0), Source("b")]}, "give it to all or none"),
])
def test_a_wrong_setting_is_a_user_error(change, said):
    with pytest.raises(UserError, match=said):
        DataConfig(**change)


# -- data.eval_sources: rows that are evaluated and never trained on ---------------------------------------------------


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def places(tmp_path):
    train = [{"prompt": f"say {i}", "completion": f"red {i}"} for i in range(20)]
    apart = [{"prompt": f"tell {i}", "completion": f"blue {i}"} for i in range(3)]
    return write(tmp_path / "train.jsonl", train), write(tmp_path / "apart.jsonl", apart)


def built(places, tmp_path, reads=READS["sft"], **changes):
    train, apart = places
    config = DataConfig(**{"sources": [train], "eval_sources": [apart], "eval_fraction": 0.0,
                           "cache_dir": str(tmp_path / "cache"), **changes})
    tokenizer = tiny_tokenizer()
    found = datasets.build(config, reads, tokenizer, seed=0)
    texts = [[tokenizer.decode(row["input_ids"]) for row in part] for part in (found.train, found.held_out)]
    return (*texts, found.report)


def test_their_rows_are_held_out_and_those_of_the_sources_all_trained_on(places, tmp_path):
    train, held_out, report = built(places, tmp_path)
    assert len(train) == 20 and not any("blue" in text for text in train)
    assert len(held_out) == 3 and all("blue" in text for text in held_out)
    assert (report["read"], report["train"], report["held_out"], report["usable"]) == (23, 20, 3, 20)
    again = built(places, tmp_path)  # from the cache
    assert again == (train, held_out, report)


def test_max_samples_leaves_them_whole(places, tmp_path):
    train, held_out, _ = built(places, tmp_path, max_samples=5)
    assert (len(train), len(held_out)) == (5, 3)


def test_what_holds_nothing_for_a_stage_is_passed_over_and_said(places, tmp_path):
    texts = write(tmp_path / "texts.jsonl", [{"text": f"long ago {i}"} for i in range(4)])
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "tell 1"}])
    train, held_out, report = built((texts, prompts), tmp_path, PTX)
    assert len(train) == 4 and not held_out and report["not_used"] == [prompts]


@pytest.mark.parametrize(("given", "said"), [
    ([{"path": "{apart}", "weight": 2.0}], "data.eval_sources: a source has a weight"),
    (["none.jsonl"], "data.eval_sources: none.jsonl does not exist"),
    ([{"path": "{apart}", "stage": ["sft"]}], "unknown key stage in data.eval_sources"),
    (3, "data.eval_sources: 3 is not a source"),
])
def test_faults_are_named_by_the_option(places, tmp_path, given, said):
    if isinstance(given, list):
        given = [{**g, "path": g["path"].format(apart=places[1])} if isinstance(g, dict) else g for g in given]
    with pytest.raises(UserError, match=said):
        built(places, tmp_path, eval_sources=given)


def test_a_run_evaluates_them_and_another_stage_refuses_them(places, tmp_path, capsys):
    save_tiny(tmp_path / "base")
    argv = [f"--data.sources={places[0]}", f"--data.eval_sources={places[1]}", "--data.eval_fraction=0"]
    run = ["--model.model_name_or_path", f"{tmp_path}/base", "--model.dtype=float32", "--train.max_steps=1",
           "--train.per_device_train_batch_size=4", "--output_dir", f"{tmp_path}/sft"]
    assert main(["--stage", "sft", *argv, *run]) == 0
    record = json.loads((tmp_path / "sft/run.json").read_text())
    assert record["facts"]["data"]["held_out"] == 3 and record["metrics"]["eval/loss"] > 0
    assert main(["--stage", "sft", *argv, "--data.eval_sources=[{path: x, stages: [sfft]}]", *run]) == 2
    assert "data.eval_sources: x names stage 'sfft' (did you mean sft?)" in capsys.readouterr().err
    assert main(["--stage", "evaluate", f"--evaluate.models=[{tmp_path}/base]", *argv[:2]]) == 2
    assert "data.eval_sources is not used by --stage evaluate; name what is asked by data.sources" in \
        capsys.readouterr().err


# -- Real records in odd formats; skipped where absent (HYBRID_RLHF_SHARED, or ../shared/data beside the checkout ------


SHARED = Path(os.environ.get("HYBRID_RLHF_SHARED") or Path(__file__).parents[3] / "shared" / "data")
def as_chatml(transcript: str) -> str:
    """An HH transcript as ChatML by plain replacement: an oracle that shares no code with the reader."""
    text = transcript.replace("\n\nHuman:", "<H>").replace("\n\nAssistant:", "<A>")
    pieces = [p for p in text.replace("<H>", "\0user\n").replace("<A>", "\0assistant\n").split("\0") if p]
    turns = [p.split("\n", 1) for p in pieces]
    return "<|im_end|>\n".join(f"<|im_start|>{who}\n{said.strip()}" for who, said in turns) + "<|im_end|>"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data at {SHARED}")
def test_all_hh_pairs_are_kept_or_counted_and_read_as_they_were_written(tokenizer):
    with gzip.open(SHARED / "hh_rlhf/test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    config = DataConfig([Source(str(SHARED / "hh_rlhf/test.jsonl.gz"))], eval_fraction=0.0, max_length=4096)
    data = build(config, READS["reward"], tokenizer, 0)
    assert data.report["read"] == len(rows) == 2312
    assert data.report["train"] + sum(data.report["dropped"].values()) == 2312
    assert data.report["train"] >= 2300
    written = {(as_chatml(r["chosen"]), as_chatml(r["rejected"])) for r in rows}
    for i in range(0, len(data.train), 7):
        row = data.train[i]
        assert (tokenizer.decode(row["chosen_ids"]), tokenizer.decode(row["rejected_ids"])) in written
        assert row["chosen_ids"][: row["num_prompt_tokens"]] == row["rejected_ids"][: row["num_prompt_tokens"]]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data at {SHARED}")
def test_a_real_sentencepiece_tokenizer_finds_boundaries_and_ends_with_its_own_eos():
    from hybrid_rlhf.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(SHARED / "stories260K-hf"))
    row = chat.encode(tokenizer, "Once upon a time", " there was a fox.")
    whole = tokenizer("Once upon a time there was a fox.")["input_ids"]
    assert row.ids == [*whole, tokenizer.eos_token_id]
    assert row.ids[: row.num_prompt_tokens] == chat.encode_prompt(tokenizer, "Once upon a time")
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :], skip_special_tokens=True).strip() == "there was a fox."
