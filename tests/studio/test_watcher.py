"""What open pages hear when runs begin, grow and end; without waiting for a clock where it can be helped."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.run_pages import Watcher
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import Studio
from tests.factories.studio_runs import make_run


class Heard:
    def __init__(self):
        self.news = []

    def publish(self, name, data):
        self.news.append((name, data))

    def new(self):
        found, self.news = self.news, []
        return found


@pytest.fixture
def heard():
    return Heard()


def watching(outputs, heard, **times):
    return Watcher(RunList(Studio(outputs), Histories()), heard, **times)


def test_a_running_run_is_told_of_when_it_grows(tmp_path, heard):
    make_run(tmp_path, "old")
    run = make_run(tmp_path, "a", "ppo", 3, "running")
    watcher = watching(tmp_path, heard)
    watcher.look_at_all()
    watcher.look_at_running()
    assert heard.new() == []
    run.grow(2)
    watcher.look_at_running()
    assert heard.new() == [("run", {"id": "a", "step": 5})]
    watcher.look_at_running()
    assert heard.new() == []
    run.answer()
    watcher.look_at_all()
    assert heard.new() == [("run", {"id": "a", "step": 5})]
    run.finish()
    watcher.look_at_running()
    assert heard.new() == [("run", {"id": "a", "step": 5}), ("runs", {})]
    run.grow(1)
    watcher.look_at_running()
    assert heard.new() == []  # nobody is at it


def test_another_list_is_told_of(tmp_path, heard):
    watcher = watching(tmp_path, heard)
    watcher.look_at_all()
    assert heard.new() == []
    run = make_run(tmp_path, "a", "sft", 3, "running")
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]
    run.grow(1)
    watcher.look_at_all()
    assert heard.new() == [("run", {"id": "a", "step": 4})]
    run.die()  # without a word
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]
    shutil.rmtree(run.folder)
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]


def test_a_running_run_that_vanishes_is_no_error(tmp_path, heard):
    run = make_run(tmp_path, "a", "sft", 3, "running")
    watcher = watching(tmp_path, heard)
    watcher.look_at_all()
    shutil.rmtree(run.folder)
    watcher.look_at_running()
    watcher.look_at_all()
    assert heard.new() == [("runs", {})]


def test_the_thread_goes_on_after_a_fault_and_ends_when_told(tmp_path, heard, caplog):
    make_run(tmp_path, "a", "sft", 3, "running")
    watcher = watching(tmp_path, heard, running_seconds=0.01, all_seconds=0.02)
    faults, really = iter([OSError("a disk"), KeyError("x")]), watcher._runs.rows

    def rows():
        fault = next(faults, None)
        if fault:
            raise fault
        return really()

    watcher._runs.rows = rows
    watcher.start()
    end = time.monotonic() + 20
    while watcher._list is None and time.monotonic() < end:
        time.sleep(0.01)
    make_run(tmp_path, "b", "sft", 3)
    while not heard.news and time.monotonic() < end:
        time.sleep(0.01)
    watcher.stop()
    assert ("runs", {}) in heard.news and "goes on" in caplog.text
    assert not any(thread.name == "studio-watcher" for thread in threading.enumerate())
