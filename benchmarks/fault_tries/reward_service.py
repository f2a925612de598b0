"""A reward service that answers as it should not; and runs that are short of what every program needs."""

from __future__ import annotations

import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import GRPO, SFT, same_run
from fault_tries.product import Started, command, done_or_refused, finished, refused, status_of, take

GOOD = {"scores": [1.0, 2.0, 3.0, 4.0]}
Handler = BaseHTTPRequestHandler


def answers(handler: Handler, body: object, status: int = 200, **headers: str) -> None:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(text)


def resets(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def pours(handler: Handler, times: int, size: int, pause: float) -> None:
    answers(handler, b"")
    for _ in range(times):
        handler.wfile.write(b" " * size)
        time.sleep(pause)


ALWAYS: dict[str, Callable[[Handler], object]] = {
    "status 500": lambda h: answers(h, b"", 500),
    "status 404": lambda h: answers(h, b"", 404),
    "closes before it answers": lambda h: h.connection.shutdown(socket.SHUT_RDWR),
    "resets": resets,
    "closes in the midst of its answer": lambda h: answers(h, b'{"scores": [1, 2', Content_Length="40"),
    "half an answer, no length": lambda h: answers(h, b'{"scores": [1, 2'),
    "no words": lambda h: h.wfile.write(b"\xff\xfe\x00" * 100),
    "nothing at all": lambda h: answers(h, b""),
    "HTML": lambda h: answers(h, b"<html>busy</html>"),
    "a list": lambda h: answers(h, [1, 2, 3, 4]),
    "null": lambda h: answers(h, None),
    "scores that are text": lambda h: answers(h, {"scores": "1234"}),
    "too few": lambda h: answers(h, {"scores": [1]}),
    "too many": lambda h: answers(h, {"scores": [1] * 99}),
    "a word among numbers": lambda h: answers(h, {"scores": [1, "two", 3, 4]}),
    "NaN": lambda h: answers(h, b'{"scores": [1, 2, NaN, 4]}'),
    "1e999": lambda h: answers(h, b'{"scores":[1,2,1e999,4]}'),
    "objects": lambda h: answers(h, {"scores": [{}, [], {}, []]}),
    "a number of 5,000 digits": lambda h: answers(h, b'{"scores": [1, 2, %s, 4]}' % (b"9" * 5000)),
    "nested 100,000 deep": lambda h: answers(h, b"[" * 100_000),
    "all skipped": lambda h: answers(h, {"scores": [None] * 4}),
    "no UTF-8": lambda h: answers(h, b'{"scores": ["\xff"]}'),
    "two lengths": lambda h: answers(h, b"{}", Content_Length="2", content_length="3"),
    "a redirect to itself": lambda h: answers(h, b"", 302, Location="/score"),
    "a redirect to a file": lambda h: answers(h, b"", 302, Location="file:///etc/passwd"),
    "a byte now and then": lambda h: pours(h, 200, 1, 0.1),
    "never an answer": lambda h: time.sleep(20),
    "4 GB": lambda h: pours(h, 4000, 2**20, 0),
}
ONCE = ("status 500", "closes before it answers", "resets", "closes in the midst of its answer",
        "half an answer, no length", "never an answer")


@contextmanager
def service(act: Callable[[Handler], object], times: int):  # noqa: ANN201
    """The address of a service that answers well once, then `times` by `act`, then well."""
    asked: list[int] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the library's name
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(1)
            with suppress(OSError):
                act(self) if 1 < len(asked) <= 1 + times else answers(self, GOOD)

        do_GET = do_POST  # noqa: N815 - what a redirect makes of it

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.handle_error = lambda *_: None
        yield server


def serves(act: Callable[[Handler], object], times: int, retries: int, place: Path) -> None:
    take(place, "base", "paid.jsonl")
    with service(act, times) as server:
        words = [*GRPO, "--reward.url", f"http://127.0.0.1:{server.server_port}/score", "--reward.timeout", "0.5",
                 "--reward.retries", str(retries)]
        started = Started(words)  # before there is a second thread: it is forked
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        ended = started.wait()
        server.shutdown()
    if retries:
        finished(ended)
        return
    refused(ended, "reward source ")
    expect(status_of("run") == "failed" and not Path("run/model").exists(), "not on the record as failed")


def at_once(number: int, place: Path) -> None:
    """Several starts with one output folder."""
    take(place, "base", "sft.jsonl")
    ended = [each.wait() for each in [Started(SFT) for _ in range(number)]]
    expect(any(each.code == 0 for each in ended), "none began")
    for each in ended:
        if each.code:
            refused(each, "another process is at this run")
    same_run(place)


def few_files(number: int, place: Path) -> None:
    """A start that may open few files."""
    take(place, "base", "sft.jsonl")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if not done_or_refused(
            command(*SFT, prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, soft)))):
        finished(command(*SFT))
    same_run(place)


SERVICE = Group(
    "a reward service that fails",
    "for ever: exit code 2, one line with the service, run.json says failed. Once, with retries: the run ends",
    [Try(f"{name}, for ever", partial(serves, act, 10**9, 0)) for name, act in ALWAYS.items()]
    + [Try(f"{name}, once", partial(serves, ALWAYS[name], 1, 3)) for name in ONCE])
SHORTAGE = Group(
    "starts at once, and few descriptors",
    "one of the starts runs to its end, the others exit with 2 and one line; "
    "with few descriptors one line or a whole run, and the same command then ends in the same bits as without",
    [Try(f"{number} starts at once", partial(at_once, number)) for number in (2, 2, 3)]
    + [Try(f"{number} descriptors", partial(few_files, number)) for number in (6, 8, 10, 12, 14, 16, 20, 24, 32, 48)])
