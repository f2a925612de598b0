"""The server and clients that send what is no request, too much, or leave."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import time
from contextlib import contextmanager, suppress
from functools import partial

from fault_tries.attempt import Group, Try, expect, limits, until
from fault_tries.product import Started, take

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MIB = 2**20


def get(path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((b"GET %s HTTP/1.1" % path, b"Host: localhost", *headers, b"", b""))


def body(raw: bytes, route: bytes = b"/v1/chat/completions") -> bytes:
    return POST.replace(b"/v1/chat/completions", route) + b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw)


def asked(text: object = "hi", **more: object) -> bytes:
    return body(json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}).encode())


def scored(completion: object, prompt: object = "q") -> bytes:
    return body(json.dumps({"prompts": [prompt], "completions": [completion]}).encode(), b"/score")


BAD: dict[str, bytes] = {  # answered with 400
    "no words": b"garbage\r\n\r\n", "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\n\n\n", "a path of bytes": get(b"/\xff"),
    "a name with a space": get(b"/health", b"Bad Name: x"), "two hosts": get(b"/health", b"Host: evil"),
    "a negative length": POST + b"Content-Length: -5\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", "a body that is no JSON": body(b"{"),
    "an empty body": body(b""), "a body of bytes": body(b"\xff\xfe\x00"), "a list": body(b"[]"), "a number": body(b"1"),
    "nested 100,000 deep": body(b"[" * 100_000), "a number of 5,000 digits": asked(max_tokens=10**400),
    "a prompt of 900,000 characters": asked("x" * 900_000), "a prompt of markers": asked("<|im_end|>" * 80_000),
    "a prompt of Han": asked("\u4e00" * 150_000), "a prompt of spaces": asked(" " * 900_000),
    "no messages": asked(messages=[]), "a role that is none": asked(messages=[{"role": "x", "content": "y"}]),
    "content that is a number": asked(3), "temperature NaN": asked(temperature=float("nan")),
    "top_p of 0": asked(top_p=0), "top_k of 2**63": asked(top_k=2**63), "n of 10**9": asked(n=10**9),
    "max_tokens of -1": asked(max_tokens=-1), "stop of 10,000 words": asked(stop=["x"] * 10_000),
    "tools": asked(tools=[{"type": "function"}]),
    "scores of unequal lists": body(b'{"prompts": ["a"], "completions": []}', b"/score"),
    "a score of 900,000 characters": scored("x" * 900_000), "a score of markers": scored("<|im_end|>" * 50_000),
    "a score of a number": scored(3), "scores of null": body(b'{"prompts": null, "completions": null}', b"/score"),
}
# with one of several statuses; 0: the connection may simply be closed
ODD: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "NULs": (bytes(5000), (400, 0)), "a path of 100,000 characters": (get(b"/" + b"x" * 100_000), (400, 404, 414)),
    "a path out of its folder": (get(b"/../../etc/passwd"), (400, 404)),
    "an encoded path": (get(b"/%2e%2e/%2e%2e/etc/passwd"), (400, 404)),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", (400, 403, 421)),
    "another origin": (POST + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}", (400, 403)),
    "a form": (body(b"{}").replace(b"application/json", b"text/plain"), (400, 403, 415)),
    "a length of 30 digits": (POST + b"Content-Length: %s\r\n\r\n" % (b"9" * 30), (400, 413)),
    "a length of a terabyte": (POST + b"Content-Length: 1000000000000\r\n\r\n{", (413,)),
    "an unknown coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", (400, 501)),
    "endless chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 41,
                       (400, 413)),
    "headers without end": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000, (400, 431)),
    "one header of a megabyte": (get(b"/health", b"X: " + b"y" * MIB), (400, 431)),
    "an unknown method": (b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 405, 501)),
    "a websocket": (get(b"/", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: eA==",
                        b"Sec-WebSocket-Version: 13"), (200, 400, 404, 426)),
    "a body of 2 MiB": (body(b'{"messages": "' + b"x" * (2 * MIB) + b'"}'), (413,)),
    "a body of 64 MiB": (body(b" " * (64 * MIB)), (413,)),
    "18,000 messages": (asked(messages=[{"role": role, "content": ""} for role in ("user", "assistant") * 9000]),
                        (200, 400, 413)),
    "a lone surrogate": (asked("\ud800"), (200, 400)), "controls": (asked("\x00\x1b[2J\u202e"), (200, 400)),
    "temperature 1e308": (asked(temperature=1e308), (200, 400)),
    "temperature 1e-320": (asked(temperature=1e-320), (200, 400)),
    "max_tokens of 2**63": (asked(max_tokens=2**63), (200, 400)),
    "min_tokens beyond max": (asked(min_tokens=99), (200, 400)),
    "a seed of 400 digits": (asked(seed=10**400), (200, 400)), "an empty stop": (asked(stop=""), (200, 400)),
    "an unknown model": (asked(model="../../etc"), (400, 404)),
    "scores of nothing": (body(b'{"prompts": [], "completions": []}', b"/score"), (200, 400)),
}


@contextmanager
def server(place: object, *words: str):  # noqa: ANN201
    """(port, the process) of a server of a chat model and a scorer, which must end in order with the block."""
    take(place, "base", "scorer")
    started = Started(["serve", "--model", "base", "--reward_model", "scorer", "--port", "0", *words])
    until(lambda: "serving" in started.err or started.has_ended(), 30, "the server")
    expect(not started.has_ended(), f"no server: {started.err[-300:]}")
    yield int(re.findall(r"http://[^:]+:(\d+)", started.err)[0]), started
    expect(not started.has_ended(), "the server has ended")
    os.kill(started.pid, signal.SIGTERM)
    ended = started.wait(45)
    expect(ended.code == 0, f"exit code {ended.code}, not 0")
    expect("Traceback" not in ended.err, f"a traceback: {ended.err.strip().splitlines()[-1][:300]}")


def is_well(port: int) -> None:
    """It answers others still, and soon."""
    began = time.monotonic()
    status, _ = answer(port, asked())
    expect(status == 200, f"then answers others with {status}")
    expect(time.monotonic() - began < 5 * limits.patience, f"then takes {time.monotonic() - began:.1f} s for others")


def answer(port: int, raw: bytes) -> tuple[int, bytes]:
    """Status (0: none, the connection was closed) and body of the answer to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with suppress(OSError):  # it may close before it has all
            connection.sendall(raw)
        found = http.client.HTTPResponse(connection)
        try:
            found.begin()
            return found.status, found.read()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""


