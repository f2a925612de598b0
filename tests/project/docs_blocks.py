"""The fenced blocks of the documents, their commands, and a folder with the files that the commands name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_STEPS = "docs/guide/first-steps.md"  # whose commands are a user's first three stages
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "RELEASE", "MIGRATION")),
         *sorted((ROOT / "docs" / "guide").glob("*.md")),
         *(ROOT / "docs" / f"{name}.md" for name in ("index", "guide", "coming-from", "design"))]
_FENCE = re.compile(r"(?:<!-- needs: (?P<needs>[\w|, ]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """needs: "" or gpu, hub, hosts, docker: what the commands need that a test has not; they are parsed only."""

    page: str
    line: int
    language: str
    needs: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command; a backslash at a line's end goes on."""
        return [shlex.split(line) for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for m in _FENCE.finditer(text):
            line = text.count("\n", 0, m.start()) + 1
            found.append(Block(path.relative_to(ROOT).as_posix(), line, m["language"], m["needs"] or "", m["text"]))
    return found


def shell_blocks() -> list[Block]:
    return [b for b in blocks() if b.language == "sh"]


def python_of(name: str) -> str:
    """The python block that defines `name`."""
    return next(b.text for b in blocks() if b.language == "python" and f"def {name}(" in b.text)


FRUITS = ["cherry", "apple", "plum", "lemon", "melon"]
COLOURS = ["red", "green", "blue", "yellow", "pink"]


@contextmanager
def documents_folder(folder: Path) -> Iterator[Path]:
    """Within the block the working folder is `folder`, filled with the documents' files and with a cache of its own."""
    from tests.factories.tiny import own_cache

    fill(folder)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        patch.chdir(folder)
        yield folder


def fill(folder: Path) -> Path:
    """The files that the documents name: data of each kind, pay.py, friendly.py, a template, and tiny models my-model
    and my-prm."""
    from tests.factories.prm import save_prm
    from tests.factories.tiny import save_tiny

    pairs = [(f"Name a {c} fruit, number {i}.", f) for i in range(10) for c, f in zip(COLOURS, FRUITS, strict=True)]
    rows = {
        "conversations": [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"A {f}."}]}
                          for q, f in pairs],
        "preferences": [{"prompt": q, "chosen": f"A {f}.", "rejected": f"Well, hmm, maybe a {f}?"} for q, f in pairs],
        "questions": [{"prompt": q} for q, _ in pairs],
        "labelled": [{"prompt": q, "completion": f"A {f}.", "label": i % 2 == 0} for i, (q, f) in enumerate(pairs)],
        "sums": [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(40)],
    }
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    row = next(b.text for b in blocks() if b.page.endswith("tools.md") and b.language == "jsonl")
    (folder / "weather.jsonl").write_text(row * 20)
    (folder / "tools.jinja").write_text((ROOT / "examples" / "tools" / "template.jinja").read_text())
    (folder / "pay.py").write_text(python_of("polite"))
    (folder / "friendly.py").write_text(python_of("friendly"))
    save_tiny(folder / "my-model", max_position_embeddings=1024)
    save_prm(folder / "my-prm", max_position_embeddings=1024)
    return folder
