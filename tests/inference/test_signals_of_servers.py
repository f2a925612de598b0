"""A signal that comes as soon as a server has said its address is not lost, and ends it in good order."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import uvicorn
from starlette.testclient import TestClient

from hybrid_rlhf.cli import main
from tests.factories.tiny import save_tiny


class Raising:
    """A stream that gets a signal to this process at its first line with an address."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, text: str) -> None:
        if "at http://" in text:
            os.kill(os.getpid(), self.number)

    def flush(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("words", [["serve"], ["studio", "--no_browser", "--outputs", "outputs"]], ids=lambda w: w[0])
def test_a_signal_right_behind_the_address_asks_the_server_to_stop(words, number, tmp_path, monkeypatch):
    asked = []

    def run(server: uvicorn.Server, **_: object) -> None:
        asked.append(server.should_exit)
        with TestClient(server.config.app):  # it starts and ends, so that no thread of it stays in this process
            pass

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(sys, "stderr", Raising(number))
    monkeypatch.chdir(tmp_path)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for n in before:
            signal.signal(n, lambda *_: None)  # that a lost signal is a failure, not this process's end
        model = ["--model", save_tiny(tmp_path / "model")] if words[0] == "serve" else []
        code = main([*words, "--port", "0", *model])
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert (code, asked) == (0, [True])
    assert not {"queue", "studio-watcher"} & {thread.name for thread in threading.enumerate()}
