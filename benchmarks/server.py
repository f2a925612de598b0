"""The server: tokens per second at 1, 8 and 64 clients, and whether a crowd, some of whom leave, gets right answers.

    python benchmarks/server.py [--load_seconds 60] [--preset small] [--json FILE] [--page docs/results/server.md]

A random model, a server process (hybrid-rlhf serve) and a client process, on loopback. For the speed every client asks
for 128 new tokens again and again; the same prompts through the engine alone, all at once, are the peer, and
floor_ratio is over what all the clients' answers at once take in products and bytes (floors.py). The crowd's right
answers are those that one client alone was given before; there is none with --load_seconds 0. Malformed requests are
of test_server_pressure.py. --page puts the tables of both into a page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import torch
from floors import Shape, decode_bytes, floor_of
from harness import ROOT, Case, memory_status, parse, parser_of, row_of, run_apart, table_of, write_rows, write_tables

WORDS = ["the", "a", "red", "blue", "green", "cat", "dog", "fox", "sun", "moon", "tree", "book", "walks", "sees",
         "finds", "under", "over", "little", "old", "big", "and", "then"]
TOKENS = 128
PATH = "/v1/chat/completions"
CROWD = Case("wrong answers in a crowd, an eighth of which leaves")


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 3)) % len(WORDS)] for i in range(length))


def make_model(preset: str, folder: str) -> None:
    """A random model with a tokenizer of 4,096 tokens and a chat template."""
    from hybrid_rlhf.data.chat import ensure_template
    from hybrid_rlhf.models.load import ModelConfig, random_causal_lm
    from hybrid_rlhf.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([text(i, 60) for i in range(400)], 4096)
    ensure_template(tokenizer)
    random_causal_lm(ModelConfig(preset=preset), tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def served(folder: str, *flags: str) -> Iterator[tuple[str, int]]:
    """(url, process id) of a server."""
    process = subprocess.Popen([sys.executable, "-m", "hybrid_rlhf.inference.server", "--model", f"m={folder}",
                                "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        while not (found := re.search(r"at (http://\S+)", line := process.stderr.readline())):
            if not line:
                raise SystemExit(f"the server has ended with code {process.wait()}")
        yield found.group(1), process.pid
    finally:
        process.terminate()
        code = process.wait(60)
        print(f"the server ended with code {code}: {process.stderr.read()[-2000:]!r}", file=sys.stderr)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def body(number: int, tokens: int, **settings: object) -> dict:
    return {"messages": [{"role": "user", "content": text(number, 20 + number % 20)}], "seed": number,
            "max_tokens": tokens, **settings}


async def rate(url: str, clients: int, seconds: float) -> dict:
    """Tokens per second of `clients` that stream at once, and what one of them sees.

    Over bare sockets: httpx takes more of a core for a piece than the engine does, and both share two.
    """
    firsts, gaps, total = [], [], 0
    start = time.monotonic()

    async def client(number: int) -> None:
        nonlocal total
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        while time.monotonic() - start < seconds:
            asked = last = time.monotonic()
            writer.write(request(body(number, TOKENS, min_tokens=TOKENS, stream=True,
                                      stream_options={"include_usage": True})))
            count = 0
            async for _ in contents(reader):
                now = time.monotonic()
                (gaps if count else firsts).append(now - (last if count else asked))
                last, count = now, count + 1
            total += TOKENS
            number += clients
        writer.close()

    await asyncio.gather(*(client(i) for i in range(clients)))
    return {"clients": clients, "tokens_per_second": round(total / (time.monotonic() - start), 1),
            "first_piece_ms": round(1000 * statistics.median(firsts), 1),
            "gap_ms": round(1000 * statistics.median(gaps), 2),
            "gap_p99_ms": round(1000 * sorted(gaps)[int(0.99 * len(gaps))], 1), "answers": total // TOKENS}


def request(asked: dict) -> bytes:
    text = json.dumps(asked).encode()
    return (f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n\r\n").encode() + text


async def contents(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The events with text of one streamed answer, which must be of TOKENS tokens; leaves the connection usable."""
    usage = b""
    while (line := await reader.readline()).strip() != b"data: [DONE]":
        if not line or b'"error"' in line:
            raise SystemExit(f"no answer: {line[:300]!r}")
        if b'"content": "' in line and b'"content": ""' not in line:
            yield line
        usage = line if b'"usage"' in line else usage
    assert json.loads(usage[6:])["usage"]["completion_tokens"] == TOKENS, usage
    while await reader.readline() != b"0\r\n":
        pass
    await reader.readline()


def engine_rate(folder: str, clients: int) -> tuple[float, float]:
    """Tokens per second of the engine alone on the same prompts, all at once, and the most that is possible."""
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.inference.conversation import open_conversation

    sampling = SamplingConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    opened = open_conversation(folder, sampling)
    prompts = []
    for number in range(clients):
        opened.messages = body(number, 1)["messages"]
        prompts.append(opened.prompt().ids)
    with opened.engine.inference():
        opened.engine.generate(prompts, sampling)
        start = time.monotonic()
        opened.engine.generate(prompts, sampling)
        alone = clients * TOKENS / (time.monotonic() - start)
    shape, lengths = Shape.of(opened.engine.model.config.to_dict()), [len(p) for p in prompts]
    decoded = clients * TOKENS, decode_bytes(shape, lengths, [TOKENS] * clients, width=4)
    floor, _ = floor_of(shape, sum(lengths), 1, decoded=decoded, dtype=torch.float32)
    return round(alone, 1), round(clients * TOKENS / floor, 1)


