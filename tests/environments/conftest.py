"""Ctrl-C reaches these tests as it reaches a run, also where what started them ignores it (a shell's background)."""

import signal

import pytest


@pytest.fixture(autouse=True)
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
