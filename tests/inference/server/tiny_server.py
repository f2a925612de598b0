"""A server of tiny models on this machine, in a thread, and what its answers must be."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import uvicorn

from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.conversation import Conversation, open_conversation
from hybrid_rlhf.inference.server.app import make_app
from hybrid_rlhf.inference.server.served_model import Limits, Served
from hybrid_rlhf.inference.server.worker import ModelQueue, Worker


@contextmanager
def running(folders: dict[str, str], *, limits: Limits | None = None, num_slots: int = 4, capacity: int = 256,
            **settings) -> Iterator[SimpleNamespace]:
    """url, worker and models of a server that ends with the block."""
    opened = {name: open_conversation(folder, SamplingConfig(), needs_template=False)
              for name, folder in folders.items()}
    models = [Served(name, ModelQueue(each.engine, num_slots, capacity), each.tokenizer)
              for name, each in opened.items()]
    with serving(models, limits, **settings) as found:
        yield found


@contextmanager
def serving(models: list[Served], limits: Limits | None = None, patience: int = 5,
            **settings) -> Iterator[SimpleNamespace]:
    """The same over models that are loaded. patience: seconds for open answers at the end."""
    worker = Worker([m.lane for m in models])
    worker.start()
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(
        make_app(models, worker, limits or Limits(), **settings), http="h11", ws="none", log_level="error",
        timeout_graceful_shutdown=patience, timeout_keep_alive=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = taken.getsockname()[1]
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, worker=worker, models=models, server=server)
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive() and not worker.is_alive


def asked(text: str = "hi", **settings) -> dict:
    return {"messages": [{"role": "user", "content": text}], **settings}


def chat(url: str, text: str = "hi", **settings) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=asked(text, **settings), timeout=60)


def content(answer: httpx.Response, index: int = 0) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][index]["message"]["content"]


def events(answer: httpx.Response) -> list[dict]:
    """The events of a whole stream; it must end as it should."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def alone(folder: str, text: str, seed: int, **settings) -> str:
    """The chat's first answer to `text` under a seed: one client, no server."""
    opened = open_conversation(folder, SamplingConfig(**settings), seed)
    return "".join(Conversation(opened.engine, opened.tokenizer, opened.sampling, seed,
                                opened.max_positions).answer(text))


def until(condition, seconds: float = 120.0) -> bool:
    """Whether `condition` comes to hold."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()
