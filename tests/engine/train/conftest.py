"""What every test of this folder begins with."""

from __future__ import annotations

import pytest

from hybrid_rlhf.engine.idle_cache import give_back_idle


@pytest.fixture(autouse=True)
def nothing_idle() -> None:
    """Engines of earlier tests hold no cache that could be given back in place of what a test expects."""
    give_back_idle()
