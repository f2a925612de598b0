"""Samples of a process that was killed: what is whole is kept, whatever byte was the last."""

from __future__ import annotations

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.training.labelling import SampleFile

SETTINGS = {"model": "m", "sampling": {"temperature": 1.0, "stop_token_ids": []}, "seed": 0}


def filled(path) -> bytes:
    file = SampleFile(path, SETTINGS)
    for number in range(3):
        file.add(number, [f"a{number}\n", "ü\u2028"], number)
    file.sync()
    file.close()
    return path.read_bytes()


def test_a_file_that_is_cut_at_any_byte_goes_on_after_its_last_whole_line(tmp_path) -> None:
    path = tmp_path / "samples.jsonl"
    whole = filled(path)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        file = SampleFile(path, SETTINGS)
        lines = max(0, whole[:size].count(b"\n") - 1)
        assert file.known == {n: ([f"a{n}\n", "ü\u2028"], n) for n in range(lines)}
        for number in range(lines, 3):
            file.add(number, [f"a{number}\n", "ü\u2028"], number)
        file.close()
        assert path.read_bytes() == whole


def test_other_settings_are_named(tmp_path) -> None:
    filled(tmp_path / "s")
    with pytest.raises(UserError, match=r"samples of other settings \(model, seed\); remove it"):
        SampleFile(tmp_path / "s", {**SETTINGS, "model": "n", "seed": 1})
