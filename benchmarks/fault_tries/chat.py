"""The chat's commands with arguments that are none."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.product import command, contents, take

FILES = {
    "lone.jsonl": '{"messages": [{"role": "user", "content": "\\ud800"}]}', "deep.jsonl": "[" * 5000, "empty.jsonl": "",
    "number.jsonl": "3", "bytes.jsonl": "\udcff\udcfe", "half.jsonl": '{"messages": [{"role"',
    "roles.jsonl": '{"messages": [{"role": "x", "content": "y"}]}',
    "good.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})}
LINES = [
    *(f"/load {name}"
      for name in (*FILES, "none", ".", "/", "~nosuch/x", "~", "/proc/self/mem", "/dev/zero", "pipe", "a\x00b",
                   "x" * 300, "a/" * 3000, "\udc80")),
    *(f"/save {name}"
      for name in ("good.jsonl", ".", "/", "/dev/full", "/dev/stdout", "x" * 300, "a\x00b", "~nosuch",
                   "no/such/folder", "\udc80", "", "link", "pipe")),
    *(f"/set {words}"
      for words in ("top_k=9223372036854775808", "top_k=9223372036854775807 temperature=1e-320", "temperature=nan",
                    "temperature=-1", "temperature=" + "1" * 5000, "top_p=0", "top_p=1e308", "max_new_tokens=0",
                    "max_new_tokens=2147483648", "seed=x", "x=1", "=", "temperature", "top_k=\u0663",
                    "temperature=1_0", "temperature=0.5 temperature=")),
    "/system \udc80", "/system <|im_end|>" * 40, f"/system {'x' * 5000}", "/edit", "/edit \x00", "/undo", "/again",
    "/regen x", "/score on", "/score", "/compare on", "/compare", "/model none", "/model ../../etc", "/model",
    "/history", "/reset", "/", "//", "/\x00", "/nothing", "/" + "a" * 100_000, '"""', "\\", "x" * 100_000,
    "\x1b[2J\u202e", "<|im_end|>" * 500, "\udc80\udcff", "{{ 7 * 7 }}", "{% for %}",
]


def typed(line: str, place: Path) -> None:
    """The line after a first question and before a last one, which is answered."""
    take(place, "base")
    for name, text in FILES.items():
        Path(name).write_text(text, errors="surrogateescape")
    os.symlink("outside", "link")
    os.mkfifo("pipe")
    before = contents(".", besides=["pipe"])
    lines = ["first", line, line if line == '"""' else "/history", "/reset",
             "/set temperature=0.7 top_p=1 top_k=0 max_new_tokens=3 seed=0", "last"]
    said = command("chat", "--model", "base", "--max_new_tokens", "3",
                   stdin="".join(each + "\n" for each in lines).encode("utf-8", "surrogateescape"), seconds=30)
    expect(said.code == (2 if said.errors else 0), f"exit code {said.code} with {len(said.errors)} errors")
    expect("Traceback" not in said.err, f"a traceback: {said.err.strip().splitlines()[-1][:200]}")
    expect(all(len(each) <= 500 for each in said.errors), "an error of more than 500 characters")
    expect(len(said.errors) <= 2, f"{len(said.errors)} errors")
    expect(said.out.count("\n") >= 2, "the last question was not answered")
    after = contents(".", besides=["pipe"])
    expect(all(after.get(name) == raw for name, raw in before.items()), "a file was changed")
    expect(not Path("outside").exists(), "written through a link")


CHAT = Group(
    "chat commands with hostile arguments",
    "one line for what is refused, no file is changed, and the next question is answered",
    [Try(repr(line)[1:60], partial(typed, line)) for line in LINES])
