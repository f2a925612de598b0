"""One job: its process and state, its output, and a watcher that keeps the exit code on a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from hybrid_rlhf.core.own_files import take_lock
from hybrid_rlhf.studio import job
from hybrid_rlhf.studio.job import find_process, process_note, read_job, read_output
from tests.factories.studio_jobs import until


@pytest.fixture
def folder(tmp_path):
    facts = {"kind": "train", "title": "x", "stage": "sft", "run": "a", "name": None, "created": "",
             "folder": str(tmp_path), "words": [sys.executable, "-c", "raise SystemExit(4)"]}
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001/job.json").write_text(json.dumps(facts))
    return tmp_path / "000001"


def state_of(folder):
    return read_job(folder, json.loads((folder / "job.json").read_text()))


def test_the_exit_code_is_kept_on_a_disk_that_is_full_at_the_end(folder, monkeypatch):
    start, sizes = subprocess.Popen, []

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def started(*words, **named):
        sizes.append((folder / "end.json.part").stat().st_size)
        monkeypatch.setattr(job, "write_file", full)
        return start(*words, **named)

    monkeypatch.setattr(job.subprocess, "Popen", started)
    job.watch(folder)
    assert sizes == [4096] and (folder / "end.json").stat().st_size == 4096  # no byte more than was taken before
    found = state_of(folder)
    assert (found.state, found.rc) == ("failed", 4)


def test_nothing_is_started_where_there_is_no_room_for_the_exit_code(folder, monkeypatch, capfd):
    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job.os, "fsync", full)
    monkeypatch.setattr(job.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    assert job.main([str(folder)]) == 75
    assert capfd.readouterr().out == "error: the job cannot be started: No space left on device\n"
    assert state_of(folder).state == "queued"


def test_the_watchers_own_note_is_not_overwritten(folder, monkeypatch):
    """It may be there before the studio goes on: without the process in it the job could be started a second time."""
    def started(*_, **__):
        (folder / "process.json").write_text('{"process": 1}')
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(job.subprocess, "Popen", started)
    job.start(folder)
    assert (folder / "process.json").read_text() == '{"process": 1}'


def test_a_look_at_the_lock_loses_no_job(folder, monkeypatch):
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    look = (folder / "lock").open("a")
    fcntl.flock(look, fcntl.LOCK_SH)
    timer = threading.Timer(0.3, look.close)
    timer.start()
    assert job.main([str(folder)]) == 0
    timer.join()
    assert state_of(folder).rc == 4


def test_a_second_watcher_leaves_the_job_to_the_first(folder, monkeypatch):
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(job, "_LOCK_WAIT", 0.1)
    monkeypatch.setattr(job, "watch", lambda _: pytest.fail("it was started"))
    with take_lock(folder / "lock"):
        assert job.main([str(folder)]) == 0


def test_a_job_that_ends_between_two_looks_is_not_lost(folder, monkeypatch):
    def look(_path):
        (folder / "end.json").write_text('{"rc": 0}')
        return False

    (folder / "process.json").write_text(json.dumps({"started": "then", "watcher": None, "process": None}))
    assert state_of(folder).state == "lost"
    monkeypatch.setattr(job, "is_locked", look)
    assert state_of(folder).state == "done"


def test_a_job_of_an_earlier_release_is_read(folder):
    """Its job.json has a mark, its process.json tells a process by its tick of the clock."""
    facts = json.loads((folder / "job.json").read_text()) | {"mark": "0" * 64}
    (folder / "job.json").write_text(json.dumps(facts))
    (folder / "process.json").write_text(json.dumps({
        "started": "then", "watcher": {"pid": os.getpid(), "began": "12345", "where": "boot"}, "process": None}))
    assert state_of(folder).state == "lost"
    (folder / "end.json").write_text('{"rc": 130, "finished": "2026-11-26T10:00:00+00:00"}'.ljust(4096))
    found = state_of(folder)
    assert (found.state, found.started, found.finished) == ("stopped", "then", "2026-11-26T10:00:00+00:00")


def test_a_process_is_known_until_it_ends_and_no_other_is_taken_for_it():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = process_note(process.pid)
    assert find_process(note).pid == process.pid
    assert find_process({**note, "began": note["began"] - 60}) is None  # an earlier process of the same number
    assert find_process(None) is find_process({"pid": process.pid}) is None
    find_process(note).send_signal(signal.SIGTERM)
    until(lambda: find_process(note) is None)  # ended, though its parent has not asked how
    assert process.wait(10) == -signal.SIGTERM
    process.stdin.close()


def test_output_is_read_in_pieces_that_break_no_character(tmp_path):
    path = tmp_path / "out.log"
    path.write_bytes("a\x1bb\r\nc\rdé".encode())
    assert read_output(path, None) == ("a␛b\nc\ndé", 10)
    assert read_output(path, 6) == ("\ndé", 10)
    path.write_bytes("xé".encode()[:2])
    assert read_output(path, 0) == ("x", 1)
    assert read_output(path, 99) == ("", 2)
    path.write_bytes(b"x\xff")  # not UTF-8
    assert read_output(path, 0) == ("x�", 2)
    for char in ("é", "😀"):  # the newest 64 KiB, from the beginning of a line
        text = f"first{char * 50000}\n" + "".join(f"line {i} {char}\n" for i in range(8000))
        path.write_text(text, encoding="utf-8")
        found, end = read_output(path, None)
        assert end == path.stat().st_size and text.endswith("\n" + found) and len(found.encode()) > 60000
        whole, at = "", 0
        while at < end:
            piece, at = read_output(path, at)
            assert 0 < len(piece.encode()) <= 2**16
            whole += piece
        assert whole == text
    assert read_output(tmp_path / "none", None) == ("", 0)


def test_the_studio_and_its_watchers_are_small():
    """torch and the like are imported by the jobs alone: the page stays quick, and no memory of theirs is taken."""
    code = ("import sys; from hybrid_rlhf.studio import command, job, studio_app; "
            "print(sorted({'torch', 'transformers', 'datasets', 'deepspeed', 'numpy', 'pandas'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
