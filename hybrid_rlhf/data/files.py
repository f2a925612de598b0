"""Read the rows of one file. An error is one line that names the file and the line in it.

`datasets` reads these files too, but it takes half a second to import, guesses types (a csv's "007" becomes 7), needs
the same keys in every row, and does not name the line of an error.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.memory import free_host_bytes
from hybrid_rlhf.core.options import in_words
from hybrid_rlhf.core.strict_json import loads, why

Rows = list[dict]
MAX_START = 2**25  # bytes; a smaller file is fully read to show some of its rows
_SHOWN = 2**22  # bytes read of the start of a larger one
_TIMES = 8  # bytes of memory per byte of text: its characters (one emoji makes all 4 bytes wide), lines, rows


def read_file(path: str | Path) -> Rows:
    """The rows of a .jsonl, .json, .csv, .tsv or .txt file, gzipped or not.

    jsonl: one object a line. json: a list of objects, {"data": [...]}, or an object of equally long lists. csv and tsv:
    a header, every value text; the separator of a csv is the most frequent in its header: comma, semicolon or tab. txt:
    one row {"text"} per line, or {"question", "answer"} where most lines are "utterance TAB reply". Raises UserError
    naming file and line for anything else.
    """
    free = free_host_bytes()
    most = None if free is None else free // _TIMES
    data = _bytes(path, -1 if most is None else most + 1)
    check(most is None or len(data) <= most,
          f"{path} has over 1/{_TIMES} of the free memory in bytes, which its rows may fill; free some, or give the "
          "rows in parts or as parquet")
    rows = list(PARSERS[kind_of(path)](_text(data, path), path))
    check(bool(rows), f"{path} is empty: no row in it; give a file with rows")
    return rows


def read_start(path: str | Path, count: int, most: int = MAX_START) -> tuple[Rows, bool]:
    """At least `count` rows of a file, if it has them, and whether these are all: of more than `most` unpacked bytes
    only the start is read. Raises UserError as `read_file` does."""
    data = _bytes(path, most + 1)
    if len(data) <= most:
        return read_file(path), True
    text, kind = _text(data[:_SHOWN], path, is_cut=True), kind_of(path)
    if kind == ".json" and not _is_object(text.lstrip().partition("\n")[0]):
        return _first_objects(text, path, count), False
    lines = text[:text.rfind("\n") + 1]
    check(bool(lines.strip()), f"{path} line 1: longer than {_SHOWN:,} bytes; give a file with a row on each line")
    return list(islice(PARSERS[".jsonl" if kind == ".json" else kind](lines, path), count)), False


def _first_objects(text: str, path: str | Path, count: int) -> Rows:
    """The first objects of a truncated JSON list."""
    rows: Rows = []
    opening = re.match(r"\s*\[\s*", text)
    if opening is None:
        raise UserError(f"{path}: a large JSON file that is not a list; its rows are seen when the run starts")
    place = opening.end()
    while len(rows) < count:
        try:
            row, end = json.JSONDecoder().raw_decode(text, place)
        except ValueError as error:
            raise UserError(f"{path} item {len(rows) + 1}: not valid JSON, or longer than {_SHOWN:,} bytes "
                            f"({why(error)}); fix it, or give jsonl") from error
        check(isinstance(row, dict),
              f"{path} item {len(rows) + 1}: a JSON object is needed, found {in_words(type(row))}")
        rows.append(row)
        separator = re.compile(r"[ \t\r\n,]*").match(text, end)
        place = separator.end() if separator else end
    return rows


def kind_of(path: str | Path) -> str:
    """The suffix that decides how a file is read, without .gz; '' for an unknown one."""
    suffixes = [s.lower() for s in Path(path).suffixes]
    suffixes = suffixes[:-1] if suffixes[-1:] == [".gz"] else suffixes
    last = suffixes[-1] if suffixes else ""
    return last if last in PARSERS or last == ".parquet" else ""


def _text(data: bytes, path: str | Path, is_cut: bool = False) -> str:
    """Bytes as text, without byte order mark; UTF-8, or UTF-16 where the mark says so. is_cut: the last character may
    be cut off."""
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data, final=not is_cut)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path} line {line}: byte 0x{data[error.start]:02x} is not {encoding.removesuffix('-sig')}; "
                        "save the file as UTF-8") from error
    check("\0" not in text, f"{path} holds NUL bytes; save it as text in UTF-8")
    return text


def _bytes(path: str | Path, most: int = -1) -> bytes:
    """The first `most` bytes of a file (-1: all), decompressed if it is gzipped."""
    try:
        with Path(path).open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return (gzip.GzipFile(fileobj=file) if is_packed else file).read(most)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}; give a file that can be read") from error


def _lines(text: str) -> list[tuple[int, str]]:
    """(line number, line) of the lines that are not blank. Only \\n ends a line: U+2028 may stand inside a string."""
    return [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parse_jsonl(text: str, path: str | Path) -> Rows:
    return [_object(line, f"{path} line {number}") for number, line in _lines(text)]


def _object(text: str, where: str) -> dict:
    try:
        value = loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({why(error)}); fix that line") from error
    check(isinstance(value, dict), f"{where}: a JSON object is needed, found {in_words(type(value))}")
    return value


def _parse_json(text: str, path: str | Path) -> Rows:
    if not text.strip():
        return []
    try:
        value = loads(text)
    except ValueError as error:
        if str(error).startswith("Extra data") and _is_object(text.lstrip().split("\n", 1)[0]):
            return _parse_jsonl(text, path)  # jsonl is often named .json
        line = f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: not valid JSON ({why(error)}); fix it there, or give jsonl") from error
    if isinstance(value, dict):
        value = _from_object(value)
    check(isinstance(value, list), f"{path}: a list of JSON objects is needed, found {in_words(type(value))}")
    for i, row in enumerate(value, 1):
        check(isinstance(row, dict), f"{path} item {i}: a JSON object is needed, found {in_words(type(row))}")
    return value


def _from_object(value: dict) -> object:
    """The rows inside one object: {"data": [...]}, columns of equal length, or the object itself as the only row."""
    lists = {k: v for k, v in value.items() if isinstance(v, list)}
    nested = [v for v in lists.values() if v and all(isinstance(r, dict) for r in v)]
    if isinstance(value.get("data"), list):
        return value["data"]
    if len(lists) == len(value) and not nested and len({len(v) for v in lists.values()}) == 1:
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return [value]


def _is_object(line: str) -> bool:
    try:
        return isinstance(loads(line), dict)
    except ValueError:
        return False


def _delimited(delimiters: str) -> Callable[[str, str | Path], Iterator[dict]]:
    """A row-by-row parser for lines separated by that of `delimiters` which is most frequent in the header."""

    def parse(text: str, path: str | Path) -> Iterator[dict]:
        csv.field_size_limit(2**31 - 1)
        header = next(filter(str.strip, io.StringIO(text, newline="")), "")
        delimiter = max(delimiters, key=header.count)  # of ties the first
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                where = f"{path} line {reader.line_num}"
                check(None not in row, f"{where}: more values than the header has columns; "
                                       "quote values that hold the separator")
                check(None not in row.values(), f"{where}: fewer values than the header has columns; fill the line up")
                yield row
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num + 1}: not valid CSV ({error}); fix that line") from error

    return parse


def _parse_txt(text: str, path: str | Path) -> Rows:
    lines = [line for _, line in _lines(text)]
    pairs = [line.split("\t") if line.count("\t") == 1 else [line, None] for line in lines]
    if sum(answer is not None for _, answer in pairs) > len(lines) / 2:  # lines without a tab are dropped and counted
        return [{"question": question, "answer": answer} for question, answer in pairs]
    return [{"text": line} for line in lines]


PARSERS: dict[str, Callable[[str, str | Path], Iterable[dict]]] = {
    ".jsonl": _parse_jsonl, ".ndjson": _parse_jsonl, ".json": _parse_json, ".csv": _delimited(",;\t"),
    ".tsv": _delimited("\t"), ".txt": _parse_txt}
