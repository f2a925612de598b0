"""A fixture for all tests of the chat."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_progress_bars(monkeypatch):
    """chat.main sets this for its process; here it must not outlive the test."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
