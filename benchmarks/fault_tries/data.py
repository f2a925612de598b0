"""Damaged files of data; very long lines; paths that are no plain files."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import GRPO, SFT, same_run
from fault_tries.product import command, contents, done_or_refused, finished, refused, take

GOOD = b'{"prompt": "a", "completion": "b"}\n'


def row(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


REFUSED_LINES: dict[str, bytes] = {  # of rows.jsonl
    "half a line at the end": GOOD * 20 + b'{"prompt": "a", "comp',
    "half a line in the midst": GOOD * 9 + b'{"prompt": "a", "comp\n' + GOOD * 9,
    "two rows in a line": GOOD.strip() + GOOD, "a NUL between rows": GOOD + b"\0\n" + GOOD,
    "a file of NULs": bytes(4096), "no UTF-8": GOOD + b'{"prompt": "\xff", "completion": "b"}\n', "empty": b"",
    "blank": b"\n \n\n", "numbers": b"1\n2\n", "lists": b"[]\n", "nulls": b"null\n",
    "unknown columns": row(alpha=1, beta=2), "an answer that is a number": row(prompt="a", completion=3),
    "an answer that is null": row(prompt="a", completion=None), "messages that are text": row(messages="x"),
    "messages of numbers": row(messages=[1]), "messages without content": row(messages=[{"role": "user"}]),
    "an unknown role": row(messages=[{"role": "x", "content": "y"}]),
    "an integer of 5,000 digits": b'{"prompt": "a", "completion": %s}\n' % (b"9" * 5000),
    "5,000 columns": row(**{f"column {i}": 1 for i in range(5000)}),
    "a column of 100,000 characters": row(**{"x" * 100_000: 1}),
    "a column named to drive the terminal": row(**{"\x1b[2J\u202e": 1}),
}
REFUSED: dict[str, tuple[str, bytes]] = {  # other files, by their name
    "JSON cut off": ("rows.json", b'[{"prompt": "a", "completion": "b"}, {"pro'),
    "JSON of a number": ("rows.json", b"3"), "a CSV of one column": ("rows.csv", b"prompt\na\n"),
    "a CSV without rows": ("rows.csv", b"prompt,completion\n"),
    "a CSV of NULs": ("rows.csv", b"prompt,completion\n\0,\0\n" * 2 + bytes(99)),
    "an open quote": ("rows.csv", b'prompt,completion\n"a,b\nc,d\n'),
    "more cells than columns": ("rows.csv", b"prompt,completion\na,b,c,d\n"),
    "no parquet": ("rows.parquet", b"PAR1" + bytes(99)),
    "gzip cut off": ("rows.jsonl.gz", gzip.compress(GOOD * 5000)[:60]), "an unknown kind": ("rows.xyz", GOOD),
} | {name: ("rows.jsonl", raw) for name, raw in REFUSED_LINES.items()}
READ_LINES: dict[str, bytes] = {  # of rows.jsonl
    "UTF-16": (GOOD * 12).decode().encode("utf-16"), "a byte order mark": b"\xef\xbb\xbf" + GOOD * 12,
    "carriage returns": GOOD.replace(b"\n", b"\r\n") * 12, "no line end": GOOD * 12 + GOOD.strip(),
    "some answers empty": (GOOD + row(prompt="a", completion="")) * 9,
    "separators of lines within text": row(prompt="a\u2028b\x85c", completion="b\x0bd") * 12,
    "special tokens in text": row(prompt="<|im_end|>" * 3, completion="<|im_start|>b") * 12,
    "lone surrogates": row(prompt="\ud800", completion="b\udfff") * 12,
    "an answer of 300,000 characters": GOOD * 12 + row(prompt="a", completion="b " * 150_000),
}
READ: dict[str, tuple[str, bytes]] = {  # other files, by their name
    "plain text called .gz": ("rows.jsonl.gz", GOOD * 12),
} | {name: ("rows.jsonl", raw) for name, raw in READ_LINES.items()}


def read(name: str, raw: bytes, is_refused: bool, place: Path) -> None:
    take(place, "base")
    Path(name).write_bytes(raw)
    done = command(*SFT, "--data.sources", name, "--data.eval_fraction", "0", "--train.eval_steps", "0")
    if is_refused:
        line = refused(done)
        expect(name in line or "no usable row" in line, f"the line names no file: {line[:300]}")
        expect(not any(ord(c) < 32 for c in line), "a control character in the line")
        expect(not Path("run/model").exists(), "a model was exported")
    else:
        finished(done)


# --- very long lines ------------------------------------------------------------------------------------------------


def long_line(size: int, name: str) -> None:
    with open(name, "wb") as file:
        file.write(b'{"prompt": "a", "completion": "' if name.endswith("jsonl") else b"")
        for _ in range(size >> 20):
            file.write(b"x" * 2**20)
        file.write(b'"}\n' if name.endswith("jsonl") else b"\n")


def large(make: Callable[[str], object], name: str, place: Path) -> None:
    """Read or refused within the limits of the try, as where 8 GiB are free: how much of a file is read depends on it.
    Made in a process of its own, whose memory does not count."""
    take(place, "base")
    if not (pid := os.fork()):
        make(name)
        os._exit(0)
    expect(os.waitpid(pid, 0)[1] == 0, "the file could not be made")

    def has_eight_gibibytes() -> None:
        from hybrid_rlhf.data import files

        files.free_host_bytes = lambda: 2**33

    done_or_refused(command(*SFT, "--data.sources", name, "--data.eval_fraction", "0", "--train.eval_steps", "0",
                            prepare=has_eight_gibibytes))


# --- paths -----------------------------------------------------------------------------------------------------------


def at_home(option: str, place: Path) -> None:
    """~ is the user's folder wherever a path is given."""
    take(place, "base", "sft.jsonl")
    value = {"--data.sources": "~/there/sft.jsonl", "--model.model_name_or_path": "~/there/base",
             "--output_dir": "~/there/run", "--data.cache_dir": "~/there/cache", "--config": "~/there/a.yaml"}[option]
    Path("there").mkdir()
    Path("there/a.yaml").write_text("seed: 0\n")
    for name in ("base", "sft.jsonl"):
        shutil.copytree(name, f"there/{name}") if Path(name).is_dir() else shutil.copy(name, f"there/{name}")
    finished(command(*SFT, option, value))
    expect(not Path("~").exists(), "a folder called ~ was made")
    same_run(place, run="there/run" if option == "--output_dir" else "run")


