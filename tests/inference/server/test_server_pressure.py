"""The server under pressure: full queues, clients that leave or dawdle, steps that fail, and its own end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from hybrid_rlhf.data import chat as encoding
from hybrid_rlhf.engine.decode.kv_cache import KeyValueRows
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server import guard, replies, worker
from hybrid_rlhf.inference.server.protocol import ApiError, read_chat
from hybrid_rlhf.inference.server.served_model import Limits, Prompt
from hybrid_rlhf.inference.server.worker import GenerationJob, ModelQueue, Worker
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model, tiny_tokenizer
from tests.inference.server.tiny_server import asked, chat, running, until

ROOT = Path(__file__).resolve().parents[3]


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


def test_the_first_request_finds_the_cache_made(endless, monkeypatch):
    """Its zeros are written when the first token comes, which takes seconds where there are gigabytes of them."""
    made, allocate = [], KeyValueRows.allocate
    monkeypatch.setattr(KeyValueRows, "allocate", lambda rows, *new: (allocate(rows, *new), made.append(rows)))
    with running({"a": endless}, num_slots=3, capacity=64) as found:
        found.worker.draw_first()
        layers = [rows for rows in made if rows.keys.shape[0] == 3 and rows.keys.shape[2] >= 64]
        assert len(layers) >= 2  # all slots, of both layers
        before = len(made)
        assert chat(found.url, max_tokens=3).status_code == 200 and len(made) == before


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
        assert b'"code": "timeout"' in text.rpartition(b"data: ")[2]
        assert until(lambda: found.models[0].num_open == 0)


MALFORMED = {
    "no words": b"garbage\r\n\r\n", "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
    "a bad chunk": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "two lengths": b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "headers without end": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000,
}


def test_what_is_no_http_is_refused_and_logs_no_traceback(endless, capfd):
    with running({"a": endless}) as served:
        for name, request in MALFORMED.items():
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                connection.sendall(request)
                assert b"HTTP/1.1 400" in _rest(connection), name
        stream = _open_stream(served.port, max_tokens=50, min_tokens=50)
        stream.sendall(b"garbage in the midst\r\n\r\n")
        assert b"[DONE]" in _rest(stream)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("length", "status"), [(10**12, 413), (1000, 408)])
def test_a_body_that_does_not_come_is_answered_in_time(endless, monkeypatch, length, status):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(guard, "DRAIN_SECONDS", 0.3)
    with running({"a": endless}) as served, socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(10)
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n{" % length)
        assert f"HTTP/1.1 {status}".encode() in _rest(connection)


def _rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    connection.settimeout(10)
    text = b""
    try:
        while part := connection.recv(65536):
            text += part
    except ConnectionResetError:  # it did not read all that we sent
        pass
    return text


# --- what is too long ------------------------------------------------------------------------------------------------

@pytest.fixture
def tokenized(monkeypatch):
    """The texts that were tokenized; one with "wait" in it takes until `go` is set."""
    found, tokenize = SimpleNamespace(texts=[], go=threading.Event()), encoding._tokenize_texts

    def noted(tokenizer, texts, *given):
        found.texts += texts
        if any("wait" in text for text in texts):
            found.go.wait(20)
        return tokenize(tokenizer, texts, *given)

    monkeypatch.setattr(encoding, "_tokenize_texts", noted)
    yield found
    found.go.set()


@pytest.mark.parametrize("text", ["<|im_end|>" * 50_000, "x" * 500_000, "\u4e00" * 100_000],
                         ids=["markers", "x", "han"])
def test_of_what_is_far_too_long_only_the_beginning_is_tokenized(endless, tokenized, text):
    with running({"a": endless}) as served:
        refused = chat(served.url, text)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert re.search(r"are \d+ or more tokens long; send less: .* may be 255$", refused.json()["error"]["message"])
        assert sum(map(len, tokenized.texts)) < 50_000


def test_scores_of_what_is_far_too_long_are_refused_without_holding_up_the_engine(endless, tokenized, tmp_path):
    tiny_scalar_model().save_pretrained(tmp_path)
    chatml_tokenizer().save_pretrained(tmp_path)
    scorer = Scorer(str(tmp_path))
    scorer.open()
    with running({"a": endless}, scorer=scorer) as served:
        for prompt in ("q", [{"role": "user", "content": "q"}]):
            asked = {"prompts": ["p", prompt], "completions": ["a", "<|im_end|>" * 50_000]}
            refused = httpx.post(f"{served.url}/score", json=asked)
            assert refused.status_code == 400
            assert "prompts.1 and its completion are" in refused.json()["error"]["message"]
        assert max(map(len, tokenized.texts), default=0) < 1000


def test_lengths_are_of_the_text_that_the_model_reads(tmp_path):
    """Without a template messages are joined by blank lines; "wholewords" would be other tokens than "whole words"."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = None
    tiny_scalar_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = Scorer(str(tmp_path))
    scorer.open()
    messages = [{"role": "user", "content": "whole"}, {"role": "assistant", "content": "words"}]
    assert scorer._rendered(messages, "here").text == "whole\n\nwords\n\nhere"


def test_prompts_of_clients_that_have_left_are_not_tokenized(endless, tokenized):
    with running({"a": endless}) as served:
        for i in range(4):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}/v1/chat/completions", json=asked(f"wait {i}"), timeout=0.3)
        assert until(lambda: served.models[0].num_open == 0)
        tokenized.go.set()
        assert chat(served.url, "another", max_tokens=1).status_code == 200
        assert [i for i in range(4) if f"wait {i}" in "".join(tokenized.texts)] == [0]
        assert not served.models[0].lane.jobs


