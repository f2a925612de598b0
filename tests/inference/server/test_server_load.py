"""A crowd of clients from another process: no wrong answer, and nothing of it stays in the server."""

from __future__ import annotations

import pytest
from server import crowd, make_model, served


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    make_model("tiny", folder)
    return folder


def _check(found: dict, least: int) -> None:
    assert (found["num_wrong"], found["wrong"], found["open_after"]) == (0, [], 0)
    for kind in ("right", "left"):
        assert found["counts"][kind] >= least, found["counts"]
    assert found["descriptors"][1] <= found["descriptors"][0] + 5


@pytest.mark.slow
def test_a_small_crowd_gets_right_answers_and_leaves_nothing_behind(model):
    with served(model, "--max_context", "200", "--max_batch", "4", "--max_queue", "8") as (url, pid):
        _check(crowd(url, pid, 2.0, 16), 1)


@pytest.mark.slow
def test_a_large_crowd_takes_no_memory_that_stays(model):
    with served(model, "--max_context", "200") as (url, pid):
        found = crowd(url, pid, 60.0, 64)
    _check(found, 20)
    assert found["memory_mib"][1] - found["memory_mib"][0] < 20, found["memory_mib"]
