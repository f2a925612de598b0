"""The server: tokens per second at 1, 8 and 64 clients, and what a crowd of good and bad ones does to it.

    python benchmarks/server.py --out docs/results/server.json [--load_seconds 60] [--preset small] [--json FILE]

A random model, a server process (hybrid-rlhf serve) and a client process, on loopback. For the speed every client asks
for 128 new tokens again and again; the same prompts through the engine alone, all at once, are beside it. For the crowd
(benchmarks/server_load.py) the right answers are those that one client alone was given before. --json writes the rows
of the speed alone: the engine is the peer, floor_ratio what all the clients' answers at once take in products and bytes
(floors.py), and no crowd comes with --load_seconds 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import httpx
import torch
from floors import Shape, decode_bytes, floor_of
from harness import machine, write_rows

from benchmarks.server_load import PATH

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["the", "a", "red", "blue", "green", "cat", "dog", "fox", "sun", "moon", "tree", "book", "walks", "sees",
         "finds", "under", "over", "little", "old", "big", "and", "then"]
TOKENS = 128


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


def resident(pid: int) -> int:
    """Bytes of memory that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


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
        prompts.append(opened.prompt_ids())
    with opened.engine.inference():
        opened.engine.generate(prompts, sampling)
        start = time.monotonic()
        opened.engine.generate(prompts, sampling)
        alone = clients * TOKENS / (time.monotonic() - start)
    shape, lengths = Shape.of(opened.engine.model.config.to_dict()), [len(p) for p in prompts]
    decoded = decode_bytes(shape, lengths, [TOKENS] * clients, width=4)
    floor, _ = floor_of(shape, sum(lengths), 1, decoded=decoded, dtype=torch.float32)
    return round(alone, 1), round(clients * TOKENS / floor, 1)


def row_of(found: dict, machine_is: str) -> dict:
    """A line of the page of all benchmarks."""
    ours, engine = found["tokens_per_second"], found["engine"]
    return {"case": f"clients_{found['clients']}", "ours": ours, "peer": engine, "ratio": ours / engine,
            "floor_ratio": found["most"] / ours, "unit": "tokens/s", "machine": machine_is}


def crowd(url: str, pid: int, seconds: float, clients: int, folder: str, patience: float = 15.0) -> dict:
    """A crowd's wrong answers, and what it left behind in the server."""
    kinds = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9), dict(temperature=0), dict(top_k=20, n=1)]
    cases = []
    for i in range(48):
        asked = body(i, 8 + 7 * (i % 8), **kinds[i % 4])
        answer = httpx.post(url + PATH, json=asked, timeout=60).json()
        cases.append({"body": asked, "answer": answer["choices"][0]["message"]["content"]})
    file = Path(folder) / "cases.json"
    file.write_text(json.dumps(cases), encoding="utf-8")

    def load(duration: float) -> dict:
        done = subprocess.run([sys.executable, "-m", "benchmarks.server_load", url, str(file), "--clients",
                               str(clients), "--seconds", str(duration), "--patience", str(patience)], cwd=ROOT,
                              capture_output=True, text=True)
        if not done.stdout:
            raise SystemExit(done.stderr[-3000:])
        return json.loads(done.stdout)

    warm = load(min(10.0, seconds))  # buffers and pools have their size after this
    time.sleep(1)
    before = resident(pid), descriptors(pid)
    found = load(seconds)
    time.sleep(6)  # idle connections are closed after 5 seconds
    after = resident(pid), descriptors(pid)
    health = httpx.get(f"{url}/health").json()
    again = sum(httpx.post(url + PATH, json=c["body"], timeout=60).json()["choices"][0]["message"]["content"]
                != c["answer"] for c in cases[:8])
    return {"seconds": seconds, "clients": clients, **found,
            "num_wrong": found["num_wrong"] + warm["num_wrong"] + again, "open_after": health["models"]["m"]["open"],
            "memory_mib": [round(b / 2**20, 1) for b in (before[0], after[0])],
            "descriptors": [before[1], after[1]]}


def table(found: dict) -> str:
    """The figures as Markdown, where there was a crowd."""
    rows = "\n".join(f"| {r['clients']} | {r['tokens_per_second']:g} | {r['engine']:g} | {r['first_piece_ms']:g} | "
                     f"{r['gap_ms']:g} | {r['gap_p99_ms']:g} |" for r in found["rates"])
    crowd_rows = "\n".join(f"| {name} | {count} |" for name, count in found["crowd"]["counts"].items())
    load = found["crowd"]
    return f"""# The server under load

`python benchmarks/server.py` on {found['machine']}: a random model (preset {found['preset']}, fp32), server and clients
on one machine over loopback, `--max_batch 64`. Every client asks for {TOKENS} tokens again and again; "engine" is
the same prompts through `engine.generate`, all at once, in a process of its own.

| clients | tokens/s | engine | first piece, ms (median) | between pieces, ms (median) | (99%) |
|---|---|---|---|---|---|
{rows}

{load['clients']} clients at once for {load['seconds']:g} s with 16 slots, five eighths good, an eighth each slow,
vanishing and hostile. Every whole answer is compared with what one client alone was given under its seed:
{load['num_wrong']} were wrong. Afterwards {load['open_after']} requests were open; memory
{load['memory_mib'][0]:g} MiB before and {load['memory_mib'][1]:g} MiB after, descriptors
{load['descriptors'][0]} and {load['descriptors'][1]}.

| what came of it | times |
|---|---|
{crowd_rows}
"""


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--preset", default="small")
    flags.add_argument("--seconds", type=float, default=15, help="of each speed measurement")
    flags.add_argument("--load_seconds", type=float, default=60)
    flags.add_argument("--clients", type=int, default=64)
    flags.add_argument("--out", help="a .json file; the table goes beside it as .md")
    flags.add_argument("--json", help="write the rows of the speed to this file")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(options.preset, folder)
        found: dict = {"machine": machine(), "preset": options.preset, "rates": []}
        if options.seconds:
            with served(folder, "--max_batch", "64", "--max_context", "512") as (url, _):
                asyncio.run(rate(url, 4, 2))
                found["rates"] = [asyncio.run(rate(url, n, options.seconds)) for n in (1, 8, 64)]
            for row in found["rates"]:
                row["engine"], row["most"] = engine_rate(folder, row["clients"])
            print("\n".join(map(str, found["rates"])))
            write_rows((row_of(row, found["machine"]) for row in found["rates"]), options.json)
        if not options.load_seconds:
            return 0
        with served(folder, "--max_context", "512", "--max_queue", "40") as (url, pid):
            found["crowd"] = crowd(url, pid, options.load_seconds, options.clients, folder)
    print(table(found))
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        Path(options.out).with_suffix(".md").write_text(table(found), encoding="utf-8")
    return int(bool(found["crowd"]["num_wrong"] or found["crowd"]["open_after"]))


if __name__ == "__main__":
    sys.exit(main())
