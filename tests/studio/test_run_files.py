"""The lenient readers: what they read, and what they refuse in a line."""

from __future__ import annotations

import os

import pytest

from hybrid_rlhf.studio import run_files
from hybrid_rlhf.studio.run_files import Unreadable


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/hostname", path),
                                  lambda path: os.symlink("nowhere", path)])
def test_what_is_no_ordinary_file_is_refused(tmp_path, make):
    make(tmp_path / "x")
    for read in (lambda path: run_files.read_text(path, 100), run_files.read_object, run_files.last_rows,
                 lambda path: run_files.read_at(path, 0, 10)):
        with pytest.raises(Unreadable, match=r"^x "):
            read(tmp_path / "x")


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "x"
    assert run_files.read_text(path, 10) is None
    path.write_bytes(b"0123456789")
    assert run_files.read_text(path, 10) == "0123456789"
    path.write_bytes(b"0123456789a")
    with pytest.raises(Unreadable, match="larger than"):
        run_files.read_text(path, 10)
    path.write_bytes(b"a\xff")
    assert run_files.read_text(path, 10) == "a\\xff"


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
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").symlink_to(tmp_path / "model")
    assert not run_files.has_model(tmp_path / "run")
