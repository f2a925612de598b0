"""Every message of ours to the user says what would fit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project import message_rules

ROOT = Path(__file__).resolve().parents[2]


def test_every_message_says_what_would_fit() -> None:
    assert [f"{m.file}: {m.text}" for m in message_rules.cureless()] == []


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
    monkeypatch.setattr(message_rules, "ROOT", tmp_path)
    return [m.text for m in message_rules.all_messages()]


def test_messages_are_found_with_their_fields_through_variables_and_wrappers(found) -> None:
    assert found == ["{path}: {what}; choose {names}", "gone", "empty", "chat: no model; give one", "no text"]


def test_a_message_without_a_cure_is_noticed(found) -> None:
    assert [m.text for m in message_rules.cureless()] == ["gone", "empty", "no text"]


def test_every_way_to_raise_is_one_that_is_read() -> None:
    """An error class of ours whose messages reach the user and which the rules do not know would go unread."""
    ours = set()
    for folder in ("hybrid_rlhf", "training", "inference"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                bases = [ast.unparse(b) for b in node.bases] if isinstance(node, ast.ClassDef) else []
                ours |= {node.name} if {"UserError", "BadScore"} & set(bases) else set()
    assert ours <= set(message_rules.ERRORS)
