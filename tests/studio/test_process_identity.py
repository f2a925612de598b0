"""A process is its number and its beginning, where /proc says when that was and where ps does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_rlhf.studio import process_identity
from hybrid_rlhf.studio.process_identity import identity, is_alive, send


@pytest.fixture(params=["proc", "ps"])
def source(request, monkeypatch, tmp_path):
    if request.param == "ps":  # as on macOS
        monkeypatch.setattr(process_identity, "_PROC", tmp_path / "no_proc")
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    return request.param


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_known_until_it_ends(source, sleeper):
    known = identity(sleeper.pid)
    assert known["pid"] == sleeper.pid and is_alive(known)
    assert send(known, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while is_alive(known):  # ended, and its parent has not asked how: nothing that could be signalled
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not send(known, signal.SIGTERM) and sleeper.wait(10) == -signal.SIGTERM
    assert identity(sleeper.pid) is None and not is_alive(known)


def test_the_tick_of_the_beginning_is_the_systems(sleeper):
    fields = Path(f"/proc/{sleeper.pid}/stat").read_text().rsplit(")", 1)[1].split()
    assert identity(sleeper.pid)["began"] == fields[22 - 3]  # the 22nd field of proc(5), the third being the first here


@pytest.mark.parametrize("change", [{"began": "1"}, {"began": ""}, {"began": None}, {"where": "another boot"}])
def test_a_stranger_of_the_same_number_gets_no_signal(source, sleeper, change, monkeypatch):
    known = {**identity(sleeper.pid), **change}
    assert not is_alive(known) and not send(known, signal.SIGKILL)
    assert sleeper.poll() is None


@pytest.mark.parametrize("pid", [0, 1, -1, True, 2.0, "1", None, 2**40])
def test_numbers_that_mean_groups_or_nothing_are_never_signalled(source, pid, monkeypatch):
    def fail(*given):
        raise AssertionError(given)

    monkeypatch.setattr(os, "kill", fail)
    monkeypatch.setattr(signal, "pidfd_send_signal", fail, raising=False)
    for began in ("1", (identity(1) or {}).get("began")):
        assert not send({"pid": pid, "began": began, "where": process_identity._where()}, signal.SIGKILL)
    for known in (None, [], "x", {}):
        assert not send(known, signal.SIGKILL) and not is_alive(known)
