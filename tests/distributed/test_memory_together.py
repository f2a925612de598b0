"""Memory runs out on one of two processes: both take the lower limit, and nothing else is different."""

from __future__ import annotations

import json

import pytest

from tests.distributed.rank_memory import CHECKS, UPDATES
from tests.factories.processes import ended, launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("memory") / "out.json"
    done = ended(launch("tests/distributed/rank_memory.py", str(out)))
    assert out.exists(), (done.stdout + done.stderr)[-3000:]
    return json.loads(out.read_text()) | {"said": done.stderr}


CASES = [(stage, name) for name, case in UPDATES.items() for stage in case.stages]


@pytest.mark.parametrize(("stage", "case"), CASES)
def test_one_process_short_of_memory_and_both_take_the_steps_of_plain_torch(found, stage, case):
    first, second = (each[case] for each in found[f"zero {stage}"])
    halvings = 2 if "first process" in case else 1  # it has all 8 rows of the second step
    assert sorted((first["times"], second["times"])) == [0, halvings]  # and none in later steps
    assert first["learnt"] == second["learnt"] and first["budgets"] == second["budgets"]
    assert first["budgets"][-1] == first["learnt"] < UPDATES[case].max_tokens
    for measured in (first, second):
        assert max(measured["plain"].values()) < 1e-5  # on the whole batch


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_memory_that_runs_out_between_two_sums_does_not_set_processes_out_of_step(found, stage):
    for measured in (each[stage] for each in found["sums"]):
        assert measured["calls"] > 6 and measured["learnt"] == 34  # 4 rows of 17 tokens, halved
        assert max(measured[name] for name in ("weights", "loss", "norm")) < 1e-5


@pytest.mark.parametrize("where", ["first pass", "second pass"])
@pytest.mark.parametrize("model", ["trained", "frozen"])
def test_one_process_short_of_memory_while_scoring_in_parts_gives_torch_s_scores(found, model, where):
    first, second = (each[f"{model}, {where}"] for each in found["scores"])
    assert (first["times"], second["times"]) == (0, 1)
    assert first["learnt"] == second["learnt"] < 40
    for measured in (first, second):
        assert measured["apart"] < 1e-5
        assert model == "frozen" or max(measured[name] for name in ("weights", "loss", "norm")) < 1e-5


def test_the_first_process_says_what_the_second_had_no_room_for(found):
    assert "out of memory in the actor's update on another process; from now on a micro-batch has at most 34 tokens " \
           "on all" in found["said"]
    assert "out of memory in the actor's score on another process" in found["said"]
    assert set(found) == {*CHECKS, "said"}
