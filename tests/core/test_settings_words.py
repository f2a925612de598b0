"""How words and files become settings: numbers, texts, mappings of anything, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest

from hybrid_rlhf.core.config import UserError, parse


@dataclass(frozen=True)
class Inner:
    """An inner part.

    Attributes:
        free: Anything.
        named: Texts.
    """

    free: dict[str, object] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        inner: A part.
        free: Anything.
    """

    inner: Inner = field(default_factory=Inner)
    free: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    """Settings.

    Attributes:
        inner: A part.
    """

    inner: Inner = field(default_factory=lambda: Inner(free={"a": 1}, named={"b": "c"}))


TEXTS = ["####", "yes", "1e-5", "~", "null", "0x1F", "a: b", "- a", "[a]", "&a", '"yes"', "é", ""]


def read(tmp_path, free, *more):
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({"inner": {"free": free}, "free": free}))
    return parse(Config, ["--config", str(path), *more], prog="x")[0]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_file_is_read_once(tmp_path, text):
    config = read(tmp_path, {"a": text, "b": [text], "c": {"d": text}, "n": 1, "t": True, "z": None})
    assert config.inner.free == config.free == {"a": text, "b": [text], "c": {"d": text}, "n": 1, "t": True, "z": None}


def test_the_command_line_is_read_as_yaml_as_before_and_wins(tmp_path):
    config = read(tmp_path, {"a": "yes"}, "--inner.free.a=no", "--free", "{b: 1e-5, c: x}")
    assert config.inner.free == {"a": False}
    assert config.free == {"b": 1e-5, "c": "x"}


@pytest.mark.parametrize(("word", "said"), [
    ("--free={a: [1}", "free: {a: [1} is not valid YAML"), ("--free.a=[1", "free.a: [1 is not valid YAML"),
    ("--named={a: 1}", "unknown option named (did you mean inner.named?)"), ("--free", "--free needs a value"),
    ("--inner.named.a=1", "inner.named[a] is 1; it must be text")])
def test_a_word_that_is_no_mapping_is_one_line(word, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        parse(Config, [word], prog="x")


def test_a_section_keeps_what_its_owner_has_changed_of_its_defaults():
    assert parse(Outer, ["--inner.free={}"], prog="x")[0].inner == Inner(free={}, named={"b": "c"})


def test_a_number_is_one_in_a_file_and_on_the_command_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("free: {a: 1e-5, b: '1e-5', c: 1E5, d: 1.5e3, day: 2020-01-01}")
    given = parse(Config, ["--config", str(path), "--free.e", "1e-5", "--free.f.g", "[2]"], prog="x")[0]
    assert given.free == {"a": 1e-5, "b": "1e-5", "c": 1e5, "d": 1.5e3, "day": "2020-01-01", "e": 1e-5, "f": {"g": [2]}}