def test_the_time_for_tokenizing_is_the_requests(endless, tokenized):
    with running({"a": endless}, limits=Limits(request_seconds=0.5)) as served:
        late = httpx.post(f"{served.url}/v1/chat/completions", json=asked("wait"), timeout=10)
        tokenized.go.set()
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")


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


def test_who_is_still_answered_when_the_server_stops_is_told_so_without_a_traceback(endless, capfd):
    with running({"a": endless}, capacity=6000, limits=Limits(max_new_tokens=5000), patience=1) as found:
        stream, whole = _open_stream(found.port, **ENDLESS), []
        client = threading.Thread(target=lambda: whole.append(chat(found.url, **ENDLESS)))
        client.start()
        assert until(lambda: len(found.models[0].lane.jobs) == 2)
        found.server.should_exit = True
        assert b'"type": "server_error"' in _rest(stream).rpartition(b"data: ")[2]
        client.join(10)
        assert (whole[0].status_code, whole[0].json()["error"]["type"]) == (503, "server_error")
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_that_is_cancelled_twice_ends_with_the_line_for_its_client():
    """By uvicorn when its patience is over, and again by the loop's end, while the work is still being taken back."""

    async def work(send):
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.1)

    async def cancelled_twice():
        ends = replies.Answer(work)({}, asyncio.Event().wait, None)
        task = asyncio.ensure_future(ends)
        for _ in range(2):
            await asyncio.sleep(0.02)
            task.cancel()
        await task

    with pytest.raises(ApiError, match="the server stops"):
        asyncio.run(cancelled_twice())


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGINT], [signal.SIGHUP, None, signal.SIGINT]])
def test_two_signals_end_a_server_in_order(endless, signals):
    """At once, and the second (after None) while open answers are waited for: that one waits for nothing."""
    server = subprocess.Popen([sys.executable, "inference/server", "--model", str(endless), "--port", "0",
                               "--max_context", "6000", "--max_new_tokens", "5000", "--request_timeout", "3"],
                              cwd=ROOT, stderr=subprocess.PIPE, text=True)
    port = int(server.stderr.readline().rpartition(":")[2])
    assert re.match(r"each model was tried, and its cache for 16 answers at once made, in \d+\.\d s: the first",
                    server.stderr.readline())
    stream = _open_stream(port, **ENDLESS)
    idle = socket.create_connection(("127.0.0.1", port))
    for number in signals:
        if number is None:
            assert until(lambda: not _takes(port))
        else:
            server.send_signal(number)
    said = server.communicate(timeout=60)[1]
    assert (server.returncode, "Traceback" in said, b"[DONE]" in _rest(stream)) == (0, False, False)
    idle.close()


def _takes(port: int) -> bool:
    """Whether a connection can be made."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_tokens_that_wait_go_out_in_one_write_and_none_of_their_events_is_lost():
    """A reader that was slow for a while finds the same events, in fewer writes; the last token's may not wait."""
    async def write(bunches: list[int]) -> list[bytes]:
        sent: list[bytes] = []
        job = GenerationJob([Request(0, [1], sum(bunches), 0)], asyncio.get_running_loop())
        served = SimpleNamespace(name="m", tokenizer=tiny_tokenizer(), lane=SimpleNamespace(serving=None),
                                 token_text=None)
        asked = read_chat(dict(messages=[dict(role="user", content="hi")], stream=True))

        async def send(message: dict) -> None:
            sent.append(message.get("body", b""))

        streaming = asyncio.ensure_future(replies.reply(send, replies.Asking(
            served, asked, [Prompt([1], "")], job, lambda _i: None, asyncio.to_thread, None)))
        number = 0
        for bunch in bunches:
            for _ in range(bunch):
                number += 1
                job.events.put_nowait((0, [60 + number], number == sum(bunches)))
            while not job.events.empty() and not streaming.done():
                await asyncio.sleep(0)
        await streaming
        return sent

    apart, together = asyncio.run(write([1] * 6)), asyncio.run(write([1, 4, 1]))
    bare = [re.sub(rb'"chatcmpl-\w+", "created": \d+', b"", b"".join(sent)) for sent in (apart, together)]
    assert bare[0] == bare[1]
    assert (len(apart), len(together)) == (9, 6)


def test_first_and_last_tokens_go_out_at_once_and_others_every_thirty_milliseconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def steps() -> list[list[tuple]]:
        loop = asyncio.get_running_loop()
        jobs = [GenerationJob([Request(i, [1], limit, 0)], loop) for i, limit in enumerate((6, 9))]
        lane = ModelQueue(None, 2, 64, serving=SimpleNamespace(stops=frozenset()), jobs=[jobs[0]])
        found = []
        for step in range(1, 7):
            now[0] += 0.016
            if step == 4:
                lane.jobs.append(jobs[1])
            for job in lane.jobs:
                job.requests[0].tokens.append(10 * job.requests[0].number + step)
            Worker([lane])._deliver_tokens(lane)
            await asyncio.sleep(0)
            found.append([job.events.get_nowait() for job in jobs if not job.events.empty()])
        return found

    assert asyncio.run(steps()) == [[(0, [1], False)], [], [(0, [2, 3], False)], [(0, [14], False)],
                                    [(0, [4, 5], False), (0, [15], False)], [(0, [6], True)]]
