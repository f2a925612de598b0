"""Files, folders and the hub: what can be read is read, and what cannot is one line with file and line number."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import sources
from hybrid_rlhf.data.files import PARSERS, read_file
from hybrid_rlhf.data.sources import Source, read

JSON = st.recursive(st.none() | st.booleans() | st.integers(-10**9, 10**9) | st.text(st.characters(exclude_categories=[
    "Cs"]), max_size=20), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner,
                                                                                   max_size=3), max_leaves=5)
OBJECTS = st.lists(st.dictionaries(st.text("abcxyz", min_size=1, max_size=5), JSON, min_size=1, max_size=4), min_size=1,
                   max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=OBJECTS, newline=st.sampled_from(["\n", "\r\n", "\n\n"]), mark=st.booleans(), zipped=st.booleans())
def test_objects_come_back_from_jsonl_whatever_line_ends_mark_or_gzip(tmp_path_factory, rows, newline, mark, zipped):
    path = tmp_path_factory.mktemp("j") / ("rows.jsonl" + (".gz" if zipped else ""))
    text = newline.join(json.dumps(r, ensure_ascii=False) for r in rows) + newline
    data = text.encode("utf-8-sig" if mark else "utf-8")
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_file(path) == rows


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
                               st.sampled_from(['say "hi", he said', "two\nlines", "plain"])), min_size=1, max_size=5))
def test_any_texts_come_back_from_csv(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("c") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([("prompt", "completion"), *rows])
    assert read_file(path) == [{"prompt": a, "completion": b} for a, b in rows]


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=60) | st.text("{}[]\",:ab\n\t", max_size=60).map(str.encode),
       kind=st.sampled_from(sorted(PARSERS)), zipped=st.booleans())
def test_arbitrary_bytes_are_rows_or_a_user_error_of_one_line(tmp_path_factory, data, kind, zipped):
    path = tmp_path_factory.mktemp("b") / f"rows{kind}"
    path.write_bytes(gzip.compress(data) if zipped else data)
    message = ""
    try:
        assert all(isinstance(row, dict) for row in read_file(path))
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert not message or str(path) in message


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", b"", "a.jsonl is empty"),
    ("a.jsonl", b"\n \r\n", "a.jsonl is empty"),
    ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": \n', "a.jsonl line 3: not valid JSON (Expecting value, column 12)"),
    ("a.jsonl", b'{"prompt": "x"}\n[1]\n', "a.jsonl line 2: a JSON object is needed, found a list"),
    ("a.jsonl", b'{"a": "' + b"\0" * 9 + b'"}', "a.jsonl line 1: a NUL byte"),
    ("a.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n', "a.jsonl line 2: byte 0xe9 is not utf-8; save the file as UTF-8"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00broken", "cannot read"),
    ("a.json", b'[{"a": 1}, 2]', "a.json item 2: a JSON object is needed, found a whole number"),
    ("a.json", b'"text"', "a.json: a list of JSON objects is needed, found text"),
    ("a.json", b'[\n{"a": 1,}]', "a.json line 2: not valid JSON"),
    ("a.csv", b"prompt,completion\n", "a.csv is empty"),
    ("a.csv", b"a,b\n1,2\n1\n", "a.csv line 3: fewer values than the header has columns"),
    ("a.csv", b"a,b\n1,2,3\n", "a.csv line 2: more values than the header has columns"),
    ("a.csv", b'a,b\n1,"2\n', "a.csv line 2: not valid CSV"),
    ("a.parquet", b"PAR1 not really", "a.parquet: not a readable parquet file"),
    ("a.pickle", b"anything", "a.pickle: unknown kind of file; there are .jsonl"),
])
def test_a_file_that_cannot_be_read_is_one_line_with_its_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read(Source(str(tmp_path / name)))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "a/b/c", "~/nowhere-at-all"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(sources, "stay_offline_if_unreachable", lambda: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="does not exist"):
        read(Source(name))


def test_a_hub_data_set_that_cannot_be_had_is_named(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"nobody/nothing is not a local file .*Error: no\); give another path$"):
        read(Source("nobody/nothing"))


def test_name_and_split_reach_the_hub(monkeypatch):
    import datasets

    seen = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: seen.append((a, k)) or [{"prompt": "x"}])
    assert read(Source("some/data", name="main", split="test[:10]")) == [{"prompt": "x"}]
    assert seen == [(("some/data", "main"), {"split": "test[:10]", "streaming": False})]


@pytest.mark.parametrize("layout", [
    {"train.jsonl": "train", "test.jsonl": "test"},
    {"data/train-00000-of-00001.jsonl": "train", "data/test-00000-of-00001.jsonl": "test"},
    {"train/rows.jsonl": "train", "test/rows.jsonl": "test"},
])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_folder_gives_the_files_of_the_split_and_runs_no_code(tmp_path, layout, split):
    for name, text in layout.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": text}))
    (tmp_path / "LICENSE.txt").write_text("not data")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / f"{tmp_path.name}.py").write_text("raise SystemExit('code was run')")
    (tmp_path / "rows.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert list(read(Source(str(tmp_path), split=split))) == [{"prompt": split}]


def test_a_folder_without_the_split_says_which_it_has(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}')
    (tmp_path / "dev.jsonl").write_text('{"a": 1}')
    with pytest.raises(UserError, match="has no split test; it has dev, train"):
        read(Source(str(tmp_path), split="test"))
    (tmp_path / "sub").mkdir()
    with pytest.raises(UserError, match="holds no data"):
        read(Source(str(tmp_path), name="sub"))


def test_parquet_and_a_saved_data_set_are_read(tmp_path):
    import datasets

    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    assert list(read(Source(str(tmp_path / "rows.parquet")))) == rows
    assert list(read(Source(str(tmp_path)))) == rows
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    assert list(read(Source(str(tmp_path / "saved")))) == rows
    with pytest.raises(UserError, match="has no split test; it has train"):
        read(Source(str(tmp_path / "saved"), split="test"))


@pytest.mark.parametrize(("text", "rows"), [
    ('{"data": [{"a": 1}]}', [{"a": 1}]),
    ('{"a": [1, 2], "b": ["x", "y"]}', [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]),
    ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
    ('{"messages": [{"role": "user"}]}', [{"messages": [{"role": "user"}]}]),
])
def test_json_files_of_the_usual_shapes_are_read(tmp_path, text, rows):
    (tmp_path / "a.json").write_text(text)
    assert read_file(tmp_path / "a.json") == rows


def test_a_text_file_is_lines_or_tab_separated_dialogue(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n\nanother\u2028line\n", encoding="utf-8")
    assert read_file(tmp_path / "a.txt") == [{"text": "one line"}, {"text": "another\u2028line"}]
    (tmp_path / "b.txt").write_text("hi\thello\nhow?\tfine\nno tab here\n")
    assert read_file(tmp_path / "b.txt")[1:] == [{"question": "how?", "answer": "fine"},
                                                 {"question": "no tab here", "answer": None}]


def test_columns_are_renamed_and_a_wrong_name_gets_the_nearest(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"query": "q", "prompt": "old", "n": 1}')
    assert read(Source(str(tmp_path / "a.jsonl"), columns={"prompt": "query"})) == [{"n": 1, "prompt": "q"}]
    with pytest.raises(UserError, match=r"has no column 'qery'.*did you mean query.*it has query, prompt, n"):
        read(Source(str(tmp_path / "a.jsonl"), columns={"prompt": "qery"}))


def test_an_unknown_embedded_set_gets_the_nearest_name():
    with pytest.raises(UserError, match=r"demo/prompt \(did you mean demo/prompts\?\)"):
        read(Source("demo/prompt"))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(UserError, match="it must be positive"):
        Source("x", weight=weight)