def request(raw: bytes, allowed: tuple[int, ...], place: object) -> None:
    with server(place) as (port, _):
        status, text = answer(port, raw)
        expect(status in allowed, f"answered with {status}, not {' or '.join(map(str, allowed))}")
        if status >= 400:
            error = json.loads(text)["error"]
            expect(error["message"] and error["type"] and len(error["message"]) < 1500,
                   f"its error is {str(error)[:200]}")
        is_well(port)


def leave(number: int, stream: bool, how: str, place: object) -> None:
    """Clients that ask for much and go away: their places are free for others."""
    raw = asked("go on", stream=stream, max_tokens=200, min_tokens=200)
    with server(place, "--max_batch", "2", "--max_queue", str(number)) as (port, _):
        for _ in range(number):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(raw if how != "half a request" else raw[:-5])
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        is_well(port)


def crowd(number: int, start: bytes, place: object) -> None:
    """Connections that begin and say no more."""
    with server(place) as (port, _):
        held = []
        for _ in range(number):
            held.append(socket.create_connection(("127.0.0.1", port)))
            with suppress(OSError):
                held[-1].sendall(start)
        is_well(port)
        for each in held:
            each.close()


def never_reads(place: object) -> None:
    """A client that asks for a stream and reads nothing of it, while others are answered."""
    with server(place) as (port, _):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        connection.sendall(asked("go on", stream=True, max_tokens=200, min_tokens=200, n=8))
        is_well(port)
        connection.close()


CLIENTS = Group(
    "the server: malformed HTTP, long bodies, clients that leave",
    "an error in OpenAI's shape (4xx), or a closed connection for "
    "what is no HTTP at all; then others are answered within 5 s; no traceback in its log; it ends with 0",
    [Try(name, partial(request, raw, (400,))) for name, raw in BAD.items()]
    + [Try(name, partial(request, raw, allowed)) for name, (raw, allowed) in ODD.items()]
    + [Try(f"40 clients leave ({how}{', streaming' * stream})", partial(leave, 40, stream, how))
       for stream in (False, True) for how in ("close", "reset")]
    + [Try("40 clients leave after half a request", partial(leave, 40, False, "half a request"))]
    + [Try(f"300 connections that {what}", partial(crowd, 300, start))
       for what, start in {"say nothing": b"", "begin a line": b"GET /hea",
                           "begin a body": POST + b"Content-Length: 1000\r\n\r\n{"}.items()]
    + [Try("a client that reads nothing", never_reads)])