def pipe(option: str, name: str, place: Path) -> None:
    """A pipe in the place of a file, which nobody writes: refused, not waited for."""
    take(place, "base", "sft.jsonl", "paid.jsonl")
    os.mkfifo(name)
    words = [*GRPO, option, f"{name}:pay"] if option == "--reward.functions" else [*SFT, option, name]
    refused(command(*words, seconds=20))


def device(name: str, place: Path) -> None:
    take(place, "base", "sft.jsonl")
    refused(command(*SFT, "--data.sources", name, seconds=20))


def damaged_cache(what: str, change: Callable[[Path], object], place: Path) -> None:
    """Cached rows are damaged: made anew, or refused in one line; never another run. Of the counts beside them: always
    the same run."""
    take(place, "base", "sft.jsonl")
    finished(command(*SFT))
    found = [path for path in Path("cache").rglob("*")
             if path.is_file() and (path.suffix == ".json") == (what == "counts")]
    expect(found, f"no {what} in the cache")
    for path in found:
        change(path)
    shutil.rmtree("run")
    before, done = contents("cache"), command(*SFT)
    if done_or_refused(done):
        same_run(place)
    else:
        expect(what == "rows", f"refused for its counts: {done.errors[0][:300]}")
        expect(contents("cache") == before, "refused, and the cache was changed")


CHANGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda p: p.write_bytes(b""),
    "half of it": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "no UTF-8": lambda p: p.write_bytes(b"\xff" * 40), "gone": Path.unlink,
    "a bit": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:])}
FILES = Group(
    "damaged files of data",
    "exit code 2 and one line that names the file; what is odd but right is read",
    [Try(name, partial(read, *file, True)) for name, file in REFUSED.items()]
    + [Try(f"{name} (right)", partial(read, *file, False)) for name, file in READ.items()])
MEMORY = Group(
    "memory: files of very long lines",
    "read, or refused in one line, in a minute and within 1.5 GiB, as on a machine with 8 GiB free",
    [Try(f"{what}, rows.{ending}", partial(large, make, f"rows.{ending}"))
     for what, endings, make in (
         ("a line of 256 MiB", ("jsonl", "txt", "csv"), partial(long_line, 2**28)),) for ending in endings])
PATHS = Group(
    "paths: ~, pipes, devices, damaged caches",
    "~ is the user's folder; a pipe or a device is refused in one line and not waited for; "
    "a damaged cache leads to the same bits as none, or to one line",
    [Try(f"~ in {option}", partial(at_home, option))
     for option in ("--data.sources", "--model.model_name_or_path", "--output_dir", "--data.cache_dir", "--config")]
    + [Try(f"a pipe for {option} ({name})", partial(pipe, option, name))
       for option, name in (
           ("--data.sources", "rows.jsonl"), ("--data.sources", "rows.csv"), ("--data.sources", "rows.parquet"),
           ("--model.model_name_or_path", "model"), ("--config", "a.yaml"), ("--output_dir", "out"),
           ("--reward.functions", "pay.py"))]
    + [Try(f"{name} as data", partial(device, name)) for name in ("/dev/zero", "/dev/stdin", "/proc/kmsg")]
    + [Try(f"{what} in the cache: {name}", partial(damaged_cache, what, change))
       for what in ("counts", "rows") for name, change in CHANGES.items()])
