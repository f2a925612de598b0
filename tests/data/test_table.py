"""Cached rows on disk: what was written comes back, row by row."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.data.cache import Table, rows_digest, save

VALUES = st.one_of(st.integers(-2**70, 2**70), st.floats(allow_nan=False), st.booleans(), st.none(),
                   st.text(max_size=8), st.lists(st.integers(0, 300_000), max_size=6))


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=5))
def test_rows_come_back_as_they_were(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    save(rows, folder, "train")
    found = Table(folder, "train")
    assert list(found) == rows
    assert (len(found), found[-1]) == (len(rows), rows[-1])
    with pytest.raises(IndexError):
        found[len(rows)]
    text = (folder / "train.jsonl").read_bytes()
    assert [json.loads(line) for line in text.splitlines()] == rows
    assert rows_digest(rows) == rows_digest(found) == hashlib.sha256(text).hexdigest()
