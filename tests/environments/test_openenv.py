"""A server that speaks OpenEnv's protocol, over a WebSocket and over HTTP, and servers that do not."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.builtin.openenv import OpenEnv


def result(text="", reward=None, done=False):
    return {"observation": {"text": text}, "reward": reward, "done": done}


def frame(kind: int, data: bytes) -> bytes:
    """A server's frame, RFC 6455 section 5.2."""
    size = len(data)
    length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big") if size < 65536 else (
        b"\x7f" + size.to_bytes(8, "big"))
    return bytes([0x80 | kind]) + length + data


def accepted(key: str) -> bytes:
    """A server's answer to a client's key, RFC 6455 section 4.2.2."""
    return base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())


class Stub(BaseHTTPRequestHandler):
    """Says what `answers` holds, in turn: what is encoded as JSON, bytes as they are, (status, body), or a function."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        stub = self.server.stub
        stub.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        answer = stub.answers.pop(0)
        answer = answer() if callable(answer) else answer
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        stub = self.server.stub
        stub.sessions += 1
        if stub.refuses or self.path != "/base/ws":
            self.send_error(404)
            return
        key = self.headers["Sec-WebSocket-Key"]
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                         b"Sec-WebSocket-Accept: " + accepted(key) + b"\r\n\r\n")
        self.close_connection = True
        while (text := self._said()) is not None:
            stub.asked.append(("ws", json.loads(text)))
            answer = stub.answers.pop(0)
            answer = answer() if callable(answer) else answer
            if answer is None:
                return
            data = answer if isinstance(answer, dict) and "type" in answer else {"type": "observation", "data": answer}
            self.wfile.write(answer if isinstance(answer, bytes) else frame(1, json.dumps(data).encode()))

    def _said(self):
        head = self.rfile.read(2)
        if len(head) < 2:
            return None
        assert head[1] & 128, "a client's frames are masked"
        size = head[1] & 127
        if size > 125:
            size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
        mask, data = self.rfile.read(4), self.rfile.read(size)
        data = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
        return data.decode() if head[0] & 15 == 1 else None

    def log_message(self, *_):
        pass


class Service:
    def __init__(self):
        self.answers, self.asked = [], []
        self.sessions, self.refuses = 0, False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        self.server.daemon_threads, self.server.stub = True, self
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/base"

    def environment(self, **options) -> OpenEnv:
        return OpenEnv(self.url, **{"timeout": 5.0, **options})


@pytest.fixture
def service():
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


def say(environment, text):
    return environment.step([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_an_episode(service, transport, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the session goes to the server, not by way of a proxy
    service.answers = [result("begin"), result("go on", 0.25), result("done", True, True), result()]
    environment = service.environment(transport=transport)
    assert environment.reset(prompt="x", seed=3, episode_id=None, secret="no") == "\nbegin"
    assert say(environment, "caf\u00e9") == (user("go on"), False, 0.25)
    assert say(environment, "b" * 70_000) == (user("done"), True, 1.0)
    assert environment.reset() is None
    if transport == "http":
        assert service.asked == [("/base/reset", {"seed": 3}), ("/base/step", {"action": {"message": "caf\u00e9"}}),
                                 ("/base/step", {"action": {"message": "b" * 70_000}}), ("/base/reset", {})]
    else:
        assert [question for _, question in service.asked] == [
            {"type": "reset", "data": {"seed": 3}}, {"type": "step", "data": {"message": "caf\u00e9"}},
            {"type": "step", "data": {"message": "b" * 70_000}}, {"type": "reset", "data": {}}]
        assert service.sessions == 1


@pytest.mark.parametrize("options, observation, shown", [
    ({}, {"a": "x"}, "x"), ({}, {"a": 1}, "1"), ({}, {"a": "x", "b": [1]}, '{"a": "x", "b": [1]}'), ({}, {}, "{}"),
    ({"observation_field": "b"}, {"a": "x", "b": "y"}, "y"), ({"observation_field": "b"}, {"b": {"c": 1}}, '{"c": 1}'),
])
def test_what_is_shown_of_an_observation(service, options, observation, shown):
    service.answers = [{"observation": observation, "reward": None, "done": False}]
    assert say(service.environment(**options), "x") == (user(shown), False, None)


def test_a_message_that_is_the_action(service):
    service.answers = [result("ok", 1), {"type": "error", "data": {"message": "Invalid message",
    "code": "VALIDATION_ERROR",
                                                                  "errors": [{"loc": ["value"]}]}}]
    environment = service.environment(action_field=None)
    assert say(environment, '{"value": 1}') == (user("ok"), False, 1.0)
    assert service.asked == [("ws", {"type": "step", "data": {"value": 1}})]
    assert say(environment, '{"value": "x"}') == (user("error: Invalid message [{'loc': ['value']}]"), False, None)
    for text in ("no", "[1]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"):
        [message], is_over, reward = say(environment, text)
        assert message["content"].startswith("error: the message must be a JSON object") and not is_over and not reward
    assert len(service.asked) == 2


def test_a_session_that_has_gone_is_opened_again_for_a_new_episode_and_not_within_one(service):
    service.answers = [result("one"), None, result("two"), None]
    environment = service.environment()
    environment.reset()
    assert environment.reset() == "\ntwo" and service.sessions == 2
    with pytest.raises(UserError, match=r"closed|lost"):
        say(environment, "x")
    assert service.sessions == 2


BAD = [
    (b"no json", "Expecting value"), ({"observation": "x"}, "answered"),
    ({"observation": {}, "reward": float("nan")}, "reward nan"), (result("\u20ac" * 700), "more than 2000 bytes"),
    (lambda: time.sleep(1), "timed out|no answer"),
]


@pytest.mark.parametrize("transport", ["websocket", "http"])
@pytest.mark.parametrize("answer, message", BAD)
def test_an_answer_that_is_none_is_one_line(service, transport, answer, message):
    is_raw = isinstance(answer, bytes) and transport == "websocket"
    service.answers = [frame(1, answer) if is_raw else answer]
    environment = service.environment(transport=transport, max_bytes=2000,
                                      timeout=0.5 if callable(answer) else 30.0)
    with pytest.raises(UserError, match=rf"openenv at http://127.0.0.1:\d+/base: .*({message})") as caught:
        say(environment, "x")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("answer, message", [
    ((500, b"broken\nall of it"), "answered status 500 .* broken all of it"), ((404, b""), "answered status 404"),
    ((422, {"detail": "extra"}), "refused an action: .*extra.*; fix action_field"),
])
def test_a_status_that_is_no_success_is_one_line(service, answer, message):
    service.answers = [answer]
    with pytest.raises(UserError, match=message):
        say(service.environment(transport="http"), "x")
    assert len(service.asked) == 1


@pytest.mark.parametrize("answer, message", [
    ({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}, "full; fix the server .or its bound"),
    (frame(8, b"\x03\xe8bye"), "closed the connection bye"),
    ({"type": "error", "data": {"message": "no",
    "code": "EXECUTION_ERROR"}}, "refused an action: no; fix action_field"),
])
def test_a_session_that_fails_is_one_line(service, answer, message):
    service.answers = [answer]
    with pytest.raises(UserError, match=message):
        say(service.environment(), "x")


def test_a_server_without_sessions_says_which_transport_to_use(service):
    service.refuses = True
    with pytest.raises(UserError, match=r"404.*needs transport http"):
        service.environment().reset()


def test_nobody_there_and_an_episode_that_is_over_at_once(service):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    for transport in ("websocket", "http"):
        with pytest.raises(UserError, match="refused"):
            OpenEnv(f"http://127.0.0.1:{port}", transport=transport).reset()
    service.answers = [result("x", done=True), {"type": "error", "data": {"code": "EXECUTION_ERROR",
    "message": "seed"}}]
    with pytest.raises(UserError, match="over before it began"):
        service.environment().reset()
    with pytest.raises(UserError, match="refused to reset: seed; fix the columns"):
        service.environment().reset(seed=1)


@pytest.mark.parametrize("options, message", [
    ({"url": "localhost:8000"}, "url is"), ({"transport": "grpc"}, "transport is 'grpc'"), ({"timeout": 0}, "above 0"),
])
def test_options_that_cannot_be_are_refused_at_the_start(options, message):
    with pytest.raises(UserError, match=message):
        BUILTINS["openenv"](**{"url": "http://localhost", **options})
