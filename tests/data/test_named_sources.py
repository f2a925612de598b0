"""A path or a list of paths is a source wherever one is asked for, and a section is a section."""

from __future__ import annotations

import pytest

from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.data.sources import Source, read
from hybrid_rlhf.training import step1_sft


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sources(*argv: str) -> list[Source]:
    return parse(step1_sft.Config, list(argv), prog="x")[0].data.sources


@pytest.mark.parametrize("argv", [
    ["--data.sources", "rows.jsonl"], ["--data.sources=rows.jsonl"], ["--data.sources", "[rows.jsonl]"],
    ["--data.sources", "[{path: rows.jsonl}]"], ["--data.sources", "{path: rows.jsonl}"],
    ["--data.sources+", "rows.jsonl"], ["--data", "{sources: rows.jsonl}"],
    ["--data.sources", "[{path: old.jsonl, columns: {prompt: q}}]", "--data.sources", "rows.jsonl"],
])
def test_a_path_is_a_source_however_it_is_given(argv) -> None:
    assert sources(*argv) == [Source("rows.jsonl")]


@pytest.mark.parametrize("text", ["rows.jsonl", "[rows.jsonl]", "[{path: rows.jsonl}]", "\n    - rows.jsonl"])
def test_a_path_is_a_source_in_yaml_and_a_later_one_takes_its_place(tmp_path, text) -> None:
    (tmp_path / "a.yaml").write_text(f"data:\n  sources: {text}\n")
    assert sources("--config", "a.yaml") == [Source("rows.jsonl")]
    assert sources("--config", "a.yaml", "--data.sources", "b.csv") == [Source("b.csv")]
    weighted = sources("--config", "a.yaml", "--data.sources", "[{path: b.csv, weight: 2}]")
    assert weighted == [Source("b.csv", weight=2.0)]


def test_paths_and_mappings_stand_in_one_list_and_more_can_be_appended() -> None:
    wanted = [Source("rows.jsonl"), Source("b.csv", columns={"prompt": "q"}, stages=["sft"])]
    assert sources("--data.sources", "[rows.jsonl, {path: b.csv, columns: {prompt: q}, stages: [sft]}]") == wanted
    assert sources("--data.sources", "rows.jsonl", "--data.sources+", "{path: b.csv, columns: {prompt: q}, "
                   "stages: [sft]}") == wanted
    assert DataConfig(["rows.jsonl", wanted[1]]).sources == DataConfig(wanted).sources == wanted


@pytest.mark.parametrize(("argv", "said"), [
    (["--data", "{class_path: rows.A}"], "unknown option data.class_path"),
    (["--data=rows.A"], "data is a section"), (["--data", "rows.jsonl"], "data is a section"),
    (["--model.lora", "rows.A"], "model.lora is a section"),
    (["--data.sources", "[[rows.jsonl]]"], "data.sources[0] is a list; it must be a mapping or text"),
    (["--model", "!!python/name:rows.A"], "model is a section"),
    (["--data.sources", "[{path: [rows.jsonl]}]"], "path is ['rows.jsonl']; it must be text"),
    (["--data.sources", "[{path: a, columns: rows.A}]"], "columns is 'rows.A'; it must be a mapping"),
    (["--data.sources", "[{path: a, columns: {prompt: 0}}]"], "columns is {'prompt': 0}; it must be a mapping"),
    (["--data.sources", "[{path: a, stages: sft}]"], "stages is 'sft'; it must be a list"),
    (["--data.sources", "[{path: a, weight: much}]"], "weight is 'much'; it must be a number"),
])
def test_a_section_or_another_kind_in_place_of_options_is_one_line(argv, said) -> None:
    with pytest.raises(UserError) as error:
        sources(*argv)
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "said"), [
    ("config: other.yaml", "a file of settings cannot name another; give --config once for each"),
    ("data: rows.A", "data is a section"),
    ("data: {1: rows.A}", "data has the key 1; a key must be text"), ("model: {freeze: [[a]]}", "model.freeze[0] is a"),
    ("seed: {a: rows.A}", "seed is a mapping; it must be a whole number"),
    ("data: {split: {sft: 1}}", "data.split is a mapping; it must be a list or null"),
])
def test_a_file_of_settings_names_no_other_file(tmp_path, text, said) -> None:
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("seed: 1")
    with pytest.raises(UserError, match=r"^--config a\.yaml: ") as error:
        sources("--config", "a.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize("text", [
    "model.class_path: rows.A", "model: {lora.class_path: rows.A}", "data: {class_path: rows.A}",
    "data: {config: other.yaml}", "model: {lora+: rows.A}", "data: {sources+: rows.jsonl}", "none: {a: rows.A}"])
def test_a_key_that_is_no_option_is_refused_before_anything_looks_at_its_value(tmp_path, text) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=r"^unknown option [\w.+]+( \(did you mean [\w.]+\?\)|; --help lists all)"):
        sources("--config", "a.yaml")


def test_an_unknown_stage_in_the_settings_is_one_line(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("stage: rows.A")
    with pytest.raises(UserError, match=r"rows\.A: there is no such stage; choose sft"):
        sources("--config", "a.yaml")


def test_a_text_that_yaml_would_read_as_a_mapping_stays_text() -> None:
    found = parse(step1_sft.Config, ["--data.chat_template", "{a: b}", "--output_dir=[a]"], prog="x")[0]
    assert (found.data.chat_template, found.output_dir) == ("{a: b}", "[a]")


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


def test_prompt_and_response_are_a_demonstration_and_with_a_label_an_answer_good_or_bad() -> None:
    from hybrid_rlhf.data.schema import detect, read_row

    row = {"prompt": "2 + 2?", "response": "4", "level": 1}
    form = detect(row, "x")
    example = read_row(row, form, "x")
    assert (form.kind, example.answers) == ("demonstration", [("4", 1.0)])
    assert example.columns == {"response": "4", "level": 1}  # handed on to reward functions
    bad = row | {"label": "no"}
    assert (detect(bad, "x").kind, read_row(bad, detect(bad, "x"), "x").answers) == ("unpaired", [("4", 0.0)])
