"""Clients of a server, in a process of their own: good, slow, vanishing and hostile ones, all at once (server.py)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx

PATH = "/v1/chat/completions"


class Clients:
    """All clients of one run. counts: kind -> what came of its requests; wrong: the first wrong answers."""

    def __init__(self, url: str, cases: list[dict], seconds: float, patience: float) -> None:
        self.url, self.cases, self.end = url, cases, time.monotonic() + seconds
        self.patience = patience  # seconds that a hostile client waits for an answer
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    async def good(self, number: int) -> None:
        """Asks, whole or as a stream, and compares; waits as it is told to when the server is busy."""
        draw = random.Random(number)
        async with httpx.AsyncClient(timeout=120) as client:
            while not self.is_over():
                case = draw.choice(self.cases)
                if draw.random() < 0.5:
                    answer = await client.post(self.url + PATH, json=case["body"])
                    if answer.status_code == 429:
                        await self._wait(answer)
                        continue
                    said = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else None
                    self._compare("good", case, said, answer.status_code)
                else:
                    await self._stream("good", client, case, 0.0, None)

    async def slow(self, number: int) -> None:
        """Reads a stream piece by piece with long pauses."""
        draw = random.Random(number)
        async with httpx.AsyncClient(timeout=120) as client:
            while not self.is_over():
                await self._stream("slow", client, draw.choice(self.cases), 0.05, None)

    async def vanishing(self, number: int) -> None:
        """Leaves in the middle of a stream, or before it begins."""
        draw = random.Random(number)
        while not self.is_over():
            async with httpx.AsyncClient(timeout=120) as client:
                await self._stream("vanishing", client, draw.choice(self.cases), 0.0, draw.randrange(4))
            await asyncio.sleep(draw.random() * 0.1)

    async def hostile(self, number: int) -> None:
        """Sends what no client should; every answer must be a refusal, or the connection's end."""
        draw = random.Random(number)
        while not self.is_over():
            kind, data = draw.choice(ATTACKS)
            try:
                status = await asyncio.wait_for(self._raw(data), self.patience)
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                status = 0
            self.counts[f"hostile: {kind}, {status or 'closed'}"] += 1
            if status == 200 or status >= 500:
                self.wrong.append(f"{kind}: status {status}")
            await asyncio.sleep(draw.random() * 0.2)

    async def _stream(self, kind: str, client: httpx.AsyncClient, case: dict, pause: float,
                      leaves_at: int | None) -> None:
        said = ""
        async with client.stream("POST", self.url + PATH, json=case["body"] | {"stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
                if answer.status_code == 429:
                    await self._wait(answer)
                    return
                self._compare(kind, case, None, answer.status_code)
                return
            count = 0
            async for piece in pieces(answer):
                said += piece
                count += 1
                if leaves_at is not None and count > leaves_at:
                    self.counts[f"{kind}: left"] += 1
                    return
                if pause:
                    await asyncio.sleep(pause)
        self._compare(kind, case, said, 200)

    async def _wait(self, answer: httpx.Response) -> None:
        self.counts["told to wait (429)"] += 1
        await asyncio.sleep(min(2.0, int(answer.headers["retry-after"])))

    def _compare(self, kind: str, case: dict, said: str | None, status: int) -> None:
        is_right = said == case["answer"]
        self.counts[f"{kind}: {'right' if is_right else 'wrong'}"] += 1
        if not is_right:
            self.wrong.append(f"{kind}, status {status}: {said!r:.100} and not {case['answer']!r:.100}")

    async def _raw(self, data: bytes) -> int:
        """The status of what a connection that sends `data` is answered; 0 where it is closed without a word."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(data)
            await writer.drain()
            line = await reader.readline()
            return int(line.split()[1]) if line else 0
        finally:
            writer.close()


async def pieces(answer: httpx.Response) -> AsyncIterator[str]:
    """The text of a stream of events. Raises ValueError for a stream that ends without saying so."""
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            found = json.loads(line[6:])
            if "error" in found:
                raise ValueError(found["error"]["message"])
            for choice in found["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
    raise ValueError("the stream broke off")


def _post(body: bytes, *more: bytes, length: int | None = None, kind: bytes = b"application/json") -> bytes:
    head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Content-Type: " + kind,
            b"Content-Length: %d" % (len(body) if length is None else length), *more]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


GOOD = b'{"messages": [{"role": "user", "content": "hi"}]}'
ATTACKS = [
    ("bad JSON", _post(b'{"messages": [')), ("deep nesting", _post(b"[" * 100_000)),
    ("huge body", _post(b"x" * 3_000_000)),
    ("huge declared body", _post(b"x", length=10**12)), ("negative length", _post(b"x", length=-1)),
    ("no JSON", _post(GOOD, kind=b"text/plain")), ("wrong values", _post(b'{"messages": [{"role": 7}], "n": 1e9}')),
    ("huge number", _post(b'{"messages": [], "seed": ' + b"9" * 9000 + b"}")),
    ("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00" * 50), ("huge header", b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000),
    ("slow headers", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "),
    ("body that does not come", _post(b"{", length=500)),
    ("another host", b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer wrong\r\n\r\n"),
    ("wrong key", b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"),
    ("path", b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ("encoded path", b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n"),
]


async def run(clients: Clients, count: int) -> None:
    """`count` clients until the time is over: five eighths good, an eighth each slow, vanishing and hostile."""
    kinds = [clients.good] * 5 + [clients.slow, clients.vanishing, clients.hostile]
    await asyncio.gather(*(kinds[i % 8](i) for i in range(count)))


def load(url: str, cases: list[dict], count: int, seconds: float, patience: float) -> dict:
    """What came of the requests of `count` clients by their kind, and the wrong answers.

    cases: {"body": a chat completion's body with a seed, "answer": what one client alone was given}. patience: seconds
    that hostile clients wait for an answer.
    """
    clients = Clients(url, cases, seconds, patience)
    asyncio.run(run(clients, count))
    return {"counts": dict(sorted(clients.counts.items())), "wrong": clients.wrong[:10],
            "num_wrong": len(clients.wrong)}
