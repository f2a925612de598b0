"""Some of the allocations that the sweep lets fail, one by one (sweep.py; docs/results/out_of_memory.md has all)."""

from __future__ import annotations

import pytest

from tests.factories.tiny import own_cache
from tests.simulated_card.sweep import CASES, sweep


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_short_of_memory_goes_on_to_the_same_numbers_or_says_where_and_what_helps(case, tmp_path,
                                                                                                monkeypatch):
    own_cache(monkeypatch, tmp_path / "cache")
    _, found = sweep(tmp_path, case, every=12)
    assert {outcome.kind for outcome in found} == {"goes on", "explained"}, [
        outcome for outcome in found if outcome.kind not in ("goes on", "explained")]