def crowd(url: str, pid: int, seconds: float, clients: int) -> dict:
    """A crowd's wrong answers, and what it left behind in the server."""
    kinds = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9), dict(temperature=0), dict(top_k=20, n=1)]
    bodies = [body(i, 8 + 7 * (i % 8), **kinds[i % 4]) for i in range(48)]
    with httpx.Client(timeout=60) as alone:
        cases = [{"body": asked, "answer": text_of(alone.post(url + PATH, json=asked))} for asked in bodies]
    settings = dict(url=url, cases=cases, count=clients)
    warm = run_apart(load, **settings, seconds=min(10.0, seconds))  # buffers and pools have their size after this
    time.sleep(1)
    before = memory_status("VmRSS", pid), descriptors(pid)
    found = run_apart(load, **settings, seconds=seconds)
    time.sleep(6)  # idle connections are closed after 5 seconds
    after = memory_status("VmRSS", pid), descriptors(pid)
    health = httpx.get(f"{url}/health").json()
    return {"seconds": seconds, "clients": clients, **found, "num_wrong": found["num_wrong"] + warm["num_wrong"],
            "open_after": health["models"]["m"]["open"],
            "memory_mib": [round(b / 2**20, 1) for b in (before[0], after[0])],
            "descriptors": [before[1], after[1]]}


def load(url: str, cases: list[dict], count: int, seconds: float) -> dict:
    """In a process of its own: `count` clients ask until the time is over and compare; every eighth leaves instead.

    cases: {"body": a chat completion's body with a seed, "answer": what one client alone was given}.
    """
    counts, wrong, end = Counter(), [], time.monotonic() + seconds

    async def client(number: int) -> None:
        draw, leaves = random.Random(number), number % 8 == 7
        async with httpx.AsyncClient(timeout=120) as http:
            while time.monotonic() < end:
                case = draw.choice(cases)
                if leaves:
                    with suppress(httpx.TimeoutException):
                        await http.post(url + PATH, json=case["body"], timeout=0.05 * draw.random() + 0.01)
                    counts["left"] += 1
                    continue
                answer = await http.post(url + PATH, json=case["body"])
                if answer.status_code == 429:
                    counts["told to wait (429)"] += 1
                    await asyncio.sleep(min(2.0, int(answer.headers["retry-after"])))
                elif answer.status_code == 200 and text_of(answer) == case["answer"]:
                    counts["right"] += 1
                else:
                    wrong.append(f"status {answer.status_code}: {answer.text[:200]}")

    async def run() -> None:
        await asyncio.gather(*map(client, range(count)))

    asyncio.run(run())
    return {"counts": dict(sorted(counts.items())), "wrong": wrong[:10], "num_wrong": len(wrong)}


def text_of(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def rate_row(folder: str, found: dict) -> dict:
    clients, ours = found.pop("clients"), found.pop("tokens_per_second")
    engine, most = engine_rate(folder, clients)
    case = Case(f"server, {clients} client{'s' * (clients > 1)}", "the engine alone")
    return row_of(f"clients_{clients}", case, ours, engine, "tokens/s", most / ours, **found)


def measure(options: argparse.Namespace, folder: str) -> Iterator[dict]:
    make_model(options.preset, folder)
    if options.seconds:
        with served(folder, "--max_batch", "64", "--max_context", "512") as (url, _):
            asyncio.run(rate(url, 4, 2))
            rates = [asyncio.run(rate(url, n, options.seconds)) for n in (1, 8, 64)]
        yield from (rate_row(folder, found) for found in rates)
    if options.load_seconds:
        with served(folder, "--max_context", "512", "--max_queue", "40") as (url, pid):
            found = crowd(url, pid, options.load_seconds, options.clients)
        yield row_of("crowd", CROWD, found["num_wrong"], None, "answers", **found)


def tables_of(rows: Sequence[dict]) -> list[str]:
    """The machine, the speed, and the crowd."""
    *rates, crowd = rows
    columns = {"tokens/s": "ours", "engine": "peer", "first piece, ms (median)": "first_piece_ms",
               "between pieces, ms (median)": "gap_ms", "(99%)": "gap_p99_ms"}
    came = crowd["counts"] | {"wrong answers": crowd["num_wrong"], "requests open afterwards": crowd["open_after"],
                              "memory before and after, MiB": "{} {}".format(*crowd["memory_mib"]),
                              "descriptors before and after": "{} {}".format(*crowd["descriptors"])}
    speed = [(row["case"].removeprefix("clients_"), *(f"{row[key]:g}" for key in columns.values())) for row in rates]
    return [table_of(["machine"], [[crowd["machine"]]]), table_of(["clients", *columns], speed),
            table_of(["what came of it", "times"], came.items())]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seconds", type=float, default=15, help="of each speed measurement")
    parser.add_argument("--load_seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = parse(parser, argv)
    if options.page and not (options.seconds and options.load_seconds):
        parser.error("--page has a table of the speed and one of the crowd; it needs --seconds and --load_seconds")
    if options.quick:
        options.preset, options.seconds, options.load_seconds = "tiny", 1, min(1, options.load_seconds)
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(measure(options, folder), options.json)
    if options.page:
        write_tables(options.page, *tables_of(rows))
    return int(any(row["num_wrong"] or row["open_after"] for row in rows if row["case"] == "crowd"))


if __name__ == "__main__":
    sys.exit(main())
