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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from server import crowd, make_model, served

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat as encoding
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.serving import Serving
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server import worker
from hybrid_rlhf.inference.server.served_model import Limits
from hybrid_rlhf.inference.server.worker import GenerationJob, ModelQueue, Stopping, Worker
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model
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


@pytest.fixture
def unhurried(monkeypatch):
    """Decode steps that take 5 ms at least, so that 5,000 tokens take 25 s: no test is slower than such an answer."""
    step = Serving.step
    monkeypatch.setattr(Serving, "step", lambda self: (time.sleep(0.005), step(self))[1])


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model with room for long answers."""
    return save_tiny(tmp_path_factory.mktemp("endless"), max_position_embeddings=8192)


def test_a_full_queue_is_429_and_a_client_that_leaves_frees_its_place(endless, unhurried):
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


def test_a_whole_answer_is_dropped_too_when_its_client_leaves_or_its_time_is_up(endless, unhurried):
    with running({"a": endless}, capacity=6000, limits=Limits(max_new_tokens=5000)) as found:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{found.url}/v1/chat/completions", json=asked(**ENDLESS), timeout=1)
        assert until(lambda: not found.models[0].lane.jobs, 20)  # whole it would take longer
    limits = Limits(max_new_tokens=5000, request_seconds=3)
    with running({"a": endless}, capacity=6000, limits=limits) as found:
        late = chat(found.url, **ENDLESS)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        stream = _open_stream(found.port, **ENDLESS)
        stream.settimeout(120)
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


def _rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    connection.settimeout(120)
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
    """The texts that were tokenized."""
    found, tokenize = SimpleNamespace(texts=[]), encoding._tokenize_texts

    def noted(tokenizer, texts, *given):
        found.texts += texts
        return tokenize(tokenizer, texts, *given)

    monkeypatch.setattr(encoding, "_tokenize_texts", noted)
    return found


def test_of_what_is_far_too_long_only_the_beginning_is_tokenized(endless, tokenized):
    text = "<|im_end|>" * 50_000
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


def test_a_step_that_fails_fails_its_answers_and_no_others_after(endless, monkeypatch):
    with running({"a": endless}) as served:
        monkeypatch.setattr(served.models[0].lane.serving._scheduler, "step", lambda: 1 / 0)
        failed = chat(served.url, max_tokens=3)
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert chat(served.url, max_tokens=3).status_code == 200  # over a new cache


def test_stopping_ends_open_answers(endless, unhurried):
    with running({"a": endless}, capacity=6000, limits=Limits(max_new_tokens=5000)) as found:
        answers: list[httpx.Response] = []
        client = threading.Thread(target=lambda: answers.append(chat(found.url, **ENDLESS)))
        client.start()
        assert until(lambda: found.models[0].lane.jobs)
        found.worker.stop()
        client.join(240)
        assert answers[0].status_code == 503
        assert httpx.get(f"{found.url}/health").status_code == 503
        assert chat(found.url).status_code == 503


def test_who_is_still_answered_when_the_server_stops_is_told_so_without_a_traceback(endless, unhurried, capfd):
    with running({"a": endless}, capacity=6000, limits=Limits(max_new_tokens=5000), patience=1) as found:
        stream, whole = _open_stream(found.port, **ENDLESS), []
        client = threading.Thread(target=lambda: whole.append(chat(found.url, **ENDLESS)))
        client.start()
        assert until(lambda: len(found.models[0].lane.jobs) == 2)
        found.server.should_exit = True
        assert b'"type": "server_error"' in _rest(stream).rpartition(b"data: ")[2]
        client.join(240)
        assert (whole[0].status_code, whole[0].json()["error"]["type"]) == (503, "server_error")
    assert "Traceback" not in capfd.readouterr().err


@contextmanager
def _process(model: str, *flags: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server that is a process of its own, and its port. It does not outlive a test that fails."""
    with subprocess.Popen([sys.executable, "inference/server", "--model", model, "--port", "0", "--max_context", "6000",
                           "--max_new_tokens", "5000", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stderr.readline().rpartition(":")[2])
            assert re.match(r"each model was tried, and its cache for 16 answers at once made, in \d+\.\d s: the first",
                            server.stderr.readline())
            yield server, port
        finally:
            server.kill()


@pytest.mark.slow
def test_two_signals_end_a_server_in_order(endless):
    """The second comes while open answers are waited for, and waits for nothing."""
    with _process(endless, "--request_timeout", "3") as (server, port):
        stream = _open_stream(port, **ENDLESS)
        idle = socket.create_connection(("127.0.0.1", port))
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup, for this process and the server
        server.send_signal(signal.SIGTERM if is_ignored else signal.SIGHUP)
        assert until(lambda: not _takes(port))
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=240)[1]
        assert (server.returncode, "Traceback" in said, b"[DONE]" in _rest(stream)) == (0, False, False)
        idle.close()


@pytest.mark.slow
def test_ctrl_c_ends_a_server_within_seconds_though_its_answers_are_endless(endless):
    with _process(endless) as (server, port):
        streams = [_open_stream(port, **ENDLESS) for _ in range(16)]  # a minute or so
        began = time.monotonic()
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=240)[1]
        assert (server.returncode, "Traceback" in said) == (0, False) and time.monotonic() - began < 45  # 3, and to end
        assert said.startswith("the server stops: open answers have 3 seconds to end\n")
        for stream in streams:
            assert b'"type": "server_error"' in _rest(stream).rpartition(b"data: ")[2]


@pytest.mark.slow
def test_a_service_manager_s_signal_lets_open_answers_end(endless):
    with _process(endless) as (server, port):
        stream = _open_stream(port, min_tokens=2500, max_tokens=2500)  # more than 3 s, less than 25
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=240)[1]
        assert (server.returncode, said) == (0, "the server stops: open answers have 25 seconds to end\n")
        assert b"[DONE]" in _rest(stream)


def _takes(port: int) -> bool:
    """Whether a connection can be made."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


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


def test_a_failure_is_a_503_or_500_of_one_line():
    from hybrid_rlhf.inference.server.choices import failure

    assert (failure(Stopping()).status, failure(UserError("a; b")).status) == (503, 500)
    assert SimpleNamespace(**failure(RuntimeError("x")).body()["error"]).message == "the answer failed: x; try again"


@pytest.mark.slow
def test_a_small_crowd_gets_right_answers_and_leaves_nothing_behind(tmp_path):
    make_model("tiny", model := str(tmp_path / "model"))
    with served(model, "--max_context", "200", "--max_batch", "4", "--max_queue", "8") as (url, pid):
        found = crowd(url, pid, 2.0, 16)
    assert (found["num_wrong"], found["wrong"], found["open_after"]) == (0, [], 0)
    assert found["counts"]["right"] >= 1 and found["counts"]["left"] >= 1, found["counts"]
    assert found["descriptors"][1] <= found["descriptors"][0] + 5
