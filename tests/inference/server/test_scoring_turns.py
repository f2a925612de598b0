"""Scores beside answers: one sequence between two steps, and an end for whoever waits."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.inference.server import worker as workers
from hybrid_rlhf.inference.server.worker import GenerationJob, ModelQueue, Stopping, Worker


class Engine:
    """Notes what is done in which order: "step", or the ids of a sequence that is scored."""

    num_slots, stops = 1, frozenset()

    def __init__(self) -> None:
        self.done: list = []

    @contextmanager
    def inference(self):
        yield self

    def serve(self, _num_slots, _capacity):
        return self

    def submit(self, request) -> None:
        self.request = request

    def drop(self, _request) -> None:
        pass

    def step(self) -> bool:
        self.done.append("step")
        self.request.tokens.append(5)
        return True


class Scorer:
    def __init__(self, engine: Engine, _capacity: int) -> None:
        self.engine = engine
        engine.done.append("slot")

    def score(self, ids, *_given):
        self.engine.done.append(ids)
        if ids == "broken":
            raise RuntimeError("no memory")
        return [ids]


@pytest.fixture
def lane(monkeypatch):
    monkeypatch.setattr(workers, "SequenceScorer", Scorer)
    return ModelQueue(Engine(), 1, 8)


def test_an_answer_has_a_step_between_any_two_sequences_that_are_scored(lane):
    async def ask() -> None:
        worker = Worker([lane])
        job = GenerationJob([Request(0, [1], 12)], asyncio.get_running_loop())
        futures = [worker.score(lane, i, 1, 0) for i in range(6)]
        worker.submit(lane, job)
        worker.start()
        assert [each.result(10) for each in futures] == [[i] for i in range(6)]
        while not (await job.events.get())[2]:
            pass
        worker.stop()

    asyncio.run(ask())
    done = [each for each in lane.engine.done if each != "slot"]
    assert done[:12] == [0, "step", 1, "step", 2, "step", 3, "step", 4, "step", 5, "step"]
    assert done.count("step") == 12


def test_a_sequence_whose_client_left_is_not_scored_and_a_failure_ends_no_other(lane, caplog):
    worker = Worker([lane])
    left, broken, next_one = (worker.score(lane, ids, 1, 0) for ids in ("left", "broken", "next"))
    assert left.cancel()
    worker.start()
    assert next_one.result(10) == ["next"]
    with pytest.raises(RuntimeError, match="no memory"):
        broken.result(10)
    assert lane.engine.done == ["slot", "broken", "slot", "next"]  # memory may have run out: the slot is given back
    assert "scoring tokens failed" in caplog.text
    worker.stop()
    with pytest.raises(Stopping):
        worker.score(lane, "late", 1, 0).result(10)


def test_who_waits_when_the_server_stops_is_told(lane, monkeypatch):
    worker = Worker([lane])
    waiting = []

    def score(_self, *_given):
        waiting.append(worker.score(lane, "never", 1, 0))
        worker._orders.put(worker._stop)
        raise UserError("x")

    monkeypatch.setattr(Scorer, "score", score)
    first = worker.score(lane, "first", 1, 0)
    worker.start()
    with pytest.raises(UserError):
        first.result(10)
    with pytest.raises(Stopping):
        waiting[0].result(10)


def test_a_failure_is_a_503_or_500_of_one_line():
    from hybrid_rlhf.inference.server.choices import failure

    assert (failure(Stopping()).status, failure(UserError("a; b")).status) == (503, 500)
    assert SimpleNamespace(**failure(RuntimeError("x")).body()["error"]).message == "the answer failed: x; try again"
