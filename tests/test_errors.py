"""docs/errors.md is what the source says, and every message of ours says what would fit."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import write_errors  # noqa: E402


def test_every_message_says_what_would_fit() -> None:
    assert [f"{m.file}: {m.text}" for m in write_errors.cureless()] == []


def test_the_page_is_what_the_source_says_now() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == write_errors.page(), "write it anew: make errors"


SOURCE = '''
def refuse(message):
    raise UserError(f"chat: {message}")

def run(path, names):
    what = "gone" if path else "empty"
    check(path, f"{path}: {what}; choose {', '.join(sorted(names))}")
    check(names, what)
    refuse("no model; give one")
    raise ApiError(400, "no " + "text", code="x")
'''


@pytest.fixture
def found(tmp_path, monkeypatch) -> list[str]:
    path = tmp_path / "hybrid_rlhf" / "one.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.setattr(write_errors, "ROOT", tmp_path)
    return [m.text for m in write_errors.all_messages()]


def test_messages_are_found_with_their_fields_through_variables_and_wrappers(found) -> None:
    assert found == ["{path}: {what}; choose {names}", "gone", "empty", "chat: no model; give one", "no text"]


def test_a_message_without_a_cure_is_noticed(found) -> None:
    assert [m.text for m in write_errors.cureless()] == ["gone", "empty", "no text"]


def test_every_way_to_raise_is_one_that_the_page_reads() -> None:
    """An error class of ours whose messages reach the user and which the page does not know would be missing there."""
    ours = set()
    for folder in ("hybrid_rlhf", "training", "inference"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                bases = [ast.unparse(b) for b in node.bases] if isinstance(node, ast.ClassDef) else []
                ours |= {node.name} if {"UserError", "BadScore"} & set(bases) else set()
    assert ours <= set(write_errors.ERRORS)
