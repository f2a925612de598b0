"""Words that readers of the field stumble over: local names that say nothing, and phrases that are riddles.

python -m tests.project.words [FOLDER ...] prints each place in these folders of the product.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hybrid_rlhf", "training", "inference")
NAMES = {"found", "given", "own", "said", "held", "mine"}  # name the thing: rows, path, config, score
PHRASES = re.compile(r"(?<!there )\b(?:is|are) no\b(?! longer| more)|\bwhoever\b|\bnobody\b|\bsomebody\b|"
                     r"\bis said of\b|\bwhat is said\b|\bwho has\b", re.IGNORECASE)


def places(folders: tuple[str, ...] | list[str] = FOLDERS) -> Iterator[str]:
    """path:line: the word, of each place."""
    for folder in folders:
        path = ROOT / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text, shown = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
            for line, name in sorted(_names(text)):
                yield f"{shown}:{line}: the name {name}"
            for line, phrase in _phrases(text):
                yield f"{shown}:{line}: {phrase!r}"


def _names(text: str) -> Iterator[tuple[int, str]]:
    """Local variables and parameters."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield node.lineno, node.arg


def _phrases(text: str) -> Iterator[tuple[int, str]]:
    """Of comments and strings, docstrings and messages among them."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)):
            for match in PHRASES.finditer(token.string):
                yield token.start[0] + token.string[:match.start()].count("\n"), match[0]


if __name__ == "__main__":
    print(*places(sys.argv[1:] or FOLDERS), sep="\n")
