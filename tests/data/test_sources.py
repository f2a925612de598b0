"""Files, folders and the hub: what can be read is read, and what cannot is one line with file and line number."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf import cli
from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.data import files, sources
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.files import read_file
from hybrid_rlhf.data.sources import Source, read
from hybrid_rlhf.training import step1_sft

JSON = st.recursive(st.none() | st.booleans() | st.integers(-10**9, 10**9) | st.text(st.characters(exclude_categories=[
    "Cs"]), max_size=20), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner,
                                                                                   max_size=3), max_leaves=5)
OBJECTS = st.lists(st.dictionaries(st.text("abcxyz", min_size=1, max_size=5), JSON, min_size=1, max_size=4), min_size=1,
                   max_size=5)


@settings(max_examples=25, deadline=None)
@given(rows=OBJECTS, newline=st.sampled_from(["\n", "\r\n", "\n\n"]), mark=st.booleans(), zipped=st.booleans())
def test_objects_come_back_from_jsonl_whatever_line_ends_mark_or_gzip(tmp_path_factory, rows, newline, mark, zipped):
    path = tmp_path_factory.mktemp("j") / ("rows.jsonl" + (".gz" if zipped else ""))
    text = newline.join(json.dumps(r, ensure_ascii=False) for r in rows) + newline
    data = text.encode("utf-8-sig" if mark else "utf-8")
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_file(path) == rows


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", b"", "a.jsonl is empty"),
    ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": \n', "a.jsonl line 3: not valid JSON (Expecting value, column 12)"),
    ("a.jsonl", b'{"prompt": "x"}\n[1]\n', "a.jsonl line 2: a JSON object is needed, found a list"),
    ("a.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n', "a.jsonl line 2: byte 0xe9 is not utf-8; save the file as UTF-8"),
    ("a.jsonl.gz", b"\x1f\x8b\x08\x00broken", "cannot read"),
    ("a.json", b'[{"a": 1}, 2]', "a.json item 2: a JSON object is needed, found a whole number"),
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


def test_a_misspelled_file_names_the_one_beside_it_that_was_meant(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p"}\n')
    monkeypatch.chdir(tmp_path)
    for name in ("prompt.jsonl", f"{tmp_path}/prompts.json", "./Prompts.jsonl/"):
        with pytest.raises(UserError, match=r"does not exist \(did you mean prompts.jsonl\?\); give a file"):
            read(Source(name))
    with pytest.raises(UserError, match=r"PAIRS.jsonl does not exist; give a file"):
        read(Source("PAIRS.jsonl"))


@pytest.mark.parametrize("words", [["--model", "outputs/sfft", "--data.sources", "demo/demonstrations"],
                                   ["--model", "./outputs/sfft", "--data.sources", "demo/demonstrations"],
                                   ["--config", "outputs/sfft"]])
def test_so_do_a_misspelled_model_and_config(tmp_path, monkeypatch, capsys, words):
    (tmp_path / "outputs" / "sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--stage", "sft", *words]) == 2
    assert "outputs/sfft" in (said := capsys.readouterr().err) and " (did you mean sft?)" in said


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


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(UserError, match="it must be positive"):
        Source("x", weight=weight)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_a_file_whose_rows_may_not_fit_into_memory_is_refused(tmp_path, monkeypatch, name):
    content = b'{"text": "red"}\n' * 2**16
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(files, "free_host_bytes", lambda: 8 * 3 * 2**16)
    with pytest.raises(UserError, match=f"{name} has over 1/8 of the free memory in bytes"):
        read(Source(str(tmp_path / name)))
    for free in (8 * len(content), None):  # None: the system does not say
        monkeypatch.setattr(files, "free_host_bytes", lambda free=free: free)
        assert len(read(Source(str(tmp_path / name)))) == 2**16


def test_a_folder_of_very_many_files_is_not_searched_while_its_name_is_typed(tmp_path, monkeypatch):
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text('{"text": "red"}\n')
    monkeypatch.setattr(sources, "MAX_ENTRIES", 3)
    with pytest.raises(UserError, match="holds more than 3 files and folders; give the folder of the data"):
        sources.first_rows(Source(str(tmp_path)))
    monkeypatch.setattr(sources, "MAX_ENTRIES", 4)
    assert len(sources.first_rows(Source(str(tmp_path)))[0]) == 3


def test_values_of_a_table_may_be_long_and_hold_ends_of_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text\r"red\rblue"\r\n\xe2\x80\xa8\n"a\n\r\nb"\n' + b"x" * 200_000)
    assert read(Source(str(tmp_path / "a.csv"))) == [
        {"text": "red\rblue"}, {"text": "\u2028"}, {"text": "a\n\r\nb"}, {"text": "x" * 200_000}]


# -- Some rows of data that nobody wants to read whole -----------------------------------------------------------------


ROWS = [{"prompt": f"é{i}", "n": i} for i in range(5)]


def lines(rows, end="\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


@pytest.fixture
def small(monkeypatch):
    """Files of more than 256 bytes are large ones, of which 230 are read."""
    monkeypatch.setattr(sources, "MAX_START", 256)
    monkeypatch.setattr(files.read_start, "__defaults__", (256,))
    monkeypatch.setattr(files, "_SHOWN", 230)


WHOLE = {"a.jsonl": lines(ROWS), "b.json": json.dumps(ROWS), "c.csv": "prompt,n\n" + "".join(
    f"é{i},{i}\n" for i in range(5)), "d.tsv": "prompt\tn\n" + "".join(f"é{i}\t{i}\n" for i in range(5)),
    "e.json": lines(ROWS), "f.jsonl": "\n" + lines(ROWS, "\r\n")}


def prompts(rows) -> list[str]:
    return [row["prompt"] for row in rows]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("packed", [False, True])
def test_a_small_file_is_counted_and_a_large_ones_start_is_shown(tmp_path, name, packed, monkeypatch, request):
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(WHOLE[name].encode()) if packed else WHOLE[name].encode())
    rows, number = sources.first_rows(Source(str(path)))
    assert (prompts(rows), number) == (["é0", "é1", "é2"], 5)
    request.getfixturevalue("small")
    large = WHOLE[name].encode() if name != "b.json" else json.dumps(ROWS * 9, ensure_ascii=False).encode()
    large = large * (1 if name == "b.json" else 9)
    path.write_bytes(gzip.compress(large) if packed else large)
    rows, number = sources.first_rows(Source(str(path)), 2)
    assert (prompts(rows), number) == (["é0", "é1"], None)


def test_a_row_that_a_cut_goes_through_is_not_shown(tmp_path, small):
    path = tmp_path / "a.csv"
    path.write_text('prompt\nx\n"' + "y\n" * 200 + '"\n')
    assert prompts(sources.first_rows(Source(str(path)), 1)[0]) == ["x"]


def test_parquet_tells_its_rows_and_columns_are_renamed(tmp_path):
    import datasets

    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"question": f"q{i}"} for i in range(7)]).to_parquet(str(path))
    rows, number = sources.first_rows(Source(str(path), columns={"prompt": "question"}))
    assert (rows, number) == ([{"prompt": "q0"}, {"prompt": "q1"}, {"prompt": "q2"}], 7)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="not a readable parquet file"):
        sources.first_rows(Source(str(path)))


def test_a_folder_is_read_or_if_large_its_first_file_is(tmp_path, monkeypatch, request):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"prompt": f"{name}{i}"} for i in range(9)]))
    assert sources.first_rows(Source(str(tmp_path)), 1) == ([{"prompt": "a0"}], 18)
    request.getfixturevalue("small")
    assert sources.first_rows(Source(str(tmp_path)), 1) == ([{"prompt": "a0"}], None)
    assert sources.first_rows(Source("demo/prompts"), 1)[1] == len(sources.read(Source("demo/prompts")))


@pytest.mark.parametrize(("content", "said"), [
    (b'{"prompt": "\xff"}\n' * 30, "line 1: byte 0xff is not utf-8"), (b"{" * 300, "line 1: longer than 230 bytes")])
def test_what_is_wrong_with_the_start_of_a_large_file_is_one_line(tmp_path, small, content, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as found:
        sources.first_rows(Source(str(path)))
    assert said in str(found.value) and "\n" not in str(found.value)


# -- A path or a list of paths is a source wherever one is asked for, and a section is a section -----------------------


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parsed(*argv: str) -> list[Source]:
    return parse(step1_sft.Config, list(argv), prog="x")[0].data.sources


@pytest.mark.parametrize("argv", [
    ["--data.sources", "rows.jsonl"], ["--data.sources=rows.jsonl"], ["--data.sources", "[rows.jsonl]"],
    ["--data.sources", "[{path: rows.jsonl}]"], ["--data.sources", "{path: rows.jsonl}"],
    ["--data.sources+", "rows.jsonl"], ["--data", "{sources: rows.jsonl}"],
    ["--data.sources", "[{path: old.jsonl, columns: {prompt: q}}]", "--data.sources", "rows.jsonl"],
])
def test_a_path_is_a_source_however_it_is_given(argv) -> None:
    assert parsed(*argv) == [Source("rows.jsonl")]


@pytest.mark.parametrize("text", ["rows.jsonl", "[rows.jsonl]", "[{path: rows.jsonl}]", "\n    - rows.jsonl"])
def test_a_path_is_a_source_in_yaml_and_a_later_one_takes_its_place(tmp_path, text) -> None:
    (tmp_path / "a.yaml").write_text(f"data:\n  sources: {text}\n")
    assert parsed("--config", "a.yaml") == [Source("rows.jsonl")]
    assert parsed("--config", "a.yaml", "--data.sources", "b.csv") == [Source("b.csv")]
    weighted = parsed("--config", "a.yaml", "--data.sources", "[{path: b.csv, weight: 2}]")
    assert weighted == [Source("b.csv", weight=2.0)]


def test_paths_and_mappings_stand_in_one_list_and_more_can_be_appended() -> None:
    wanted = [Source("rows.jsonl"), Source("b.csv", columns={"prompt": "q"}, stages=["sft"])]
    assert parsed("--data.sources", "[rows.jsonl, {path: b.csv, columns: {prompt: q}, stages: [sft]}]") == wanted
    assert parsed("--data.sources", "rows.jsonl", "--data.sources+", "{path: b.csv, columns: {prompt: q}, "
                   "stages: [sft]}") == wanted
    assert DataConfig(["rows.jsonl", wanted[1]]).sources == DataConfig(wanted).sources == wanted


@pytest.mark.parametrize(("argv", "said"), [
    (["--data", "{class_path: rows.A}"], "unknown option data.class_path"),
    (["--data", "rows.jsonl"], "data is a section"),
    (["--data.sources", "[[rows.jsonl]]"], "data.sources[0] is a list; it must be a mapping or text"),
    (["--model", "!!python/name:rows.A"], "model is a section"),
    (["--data.sources", "[{path: a, columns: {prompt: 0}}]"], "columns[prompt] is 0; it must be text"),
    (["--data.sources", "[{path: a, weight: much}]"], "weight is 'much'; it must be a number"),
])
def test_a_section_or_another_kind_in_place_of_options_is_one_line(argv, said) -> None:
    with pytest.raises(UserError) as error:
        parsed(*argv)
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "said"), [
    ("config: other.yaml", "a file of settings cannot name another; give --config once for each"),
    ("data: rows.A", "data is a section"),
])
def test_a_file_of_settings_names_no_other_file(tmp_path, text, said) -> None:
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("seed: 1")
    with pytest.raises(UserError, match=r"^--config a\.yaml: ") as error:
        parsed("--config", "a.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize("text", [
    "model.class_path: rows.A", "data: {class_path: rows.A}", "data: {config: other.yaml}", "model: {lora+: rows.A}"])
def test_a_key_that_is_no_option_is_refused_before_anything_looks_at_its_value(tmp_path, text) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=r"^unknown option [\w.+]+( \(did you mean [\w.]+\?\)|; --help lists all)"):
        parsed("--config", "a.yaml")


def test_dotted_keys_of_a_file_are_the_options_that_they_name(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("data.sources: [rows.jsonl]\nmodel: {lora.r: 4}\n")
    found = parse(step1_sft.Config, ["--config", "a.yaml"], prog="x")[0]
    assert (found.data.sources, found.model.lora.r) == ([Source("rows.jsonl")], 4)


@pytest.mark.parametrize(("name", "text"), [
    ("a.csv", "prompt;response\nSay it, please;yes, sir\n"),
    ("b.csv", 'prompt,response\n"Say it, please","yes, sir"\n'),
    ("c.csv", 'prompt;response\n"Say it, please";"yes, sir"\n'),
    ("d.csv", "prompt\tresponse\nSay it, please\tyes, sir\n"),
])
def test_a_csv_is_separated_by_what_its_header_is(tmp_path, name, text) -> None:
    (tmp_path / name).write_text(text)
    assert list(read(Source(str(tmp_path / name)))) == [{"prompt": "Say it, please", "response": "yes, sir"}]
