"""The server under pressure: full queues, clients that leave or dawdle, steps that fail, and its own end."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest
from serving import asked, chat, running, until
from tiny import save_tiny, tiny_tokenizer

from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.inference.server import guard, replies, worker
from hybrid_rlhf.inference.server.served_model import Limits
from hybrid_rlhf.inference.server.worker import Job, ModelQueue, Worker


def _open_stream(port: int, **settings) -> socket.socket:
    """A connection whose answer has begun."""
    body = json.dumps(asked(stream=True, **settings)).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


ENDLESS = dict(min_tokens=5000, max_tokens=5000)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model with room for long answers."""
    return save_tiny(tmp_path_factory.mktemp("endless"), max_position_embeddings=8192)


def test_a_full_queue_is_429_and_a_client_that_leaves_frees_its_place(endless):
    limits = Limits(max_queue=1, max_new_tokens=5000)
    with running({"a": endless}, num_slots=2, capacity=6000, limits=limits) as found:
        open_ones = [_open_stream(found.port, **ENDLESS) for _ in range(3)]
        busy = chat(found.url)
        assert busy.status_code == 429 and int(busy.headers["retry-after"]) >= 1
        assert busy.json()["error"]["type"] == "rate_limit_error"
        for connection in open_ones:
            connection.close()
        assert until(lambda: found.models[0].num_open == 0 and not found.models[0].lane.jobs)
        assert chat(found.url, max_tokens=2).status_code == 200


def test_a_whole_answer_is_dropped_too_when_its_client_leaves_or_its_time_is_up(endless):
    limits = Limits(max_new_tokens=5000, request_seconds=0.7)
    with running({"a": endless}, capacity=6000, limits=limits) as found:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{found.url}/v1/chat/completions", json=asked(**ENDLESS), timeout=0.2)
        assert until(lambda: not found.models[0].lane.jobs, 0.4)
        late = chat(found.url, **ENDLESS)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        stream = _open_stream(found.port, **ENDLESS)
        stream.settimeout(10)
        text = b""
        while part := stream.recv(65536):
            text += part
        assert b"[DONE]" not in text
        assert found.models[0].num_open == 0


def test_connections_that_dawdle_are_closed(endless, monkeypatch):
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.3)
    with running({"a": endless}) as served:
        _dawdle(served)


def _dawdle(served) -> None:
    for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
                  b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
        connection = socket.create_connection(("127.0.0.1", served.port))
        connection.settimeout(5)
        connection.sendall(start)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert chat(served.url, max_tokens=1).status_code == 200


def test_a_step_that_fails_fails_its_answers_and_no_others_after(endless, monkeypatch):
    with running({"a": endless}) as served:
        monkeypatch.setattr(served.models[0].lane.serving._scheduler, "step", lambda: 1 / 0)
        failed = chat(served.url, max_tokens=3)
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert chat(served.url, max_tokens=3).status_code == 200  # over a new cache


def test_stopping_ends_open_answers(endless):
    with running({"a": endless}, capacity=6000, limits=Limits(max_new_tokens=5000)) as found:
        answers: list[httpx.Response] = []
        client = threading.Thread(target=lambda: answers.append(chat(found.url, **ENDLESS)))
        client.start()
        assert until(lambda: found.models[0].lane.jobs)
        found.worker.stop()
        client.join(10)
        assert answers[0].status_code == 503
        assert httpx.get(f"{found.url}/health").status_code == 503
        assert chat(found.url).status_code == 503


def test_tokens_that_wait_go_out_in_one_write_and_none_of_their_events_is_lost():
    """A reader that was slow for a while finds the same events, in fewer writes; the last token's may not wait."""
    async def write(bunches: list[int]) -> list[bytes]:
        sent: list[bytes] = []
        job = Job([Request(0, [1], sum(bunches), 0)], asyncio.get_running_loop())
        served = SimpleNamespace(name="m", tokenizer=tiny_tokenizer(), lane=SimpleNamespace(serving=None))
        asked = SimpleNamespace(stops=(), wants_usage=False)

        async def send(message: dict) -> None:
            sent.append(message.get("body", b""))

        streaming = asyncio.ensure_future(replies.stream(send, served, asked, job, lambda _i: None))
        number = 0
        for bunch in bunches:
            for _ in range(bunch):
                number += 1
                job.events.put_nowait((0, [60 + number], number == sum(bunches)))
            while not job.events.empty():
                await asyncio.sleep(0)
        await streaming
        return sent

    apart, together = asyncio.run(write([1] * 6)), asyncio.run(write([1, 4, 1]))
    bare = [re.sub(rb'"chatcmpl-\w+", "created": \d+', b"", b"".join(sent)) for sent in (apart, together)]
    assert bare[0] == bare[1]
    assert (len(apart), len(together)) == (9, 6)


def test_first_and_last_tokens_go_out_at_once_and_those_between_thirty_times_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def steps() -> list[list[tuple]]:
        jobs = [Job([Request(i, [1], limit, 0)], asyncio.get_running_loop()) for i, limit in enumerate((6, 9))]
        lane = ModelQueue(None, 2, 64, serving=SimpleNamespace(stops=frozenset()), jobs=[jobs[0]])
        found = []
        for step in range(1, 7):
            now[0] += 0.016
            if step == 4:
                lane.jobs.append(jobs[1])
            for job in lane.jobs:
                job.requests[0].tokens.append(10 * job.requests[0].number + step)
            Worker([lane])._tell(lane)
            await asyncio.sleep(0)
            found.append([job.events.get_nowait() for job in jobs if not job.events.empty()])
        return found

    assert asyncio.run(steps()) == [[(0, [1], False)], [], [(0, [2, 3], False)], [(0, [14], False)],
                                    [(0, [4, 5], False), (0, [15], False)], [(0, [6], True)]]
