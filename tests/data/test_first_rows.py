"""Some rows of data that nobody wants to read whole: as `read` has them, of the start of large files, and in one line
what is wrong."""

from __future__ import annotations

import gzip
import json

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import files, sources
from hybrid_rlhf.data.sources import Source

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


def test_the_start_of_a_utf_16_file_is_text_wherever_it_is_cut(tmp_path, small):
    path = tmp_path / "a.jsonl"
    for more in range(4):
        path.write_bytes((" " * more + lines([{"prompt": "😀"}] * 30)).encode("utf-16"))
        assert prompts(sources.first_rows(Source(str(path)), 1)[0]) == ["😀"]


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
    (b'{"prompt": "\xff"}\n' * 30, "line 1: byte 0xff is not utf-8"), (b"{" * 300, "line 1: longer than 230 bytes"),
    (b'{"a": "\x00"}\n' * 30, "line 1: a NUL byte"), (b"[1]\n" * 90, "line 1: a JSON object is needed, found a list"),])
def test_what_is_wrong_with_the_start_of_a_large_file_is_one_line(tmp_path, small, content, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as found:
        sources.first_rows(Source(str(path)))
    assert said in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(("text", "said"), [
    ('[{"a": 1}, ' + "3, " * 90, "item 2: a JSON object is needed, found a whole number"),
    ('{"data": [\n' + "{}, " * 90, "is not a list"),
    ("[" + '{"a": "' + "x" * 500, "item 1: not valid JSON, or longer")])
def test_a_large_list_of_json_is_read_object_by_object(tmp_path, small, text, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        sources.first_rows(Source(str(path)))


def test_what_is_not_there_is_one_line(tmp_path):
    for path, said in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path / "a.docx", "unknown kind of file")):
        (tmp_path / "a.docx").write_text("x")
        with pytest.raises(UserError, match=said):
            sources.first_rows(Source(str(path)))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="is empty"):
        sources.first_rows(Source(str(tmp_path / "empty.jsonl")))
