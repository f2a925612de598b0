"""Rows on disk: what was written comes back, row by row, and what is damaged is no table."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.data import row_file

VALUES = st.one_of(st.integers(-2**70, 2**70), st.floats(allow_nan=False), st.booleans(), st.none(),
                   st.text(max_size=8), st.lists(st.integers(0, 300_000), max_size=6))


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=5))
def test_rows_come_back_as_they_were(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t") / "rows"
    row_file.save(rows, folder)
    found = row_file.read(folder)
    assert list(found) == rows
    assert (len(found), found[-1]) == (len(rows), rows[-1])
    with pytest.raises(IndexError):
        found[len(rows)]
    lines = (folder / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == rows
    text = (folder / "rows.jsonl").read_bytes()
    assert row_file.digest(rows) == row_file.digest(found) == hashlib.sha256(text).hexdigest()


def test_a_table_that_is_not_whole_is_none_and_one_that_is_there_stays(tmp_path):
    rows = [{"n": i} for i in range(3)]
    assert row_file.read(tmp_path / "none") is None
    for number, (name, damage) in enumerate([("rows.jsonl", lambda b: b[:-1]), ("rows.jsonl", lambda b: b + b"\n"),
                                             ("ends.npy", lambda b: b[:-1]), ("ends.npy", lambda b: b[:7]),
                                             ("ends.npy", lambda _: b""), ("ends.npy", lambda _: b"damaged")]):
        folder = tmp_path / str(number)
        row_file.save(rows, folder)
        row_file.save([{"n": 9}], folder)
        assert list(row_file.read(folder)) == rows
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        assert row_file.read(folder) is None
    assert not list(tmp_path.glob(".writing-*"))


def test_a_table_of_objects_is_not_unpickled(tmp_path):
    import numpy as np

    row_file.save([{"n": 1}], tmp_path / "rows")
    np.save(tmp_path / "rows" / "ends.npy", np.array([8], dtype=object), allow_pickle=True)
    assert row_file.read(tmp_path / "rows") is None
