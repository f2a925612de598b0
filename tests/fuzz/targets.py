"""What is fuzzed: each target takes bytes, does what the product does with them, and lets nothing out but a refusal.

A refusal is a UserError or an ApiError: one line, short enough to be read. Everything else that a target raises is a
fault of ours.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.data import chat, sources
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.examples import MAKERS, Counts, Lengths
from hybrid_rlhf.data.schema import FORMATS, KINDS, detect, read_row
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.inference.server.protocol import ApiError, read_chat, read_completion, read_json, read_score
from hybrid_rlhf.models.weights import fingerprint
from hybrid_rlhf.run.runfile import read_run

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".jsonl.gz")
LENGTHS = Lengths(64, 32, "response", "Score {score:g}. {prompt}")
MAX_LINE = 2000


@cache
def tokenizer():  # noqa: ANN201
    from tests.factories.tiny import tiny_tokenizer

    found = tiny_tokenizer()
    found.chat_template = chat.CHATML
    return found


@cache
def scratch() -> Path:
    """A folder in memory where there is one: a target writes a file per input."""
    return Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


def _one_line(error: Exception) -> None:
    text = str(error)
    assert "\n" not in text.strip() or isinstance(error, UserError), text
    assert len(text) < MAX_LINE, f"a message of {len(text)} characters: {text[:200]}"


def rows(found: list[dict]) -> None:
    """From rows to tokens, for every training that their format serves."""
    form = detect(found[0], "somewhere")
    for row in found[:20]:
        try:
            example = read_row(row, form, "somewhere")
        except SkipRow:
            continue
        for kind in KINDS[form.kind]:
            counts = Counts()
            try:
                for work in MAKERS[kind](example, tokenizer(), LENGTHS):
                    made = work.finish(chat.encode_all(tokenizer(), work.texts), counts)
                    assert made is None or json.dumps(made)
            except SkipRow:
                pass


def data_file(data: bytes) -> None:
    """A file of somebody's data: the first byte chooses its kind."""
    if not data:
        return
    folder = scratch()
    path = folder / f"rows{SUFFIXES[data[0] % len(SUFFIXES)]}"
    path.write_bytes(data[1:])
    try:
        rows(sources.read(Source(str(path))))
    except UserError as error:
        _one_line(error)
    finally:
        path.unlink()
    assert not list(folder.iterdir()), "something was left behind"


def schema(data: bytes) -> None:
    """One row of a known format whose columns hold anything that JSON can say."""
    try:
        values = json.loads(data[1:].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return
    form = FORMATS[data[0] % len(FORMATS)]
    values = values if isinstance(values, list) and values else [values]
    row = {name: values[i % len(values)] for i, name in enumerate((*form.required, "margin", "system"))}
    try:
        rows([row])
    except UserError as error:
        _one_line(error)


def configuration(data: bytes) -> None:
    """A YAML file, and behind the first NUL words of a command line."""
    from hybrid_rlhf.training.step1_sft import Config

    text, _, words = data.partition(b"\0")
    path = scratch() / "config.yaml"
    path.write_bytes(text)
    argv = ["--config", str(path), *(f"--{w}" for w in words.decode("utf-8", "replace").split("\0") if w)]
    if any(w.split("=")[0] in ("--help", "-h", "--print_config") or "help" in w for w in argv[2:]):
        return
    try:
        parse(Config, argv, prog="fuzz")
    except UserError as error:
        _one_line(error)
    finally:
        path.unlink()


def server_body(data: bytes) -> None:
    """What a client sends: the first byte chooses the route."""
    try:
        found = read_json(data[1:])
        if data[:1] >= b"\x80":
            (read_completion if data[:1] >= b"\xc0" else read_score)(found)
            return
        asked = read_chat(found)
        chat.encode_prompt(tokenizer(), asked.messages)
    except SkipRow:
        pass
    except ApiError as error:
        _one_line(error)
        json.dumps(error.body())


def run_folder(data: bytes) -> None:
    """A run record and a weight file of somebody else's."""
    folder = scratch() / "run"
    folder.mkdir(exist_ok=True)
    record, _, weights = data.partition(b"\0\0")
    (folder / "run.json").write_bytes(record)
    (folder / "model.safetensors").write_bytes(len(weights[:60]).to_bytes(8, "little") + weights)
    for read in (read_run, fingerprint):
        try:
            read(folder)
        except UserError as error:
            _one_line(error)
        except RecursionError:  # a run record nested too deeply is not defended against
            pass


TARGETS: dict[str, Callable[[bytes], None]] = {
    "data_file": data_file, "schema": schema, "configuration": configuration, "server_body": server_body,
    "run_folder": run_folder}

_ROWS = [
    {"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.5},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "a", "completions": ["b", "c"], "scores": [1, 0.5]}, {"instruction": "a", "input": "", "output": "b"},
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}, {"text": "a b"},
    {"prompt": "a", "completion": "b", "label": True}, {"question": "a", "response_j": "b", "response_k": "c"},
]
SEEDS: dict[str, list[bytes]] = {
    "data_file": [bytes([i]) + json.dumps(row).encode() + b"\n" for row in _ROWS for i in (0, 1)] + [
        b"\x02prompt,completion\na,b\n", b"\x03question\tanswer\na\tb\n", b"\x04a\tb\nc\td\n", b"\x05\x1f\x8b\x08\x00",
        b"\x00\xff\xfe{\x00}\x00", b"\x01" + json.dumps({"data": _ROWS[:1]}).encode()],
    "schema": [bytes([i]) + json.dumps(list(row.values())).encode() for row in _ROWS for i in range(len(FORMATS))],
    "configuration": [b"train: {learning_rate: 1.0e-3}\ndata: {sources: [{path: a.jsonl, weight: 1}]}\n",
                      b"seed: 1\n\0train.max_steps=3\0data.sources=[{path: a}]\0model.lora.r=8", b"a: &a [*a]\n",
                      b"model: {preset: tiny}\n\0data.split=null\0seed=x"],
    "server_body": [first + json.dumps(body).encode() for first in (b"\x00", b"\xff") for body in (
        {"messages": [{"role": "user", "content": "hi <|im_end|>"}], "temperature": 0.5, "top_p": 0.9, "max_tokens": 3,
         "stop": ["x"], "seed": 1, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}], "tools": []},
        {"prompts": ["a", [{"role": "user", "content": "b"}]], "completions": ["c", "d"]})],
    "run_folder": [json.dumps({"format": 1, "stage": "sft", "status": "finished", "config": {}, "metrics": {},
                               "facts": {}}).encode() + b'\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'],
}
