"""The files of a run: what is read of them while they grow, and their sizes."""

from __future__ import annotations

import pytest

from hybrid_rlhf.studio import run_files
from hybrid_rlhf.studio.run_files import Unreadable


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path):
    (tmp_path / "x").mkdir()
    for read in (run_files.read_text, run_files.read_bytes, run_files.last_rows):
        with pytest.raises(Unreadable, match=r"^x cannot be read: Is a directory"):
            read(tmp_path / "x")


def test_bytes_that_are_not_text_are_shown(tmp_path):
    assert run_files.read_text(tmp_path / "x") is None
    (tmp_path / "x").write_bytes(b"a\xff")
    assert run_files.read_text(tmp_path / "x") == "a\\xff"


def test_the_last_rows_are_whole_ones(tmp_path):
    path = tmp_path / "x"
    path.write_text('{"step": 1}{"step": 2}\n{"step": 3}\n{"step": 4')
    assert run_files.last_rows(path) == [{"step": 3}]
    assert run_files.last_rows(path, 34) == [{"step": 3}]  # begins at {"step": 2}, in the midst of a line
    assert run_files.last_rows(path, 5) == [] and run_files.last_rows(tmp_path / "none") == []


def test_a_folder_s_size_is_that_of_its_own_files(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"0" * 1000)
    folder = tmp_path / "run"
    (folder / "a/b").mkdir(parents=True)
    (folder / "x").write_bytes(b"0" * 10)
    (folder / "a/b/y").write_bytes(b"0" * 5)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "up").symlink_to(tmp_path)
    assert run_files.size_of(folder) == 15 and run_files.size_of(tmp_path / "none") == 0


def test_a_model_is_one_with_its_configuration(tmp_path):
    assert not run_files.has_model(tmp_path)
    (tmp_path / "model").mkdir()
    assert not run_files.has_model(tmp_path)
    (tmp_path / "model/adapter_config.json").write_text("{}")
    assert run_files.has_model(tmp_path)
