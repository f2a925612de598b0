"""The watcher: an exit code is not lost on a full disk, and what cannot start is said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from hybrid_rlhf.studio import job_files, job_process
from hybrid_rlhf.studio.job_files import read_facts, read_job


@pytest.fixture
def folder(tmp_path):
    facts = {"kind": "train", "title": "x", "stage": "sft", "run": "a", "name": None, "created": "", "mark": "",
             "folder": str(tmp_path), "words": [sys.executable, "-c", "raise SystemExit(4)"]}
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001/job.json").write_text(json.dumps(facts))
    return tmp_path / "000001"


def test_the_exit_code_has_its_room_from_the_beginning(folder, monkeypatch):
    """Once the process runs the disk is full: nothing grows, nothing is made. Its room is taken before."""
    opened, start, waits, sizes = open, subprocess.Popen, [], []

    def full(path, mode="r", *more, **named):
        if "w" in mode or "x" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *more, **named)

    def started(*words, **named):
        sizes.append((folder / "end.json.part").stat().st_size)
        process = start(*words, **named)
        monkeypatch.setattr("builtins.open", full)
        monkeypatch.setattr(job_process, "write_file", lambda *_: full("", "x"))
        return process

    monkeypatch.setattr(job_process.subprocess, "Popen", started)
    monkeypatch.setattr(job_process.time, "sleep", waits.append)
    replace = os.replace

    def failing(source, target):
        if target.name == "end.json" and len(sizes) == 1:
            sizes.append(os.path.getsize(source))
            raise OSError(errno.EIO, "Input/output error")  # once: it is tried again
        return replace(source, target)

    monkeypatch.setattr(job_process.os, "replace", failing)
    job_process.watch(folder)
    monkeypatch.undo()
    assert sizes == [4096, 4096] and 1 in waits and (folder / "end.json").stat().st_size == 4096
    job = read_job(folder, read_facts(folder))
    assert (job.state, job.rc) == ("failed", 4)


def test_nothing_is_started_where_there_is_no_room_for_its_end(folder, monkeypatch, capfd):
    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job_process.os, "fsync", full)
    monkeypatch.setattr(job_process.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    monkeypatch.setattr(job_process.signal, "signal", lambda *_: None)
    assert job_process.main([str(folder), str(lock)]) == 75
    assert capfd.readouterr().out == "error: the job cannot be started: No space left on device\n"
    os.close(lock)
    assert read_job(folder, read_facts(folder)).state == "queued"


def test_a_job_that_starts_and_ends_between_two_looks_is_not_lost(folder, monkeypatch):
    looks = []

    def look(_path):
        """Nobody has the lock yet; then it began, and before the second look it has ended."""
        looks.append(1)
        (folder / "process.json").write_text(json.dumps({"started": "then", "watcher": None, "process": None}))
        if len(looks) == 2:
            (folder / "end.json").write_text('{"rc": 0}')
        return False

    monkeypatch.setattr(job_files.file_lock, "is_held", look)
    assert read_job(folder, read_facts(folder)).state == "done"
    (folder / "end.json").unlink()
    assert read_job(folder, read_facts(folder)).state == "lost"


def test_the_studio_and_its_watchers_are_small():
    """torch and the like are imported by the jobs alone: the page stays quick, and no memory of theirs is held."""
    code = ("import sys; from hybrid_rlhf.studio import command, job_process, studio_app, studio_parts; "
            "print(sorted({'torch', 'transformers', 'datasets', 'deepspeed', 'numpy', 'pandas'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
