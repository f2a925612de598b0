"""A lock is one process's or thread's, goes with it, and is handed on with the open file."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from hybrid_rlhf.studio import file_lock


def test_a_lock_is_one_s_until_it_is_closed(tmp_path):
    path = tmp_path / "lock"
    assert not file_lock.is_held(path)
    handle = file_lock.take(path)
    assert handle is not None and file_lock.is_held(path) and file_lock.take(path) is None
    os.close(handle)
    assert not file_lock.is_held(path)


def test_a_child_that_is_given_the_file_has_the_lock_until_it_ends(tmp_path):
    path = tmp_path / "lock"
    handle = file_lock.take(path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(handle,))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # which is not given it
    os.close(handle)
    assert file_lock.is_held(path)
    child.kill()
    child.wait()
    assert not file_lock.is_held(path) and other.poll() is None
    other.communicate(b"\n")


def test_the_block_is_run_by_one_thread_at_a_time(tmp_path):
    inside, most = [], []

    def enter():
        with file_lock.alone(tmp_path / "lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_links_are_not_followed_and_a_lack_of_files_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        file_lock.take(tmp_path / "link")
    assert not file_lock.is_held(tmp_path / "link") and not (tmp_path / "other").exists()

    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:  # undone before the folder is cleaned up, which opens it too
        patched.setattr(file_lock.os, "open", none_left)
        with pytest.raises(OSError, match="Too many"):
            file_lock.is_held(tmp_path / "lock")


def test_a_file_system_without_locks_is_taken_as_it_is(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    os.close(file_lock.take(tmp_path / "lock"))
    assert not file_lock.is_held(tmp_path / "lock")
    with file_lock.alone(tmp_path / "lock"):
        pass
