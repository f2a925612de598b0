"""A judge behind an address on this machine, in a thread, and judges that answer what a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from hybrid_rlhf.rewards.judge import JudgeConfig, JudgeSource, open_judge
from hybrid_rlhf.rewards.judge.asking import Arriving


def said(text: object, **more: object) -> dict:
    """A chat completion that says `text`."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 10}} | more


def _handler_of(state: SimpleNamespace) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the library's name
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.asked.append(body)
                state.headers.append(dict(self.headers))
                state.times.append(time.monotonic())
                state.paths.append(self.path)
                state.running += 1
                state.busy = max(state.busy, state.running)
                status, answer, *more = state.answers[min(len(state.asked), len(state.answers)) - 1]
            try:
                answer = answer(body) if callable(answer) else answer
            finally:
                with state.lock:
                    state.running -= 1
            text = answer if isinstance(answer, (bytes, str)) else json.dumps(answer)
            try:
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                if state.tells_length:
                    self.send_header("Content-Length", str(state.tells_length))
                self.end_headers()
                self.wfile.write(text if isinstance(text, bytes) else text.encode())
            except OSError:  # the client did not wait
                pass

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def judge_server() -> Iterator[SimpleNamespace]:
    """A server whose `answers` are (status, body or a function of the request[, headers]), the last one for ever after.
    asked: bodies; headers: of the requests;
    times: when; busy: most requests at a time."""
    state = SimpleNamespace(answers=[(200, said('{"ok": "yes"}'))], asked=[], headers=[], times=[], paths=[],
                            tells_length=0, running=0, busy=0, lock=threading.Lock())

    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(state))
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class Scripted:
    """A backend whose replies are answer(chat), and whose probabilities are chances(chat, words)."""

    name, identity, reads_images = "scripted", ["scripted"], False

    def __init__(self, answer: Callable[[list], object], chances: Callable | None = None) -> None:
        self.answer, self.chances, self.asked, self.rounds = answer, chances, [], 0

    def open(self) -> None:
        pass

    def complete(self, chats, max_new_tokens: int, seed: int) -> Arriving[str]:
        self.asked += chats
        self.rounds += 1
        yield from ((i, self.answer(chat)) for i, chat in enumerate(chats))

    def choose(self, chats, words) -> Arriving[list[float]]:
        self.asked += chats
        yield from ((i, self.chances(chat, words)) for i, chat in enumerate(chats))


def in_order(answers: Arriving) -> list:
    """A backend's answers in the order of the chats."""
    return [answer for _, answer in sorted(answers, key=lambda each: each[0])]


ONE = {"items": [{"name": "ok", "question": "Is it fine?"}]}


def scripted_judge(answer: Callable[[list], object], chances: Callable | None = None, **settings: object
                   ) -> tuple[JudgeSource, Scripted]:
    """A JudgeSource that asks a Scripted backend, and that backend."""
    source = open_judge(JudgeConfig(**({"url": "http://localhost:1/v1", "rubric": ONE} | settings)))
    source.asker.backend = backend = Scripted(answer, chances)
    return source, backend
